"""Batches are handed out: each rank takes the next one when it is free, and reports on it.

The first rank reads the stream and puts batches; every rank, the first among them, asks for one,
learns it whole, and reports. So a slow rank takes fewer, and a group of one time is never split.
The first rank takes the reports in the order of the batches.

Shapes: B events of a batch, H heads.
"""

import dataclasses
import json
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embertide.trainer.data.base import Batch
from embertide.trainer.data.shared import packed, unpacked
from embertide.trainer.sync.channel import RankLostError
from embertide.trainer.sync.row_server import by_powers

_MAX_BYTES = 256 << 20
"""Bound on batches that are not yet taken back in order."""
_READY = 2
"""Jobs that wait for a rank that is free, for each rank."""
STILL_S = 1.0
"""How long a rank that asks waits for something to do before it is told that there is nothing."""

_NOTHING, _JOB, _COMMAND = range(3)
_HEAD = struct.Struct("<BQ")  # what follows, and a number
_SIZES = struct.Struct("<QQ")  # round, bytes of what is learned

Floats = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """The task of one rank in a batch.

    Attributes:
        number: Number of the job, from 0 on.
        learn: Events that are learned; None: none are.
        score: Events that are scored alone.
        round: Counts the times before it that no job was under way (`HandOut.end_round`).
    """

    number: int
    learn: Batch | None
    score: Batch | None
    round: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(each.nbytes for each in (self.learn, self.score) if each is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The result of a job.

    Attributes:
        number: Number of the job.
        rank: Who did it.
        learned: Scores of the events learned, from before, [B] or [B, H].
        scored: Scores of the others.
        missing: Dense values learned from that were missing.
        reason: Why the batch was not learned, as it would have made the net not finite; else empty.
    """

    number: int
    rank: int
    learned: Floats
    scored: Floats
    missing: int = 0
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A task of a rank together with all others, between batches.

    Attributes:
        name: The name of the task.
        value: As JSON.
        data: Bytes beside it.
    """

    name: str
    value: Any
    data: bytes = b""


Task = Job | Command


class HandOut:
    """Jobs on their way to ranks and back. `put`, `take`, `drain` and `command` are for one thread.

    `next` and `report` are for any. After `fail` all raise.

    Args:
        ranks: The number of ranks.
        max_out: Jobs that ranks may have at a time, all together.
        max_apart: Jobs from the oldest that is not reported to the newest that is handed out.
        timeout_s: How long a job may take.
        lost: Says which rank is gone.

    Attributes:
        stats: Counters.
        round: The round of the jobs that are put now.
    """

    def __init__(
        self,
        ranks: int,
        *,
        max_out: int,
        max_apart: int,
        timeout_s: float,
        lost: Callable[[Exception], RankLostError],
    ) -> None:
        """Begin with no jobs."""
        self.stats = HandOutStats(ranks)
        self.round = 0
        self._max_out, self._max_apart, self._timeout_s = max_out, max_apart, timeout_s
        self._lost = lost
        self._changed = threading.Condition()
        self._ready: deque[Job] = deque()
        self._out: dict[int, float] = {}  # when each job that a rank has was handed out
        self._had: dict[int, int] = {}  # the job that each rank has
        self._is_free_here = True  # the first rank's learning thread has nothing to do
        self._reports: dict[int, Report] = {}
        self._bytes = 0
        self._next = self._taken = 0  # job to be put, report to be taken
        self._sizes: dict[int, int] = {}
        self._commands: list[deque[Command]] = [deque() for _ in range(ranks)]
        self._failed: Exception | None = None

    # --- of the thread that reads -----------------------------------------------------------------

    def put(self, learn: Batch | None, score: Batch | None) -> bool:
        """Hand a batch out once there is room; returns whether there was.

        Where there is none, reports are there to be taken, which makes room.

        Raises:
            RankLostError: A rank is gone.
        """
        job = Job(self._next, learn, score, self.round)

        def has_room() -> bool:
            fits = self._bytes == 0 or self._bytes + job.nbytes <= _MAX_BYTES
            return fits and len(self._ready) < _READY * len(self._commands)

        with self._changed:
            self._wait_for(lambda: has_room() or self._taken in self._reports)
            if not has_room():
                return False
            self._next += 1
            self._sizes[job.number] = job.nbytes
            self._bytes += job.nbytes
            self._ready.append(job)
            self._changed.notify_all()
        return True

    def take(self, *, all_of_them: bool = False) -> Iterator[Report]:
        """Yield the reports that are there, in order; or those of all that was put.

        Raises:
            RankLostError: A rank is gone.
        """
        while True:
            with self._changed:
                if all_of_them:
                    self._wait_for(
                        lambda: self._taken == self._next or self._taken in self._reports
                    )
                elif self._failed is not None:
                    raise self._failed
                report = self._reports.pop(self._taken, None)
                if report is None:
                    return
                self._bytes -= self._sizes.pop(self._taken)
                self._taken += 1
                self._changed.notify_all()
            yield report

    def end_round(self) -> None:
        """Begin another round; all reports of the jobs before are taken."""
        assert self._taken == self._next
        self.round += 1

    def wait_for_here(self) -> None:
        """Return once the first rank's learning thread has nothing to do.

        Raises:
            RankLostError: A rank is gone.
        """
        with self._changed:
            self._wait_for(lambda: self._is_free_here)

    def has_had_s(self, rank: int) -> float:
        """Return for how long a rank has had its job; 0: it has none."""
        with self._changed:
            job = self._had.get(rank)
            return 0.0 if job is None else time.monotonic() - self._out[job]

    def command(self, command: Command) -> None:
        """Have all other ranks do something with this one; all reports are taken before."""
        assert self._taken == self._next
        self._command(command, self._commands[1:])

    def end(self, command: Command) -> None:
        """Have the learning thread of every rank end, this one's among them."""
        self._command(command, self._commands)

    def _command(self, command: Command, of_ranks: Sequence[deque[Command]]) -> None:
        with self._changed:
            for commands in of_ranks:
                commands.append(command)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Have whoever waits raise this."""
        with self._changed:
            self._failed = self._failed or error
            self._changed.notify_all()

    def _wait_for(self, there: Callable[[], bool]) -> None:
        while not self._changed.wait_for(lambda: self._failed is not None or there(), 1.0):
            oldest = min(self._out.values(), default=time.monotonic())
            if time.monotonic() - oldest > self._timeout_s:
                slow = RuntimeError(f"a batch has been with a rank for {self._timeout_s:.0f} s")
                raise self._lost(slow)
        if self._failed is not None:
            raise self._failed

    # --- of ranks ---------------------------------------------------------------------------------

    def next(self, rank: int) -> Task | None:
        """Return what a rank is to do; None: nothing for now, ask again.

        Raises:
            RankLostError: Another rank is gone.
        """

        def has_job() -> bool:
            return (
                bool(self._ready)
                and len(self._out) < self._max_out
                and self._ready[0].number - self._oldest() < self._max_apart
            )

        commands = self._commands[rank]
        began = time.monotonic()
        with self._changed:
            if rank == 0:
                self._is_free_here = True
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: bool(self._failed or commands or has_job()),
                STILL_S,
            )
            self.stats.waits_s[rank] += time.monotonic() - began
            if self._failed is not None:
                raise self._failed
            if commands:
                return commands.popleft()
            if not has_job():
                return None
            job = self._ready.popleft()
            self._out[job.number] = time.monotonic()
            self._had[rank] = job.number
            self._is_free_here &= rank != 0
            self._changed.notify_all()
            return job

    def _oldest(self) -> int:
        """Return the oldest job that a rank has; else the next one."""
        return min(self._out, default=self._ready[0].number)

    def report(self, report: Report) -> None:
        """Take note of a job that is done."""
        with self._changed:
            apart = max(self._out) - report.number
            self.stats.took_s += time.monotonic() - self._out.pop(report.number)
            self._had.pop(report.rank)
            self._reports[report.number] = report
            self.stats.done[report.rank] += 1
            self.stats.apart[apart] += 1
            self._changed.notify_all()


class HandOutStats:
    """The ranks' work since the start.

    Attributes:
        done: Jobs, by rank.
        waits_s: Seconds in which a rank had nothing to do, by rank.
        took_s: Seconds of all jobs together, from when they were handed out.
        apart: Jobs, by how many newer ones had been handed out when they were done.
    """

    def __init__(self, ranks: int) -> None:
        """Begin at nothing."""
        self.done = [0] * ranks
        self.waits_s = [0.0] * ranks
        self.took_s = 0.0
        self.apart: Counter[int] = Counter()

    @property
    def mean_s(self) -> float:
        """Mean seconds of a job."""
        return self.took_s / max(sum(self.done), 1)

    def as_json(self) -> dict[str, Any]:
        """Return them by name; of lists by rank."""
        return {
            "done": {str(rank): count for rank, count in enumerate(self.done)},
            "waits_s": {str(rank): waits_s for rank, waits_s in enumerate(self.waits_s)},
            "apart": by_powers(self.apart),
        }


# --- how they travel ------------------------------------------------------------------------------


def packed_task(task: Task | None) -> Tensor:
    """Return a task as bytes."""
    if task is None:
        return _bytes(_HEAD.pack(_NOTHING, 0))
    if isinstance(task, Command):
        words = json.dumps([task.name, task.value]).encode()
        return _bytes(_HEAD.pack(_COMMAND, len(words)) + words + task.data)
    learn = b"" if task.learn is None else packed(task.learn)
    score = b"" if task.score is None else packed(task.score)
    sizes = _SIZES.pack(task.round, len(learn))
    return _bytes(_HEAD.pack(_JOB, task.number) + sizes + learn + score)


def unpacked_task(data: Tensor) -> Task | None:
    """Return the task of `packed_task`."""
    whole = memoryview(data.numpy().tobytes())
    kind, number = _HEAD.unpack_from(whole)
    rest = whole[_HEAD.size :]
    if kind == _NOTHING:
        return None
    if kind == _COMMAND:
        name, value = json.loads(bytes(rest[:number]))
        return Command(name, value, bytes(rest[number:]))
    round_, size = _SIZES.unpack_from(rest)
    end = _SIZES.size + size
    learn, score = bytes(rest[_SIZES.size : end]), bytes(rest[end:])
    return Job(
        number,
        unpacked(learn) if learn else None,
        unpacked(score) if score else None,
        round_,
    )


def packed_report(report: Report) -> Tensor:
    """Return a report as bytes."""
    head = [report.number, report.rank, report.missing, report.reason, report.learned.shape]
    words = json.dumps(head).encode()
    arrays = (np.ascontiguousarray(each).tobytes() for each in (report.learned, report.scored))
    return _bytes(b"".join((struct.pack("<I", len(words)), words, *arrays)))


def unpacked_report(data: Tensor) -> Report:
    """Return the report of `packed_report`."""
    whole = data.numpy().tobytes()
    (size,) = struct.unpack_from("<I", whole)
    number, rank, missing, reason, shape = json.loads(whole[4 : 4 + size])
    floats = np.frombuffer(whole[4 + size :], np.float32)
    ends = int(np.prod(shape))
    learned = floats[:ends].reshape(shape)
    return Report(number, rank, learned, floats[ends:], missing, reason)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
