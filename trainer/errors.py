"""Errors of the trainer: one base class, with the facts in fields as well as in the text."""

from embertide._common.errors import OperatingError
from embertide._common.quoting import terminal_text, without_secrets


class TrainerError(OperatingError):
    """Base of every error that the trainer raises on purpose."""


class FinalError(TrainerError):
    """It cannot go on, and would come to the same end if it began again."""

    final = True


class ConfigurationError(TrainerError):
    """The request cannot work, however often it is tried."""

    exit_status = 2


class DataError(ConfigurationError):
    """Input that cannot be read, or that is not what the schema says.

    Attributes:
        path: The file or URL, or a name for a source that has none.
        reason: The cause and the remedy.
        row: Event index at which it was found, or None if it concerns the whole input.
    """

    def __init__(self, path: str, reason: str, row: int | None = None) -> None:
        """Keeps the facts; they are also the pickled form."""
        super().__init__(path, reason, row)
        self.path = path
        self.reason = reason
        self.row = row

    def __str__(self) -> str:
        """Path, event index where known, reason."""
        path = terminal_text(without_secrets(self.path))
        where = path if self.row is None else f"{path}, event {self.row}"
        return f"{where}: {self.reason}"
