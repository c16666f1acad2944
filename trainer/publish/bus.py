"""One model's streams in Redis: versions go out on them, and are trimmed (docs/formats.md, "Bus").

An entry's id names its version, so a version can be read, or trimmed, by its number. A version's
rows stay until every live node has applied them, and never above a budget in bytes. A full Redis
(`noeviction`) refuses rows and takes what frees memory: the streams are emptied, and the version
goes out again. If it is still refused, the commit alone goes out, and nodes read the version's
files at once.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from embertide._common.redis_url import client_of, failure
from embertide.trainer.errors import TrainerError
from embertide.trainer.publish.folder import PARTITIONS, VersionId
from embertide.trainer.sync.channel import ALONE, Channel
from embertide.v1 import update_pb2

LINEAGE_BITS = 32
"""An entry's id ends in the lineage and, below it, the batch's place in its version."""
# Bound on the wait for an answer; a Redis that stands still costs a version as long.
_ANSWER_S = 5.0
_SENT_AT_ONCE = 4 << 20
_COMMIT_ENTRIES = 1024
# Beside the message: its id, its field, what an allocator rounds up to.
_ENTRY_BYTES = 128
# Where the lineage was before keys carried the model's name.
_OLD_LINEAGE_KEY = "e:{commit}:lineage"

# A full Redis refuses what may grow, but not in a script that has written before: DEL and XTRIM
# come first in each of these.
_TAKE_LINEAGE = """
local mine = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1])) + 1
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], string.format('%.0f', mine))
return mine
"""
# Redis may have lost everything, or gone back to an older copy: the larger lineage counts.
# Returns the lineage, and 1 where Redis had one.
_HOLD_LINEAGE = """
local held = redis.call('GET', KEYS[1])
if tonumber(held or '0') >= tonumber(ARGV[1]) then return {tonumber(held), 1} end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1])
return {tonumber(ARGV[1]), held and 1 or 0}
"""
# An entry that is there already was sent before the connection broke. One that is newer is of
# another publication or of a Redis that went back: it must not hide ours.
# Only a larger lineage is another publisher's: a Redis that was emptied meanwhile is told ours.
_COMMIT = """
local held = tonumber(redis.call('GET', KEYS[1]) or '0')
if held > tonumber(ARGV[1]) then return 0 end
if held < tonumber(ARGV[1]) then
  redis.call('DEL', KEYS[1])
  redis.call('SET', KEYS[1], ARGV[1])
end
redis.call('XTRIM', KEYS[2], 'MINID', '=', ARGV[4])
redis.call('XTRIM', KEYS[2], 'MAXLEN', '=', ARGV[5])
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
if last[1] and last[1][1] == ARGV[2] then return 1 end
local reply = redis.pcall('XADD', KEYS[2], ARGV[2], 'm', ARGV[3])
if type(reply) == 'table' and reply.err then
  redis.call('DEL', KEYS[2])
  redis.call('XADD', KEYS[2], ARGV[2], 'm', ARGV[3])
end
return 1
"""

log = logging.getLogger(__name__)


class BusError(TrainerError):
    """Redis cannot be reached; the message names the address and the reason."""


class _FullError(Exception):
    """Redis has no memory left for rows."""


@dataclasses.dataclass(slots=True)
class BusStats:
    """Counters since the start.

    Attributes:
        full: Times that Redis refused rows for want of memory.
        by_commit_alone: Versions whose rows did not go out on the bus: too large, or Redis full.
        emptied: Times that Redis was found to have lost what it held.
        trimmed_early: Versions trimmed for the budget before every live node had applied them.
    """

    full: int = 0
    by_commit_alone: int = 0
    emptied: int = 0
    trimmed_early: int = 0


class Keys:
    """The keys of one model (docs/formats.md, "Bus")."""

    def __init__(self, model: str) -> None:
        """Name the model."""
        self._model = model
        self.lineage = f"e:{{{model}:commit}}:lineage"
        self.log = f"e:{{{model}:commit}}:log"
        self.promoted = f"e:{{{model}:commit}}:promoted"
        self.nodes = f"e:{{{model}:commit}}:nodes"
        self.trainer = f"e:{{{model}:commit}}:trainer"
        self.rollback_order = f"e:{{{model}:commit}}:rollback"
        self.rollback_outcome = f"e:{{{model}:commit}}:rolled_back"

    def node(self, name: str) -> str:
        """Return where a node says what it has applied."""
        return f"e:{{{self._model}:commit}}:node:{name}"

    def partition(self, partition: int) -> str:
        """Return the stream of a partition's commits."""
        return f"e:{{{self._model}:{partition}}}:commit"

    def bucket(self, table: int, bucket: int) -> str:
        """Return the stream of a bucket's rows."""
        return f"e:{{{self._model}:{bucket % PARTITIONS}}}:{table}:{bucket}"

    def of_rows(self) -> list[str]:
        """Patterns of the streams of rows and of partition commits."""
        name = "".join(
            f"[{c}]" if c in "*?[" else "\\" + c if c == "\\" else c for c in self._model
        )
        return [f"e:{{{name}:[0-9]*}}:*"]


class Bus:
    """Sends one model's versions. Every method but `connect` may raise redis.RedisError.

    Attributes:
        stats: Counts of what was refused, lost and trimmed.
    """

    def __init__(
        self, client: Any, model: str, budget_bytes: int, channel: Channel = ALONE
    ) -> None:
        """Use a connected client; `connect` makes one."""
        self.stats = BusStats()
        self._channel = channel
        self._redis = client
        self._keys = Keys(model)
        self._budget = self._room = budget_bytes
        self._versions: deque[tuple[int, int]] = deque()  # number, bytes; those that streams hold
        # By stream: a version at or before that of its first entry, and that of its last.
        self._streams: dict[str, tuple[int, int]] = {}
        self._known = False  # whether streams of earlier publishers are gone

    @classmethod
    def connect(cls, url: str, model: str, budget_bytes: int, channel: Channel = ALONE) -> "Bus":
        """Connect to the Redis that `url` names; each of the ranks on `channel` does.

        Raises:
            BusError: It cannot be reached, or the model's name is not one for the bus.
        """
        if set("{}") & set(model):
            raise BusError(f"model {model!r}: a name on the bus has no braces; choose another")
        return cls(connect(url), model, budget_bytes, channel)

    # --- lineage ----------------------------------------------------------------------------------

    def take_lineage(self, floor: int) -> int:
        """Take a lineage above `floor` and above any that Redis knows, be it full."""
        # A run of the build before may have used up lineages that left no file.
        old = int(self._redis.get(_OLD_LINEAGE_KEY) or 0)
        return int(self._redis.eval(_TAKE_LINEAGE, 1, self._keys.lineage, max(floor, old)))

    def hold_lineage(self, lineage: int) -> int:
        """Return the lineage that Redis has; `lineage`, set anew, if it had none or a smaller."""
        now, had = self._redis.eval(_HOLD_LINEAGE, 1, self._keys.lineage, lineage)
        if not had:
            self.stats.emptied += 1
            self._versions.clear()
            self._streams.clear()
            log.warning("Redis has lost what it held; nodes read the versions in between as files")
        return int(now)

    # --- versions ---------------------------------------------------------------------------------

    def send(
        self,
        commit: update_pb2.GlobalCommit,
        partitions: Iterable[update_pb2.PartitionCommit],
        messages: Callable[[], Iterator[tuple[int, int, int, bytes]]],
    ) -> bool:
        """Send one version: its rows, its partition commits, and last its commit.

        Of many ranks, each sends the rows that it has, and then the first one the commits. What one
        cannot do, none does.

        Args:
            commit: As nodes are to read it.
            partitions: The version's partition commits.
            messages: Gives this rank's batches as (table id, bucket, place in the bucket, message).

        Returns:
            Whether it was committed; False where another publisher has the lineage.
        """
        version, partitions = VersionId.of(commit.version), list(partitions)
        batches = sum(bucket.batches for each in partitions for bucket in each.buckets)
        size = sum(each.delta_bytes + each.ByteSize() for each in partitions) + commit.ByteSize()
        size += _ENTRY_BYTES * (batches + len(partitions) + 1)
        self._first_does(self._forget_others)
        if not self._send_rows(version, size, partitions, messages):
            self.stats.by_commit_alone += 1
            commit = update_pb2.GlobalCommit.FromString(commit.SerializeToString())
            commit.ClearField("dense")  # the files have it
        done = [False]

        def send_commit() -> None:
            done[0] = bool(
                self._redis.eval(
                    _COMMIT,
                    2,
                    self._keys.lineage,
                    self._keys.log,
                    version.lineage,
                    f"{version.number}-{version.lineage}",
                    commit.SerializeToString(),
                    f"{self._versions[0][0] if self._versions else version.number}-0",
                    _COMMIT_ENTRIES - 1,
                )
            )

        self._first_does(send_commit)
        return bool(self._channel.gather(done[0])[0])

    def _first_does(self, what: Callable[[], None]) -> bool:
        """Do it on the first rank, all others wait; as `_all_do` else."""
        return self._all_do(what if self._channel.first else lambda: None)

    def _all_do(self, what: Callable[[], None]) -> bool:
        """Do it on all ranks; return whether Redis was full for one.

        Raises:
            redis.RedisError: It was away for one.
        """
        failure: redis.RedisError | None = None
        full = False
        try:
            what()
        except _FullError:
            full = True
        except redis.RedisError as error:
            failure = error
        said = self._channel.gather([full, failure and str(failure)])
        if failure is not None:
            raise failure
        for rank, (_, words) in enumerate(said):
            if words is not None:
                raise redis.RedisError(f"rank {rank}: {words}")
        return any(each for each, _ in said)

    def _send_rows(
        self,
        version: VersionId,
        size: int,
        partitions: list[update_pb2.PartitionCommit],
        messages: Callable[[], Iterator[tuple[int, int, int, bytes]]],
    ) -> bool:
        for _ in range(2):
            if size > self._room:
                log.warning(
                    "version %d has %d bytes, the bus has room for %d: its rows go out by files",
                    version.number,
                    size,
                    self._room,
                )
                self._room = min(self._budget, self._room + self._budget // 16)
                return False

            def send() -> None:
                self._make_room(version.number, size)
                self._versions.append((version.number, size))
                self._add(version, self._rows(version, messages()))

            if self._all_do(send) or self._first_does(
                lambda: self._add(version, self._commits(version, partitions))
            ):
                self.stats.full += 1
                log.warning("Redis is full: the streams of the model are emptied")
                held = sum(held for _, held in self._versions)
                self._all_do(lambda: self._trim(version.number + 1))
                self._room = held // 2
                continue
            self._room = min(self._budget, self._room + self._budget // 16)
            return True
        return False

    def _rows(
        self, version: VersionId, messages: Iterator[tuple[int, int, int, bytes]]
    ) -> Iterator[tuple[str, str, bytes]]:
        """Yield (stream, entry id, message) of rows."""
        number, lineage = version
        for table, bucket, i, message in messages:
            yield (
                self._keys.bucket(table, bucket),
                f"{number}-{(lineage << LINEAGE_BITS) + i}",
                message,
            )

    def _commits(
        self, version: VersionId, partitions: list[update_pb2.PartitionCommit]
    ) -> Iterator[tuple[str, str, bytes]]:
        """Yield the same of partition commits."""
        for each in partitions:
            yield (
                self._keys.partition(each.partition),
                f"{version.number}-{version.lineage}",
                each.SerializeToString(deterministic=True),
            )

    def _add(self, version: VersionId, entries: Iterator[tuple[str, str, bytes]]) -> None:
        """Append entries, a bounded number of bytes in flight."""
        chunk: list[tuple[str, str, bytes]] = []
        size = 0
        for entry in entries:
            chunk.append(entry)
            size += len(entry[2]) + _ENTRY_BYTES
            oldest, _ = self._streams.get(entry[0], (version.number, 0))
            self._streams[entry[0]] = oldest, version.number
            if size >= _SENT_AT_ONCE:
                self._add_chunk(version, chunk)
                chunk, size = [], 0
        self._add_chunk(version, chunk)

    def _add_chunk(self, version: VersionId, chunk: list[tuple[str, str, bytes]]) -> None:
        refused = self._append(chunk)
        if not refused:
            return
        # Above ours is what a superseded publisher still sent, or we ourselves before the
        # connection broke. It goes: a node that lacks entries then reads files.
        held = self._redis.get(self._keys.lineage)
        if held is None or int(held) != version.lineage:
            return  # the commit will be refused
        self._redis.delete(*refused)
        self._append([entry for entry in chunk if entry[0] in refused])

    def _append(self, chunk: list[tuple[str, str, bytes]]) -> set[str]:
        """Append entries; return the streams that hold newer ones and refused."""
        pipe = self._redis.pipeline(transaction=False)
        for stream, entry_id, message in chunk:
            pipe.xadd(stream, {"m": message}, id=entry_id)
        refused = set()
        for (stream, _, _), reply in zip(chunk, pipe.execute(raise_on_error=False), strict=True):
            if isinstance(reply, redis.exceptions.OutOfMemoryError):
                raise _FullError
            if isinstance(reply, redis.ResponseError) and "equal or smaller" in str(reply):
                refused.add(stream)
            elif isinstance(reply, Exception):
                raise reply
        return refused

    # --- retention --------------------------------------------------------------------------------

    def _slowest(self) -> int | None:
        """Return the newest version that every live node has applied; None: no node says."""
        names = sorted(self._redis.smembers(self._keys.nodes))
        if not names:
            return None
        applied = self._redis.mget([self._keys.node(name.decode()) for name in names])
        gone = [name for name, number in zip(names, applied, strict=True) if number is None]
        if gone:
            self._redis.srem(self._keys.nodes, *gone)
        return min((int(number) for number in applied if number is not None), default=None)

    def _make_room(self, number: int, size: int) -> None:
        """Trim what every live node has applied, and what must go for `size` more bytes."""
        slowest = self._slowest()
        if slowest is not None:
            self._trim(min(slowest + 1, number))
        held = sum(held for _, held in self._versions)
        first = None
        for oldest, freed in self._versions:
            if held + size <= self._room:
                break
            held -= freed
            first = oldest + 1
            self.stats.trimmed_early += slowest is not None
        if first is not None:
            self._trim(first)

    def _trim(self, number: int) -> None:
        """Remove entries of the versions before `number`."""
        while self._versions and self._versions[0][0] < number:
            self._versions.popleft()
        before = [
            (stream, last) for stream, (first, last) in self._streams.items() if first < number
        ]
        pipe = self._redis.pipeline(transaction=False)
        for stream, last in before:
            if last < number:
                del self._streams[stream]
                pipe.delete(stream)
            else:
                self._streams[stream] = number, last
                pipe.xtrim(stream, minid=f"{number}-0", approximate=False)
        pipe.execute()

    def _forget_others(self) -> None:
        """Delete the streams of earlier publishers: what they weigh is not known."""
        if self._known:
            return
        for pattern in self._keys.of_rows():
            for stream in self._redis.scan_iter(match=pattern, count=1000):
                self._redis.delete(stream)
        self._known = True


def connect(url: str) -> Any:
    """Return a client of the Redis that `url` names.

    Raises:
        BusError: It cannot be reached.
    """
    try:
        client = client_of(
            url,
            socket_timeout=_ANSWER_S,
            socket_connect_timeout=2.0,
            health_check_interval=30,
            # Once, at once, for a connection that a restart cut: a version must not wait.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )
        client.ping()
    except (redis.RedisError, ValueError) as error:
        raise BusError(failure("--bus", url, error)) from error
    return client
