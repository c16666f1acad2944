"""Criteo's display ads as they are published: TSV without a header, one impression a line.

A line is the label, 13 integers (I1 to I13) and 26 categories (C1 to C26, hexadecimal strings,
which are hashed as strings); any but the label may be empty. Lines are in order of time, but the
time itself is not given.
"""

from embertide.trainer.data.base import DeadLetters, criteo_schema
from embertide.trainer.data.csv import TextFormat, TextSource

_CATEGORIES = tuple(f"C{i}" for i in range(1, 27))

CRITEO_FORMAT = TextFormat(
    delimiter="\t",
    quoted=False,
    names=("label", *(f"I{i}" for i in range(1, 14)), *_CATEGORIES),
    # By name, for some columns happen to start with values of decimal digits only.
    kinds=dict.fromkeys(_CATEGORIES, "string"),
)


class CriteoSource(TextSource):
    """An `EventSource` over one such file; a line of other than 40 fields is a dead letter."""

    def __init__(self, path: str, *, dead_letters: DeadLetters | None = None) -> None:
        """Opens the file with `criteo_schema()`.

        Raises:
            DataError: The file is missing or empty.
        """
        super().__init__(path, criteo_schema(), CRITEO_FORMAT, dead_letters=dead_letters)
