"""Options of a chaos run."""

import dataclasses
import shutil
from collections.abc import Sequence, Set
from pathlib import Path

from embertide._common.private import own_folder
from embertide.server.adapters.process import ProcessError


class ChaosError(ProcessError):
    """The harness cannot run; the message says what to do."""

    remedy = "see the logs in the folder of the run"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChaosOptions:
    """Options of a chaos run.

    Attributes:
        directory: Folder of logs, of the publication and of the report.
        triton: The tritonserver; None: that of the wheel.
        data: Events, as `embertide train --data` takes them in a file; None: synthetic news.
        config: A run's file, as `embertide train --config` takes it; None: the news model.
        events_per_s: How fast events happen.
        version_s: Event time between versions.
        versions_per_snapshot: A node whose files were harmed waits for the next snapshot.
        seed: Seed of the traffic.
        clients: Clients per node.
        samples: Samples per request.
        pause_s: From an answer to a client's next request.
        deadline_s: Deadline of a request.
        heal_s: A round in which the fleet takes longer has failed.
        without: Kinds of faults that are left out.
        clock_library: libfaketime, by which clocks are set; None: they are left alone.
    """

    directory: Path
    backends: Path
    cache: Path
    triton: Path | None = None
    data: str | None = None
    config: Path | None = None
    seed: int = 1
    minutes: float | None = None
    events_per_s: float = 400.0
    version_s: int = 60
    versions_per_snapshot: int = 20
    clients: int = 2
    samples: int = 32
    pause_s: float = 0.02
    deadline_s: float = 5.0
    heal_s: float = 60.0
    without: Sequence[str] = ()
    clock_library: Path | None = None

    @property
    def publication(self) -> Path:
        """Where the trainer publishes."""
        return self.directory / "publication"

    def empty(self, keep: Set[str] = frozenset()) -> None:
        """Empty the folder, but for these names.

        Raises:
            ChaosError: It holds something else.
        """
        folder, ours = self.directory, {"rounds.jsonl", "logs"}
        held = {path.name for path in folder.iterdir()} if folder.exists() else set()
        if held - {self.publication.name} and not held & ours:
            raise ChaosError(f"{folder} holds something else than a run of chaos: give another one")
        own_folder(folder)
        # The publication may be a mount, which stays.
        self.publication.mkdir(parents=True, exist_ok=True)
        gone = [folder / name for name in held - keep - {self.publication.name}]
        for path in (*gone, *self.publication.iterdir()):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.log("").parent.mkdir()

    def log(self, name: str) -> Path:
        """Where a process writes its log."""
        return self.directory / "logs" / f"{name}.log"
