"""A training run of several ranks that is killed at random and goes on from its checkpoints.

The command keeps torchrun's agent running, which starts the ranks. When a rank or the agent is
killed, all ranks end and the command starts them again. When the command itself is killed, all of
them end with it, and we start it again.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
from snapshots import snapshot_files

from bench.servers import BUILD, BenchError
from embertide.server.adapters.process import Child
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.checkpoint.checkpoint import is_complete

_CACHE = BUILD / "cache" / "dense"
_RESTARTS = 1000
_START_S, _RUN_S, _END_S = 120.0, 600.0, 60.0
_KERNEL_S = 15.0  # ranks that are only just starting learn of it once they have loaded torch
_LOOK_S = 0.02

Moment = Literal["start", "write", "any", "late"]
Victim = Literal["rank", "all ranks", "agent", "command"]
MOMENTS: Mapping[Moment, float] = {"start": 0.2, "write": 0.45, "any": 0.35}
"""When to kill, and how often: while ranks start, while a snapshot is written, at any time."""
PLAN_MOMENTS: Mapping[Moment, float] = {"start": 0.15, "write": 0.15, "late": 0.7}
"""The same of ranks that look for a plan: a search takes as long as several starts."""
VICTIMS: Mapping[Victim, float] = {"rank": 0.6, "all ranks": 0.12, "agent": 0.14, "command": 0.14}
# The longest delay after the moment has come. Starting takes some seconds.
_DELAY_S: Mapping[Moment, float] = {"start": 3.0, "write": 0.1, "any": 1.5, "late": 35.0}
_ROW_US = 300  # that rank 1 sleeps for a row where ranks look for a plan: so there is one that pays


_SLOW_RANK = """
import os

from bench.search.real import sleep_for_rows

if os.environ.get("RANK") == "1":
    sleep_for_rows({row_us} / 1e6)
# A plan is tried however little is left of a stream whose end is not known.
type(source).total_events = lambda _: None
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """A model, and the generated news that it learns from.

    Checkpoints follow one another so closely that one is nearly always being written.

    Attributes:
        model: A function of `embertide.trainer.presets`.
        hours: Length of the stream; an hour has 10,000 events.
        prune_bytes: Bytes of rows that pruning leaves; 0: it prunes nothing.
        snapshot_every: Versions from one snapshot to the next.
        sync: The strategy, as a run's file has it; one whose ranks are not at the same step does
            not repeat byte for byte.
        batch_size: Events of a step.
        plan: Whether ranks look for a plan, and rank 1 is so slow with rows that one pays. No byte
            depends on it.
    """

    model: str
    hours: int
    prune_bytes: int = 0
    publish_every_s: int = 300
    snapshot_every: int = 2
    sync: str = "AllReduce()"
    batch_size: int = 256
    plan: bool = False

    @property
    def moments(self) -> Mapping[Moment, float]:
        """When to kill, and how often."""
        return PLAN_MOMENTS if self.plan else MOMENTS

    @property
    def kills(self) -> int:
        """Most kills of one run, so that some searches come to their end."""
        return 2 if self.plan else 1000

    @property
    def repeats(self) -> bool:
        """Whether two runs of it are the same, byte for byte."""
        return self.sync == "AllReduce()"

    def run_file(self, keep_snapshots: int) -> str:
        """Return the text of a run's file."""
        prune = f"PruneConfig(bytes={self.prune_bytes})" if self.prune_bytes else "None"
        slow = _SLOW_RANK.format(row_us=_ROW_US) if self.plan else ""
        return f'''"""A run that benchmarks and tests kill."""

from embertide.trainer.config import AllReduce, LocalSGD, PartialAllReduce, PruneConfig, RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.presets import {self.model}, news_rates

run = RunConfig(
    model={self.model}(),
    optimizer=news_rates(),
    prune={prune},
    publish_every_s={self.publish_every_s},
    snapshot_every={self.snapshot_every},
    keep_snapshots={keep_snapshots},
    sync={self.sync},
    batch_size={self.batch_size},
)
source = NewsSource(NewsConfig(hours={self.hours}))
{slow}'''


PLAIN = Stream(model="news_model", hours=3)
PRUNED = Stream(model="news_counters", hours=3, prune_bytes=200_000)
"""The model with histories and counters."""
APART = {
    name: dataclasses.replace(PLAIN, sync=sync)
    for name, sync in (("LocalSGD", "LocalSGD()"), ("partial all-reduce", "PartialAllReduce()"))
}
"""Ranks that are not at the same step."""
PLANNED = dataclasses.replace(PLAIN, hours=12, batch_size=64, plan=True)
"""Ranks that look for a plan, and start again with it."""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Return once a condition holds.

    Raises:
        BenchError: It does not hold in time; the message says what was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(_LOOK_S)


def _is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """How a run ended.

    Attributes:
        files: Files of the last snapshot.
        result: The trainer's report on the whole stream.
    """

    files: dict[str, bytes]
    result: dict[str, Any]

    @property
    def comparable(self) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Return the results that kills may not change."""
        names = ["events", "version", "forgotten_users"]
        names += ["auc_by_day", "log_loss_by_day", "calibration_by_day"]
        return self.files, {name: self.result[name] for name in names}

    def is_as(self, other: "End", stream: Stream) -> bool:
        """Whether it is as good as that of a run that was not killed.

        The bytes are the same; where runs do not repeat, as many events were learned.
        """
        if stream.repeats:
            return self.comparable == other.comparable
        return bool(self.result["events"] == other.result["events"])


class RankRun:
    """One publication, and the commands that fill it one after the other. For one thread."""

    def __init__(
        self, folder: Path, stream: Stream, *, bus: str | None = None, keep_snapshots: int = 8
    ) -> None:
        """Prepare a run; `start` starts it.

        Args:
            folder: Folder of the publication and the logs.
            stream: The stream that it learns.
            bus: Redis URL for updates; None: files alone.
            keep_snapshots: Snapshots kept, with the deltas that follow the oldest.
        """
        self.publication = Publication(folder / "pub")
        self.stage = ""  # of the search for a plan, when the ranks were last killed
        self._options = ["--plan", "auto"] if stream.plan else []
        self._folder = folder
        self._bus = bus
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "run.py"
        self._file.write_text(stream.run_file(keep_snapshots))
        self._starts = 0
        self._ranks = 0
        self._pids: dict[int, int] = {}  # of the ranks that run now, by rank
        self._log_begin = 0  # of what these ranks log
        self._agent = 0  # process of the parent of these ranks
        self._command: Child

    # --- starting ---------------------------------------------------------------------------------

    def start(self, ranks: int) -> None:
        """Start the command, and return when its ranks are processes.

        Raises:
            BenchError: They do not come.
        """
        self._starts += 1
        self._ranks = ranks
        command = [sys.executable, "-m", "embertide.trainer", "train", str(self.publication.path)]
        command += ["--config", str(self._file), "--cache", str(_CACHE), "--json"]
        command += ["--nproc", str(ranks), "--restarts", str(_RESTARTS)]
        command += ["--bus", self._bus] if self._bus else []
        command += self._options
        self._command = Child(command, log=self._folder / f"{self._starts}.log")
        self._await_ranks({})

    def close(self) -> None:
        """End it, if it still runs."""
        if self._starts:
            self._command.stop()

    def _find_ranks(self) -> dict[int, int]:
        """Return the process of each rank."""
        pids: dict[int, int] = {}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._command.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    rank = process.environ().get("RANK")
                    # Processes that a rank starts have its variables, and come after it.
                    if rank is not None and int(rank) not in pids:
                        pids[int(rank)] = process.pid
                        self._agent = process.ppid()
        return pids

    def _await_ranks(self, before: Mapping[int, int]) -> None:
        """Wait until all ranks have other processes than before, or the run is at its end."""

        def are_there() -> bool:
            self._pids = self._find_ranks()
            all_new = not set(self._pids.values()) & set(before.values())
            return self.ended() or (len(self._pids) == self._ranks and all_new)

        wait_until(are_there, f"{self._ranks} ranks to start", _START_S)
        self._log_begin = len(self._command.log_text())

    def _find_all_ranks(self) -> None:
        """Find the ranks that run now: they may have started again by themselves."""

        def are_there() -> bool:
            self._pids = self._find_ranks()
            return self.ended() or len(self._pids) == self._ranks

        wait_until(are_there, f"{self._ranks} ranks to run", _START_S)

    # --- watching ---------------------------------------------------------------------------------

    def ended(self) -> bool:
        """Return whether the run came to its end.

        Raises:
            BenchError: It ended in any other way; the message is its log.
        """
        if self._command.code not in (None, 0):
            raise BenchError(f"the run ended with {self._command.code}: {self._command.log_text()}")
        return self._command.code == 0

    def _learns(self) -> bool:
        """Return whether the ranks have learned since they were started."""
        return self.ended() or "progress" in self._command.log_text()[self._log_begin :]

    def _read_stage(self) -> str:
        """Return the stage of the search for a plan that these ranks spoke of last."""
        log = self._command.log_text()[self._log_begin :]
        lines = [line for line in log.splitlines() if line.startswith('{"progress"')]
        with contextlib.suppress(IndexError, ValueError):
            return str(json.loads(lines[-1])["progress"]["plan"].get("stage", ""))
        return "not learning"

    def _writes(self) -> bool:
        """Return whether a snapshot is being written."""
        partial = (self.publication.path / "snapshots").glob(".*.partial")
        return any(partial) or self.ended()

    def newest(self) -> int:
        """Return the number of the newest version; 0: there is none."""
        versions = self.publication.versions()
        return versions[-1].number if versions else 0

    def unfinished(self) -> set[str]:
        """Name what killed ranks have left unfinished."""
        publication, path = self.publication, self.publication.path
        complete = [v for v in publication.snapshots() if is_complete(publication, v)]
        # A folder without the file that makes it exist.
        parts = {
            "checkpoint": [folder / "checkpoint.json" for folder in path.glob("checkpoints/*")],
            "delta": [folder / "commit.pb" for folder in path.glob("deltas/*")],
            "snapshot": [folder / "none" for folder in path.glob("snapshots/.*.partial")],
        }
        names = {name for name, files in parts.items() if not all(f.exists() for f in files)}
        # Versions are out that the newest checkpoint has not learned.
        return names | ({"versions"} if publication.versions()[-1:] > complete[-1:] else set())

    # --- killing ----------------------------------------------------------------------------------

    def kill(self, moment: Moment, victim: Victim, rng: np.random.Generator) -> bool:
        """Kill at such a moment, and return when no rank of before runs any more.

        Returns:
            Whether it was killed; if not, it had come to its end before.

        Raises:
            BenchError: It does not get so far, or ranks outlive what was killed.
        """
        if moment != "start":
            wait_until(self._learns, "the ranks to learn", _START_S)
        if moment == "write":
            wait_until(self._writes, "a snapshot to be written", _START_S)
        until = time.monotonic() + rng.uniform(0, _DELAY_S[moment])
        while time.monotonic() < until and not self.ended():
            time.sleep(0.001)
        self._find_all_ranks()
        victims = {
            "rank": [self._pids.get(int(rng.integers(self._ranks)), 0)],
            "all ranks": list(self._pids.values()),
            "agent": [self._agent],
            "command": [self._command.pid],
        }[victim]
        if self.ended() or not all(_is_running(pid) for pid in victims):
            wait_until(self.ended, "the run to end", _END_S)
            return False
        self.stage = self._read_stage()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        if victim == "command":
            self._command.wait()
        # Ranks leave in order when another one is lost; the kernel ends them with their agent.
        timeout_s = _END_S if victim in ("rank", "all ranks") else _KERNEL_S
        what = f"the ranks to end after a kill of the {victim}"
        wait_until(lambda: not any(map(_is_running, self._pids.values())), what, timeout_s)
        return True

    def go_on(self, ranks: int) -> None:
        """Have ranks run again after a kill.

        Args:
            ranks: The number of ranks, if the command was killed; else there are as many as before.
        """
        if self._command.code == -signal.SIGKILL:
            self.start(ranks)
        else:
            self._await_ranks(self._pids)

    def end(self) -> End:
        """Wait for its end.

        Raises:
            BenchError: It does not come, or it is not a good one.
        """
        wait_until(self.ended, "the run to end", _RUN_S)
        lines = self._command.log_text().splitlines()
        result = json.loads(next(line for line in reversed(lines) if line.startswith('{"result"')))
        last = self.publication.snapshots()[-1]
        return End(snapshot_files(self.publication.snapshot_path(last)), result["result"])
