"""Publisher: a trainer's changes become versions, in files and on the bus (DESIGN.md section 4).

The order makes a version exist for everybody or for nobody: delta files, commit file, row batches
on the buckets' streams, partition commits, and last the global commit, which Redis appends only
while the lineage is still this publisher's. Redis away costs freshness alone: nodes read the files,
and the next version goes out on the bus again.
"""

import dataclasses
import logging
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from embertide import _store
from embertide.trainer.errors import TrainerError
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.promotion import PromotionRecord
from embertide.trainer.publish.snapshot import dense_id
from embertide.v1 import update_pb2

PARTITIONS = 64
"""Streams of one partition share a slot of a Redis Cluster."""
# Where the lineage was before keys carried the model's name.
_OLD_LINEAGE_KEY = "e:{commit}:lineage"
# A batch with its header stays under 1 MiB.
_MAX_BATCH_BYTES = (1 << 20) - 256
_MAX_INLINE_DENSE = 1 << 20
# Entries kept of each stream: minutes of versions; a node further behind reads files.
_BUCKET_ENTRIES = 256
_COMMIT_ENTRIES = 1024

_TAKE_LINEAGE = """
local now = tonumber(redis.call('GET', KEYS[1]) or '0')
local mine = math.max(now, tonumber(ARGV[1])) + 1
redis.call('SET', KEYS[1], mine)
return mine
"""
# Redis may have lost everything, or gone back to an older copy: the larger lineage counts.
_HOLD_LINEAGE = """
local now = tonumber(redis.call('GET', KEYS[1]) or '0')
if now < tonumber(ARGV[1]) then
  redis.call('SET', KEYS[1], ARGV[1])
  now = tonumber(ARGV[1])
end
return now
"""
_COMMIT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'm', ARGV[2])
return 1
"""

log = logging.getLogger(__name__)


class SupersededError(TrainerError):
    """Another publisher has taken the lineage; this one must stop."""


class BusError(TrainerError):
    """Redis cannot be reached; the message names the address and the reason."""


@dataclasses.dataclass(slots=True)
class PublisherStats:
    """Counters since the start."""

    versions: int = 0
    rows: int = 0
    bytes: int = 0
    bus_failures: int = 0  # versions that went out by files alone, for want of Redis


Change = tuple[_store.TableConfig, int, bytes]
"""Table, bucket, records that changed since the version before (tombstones among them)."""


class _Keys:
    """The keys of one model (docs/formats.md, "Bus")."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.lineage = f"e:{{{model}:commit}}:lineage"
        self.log = f"e:{{{model}:commit}}:log"
        self.promoted = f"e:{{{model}:commit}}:promoted"

    def partition(self, partition: int) -> str:
        return f"e:{{{self._model}:{partition}}}:commit"

    def bucket(self, table: int, bucket: int) -> str:
        return f"e:{{{self._model}:{bucket % PARTITIONS}}}:{table}:{bucket}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _batch_crc(lineage: int, version: int, table: int, bucket: int, seq: int, rows: bytes) -> int:
    return _store.crc32c(struct.pack("<QQIIQ", lineage, version, table, bucket, seq) + rows)


class Publisher:
    """Publishes the versions of one model. Used by one thread.

    Attributes:
        lineage: This publisher's run; larger than any before it.
        newest: The version published last, by anybody; None before the first.
        schema_id: What versions say of the model; of no other one once the first is out.
    """

    def __init__(
        self, publication: Publication, *, bus: str | None, model: str, schema_id: int
    ) -> None:
        """Take the lineage.

        Args:
            publication: Where versions are written.
            bus: Redis URL; None publishes to files alone.
            model: Its name, by which several models can share a Redis.
            schema_id: Of the model, as its snapshots say.

        Raises:
            BusError: Redis cannot be reached now, or the model's name is not one for the bus.
        """
        if bus is not None and set("{}") & set(model):
            raise BusError(f"model {model!r}: a name on the bus has no braces; choose another")
        self.publication = publication
        self.schema_id = schema_id
        self.stats = PublisherStats()
        self._redis = None if bus is None else _connect(bus)
        self._keys = _Keys(model)
        floor = self._largest_lineage()
        self.lineage = floor + 1 if self._redis is None else self._take_lineage(floor)
        # Listed once the lineage is ours: whoever had it commits no more.
        versions = publication.versions()
        self.newest: VersionId | None = versions[-1] if versions else None
        self._sequences: dict[tuple[int, int], int] = defaultdict(int)
        self._dense_id = ""
        self._committed_ms = 0  # of `newest`, if it is this publisher's

    def _largest_lineage(self) -> int:
        return max((version.lineage for version in self.publication.versions()), default=0)

    def _take_lineage(self, floor: int) -> int:
        assert self._redis is not None
        try:
            # A run of the build before may have used up lineages that left no file.
            old = int(self._redis.get(_OLD_LINEAGE_KEY) or 0)
            return int(self._redis.eval(_TAKE_LINEAGE, 1, self._keys.lineage, max(floor, old)))
        except redis.RedisError as error:
            raise BusError(f"Redis cannot be used: {error}") from error

    def owed(
        self, since: int, until: int | None = None
    ) -> dict[tuple[int, int], list[update_pb2.RowBatch]]:
        """Return what other publishers sent after version number `since`, by (table id, bucket).

        With `until`, what was sent after that version is left out.

        A publisher that resumes from `since` must send these rows in its first version: nodes may
        hold what nobody will confirm.
        """
        batches = defaultdict(list)
        for version in self.publication.deltas():
            if since < version.number and (until is None or version.number <= until):
                for batch in self.publication.read_batches(version):
                    batches[batch.table_id, batch.bucket].append(batch)
        return batches

    def adopt(self, number: int, *, watermark_ms: int, dense: bytes) -> None:
        """Say that a snapshot of this lineage is the newest version: a publication's first."""
        self.newest = VersionId(number, self.lineage)
        self._dense_id = dense_id(dense)
        self._committed_ms = _now_ms()
        self.publication.note(
            self.newest, watermark_ms=watermark_ms, committed_ms=self._committed_ms
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
        """Publish a version.

        Args:
            number: Greater than that of any version before it.
            watermark_ms: Event time up to which it has learned.
            changes: Each changed bucket once.
            dense: The dense tensors (safetensors); sent if they differ from the version before.
            rollback_to: The version whose state this one restores; 0: none.

        Raises:
            ValueError: `number` does not rise.
            SupersededError: Another publisher runs.
        """
        if self.newest is not None and number <= self.newest.number:
            raise ValueError(f"version {number} is not newer than {self.newest.number}")
        version = VersionId(number, self.lineage)
        partitions = self._partitions(version, changes)
        file = update_pb2.CommitFile()
        commit = file.commit
        commit.version.number, commit.version.lineage = version
        if self.newest is not None:
            commit.previous.number, commit.previous.lineage = self.newest
        commit.watermark_ms = watermark_ms
        commit.schema_id = self.schema_id
        commit.rollback_to = rollback_to
        commit.committed_ms = _now_ms()
        commit.dense_id = dense_id(dense)
        changed = dense if commit.dense_id != self._dense_id else b""
        reached = self._check_lineage()
        self.publication.note(version, watermark_ms=watermark_ms, committed_ms=commit.committed_ms)
        self.publication.write_delta(version, partitions, changed, file)
        self.newest = version
        self._committed_ms = commit.committed_ms
        self._dense_id = commit.dense_id
        self.stats.versions += 1
        if changed and len(changed) <= _MAX_INLINE_DENSE:
            commit.dense = changed
        if reached:
            self._send(partitions, commit)
        return version

    def _partitions(
        self, version: VersionId, changes: Iterable[Change]
    ) -> list[tuple[update_pb2.PartitionCommit, list[update_pb2.RowBatch]]]:
        by_partition: dict[int, list[update_pb2.RowBatch]] = defaultdict(list)
        commits: dict[int, update_pb2.PartitionCommit] = {}
        for table, bucket, records in changes:
            pieces = _store.cut_records(table.layout, records, _MAX_BATCH_BYTES)
            if not pieces:
                continue
            partition = bucket % PARTITIONS
            commit = commits.setdefault(
                partition,
                update_pb2.PartitionCommit(
                    lineage=version.lineage, version=version.number, partition=partition
                ),
            )
            for data, rows, tombstones in pieces:
                self._sequences[table.id, bucket] += 1
                batch = self._batch(version, table.id, bucket, data)
                batch.rows, batch.tombstones = rows, tombstones
                by_partition[partition].append(batch)
                self.stats.rows += rows + tombstones
                self.stats.bytes += len(data)
            commit.buckets.add(
                table_id=table.id,
                bucket=bucket,
                sequence=self._sequences[table.id, bucket],
                batches=len(pieces),
            )
        return [(commits[partition], by_partition[partition]) for partition in sorted(commits)]

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

    def _check_lineage(self) -> bool:
        """Return whether the bus can be written to; raises SupersededError if it must not be."""
        now, reached = self._largest_lineage(), False
        if self._redis is not None:
            try:
                held = int(self._redis.eval(_HOLD_LINEAGE, 1, self._keys.lineage, self.lineage))
                now, reached = max(now, held), True
            except redis.RedisError as error:
                self._bus_failed(error)
        if now > self.lineage:
            raise self._superseded(f"publisher of lineage {now}")
        return reached

    def _superseded(self, who: str) -> SupersededError:
        newest = self.publication.versions()[-1]
        if newest.lineage > self.lineage and newest in self.publication.deltas():
            to = self.publication.read_commit(newest).commit.rollback_to
            if to:
                return SupersededError(
                    f"version {newest.number} rolled back to version {to}: start this trainer "
                    "again, and it goes on from its newest checkpoint before the versions undone"
                )
        return SupersededError(f"{who} has taken over from {self.lineage}: stop this trainer")

    def _bus_failed(self, error: Exception) -> None:
        self.stats.bus_failures += 1
        log.warning("the bus is away (%s); version goes out by files alone", error)

    def _send(
        self,
        partitions: Sequence[tuple[update_pb2.PartitionCommit, list[update_pb2.RowBatch]]],
        commit: update_pb2.GlobalCommit,
    ) -> None:
        assert self._redis is not None
        try:
            pipe = self._redis.pipeline(transaction=False)
            for partition, batches in partitions:
                for batch in batches:
                    stream = self._keys.bucket(batch.table_id, batch.bucket)
                    _add(pipe, stream, batch.SerializeToString(), _BUCKET_ENTRIES)
                stream = self._keys.partition(partition.partition)
                _add(pipe, stream, partition.SerializeToString(), _COMMIT_ENTRIES)
            pipe.execute()
            keys = (self._keys.lineage, self._keys.log)
            message = commit.SerializeToString()
            done = self._redis.eval(_COMMIT, 2, *keys, self.lineage, message, _COMMIT_ENTRIES)
        except redis.RedisError as error:
            self._bus_failed(error)
            return
        if not done:
            raise self._superseded("another publisher")


def _add(pipe: Any, stream: str, message: bytes, entries: int) -> None:
    pipe.xadd(stream, {"m": message}, maxlen=entries, approximate=True)


def promotion_record(publication: Publication, *, bus: str | None, model: str) -> PromotionRecord:
    """Open the record of the versions that ordinary requests may see.

    Raises:
        BusError: Redis cannot be reached.
    """
    return PromotionRecord(publication, bus and _connect(bus), _Keys(model).promoted)


def _connect(url: str) -> Any:
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=5.0,
            socket_connect_timeout=2.0,
            health_check_interval=30,
            # Once, at once, for a connection that a restart cut: a version must not wait.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )
        client.ping()
    except (redis.RedisError, ValueError) as error:
        raise BusError(
            f"Redis at {url.rsplit('@', 1)[-1]} cannot be reached: {error}; start it, or give "
            "another --bus URL"
        ) from error
    return client
