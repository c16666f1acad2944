"""Options of the demo: those that a user may choose, and those that it chooses itself."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Self

from embertide.server.adapters.process import ProcessError

MODEL = "news"
"""The name under which any of the news models is served."""
UNMOVED_MODEL = "unmoved"
"""The copy on one node that holds all rows: what answers are compared with during the reshard."""
FROZEN_MODEL = "frozen"
STALENESS_MIN = 15.0
"""Staleness at most, however long the stream is."""
VERSIONS = 6_000
"""Versions that a stream is cut into, or more where staleness would exceed its most; each
takes all processes some 60 ms of CPU time."""
CONTEXT = {
    "news-crossed": (
        *("user", "prev", "env", "device", "os"),
        *("country", "region", "referrer", "hour"),
    )
}
"""Columns that are the user's, by model: requests carry them once for all of its candidates."""
MADE_STALENESS_MIN = 9.0
"""The same of models whose columns nodes make from published rows: as old as the version."""
_FIT = 3  # versions, in the staleness that scoring allows
_MARKER = "demo.json"
_PATHS = ("directory", "backends", "cache", "triton")


class DemoError(ProcessError):
    """The demo cannot run; the message says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """Options of the demo."""

    directory: Path
    backends: Path
    cache: Path  # of compiled dense programs
    triton: Path | None = None  # the tritonserver; None: that of the wheel
    model: str = "news"  # the trainer's preset
    ranks: int = 1  # of the trainer
    data: str | None = None
    events: int | None = None
    hours: int = 96
    max_staleness_min: float = STALENESS_MIN
    versions: int | None = None  # staleness is less where this many make it so
    grpc_port: int = 8001  # of the first node, as the next one; the second takes free ones
    metrics_port: int = 8002
    control_port: int = 7070
    console_port: int = 7080
    bus: str | None = None  # a Redis that runs already; one of the demo's own without it

    def input(self) -> list[str]:
        """Return the trainer's options that name the stream."""
        words = (
            ["--demo", "--hours", str(self.hours)] if self.data is None else ["--data", self.data]
        )
        return words if self.events is None else [*words, "--events", str(self.events)]

    def context(self) -> list[str]:
        """Return the trainer's option that says which columns are the user's."""
        names = CONTEXT.get(self.model)
        return ["--set", f"model.context={','.join(names)}"] if names else []

    def rank_words(self) -> list[str]:
        """Return the trainer's options for its ranks: several look for a plan as they learn."""
        words = ["--nproc", str(self.ranks)]
        return [*words, "--plan", "auto"] if self.ranks > 1 else words

    @property
    def publish_every_s(self) -> int:
        """Event time between versions: three fit the staleness that scoring allows."""
        return max(1, min(600, int(self.max_staleness_min * 60 / _FIT)))

    def published_every(self, seconds: int) -> Self:
        """Return them with versions so far apart in event time."""
        return dataclasses.replace(self, max_staleness_min=seconds * _FIT / 60, versions=None)

    @property
    def publication(self) -> Path:
        """Where the trainer publishes."""
        return self.directory / "publication"

    @property
    def kept(self) -> Path:
        """The copy that is frozen."""
        return self.directory / "kept"

    @property
    def frozen_records(self) -> Path:
        """The answers of the frozen copy."""
        return self.directory / "frozen"

    @property
    def reshard(self) -> Path:
        """The moves of the reshard, and when they happened."""
        return self.directory / "reshard.json"

    @property
    def decisions(self) -> Path:
        """The control plane's observations and decisions, whether it moved or not."""
        return self.directory / "decisions.json"

    @property
    def metrics(self) -> Path:
        """The nodes' last pages of metrics."""
        return self.directory / "metrics.txt"

    def log(self, name: str) -> Path:
        """Where a process writes its log."""
        return self.directory / "logs" / f"{name}.log"

    def mark(self) -> None:
        """Write them into the folder, which they make a demo's."""
        text = json.dumps(dataclasses.asdict(self), default=str, indent=1)
        (self.directory / _MARKER).write_text(text + "\n")

    @staticmethod
    def marks(directory: Path) -> bool:
        """Return whether a folder is a demo's."""
        return (directory / _MARKER).exists()


def load_demo(directory: Path) -> tuple[DemoOptions, dict[str, Any]]:
    """Return the options and the report of a demo that ran.

    Raises:
        DemoError: There is none.
    """
    try:
        said = json.loads((directory / _MARKER).read_text())
        report = json.loads((directory / "report.json").read_text())
    except FileNotFoundError as error:
        raise DemoError(f"{error.filename} is missing: run the demo first") from None
    paths = {name: Path(said[name]) for name in _PATHS if said.get(name) is not None}
    return DemoOptions(**{**said, **paths, "directory": directory}), report
