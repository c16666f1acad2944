"""Publisher: a trainer's changes become versions, in files and on the bus (DESIGN.md section 4).

The order makes a version exist for everybody or for nobody: delta files, commit file, row batches
on the buckets' streams, partition commits, and last the global commit, which Redis appends only
while the lineage is still this publisher's. Redis away costs freshness alone: nodes read the files,
and the next version goes out on the bus again.
"""

import contextlib
import dataclasses
import logging
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

import redis

from embertide import _store
from embertide._common.redis_url import cause_of
from embertide._common.room import RoomWatch
from embertide.trainer.errors import FinalError
from embertide.trainer.publish.bus import Bus, BusError, BusStats, Keys, connect
from embertide.trainer.publish.folder import (
    NoRoomError,
    Publication,
    PublicationError,
    VersionId,
    Written,
    needing_room,
)
from embertide.trainer.publish.lock import FolderLock
from embertide.trainer.publish.promotion import PromotionRecord
from embertide.trainer.publish.snapshot import dense_id
from embertide.trainer.sync.channel import ALONE, Channel
from embertide.v1 import update_pb2

__all__ = ["BUS_BYTES", "BusError", "Change", "Publisher", "PublisherStats", "SupersededError"]

BUS_BYTES = 512 << 20
"""Default bound on a model's versions in Redis."""
# A batch with its header stays under 1 MiB.
_MAX_BATCH_BYTES = (1 << 20) - 256
_MAX_INLINE_DENSE = 1 << 20
# A Redis that hangs costs a version the client's timeout; it is then left alone for as long, at
# most this: nodes must find the bus again soon after it is back.
_MAX_PAUSE_S = 5.0

log = logging.getLogger(__name__)


class SupersededError(FinalError):
    """Another publisher has taken the lineage; this one must stop."""


def superseded_by_rollback(number: int, to: int) -> SupersededError:
    """Return the error of a trainer whose versions after `to` version `number` has undone."""
    return SupersededError(
        f"version {number} rolled back to version {to}: start this trainer again, and it goes on "
        "from its newest checkpoint before the versions undone"
    )


@dataclasses.dataclass(slots=True)
class PublisherStats:
    """Counters since the start."""

    versions: int = 0
    versions_without_room: int = 0  # that the drive had no room for; the next one has their rows
    damaged_partitions: int = 0  # of versions before, which cannot be read: their rows go again
    rows: int = 0
    bytes: int = 0
    bus_failures: int = 0  # versions that went out by files alone, for want of Redis
    bus_full: int = 0  # times that Redis refused rows for want of memory
    bus_commits_alone: int = 0  # versions whose rows did not fit on the bus
    bus_emptied: int = 0  # times that Redis had lost what it held
    bus_trimmed_early: int = 0  # versions trimmed before every live node had applied them


@dataclasses.dataclass(frozen=True, slots=True)
class Owed:
    """The changes that other publishers sent.

    Attributes:
        batches: By (table id, bucket).
        damaged: Partitions of which some file cannot be read: any row of theirs may have changed.
    """

    batches: dict[tuple[int, int], list[update_pb2.RowBatch]]
    damaged: set[int]


Change = tuple[_store.TableConfig, int, bytes]
"""Table, bucket, records that changed since the version before (tombstones among them)."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _batch_crc(lineage: int, version: int, table: int, bucket: int, seq: int, rows: bytes) -> int:
    header = struct.pack("<QQIIQ", lineage, version, table, bucket, seq)
    return _store.crc32c(rows, _store.crc32c(header))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """A version whose rows are taken; `Publisher.finish` makes it exist."""

    version: VersionId
    file: update_pb2.CommitFile
    dense: bytes  # tensors, if they changed
    written: Written
    bus: Bus | None  # that it goes out on


class Publisher:
    """Publishes the versions of one model, one at a time.

    Used by one thread at a time: what one has begun, another may finish.

    Memory: 64 KiB a partition for a version's batches until it is out; the rest is on the drive.

    Attributes:
        lineage: This publisher's run; larger than any before it.
        newest: The version published last, by anybody; None before the first.
        schema_id: The schema id in its versions; it cannot change once the first is out.
    """

    def __init__(
        self,
        publication: Publication,
        *,
        bus: str | None,
        model: str,
        schema_id: int,
        bus_bytes: int = BUS_BYTES,
        exclusive: bool = True,
        floor: int = 0,
        channel: Channel = ALONE,
    ) -> None:
        """Take the lineage; without a bus, also the folder's lock.

        Args:
            publication: Where versions are written.
            bus: Redis URL; None publishes to files alone.
            model: Its name, by which several models can share a Redis.
            schema_id: The schema id of the model, as its snapshots have it.
            bus_bytes: Bound on the bytes of its versions in Redis.
            exclusive: False leaves the lock alone: for one who means to supersede a trainer.
            floor: A lineage that others have had, though the folder may not show it.
            channel: The channel of the ranks that publish together; each makes one of these, and
                all call it alike.

        Raises:
            BusError: Redis cannot be reached now, or the model's name is not one for the bus.
            LockedError: Without a bus: a publisher in another process has the folder.
        """
        self.publication = publication
        self._room = RoomWatch(publication.path)
        self.schema_id = schema_id
        self.stats = PublisherStats()
        self._channel = channel
        self._bus: Bus | None = None
        self._away_until = 0.0
        taken: list[list[int]] = [[0, 0, 0]]
        with channel.together():
            self._lock = None
            if bus is None and exclusive and channel.first:
                self._lock = FolderLock(publication.path)
            if bus is not None:
                self._bus = Bus.connect(bus, model, bus_bytes, channel)
            if channel.first:
                floor = max(floor, publication.largest_lineage())
                lineage = floor + 1 if self._bus is None else self._take_lineage(self._bus, floor)
                # Listed once the lineage is ours: whoever had it commits no more.
                newest = (publication.versions() or [VersionId(0, 0)])[-1]
                taken = [[lineage, *newest]]
        self.lineage, number, of = channel.gather(taken[0])[0]
        self.newest: VersionId | None = VersionId(number, of) if number else None
        self._sequences: dict[tuple[int, int], int] = defaultdict(int)
        self._dense_id = ""
        self._committed_ms = 0  # of `newest`, if it is this publisher's

    def _take_lineage(self, bus: Bus, floor: int) -> int:
        try:
            return bus.take_lineage(floor)
        except redis.RedisError as error:
            raise BusError(f"Redis {cause_of('--bus', error)}") from error

    def owed(self, since: int, until: int | None = None) -> Owed:
        """Return what other publishers sent after version number `since`.

        With `until`, what was sent after that version is left out.

        A publisher that resumes from `since` must send these rows in its first version: nodes may
        hold what nobody will confirm.
        """
        owed = Owed(defaultdict(list), set())
        for version in self.publication.deltas():
            if since < version.number and (until is None or version.number <= until):
                for batch in self.publication.salvage(version, owed.damaged):
                    owed.batches[batch.table_id, batch.bucket].append(batch)
        return owed

    def adopt(self, number: int, *, watermark_ms: int, dense: bytes) -> None:
        """Say that a snapshot of this lineage is the newest version: a publication's first."""
        self.newest = VersionId(number, self.lineage)
        self._dense_id = dense_id(dense)
        self._committed_ms = self._first_clock_ms()
        self._note(self.newest, watermark_ms, self._committed_ms)

    def _first_clock_ms(self) -> int:
        """Return the time by the first rank's clock, which is the run's."""
        return int(self._channel.gather(_now_ms())[0])

    def _note(self, version: VersionId, watermark_ms: int, committed_ms: int) -> None:
        with self._channel.together():
            if self._channel.first:
                with needing_room(self.publication.path):
                    self.publication.note(
                        version, watermark_ms=watermark_ms, committed_ms=committed_ms
                    )

    def committed_ms(self, version: VersionId) -> int:
        """Return when a version that is out was committed, by the publisher's clock."""
        if version == self.newest and self._committed_ms:
            return self._committed_ms
        return self.publication.read_commit(version).commit.committed_ms

    def publish(
        self,
        number: int,
        *,
        watermark_ms: int,
        changes: Iterable[Change],
        dense: bytes,
        rollback_to: int = 0,
    ) -> VersionId:
        """Publish a version: `begin`, then `finish`, which say what the arguments are."""
        return self.finish(
            self.begin(
                number,
                watermark_ms=watermark_ms,
                changes=changes,
                dense=dense,
                rollback_to=rollback_to,
            )
        )

    def begin(
        self,
        number: int,
        *,
        watermark_ms: int,
        changes: Iterable[Change],
        dense: bytes,
        rollback_to: int = 0,
    ) -> Outgoing:
        """Take a version's rows; nobody sees it yet.

        Args:
            number: Greater than that of any version before it.
            watermark_ms: Event time up to which it has learned.
            changes: Each changed bucket once, ascending by table and number.
            dense: The dense tensors (safetensors); sent if they differ from the version before.
            rollback_to: The version whose state this one restores; 0: none.

        Returns:
            What `finish` is to be called with before any other version is begun.

        Raises:
            ValueError: `number` does not rise.
            SupersededError: Another publisher runs.
            NoRoomError: The drive is full.
        """
        if self.newest is not None and number <= self.newest.number:
            raise ValueError(f"version {number} is not newer than {self.newest.number}")
        version = VersionId(number, self.lineage)
        file = update_pb2.CommitFile()
        commit = file.commit
        commit.version.number, commit.version.lineage = version
        if self.newest is not None:
            commit.previous.number, commit.previous.lineage = self.newest
        commit.watermark_ms = watermark_ms
        commit.schema_id = self.schema_id
        commit.rollback_to = rollback_to
        commit.committed_ms = self._first_clock_ms()
        commit.dense_id = dense_id(dense)
        bus = self._check_lineage()
        with self._watching():
            with needing_room(self.publication.path), self._channel.together():
                self._room.check()
            self._note(version, watermark_ms, commit.committed_ms)
            with needing_room(self.publication.path):
                written = self.publication.writing(self._channel)
                try:
                    with self._channel.together():
                        for batch in self._batches(version, changes):
                            written.add(batch)
                except BaseException:
                    written.close()
                    raise
        return Outgoing(
            version=version,
            file=file,
            dense=dense if commit.dense_id != self._dense_id else b"",
            written=written,
            bus=bus,
        )

    def finish(self, outgoing: Outgoing) -> VersionId:
        """Write a version that was begun, and send it on the bus.

        Raises:
            SupersededError: Another publisher runs.
            NoRoomError: The drive is full; the version is not there, nor anything of it.
        """
        file, commit = outgoing.file, outgoing.file.commit
        with self._watching(), contextlib.closing(outgoing.written) as written:
            with needing_room(self.publication.path):
                self.publication.write_delta(outgoing.version, outgoing.dense, file, written)
            sizes = (each.delta_bytes for each in file.partitions)
            self._room.fits(sum(sizes, len(outgoing.dense)))
            self.newest = outgoing.version
            self._committed_ms = commit.committed_ms
            self._dense_id = commit.dense_id
            self.stats.versions += 1
            if outgoing.dense and len(outgoing.dense) <= _MAX_INLINE_DENSE:
                commit.dense = outgoing.dense
            if outgoing.bus is not None:
                self._send(outgoing.bus, file, written)
        return outgoing.version

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Note that the drive is full, once what was written in vain is gone."""
        try:
            yield
        except NoRoomError:
            self._room.full()
            raise

    def _batches(
        self, version: VersionId, changes: Iterable[Change]
    ) -> Iterator[update_pb2.RowBatch]:
        for table, bucket, records in changes:
            for data, rows, tombstones in _store.cut_records(
                table.layout, records, _MAX_BATCH_BYTES
            ):
                self._sequences[table.id, bucket] += 1
                batch = self._batch(version, table.id, bucket, data)
                batch.rows, batch.tombstones = rows, tombstones
                self.stats.rows += rows + tombstones
                self.stats.bytes += len(data)
                yield batch

    def _batch(
        self, version: VersionId, table: int, bucket: int, data: bytes
    ) -> update_pb2.RowBatch:
        sequence = self._sequences[table, bucket]
        return update_pb2.RowBatch(
            lineage=version.lineage,
            version=version.number,
            table_id=table,
            bucket=bucket,
            sequence=sequence,
            records=data,
            schema_id=self.schema_id,
            crc32c=_batch_crc(version.lineage, version.number, table, bucket, sequence, data),
        )

    def _check_lineage(self) -> Bus | None:
        """Return the bus if it can be written to; raises SupersededError if it must not be."""
        usable = False
        with self._channel.together():
            if self._channel.first:
                usable = self._holds_lineage()
            if self._bus is not None:
                self._count(self._bus.stats)
        return self._bus if self._channel.gather(usable)[0] else None

    def _holds_lineage(self) -> bool:
        """Return whether the bus can be written to; raises SupersededError if it must not be."""
        now, usable = self.publication.largest_lineage(), False
        if self._bus is not None:
            began = time.monotonic()
            try:
                if began < self._away_until:
                    raise redis.TimeoutError("it did not answer just now")
                now = max(now, self._bus.hold_lineage(self.lineage))
                usable = True
            except redis.RedisError as error:
                self._bus_failed(error, began)
        if now > self.lineage:
            raise self._superseded(f"publisher of lineage {now}")
        return usable

    def _superseded(self, who: str) -> SupersededError:
        newest = self.publication.versions()[-1]
        if newest.lineage > self.lineage and newest in self.publication.deltas():
            to = 0
            with contextlib.suppress(PublicationError):
                to = self.publication.read_commit(newest).commit.rollback_to
            if to:
                return superseded_by_rollback(newest.number, to)
        return SupersededError(f"{who} has taken over from {self.lineage}: stop this trainer")

    def _bus_failed(self, error: Exception, began: float) -> None:
        now = time.monotonic()
        self._away_until = max(self._away_until, now + min(now - began, _MAX_PAUSE_S))
        self.stats.bus_failures += 1
        log.warning("the bus is away (%s); version goes out by files alone", error)

    def _send(self, bus: Bus, file: update_pb2.CommitFile, written: Written) -> None:
        began = time.monotonic()
        try:
            committed = bus.send(file.commit, file.partitions, written.messages)
        except redis.RedisError as error:
            self._bus_failed(error, began)
            return
        finally:
            self._count(bus.stats)
        if not committed:
            raise self._superseded("another publisher")

    def _count(self, bus: BusStats) -> None:
        self.stats.bus_full, self.stats.bus_emptied = bus.full, bus.emptied
        self.stats.bus_commits_alone = bus.by_commit_alone
        self.stats.bus_trimmed_early = bus.trimmed_early


def promotion_record(publication: Publication, *, bus: str | None, model: str) -> PromotionRecord:
    """Open the record of the versions that ordinary requests may see.

    Raises:
        BusError: Redis cannot be reached.
    """
    return PromotionRecord(publication, bus and connect(bus), Keys(model).promoted)
