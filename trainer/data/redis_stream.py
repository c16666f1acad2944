"""Live events from a Redis Stream, read so that a trainer that was killed goes on exactly.

An entry's id is FIRST-COUNT: the event index of its first event, and how many it has. So every
event has its index whoever adds it, the entry of an index is found without reading from the
beginning, and what was trimmed away unread is a gap, known to the event. The script that adds an
entry (`EventSender`; docs/formats.md has it for other producers) takes the next index.

A batch may be given only when its last group of one ts is complete: when a later event came, or
when nothing came for `quiet_s`. The second is a fact that reading again would not show, so it is
written into the stream: an entry of no events, `closed`, says that no event up to a ts comes any
more. Whoever reads again cuts the same batches.

Redis delivers to a consumer group, and what was delivered is pending until a checkpoint holds it.
The place to read from is nevertheless ours: the group is set to it at the start and after a lost
connection, so pending entries are delivered again and none is skipped.
"""

import functools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from embertide._common.quoting import without_secrets
from embertide._common.redis_url import client_of, failure
from embertide.trainer.data.assemble import Assembler, Chunk
from embertide.trainer.data.base import (
    MAX_GROUP,
    Batch,
    DeadLetters,
    EventSchema,
    EventSource,
)
from embertide.trainer.data.payloads import (
    ARROW,
    AVRO,
    JSON,
    PayloadError,
    Payloads,
    payloads_of,
    recognise,
)
from embertide.trainer.data.rows import Cutter, check_bounds, check_waits
from embertide.trainer.errors import ConfigurationError, DataError, FinalError, TrainerError

SCHEMES = ("redis://", "rediss://", "unix://")
STREAM = "e:{events}:log"
"""Key of the stream, unless the URL names another."""

_CONSUMER = "trainer"
_LAST_OF = (1 << 64) - 1  # the largest second part of an id
_LAST_INDEX = 1 << 53  # the script counts in float64
_PAGE = 1000
# The schema may be told by an old entry if the newest do not decode.
_ENTRIES_TO_RECOGNISE = 16
_FIRST_ANSWER_S = 3.0
_MAX_REREADS = 100
_LONGEST_PAUSE_S = 5.0
_LOOK_S = 1.0  # between looks at whether to leave, and at how much is unread
_MS_DIGITS = 15  # of a time: below 2^53

_LAST_ID = """
local last = '0-0'
if redis.call('EXISTS', KEYS[1]) == 1 then
  local info = redis.call('XINFO', 'STREAM', KEYS[1])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then last = info[i + 1] end
  end
end
"""
_ADD = f"""{_LAST_ID}
local first, count = string.match(last, '(%d+)-(%d+)')
local id = string.format('%.0f-%s', first + count, ARGV[1])
local now = redis.call('TIME')
local at = string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000))
return redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], id, 'arrow', ARGV[2], 'at', at)
"""
_CLOSE = f"""{_LAST_ID}
if last ~= ARGV[1] then return 0 end
redis.call('XADD', KEYS[1], ARGV[2], 'closed', ARGV[3])
return 1
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Where a stream of events is, and how it is read.

    Attributes:
        url: The Redis. Not the bus, which may lose everything: this one keeps its data on disk.
        stream: Key of the stream.
        group: Consumer group. Each publication that learns from the stream has its own; two
            readers of one group take entries from one another, which ends both with an error.
        quiet_s: Where nothing came for so long, events held back count as complete. Long enough
            for what happens at once to arrive; a shorter one makes smaller batches.
        entries: Entries of one read, at most: what is held in memory at a time.
        keep_entries: Entries that the stream keeps, about; the oldest are dropped, read or not.
        patience_s: A Redis that is away for longer ends the run, which goes on when started again.
        avro_schema: File of the schema (.avsc) of entries with a field `avro`; empty: none is read.
    """

    url: str
    stream: str = STREAM
    group: str = "reader"
    quiet_s: float = 5.0
    entries: int = 64
    keep_entries: int = 100_000
    patience_s: float = 600.0
    avro_schema: str = ""

    def __post_init__(self) -> None:
        """Refuses what cannot be read."""
        if not self.url.startswith(SCHEMES):
            raise ValueError(
                f"{without_secrets(self.url)!r} is no Redis URL; give redis://host:port/db"
            )
        for name in ("stream", "group"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; name one")
        for name in ("entries", "keep_entries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        check_waits(self.quiet_s, self.patience_s)

    @classmethod
    def of(cls, url: str, **settings: Any) -> "StreamConfig":
        """Takes a URL that may end in #KEY, the key of the stream."""
        url, _, stream = url.partition("#")
        return cls(url=url, stream=stream or STREAM, **settings)

    def __str__(self) -> str:
        """Address and key, without a password."""
        return f"{self.url.rsplit('@', 1)[-1]}#{self.stream}"


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry as it stands in the stream; `first` and `count` are its id."""

    first: int
    count: int
    fields: dict[bytes, bytes]

    @classmethod
    def of(cls, id: bytes, fields: dict[bytes, bytes] | None = None) -> "_Entry":
        first, _, count = id.partition(b"-")
        return cls(int(first), int(count), fields or {})

    @property
    def id(self) -> str:
        return f"{self.first}-{self.count}"

    @property
    def numbered(self) -> bool:
        """Whether the id is ours and not one that Redis made."""
        return self.count > 0 or b"closed" in self.fields

    @property
    def end(self) -> int:
        """Event index after it; one that Redis numbered takes the place of an event."""
        return self.first + (self.count if self.numbered else 1)


class RedisStreamSource(EventSource):
    """An `EventSource` over one stream. It never ends: whoever reads it stops.

    Used by one thread, but for `checkpointed`, `counters` and `lag`.
    """

    def __init__(
        self,
        config: StreamConfig,
        schema: EventSchema | None = None,
        *,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        """Connects.

        Args:
            config: Where the stream is.
            schema: The columns to read; by default the known schema that the newest entries fit.
            dead_letters: Where rejected events go; by default they are only counted.

        Raises:
            TrainerError: Redis cannot be reached, or no entry tells the schema.
        """
        self.config = config
        self.path = str(config)
        self.dead_letters = DeadLetters() if dead_letters is None else dead_letters
        self._redis = _connect(config)
        self._counts = dict.fromkeys(("reconnects", "rereads", "closed", "failed_acks"), 0)
        self._leaving = threading.Event()
        self._unread = 0  # events, as of the newest look
        self._looked_s = -_LOOK_S
        self._lock = threading.Lock()  # of the counts
        self._payloads: dict[bytes, Payloads[Any]] = {
            b"arrow": payloads_of(ARROW),
            b"json": payloads_of(JSON),
        }
        if config.avro_schema:
            self._payloads[b"avro"] = payloads_of(AVRO, config.avro_schema)
        self.schema = schema or self._recognise()

    @property
    def live(self) -> bool:
        """It is."""
        return True

    def total_events(self) -> int | None:
        """Unknown: more may come."""
        return None

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """See `EventSource.batches`; waits for events without an end.

        Raises:
            TrainerError: Redis was away for `patience_s`, or another reader uses the group.
        """
        check_bounds(batch_size, start)
        self._leaving.clear()
        return self._batches(batch_size, start)

    def leave(self) -> None:
        """See `EventSource.leave`: a read that waits ends within a second."""
        self._leaving.set()

    def checkpointed(self, offset: int) -> None:
        """Acknowledges the entries that lie before `offset`."""
        key, group = self.config.stream, self.config.group
        last = f"{offset - 1}-{_LAST_OF}"
        try:
            while offset:
                pending: Any = self._redis.xpending_range(key, group, "-", last, _PAGE)
                ids = [found["message_id"] for found in pending]
                done = [id for id in ids if _Entry.of(id).end <= offset]
                if not done:
                    return
                self._redis.xack(key, group, *done)
        except redis.RedisError as error:
            self._count("failed_acks")
            log.warning("%s: events before %d are not acknowledged: %s", self.path, offset, error)

    def counters(self) -> dict[str, int]:
        """See `EventSource.counters`.

        Reconnects; reads done again because another reader was in between; groups closed after a
        quiet time; acknowledgements that failed and came with the next.
        """
        with self._lock:
            return dict(self._counts)

    def lag(self) -> dict[str, int]:
        """See `EventSource.lag`: events, as of a second before the last read at the earliest."""
        return {self.path: self._unread}

    def _count(self, name: str) -> int:
        with self._lock:
            self._counts[name] += 1
            return self._counts[name]

    # --- reading --------------------------------------------------------------------------------

    def _batches(self, batch_size: int, start: int) -> Iterator[Batch]:
        assembler = Assembler(self.schema, self.dead_letters, start)
        cutter = Cutter(self.path, batch_size)
        last = None
        for entry in self._entries(start):
            if entry is None:
                if last is not None and assembler.may_close(cutter):
                    self._close(last, assembler.latest_ms)
                continue
            last = entry
            if b"closed" in entry.fields:
                for rows in assembler.close(self._closed_ms(entry)):
                    yield from cutter.add(rows)
                yield from cutter.finish(entry.end)
                continue
            chunk = self._decode(entry, start)
            if chunk is not None:
                yield from cutter.add(assembler.accept(chunk))

    def _entries(self, start: int) -> Iterator[_Entry | None]:
        """Yields the entries from that with event `start` on; None where nothing came."""
        at, placed = start, False
        while not self._leaving.is_set():
            found = self._read(at, placed)
            placed = True
            if self._leaving.is_set():
                return
            if not found:
                yield None
            for entry in found:
                gap = entry.numbered and entry.first > at
                if gap and self._was_taken(at, entry):
                    placed = False  # ours to read again, from there on
                    break
                if gap:
                    self.dead_letters.add_range(
                        at, entry.first - at, "trimmed before it was read", f"entry {entry.id}"
                    )
                yield entry
                at = max(at, entry.end)

    def _read(self, at: int, placed: bool) -> list[_Entry]:
        """Reads on from event `at`, to where the group is brought if it is not `placed` there."""
        config = self.config
        deadline, pause_s = None, 0.1
        quiet_s = time.monotonic() + config.quiet_s
        while not self._leaving.is_set():
            try:
                if not placed:
                    self._place(at)
                reply: Any = self._redis.xreadgroup(
                    config.group,
                    _CONSUMER,
                    {config.stream: ">"},
                    count=config.entries,
                    block=max(1, round(min(quiet_s - time.monotonic(), _LOOK_S) * 1000)),
                )
                placed = True
                entries = [_Entry.of(*found) for _, given in reply or () for found in given]
                self._look_ahead(entries)
                if not entries and time.monotonic() < quiet_s:
                    continue
                return entries
            except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError) as error:
                # The group is gone with a Redis that has lost everything: placing it tells.
                answered = isinstance(error, redis.ResponseError)
                if answered and not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                    raise TrainerError(
                        f"{self.path} cannot be read: {error}; see that Redis runs"
                    ) from error
                # A reply may be lost on the way: what it had counts as delivered.
                placed = False
                self._count("reconnects")
                now = time.monotonic()
                deadline = deadline or now + config.patience_s
                if now >= deadline:
                    raise TrainerError(
                        f"{self.path} was away for {config.patience_s:.0f} s: {error}; start the "
                        "trainer again when it is back"
                    ) from error
                log.warning("%s is away (%s); trying again", self.path, error)
                self._leaving.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                quiet_s = time.monotonic() + config.quiet_s
        return []

    def _look_ahead(self, entries: list[_Entry]) -> None:
        """Takes note of how many events come after these, which one read gave."""
        if len(entries) < self.config.entries:
            self._unread = 0
        elif time.monotonic() - self._looked_s >= _LOOK_S:
            self._unread = max(0, self._end() - entries[-1].end)
            self._looked_s = time.monotonic()

    def _place(self, at: int) -> None:
        """Makes the group go on with the entry that holds event `at`, or begins there."""
        key, group, client = self.config.stream, self.config.group, self._redis
        end = self._end()
        if at > end:
            raise DataError(
                self.path,
                f"start {at} lies beyond its {end} events: was the stream lost? To count on from "
                f"there: redis-cli XSETID '{key}' {at}-0; to learn what it holds from the "
                "beginning, train in a new folder and keep this one",
            )
        after = "0-0"
        if at:
            after = f"{at - 1}-{_LAST_OF}"
            before: Any = client.xrevrange(key, max=after, count=1)
            entry = _Entry.of(before[0][0]) if before else None
            if entry is not None and entry.end > at:
                after = f"{entry.first}-{entry.count - 1}"
        try:
            client.xgroup_create(key, group, id=after, mkstream=True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
            client.xgroup_setid(key, group, id=after)

    def _end(self) -> int:
        """Event index after the last event that was ever added."""
        try:
            info: Any = self._redis.xinfo_stream(self.config.stream)
        except redis.ResponseError as error:
            if str(error).startswith("no such key"):
                return 0
            raise
        last = _Entry.of(info["last-generated-id"])
        return last.first + last.count

    def _was_taken(self, at: int, entry: _Entry) -> bool:
        """Whether what lies between event `at` and `entry` is there: another reader took it."""
        try:
            between: Any = self._redis.xrange(self.config.stream, min=f"{at}-0", count=1)
        except redis.RedisError:
            return True  # nobody can tell; reading again waits until somebody can
        if not between or _Entry.of(between[0][0]).first >= entry.first:
            return False
        if self._count("rereads") > _MAX_REREADS:
            raise TrainerError(
                f"another reader uses group {self.config.group!r} of {self.path}: stop it, or give "
                "this one a group of its own"
            )
        return True

    def _close(self, last: _Entry, ts_ms: int) -> None:
        """Says in the stream that events up to a ts are complete, unless more came meanwhile."""
        keys_and_args = (self.config.stream, last.id, f"{last.end}-0", str(ts_ms))
        try:
            if self._redis.eval(_CLOSE, 1, *keys_and_args):
                self._count("closed")
        except redis.RedisError as error:
            log.warning("%s: events are held back until more come: %s", self.path, error)

    # --- decoding -------------------------------------------------------------------------------

    def _closed_ms(self, entry: _Entry) -> int:
        try:
            return int(entry.fields[b"closed"])
        except ValueError:
            self._malformed(entry, "closed is no number")
            return -(1 << 62)  # closes nothing

    def _decode(self, entry: _Entry, start: int) -> Chunk | None:
        """Returns the events of an entry from index `start` on; None if they do not decode."""
        try:
            payloads, data = self._payload(entry)
            if not 0 < entry.count <= MAX_GROUP or entry.end > _LAST_INDEX:
                raise PayloadError(
                    f"an entry holds 1 to {MAX_GROUP} events, below index {_LAST_INDEX}"
                )
            rows = payloads.rows(data, self.schema)
            if len(rows) != entry.count:
                raise PayloadError(f"it holds {len(rows)} events")
        except PayloadError as error:
            self._malformed(entry, str(error))
            return None
        rows = rows[max(start - entry.first, 0) :]
        ((_, columns),) = payloads.columns([rows], self.schema)
        return Chunk(
            event_N=np.arange(entry.end - len(rows), entry.end, dtype=np.int64),
            columns=columns,
            end=entry.end,
            came_ms=_came_ms(entry),
        )

    def _payload(self, entry: _Entry) -> tuple[Payloads[Any], bytes]:
        for field, payloads in self._payloads.items():
            if field in entry.fields:
                return payloads, entry.fields[field]
        named = ", ".join(field.decode() for field in self._payloads)
        raise PayloadError(f"it has no field {named}")

    def _malformed(self, entry: _Entry, why: str) -> None:
        self.dead_letters.add_range(
            entry.first, max(entry.count, 1), "malformed entry", f"entry {entry.id}: {why}"
        )

    def _recognise(self) -> EventSchema:
        try:
            newest: Any = self._redis.xrevrange(self.config.stream, count=_ENTRIES_TO_RECOGNISE)
        except redis.RedisError as error:
            raise TrainerError(
                f"{self.path} cannot be read: {error}; see that Redis runs"
            ) from error
        columns = (functools.partial(self._columns, _Entry.of(*found)) for found in newest)
        schema, seen = recognise(columns)
        if schema is None:
            raise FinalError(
                f"{self.path} has no entry of a known schema{seen}; add events first, or give "
                "schema= in a run's file (embertide train --config)"
            )
        return schema

    def _columns(self, entry: _Entry) -> Sequence[str]:
        payloads, data = self._payload(entry)
        return payloads.names(data)


class EventSender:
    """Adds events to a stream, for `RedisStreamSource` to read.

    Attributes:
        sent: Events that were added.
    """

    def __init__(self, config: StreamConfig, schema: EventSchema) -> None:
        """Connects.

        Raises:
            ConfigurationError: Batches of this schema do not have the values to send.
            TrainerError: Redis cannot be reached.
        """
        if not schema.one_use_each:
            raise ConfigurationError(
                "these events cannot be sent: a column has two uses; give a schema with a use a "
                "column"
            )
        self._schema = schema
        self._config = config
        self._redis = _connect(config)
        self.sent = 0

    def send(self, batch: Batch) -> int:
        """Adds a batch as one entry.

        Returns:
            The event index that its first event got.

        Raises:
            TrainerError: Redis did not take it: it is away or full. Whether it did take it is not
                known if the connection was lost on the way.
        """
        args = (len(batch), _encode(self._schema, batch), self._config.keep_entries)
        try:
            id: Any = self._redis.eval(_ADD, 1, self._config.stream, *args)
        except redis.RedisError as error:
            raise TrainerError(
                f"{self._config} did not take events: {error}; see that Redis has room"
            ) from error
        self.sent += len(batch)
        return _Entry.of(id).first


def _connect(config: StreamConfig) -> "redis.Redis":
    """Opens a client that asks once: what was asked twice might be done twice."""
    try:
        # One that stands still is told at once: a read may wait for events, the first word not.
        with client_of(
            config.url,
            socket_timeout=_FIRST_ANSWER_S,
            socket_connect_timeout=2.0,
            retry=Retry(NoBackoff(), 0),
        ) as first:
            first.ping()
        client = client_of(
            config.url,
            socket_timeout=config.quiet_s + 5.0,
            socket_connect_timeout=2.0,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except (redis.RedisError, ValueError) as error:
        raise TrainerError(failure("--data", config.url, error)) from error
    return client


def _came_ms(entry: _Entry) -> int | None:
    """When Redis took the entry, if its producer had it say so; what cannot be is not believed."""
    text = entry.fields.get(b"at", b"")
    return int(text) if text.isdigit() and len(text) <= _MS_DIGITS else None


def _encode(schema: EventSchema, batch: Batch) -> bytes:
    """Arrow's IPC stream of a batch; keys that were strings go as the integers they became."""
    features = [feature.column for feature in schema.features]
    columns: dict[str, Any] = {
        name: batch.keys_BF[:, features.index(name)] for name in schema.key_columns
    }
    for f, bags in batch.lists.items():
        offsets_B1, feature = bags.offsets_B1.astype(np.int32), schema.features[f]
        columns[feature.column] = pa.ListArray.from_arrays(offsets_B1, bags.keys_N)
        if feature.weights:
            columns[feature.weights] = pa.ListArray.from_arrays(offsets_B1, bags.weights_N)
    columns |= {name: batch.dense_BD[:, d] for d, name in enumerate(schema.dense)}
    if schema.label is not None:
        columns[schema.label] = batch.label_B.astype(np.int8)
    if schema.id is not None:
        columns[schema.id] = batch.id_B
    for place, name in enumerate(schema.more_labels):
        assert batch.more_labels_BL is not None
        columns[name] = pa.array(batch.more_labels_BL[:, place], from_pandas=True)
    if schema.weight is not None:
        columns[schema.weight] = batch.weight_B
    if schema.ts is not None:
        columns[schema.ts] = pa.array(batch.ts_ms_B.view("M8[ms]"))
    table = pa.table(columns)
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    data: bytes = out.getvalue().to_pybytes()
    return data
