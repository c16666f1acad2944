"""Saver: checkpoints and snapshots written in a thread of their own, while training goes on.

The training thread copies the rows bucket by bucket, since they change in place; the writer takes
the copies, writes them and lets go of them. What waits to be written is bounded: beyond
`memory_bytes` training waits for the drive. One checkpoint is in flight at a time. An error of the
writer is raised in the training thread, by the next `check`, `save` or `wait`; where the drive was
full, training goes on, the checkpoint before stays, and the next one is tried when it is due.
"""

import dataclasses
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Self

from embertide import _store
from embertide._common.room import RoomWatch, is_no_room, no_room
from embertide.trainer.errors import TrainerError
from embertide.trainer.publish.folder import MANIFEST, Publication, VersionId
from embertide.trainer.publish.promotion import PromotionRecord
from embertide.trainer.publish.snapshot import PROGRAM, DensePart, SnapshotInfo, write_snapshot
from embertide.trainer.publish.threads import NoThreadError, Workers
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint.checkpoint import Checkpoint, CheckpointWriter, UnwrittenError
from embertide.trainer.run.checkpoint.increment import Increment, Keys
from embertide.trainer.sync.channel import ALONE, Channel

_SAID_EVERY_S = 60.0

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SaverOptions:
    """How checkpoints are written and how long they stay."""

    memory_bytes: int
    keep_snapshots: int
    keep_s: float


@dataclasses.dataclass(slots=True)
class SaverStats:
    """Counters since the start."""

    saved: int = 0
    increments: int = 0  # of them, those that rest on a snapshot before
    bytes_written: int = 0  # of snapshots and checkpoints, on all ranks
    bytes_reused: int = 0  # that increments rest on: of the snapshot before, and its checkpoint
    without_room: int = 0  # that the drive had no room for
    without_thread: int = 0  # that no thread could be started for
    waits: int = 0  # of training: for the checkpoint before, or for room to copy a bucket
    paused_s: float = 0.0  # of training, copying and waits together
    longest_pause_s: float = 0.0
    written_s: float = 0.0  # the writer at work


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotJob:
    """The part of a snapshot that is written beside the rows.

    Attributes:
        then: Called in the writer's thread once checkpoint and snapshot are there.
        increment: The increment that it rests on, where only changes are written; None: all rows
            are.
    """

    checkpoint: Checkpoint
    info: SnapshotInfo
    tables: Sequence[_store.TableConfig]
    dense: DensePart
    then: Callable[[], None]
    increment: Increment | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BucketCopy:
    """A bucket's rows and what their learning knows, as of the checkpoint's version.

    Attributes:
        records: As nodes hold them.
        state: State of the trained rows.
        waiting: Trained records that nodes hold otherwise or lack (`PublishedImage`).
        trained: Of a table that is served in another type: all trained records, or for an increment
            those of `keys`; nothing waits then. None: of any other.
        keys: For an increment, the keys of `state`; it has no records.
        is_unpruned: Whether it is of the unpruned rows, whose records are `waiting`: no snapshot
            has them.
    """

    table: _store.TableConfig
    bucket: int
    records: bytes
    state: "_store.BucketState"
    waiting: bytes = b""
    trained: bytes | None = None
    keys: Keys | None = None
    is_unpruned: bool = False

    @property
    def bytes(self) -> int:
        """Bytes that it counts against the bound."""
        state = sum(array.nbytes for array in self.state)
        return len(self.records) + len(self.waiting) + len(self.trained or b"") + state


class _Handover:
    """Copies on their way from one thread to one other; `waits` counts those of the giver."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0  # given and not yet written
        self._copies: deque[BucketCopy] = deque()
        self._whole: bool | None = None  # at its end: whether all was given
        self._left = False  # the taker has gone
        self._changed = threading.Condition()
        self.waits = 0

    def give(self, copy: BucketCopy) -> None:
        """Hand a copy over once there is room; one larger than the bound goes alone."""

        def room() -> bool:
            fits = self._bytes == 0 or self._bytes + copy.bytes <= self._max_bytes
            return fits or self._left

        with self._changed:
            self.waits += not room()
            self._changed.wait_for(room)
            self._bytes += copy.bytes
            self._copies.append(copy)
            self._changed.notify_all()

    def end(self, *, whole: bool) -> None:
        """Say that nothing more comes."""
        with self._changed:
            self._whole = whole
            self._changed.notify_all()

    def leave(self) -> None:
        """Say that nothing more is taken."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def take(self) -> Iterator[BucketCopy]:
        """Yield all copies; one counts as written when the next is asked for.

        Raises:
            UnwrittenError: The giver failed half way.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._copies or self._whole is not None)
                if not self._copies:
                    break
                copy = self._copies.popleft()
            yield copy
            with self._changed:
                self._bytes -= copy.bytes
                self._changed.notify_all()
        if not self._whole:
            raise UnwrittenError("the rows could not be copied; start the run again")


class Saver:
    """Writes the checkpoints of one run. Used by one thread, the training thread.

    As a context it waits for the checkpoint in flight at its end, also after an error.
    """

    def __init__(
        self, publication: Publication, options: SaverOptions, channel: Channel = ALONE
    ) -> None:
        """Write to `publication`, on a channel of the writer's thread, with all ranks on it."""
        self._channel = channel
        self._publication = publication
        self._options = options
        self._workers = Workers("checkpoint")
        self._writing: Future[None] | None = None
        self._number = 0  # of the version in flight
        self.stats = SaverStats()
        self._room = RoomWatch(publication.path)
        self._said_s = -_SAID_EVERY_S  # that there is no room

    def save(self, job: SnapshotJob, copies: Iterable[BucketCopy]) -> None:
        """Copy the rows and begin to write them; returns when they are copied.

        Args:
            job: The rest of the same version; nothing in it changes from here on.
            copies: Every bucket once, in the order of the snapshot, or of an increment those that
                changed; made as they are asked for.

        Raises:
            UnwrittenError: The checkpoint before this one could not be written; what becomes of
                this one, `check` and `wait` say.
        """
        began = time.monotonic()
        self.stats.waits += self._writing is not None and not self._writing.done()
        self.wait()
        handover = _Handover(self._options.memory_bytes)
        self._number = job.checkpoint.version.number
        # Not by this thread, which hands copies over to it.
        self._writing = self._workers.submit(
            functools.partial(self._write, job, handover), here=False
        )
        if self._writing.done():
            handover.leave()  # nobody takes them
        whole = False
        try:
            for copy in copies:
                handover.give(copy)
            whole = True
        finally:
            handover.end(whole=whole)
            pause_s = time.monotonic() - began
            self.stats.waits += handover.waits
            self.stats.paused_s += pause_s
            self.stats.longest_pause_s = max(self.stats.longest_pause_s, pause_s)

    def check(self) -> None:
        """Raise what the writer failed with, if it did.

        Raises:
            UnwrittenError: The version and the reason.
        """
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self, *, needed: bool = False) -> None:
        """Return once no checkpoint is in flight.

        Args:
            needed: Whether a drive without room is an error.

        Raises:
            UnwrittenError: The version and the reason.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except (OSError, _store.StoreError, TrainerError) as error:
            if not needed and (is_no_room(error) or isinstance(error, NoThreadError)):
                self._go_without(error)
                return
            raise UnwrittenError(
                f"the checkpoint of version {self._number} cannot be written: {error}; free "
                "room and start the run again: it goes on from the checkpoint before"
            ) from error

    def _go_without(self, error: Exception) -> None:
        """Go on without a checkpoint, for a cause that may pass."""
        what = f"the checkpoint of version {self._number} is not written, the one before stays"
        if isinstance(error, NoThreadError):
            self.stats.without_thread += 1
            log.error("%s: %s", what, error)
            return
        self.stats.without_room += 1
        self._room.full()
        now = time.monotonic()
        if now < self._said_s + _SAID_EVERY_S:
            return
        self._said_s = now
        room = (
            str(error)
            if isinstance(error, TrainerError)
            else no_room(self._publication.path, error)
        )
        log.error(
            "%s: %s; make room, or keep fewer snapshots (keep_snapshots, keep_snapshots_s)",
            what,
            room,
        )

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait for the checkpoint in flight; its error is raised unless another is under way."""
        if kind is None:
            self.wait(needed=True)
        elif self._writing is not None and (failure := self._writing.exception()) is not None:
            log.error("the checkpoint of version %d was not written: %s", self._number, failure)

    def _write(self, job: SnapshotJob, handover: _Handover) -> None:
        """Write a checkpoint and its snapshot, then drop the old ones."""
        began = time.monotonic()
        try:
            version, increment = job.checkpoint.version, job.increment
            with self._channel.together():
                self._room.check()
            with CheckpointWriter(self._publication, version, self._channel, increment) as writer:
                if increment is None:
                    self._write_rows(job, writer, handover)
                else:
                    self._write_changes(job, increment, writer, handover)
            before = self.stats.bytes_written
            with self._channel.together():
                if self._channel.first:
                    self._count(job)
                    self._room.fits(self.stats.bytes_written - before)
                    self._publication.prune(
                        self._options.keep_snapshots,
                        keep_s=self._options.keep_s,
                        served=PromotionRecord(self._publication).read().may_see,
                    )
                    checkpoints.prune(self._publication, self._options.keep_snapshots)
            self.stats.saved += 1
            job.then()
        finally:
            handover.leave()
            self.stats.written_s += time.monotonic() - began

    def _write_changes(
        self,
        job: SnapshotJob,
        increment: Increment,
        writer: CheckpointWriter,
        handover: _Handover,
    ) -> None:
        for copy in handover.take():
            writer.add(
                copy.table.name,
                copy.bucket,
                copy.state,
                copy.waiting,
                trained=copy.trained,
                keys=copy.keys,
                is_unpruned=copy.is_unpruned,
            )
        manifest: str | None = None
        with self._channel.together():
            if self._channel.first:
                base = self._publication.snapshot_path(increment.base)
                manifest = (base / MANIFEST).read_text(encoding="utf-8")
        writer.finish(job.checkpoint, manifest)

    def _count(self, job: SnapshotJob) -> None:
        """Count what was written and what was not written again."""
        version, increment = job.checkpoint.version, job.increment

        def size(folder: Path) -> int:
            files = [path for path in folder.rglob("*") if path.is_file()]
            return sum(each.stat().st_size for each in files if each != folder / PROGRAM)

        def whole(version: VersionId) -> int:
            folder = checkpoints.folder_of(self._publication, version)
            return size(self._publication.snapshot_path(version)) + size(folder)

        if increment is None:
            self.stats.bytes_written += whole(version)
            return
        self.stats.increments += 1
        self.stats.bytes_written += size(checkpoints.folder_of(self._publication, version))
        self.stats.bytes_reused += whole(increment.base)

    def _write_rows(self, job: SnapshotJob, writer: CheckpointWriter, handover: _Handover) -> None:
        def buckets() -> Iterator[tuple[_store.TableConfig, int, bytes]]:
            for copy in handover.take():
                writer.add(
                    copy.table.name,
                    copy.bucket,
                    copy.state,
                    copy.waiting,
                    trained=copy.trained,
                    is_unpruned=copy.is_unpruned,
                )
                if not copy.is_unpruned:
                    yield copy.table, copy.bucket, copy.records

        version = job.checkpoint.version
        if self._channel.first:
            # One that is there has lost its checkpoint: both are made again.
            self._publication.remove_snapshot(version)
        write_snapshot(
            self._publication.snapshot_path(version),
            job.info,
            job.tables,
            buckets(),
            job.dense,
            before=lambda manifest: writer.finish(job.checkpoint, manifest),
            channel=self._channel,
        )
