"""One partition of a topic of Kafka, read so that whoever reads it again gets the same batches.

The event index of a row is the offset of its message times `ROWS`, plus its place in the message.
A batch may be given only when its last group of one ts is complete: when a later event came, or
when the broker had nothing more for `quiet_s`. Reading again would not show the second, and the
topic is not ours to write to, so it is written down beside the publication first (journal.py).
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import (
    TIMESTAMP_LOG_APPEND_TIME,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from embertide.trainer.data.assemble import Assembler, Chunk
from embertide.trainer.data.base import (
    MAX_GROUP,
    Batch,
    DeadLetters,
    EventSchema,
    EventSource,
)
from embertide.trainer.data.journal import CLOSINGS, Journal
from embertide.trainer.data.kafka_client import POLL_S, KafkaClient, KafkaConfig, text_of
from embertide.trainer.data.order import UNKNOWN_MS
from embertide.trainer.data.payloads import PayloadError, Payloads, payloads_of
from embertide.trainer.data.rows import Cutter, check_bounds
from embertide.trainer.errors import DataError, FinalError, TrainerError

ROWS = MAX_GROUP
"""Events of a message, at most: an event index is offset * ROWS + place."""

_PARTITIONS_EVERY_S = 60.0

log = logging.getLogger(__name__)


class _Closings:
    """Where the events up to a ts were said to be complete, and where the reading began."""

    def __init__(self, path: Path | None) -> None:
        """Read what was written down."""
        self._journal = Journal(path)
        self.begin: int | None = None  # offset
        self.closed: list[tuple[int, int]] = []  # event index, ts_ms
        for said in self._journal.lines():
            if "begin" in said:
                self.begin = said["begin"]
            else:
                self.closed.append((said["at"], said["ts_ms"]))
        self.closed.sort()
        self._rewrite()

    def begin_at(self, offset: int) -> None:
        self.begin = offset
        self._journal.add({"begin": offset})

    def close(self, at: int, ts_ms: int) -> None:
        self.closed.append((at, ts_ms))
        self._journal.add({"at": at, "ts_ms": ts_ms})

    def forget_before(self, index: int) -> None:
        """Drop what nobody needs who reads from there; the last before it holds on."""
        before = [each for each in self.closed if each[0] <= index]
        self.closed = before[-1:] + [each for each in self.closed if each[0] > index]
        self._rewrite()

    def _rewrite(self) -> None:
        begin = [] if self.begin is None else [{"begin": self.begin}]
        self._journal.replace([*begin, *({"at": at, "ts_ms": ts_ms} for at, ts_ms in self.closed)])


class KafkaPartition(EventSource):
    """An `EventSource` over one partition. It never ends: whoever reads it leaves.

    Used by one thread, but for `checkpointed`, `counters`, `lag` and `leave`.
    """

    def __init__(
        self,
        config: KafkaConfig,
        partition: int,
        schema: EventSchema,
        *,
        dead_letters: DeadLetters | None = None,
        partitions: int = 0,
    ) -> None:
        """Names it; it connects when it is read.

        With `partitions`, how many of the topic are read, it looks now and then whether there are
        more, and says so: one of a topic's partitions is enough to look.

        Raises:
            ConfigurationError: There is no such format.
        """
        self.config = config
        self.partition = partition
        self.schema = schema
        self.path = f"{config}, partition {partition}"
        self.dead_letters = DeadLetters() if dead_letters is None else dead_letters
        self._payloads = payloads_of(config.format, config.avro_schema)
        self._folder: Path | None = None
        self._lock = threading.Lock()  # of what follows, but for `_leaving`
        self._client: KafkaClient | None = None
        self.partitions = partitions
        counted = ("closed", "outages", "failed_commits", "unread_partitions")
        self._counts = dict.fromkeys(counted, 0)
        self._behind: int | None = None
        self._checkpointed: int | None = None
        self._is_read = False  # all that the broker has
        self._leaving = threading.Event()

    @property
    def live(self) -> bool:
        """It is."""
        return True

    def total_events(self) -> int | None:
        """Unknown: more may come."""
        return None

    def remember_in(self, folder: Path) -> None:
        """See `EventSource.remember_in`."""
        self._folder = folder

    def leave(self) -> None:
        """See `EventSource.leave`."""
        self._leaving.set()

    @property
    def is_read(self) -> bool:
        """Whether the broker answered that all it has was read, and nothing came since."""
        with self._lock:
            return self._is_read

    def lag(self) -> dict[str, int]:
        """Messages that the broker has and that were not read yet."""
        with self._lock:
            name = f"{self.config.topic}-{self.partition}"
            return {} if self._behind is None else {name: self._behind}

    def counters(self) -> dict[str, int]:
        """See `EventSource.counters`.

        Groups closed after a quiet time; outages of brokers; offsets that were not written for
        other tools; values that records left out, which count as null.
        """
        with self._lock:
            return {**self._counts, "absent_values": self._payloads.absent.total()}

    def checkpointed(self, offset: int) -> None:
        """Writes to the group what was learned, for other tools."""
        with self._lock:
            self._checkpointed = offset
            if self._client is None or not offset:
                return
            place = TopicPartition(self.config.topic, self.partition, offset // ROWS)
            try:
                self._client.consumer.commit(offsets=[place], asynchronous=True)
            except (KafkaException, RuntimeError) as error:
                self._counts["failed_commits"] += 1
                log.warning("%s: offsets were not written: %s", self.path, text_of(error))

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """See `EventSource.batches`; waits for events until `leave`.

        Raises:
            TrainerError: Brokers were away for `patience_s`, or refuse us.
            DataError: Messages are gone that were not read yet, unless they are to be skipped.
        """
        check_bounds(batch_size, start)
        self._leaving.clear()
        return self._batches(batch_size, start)

    # --- reading --------------------------------------------------------------------------------

    def _batches(self, batch_size: int, start: int) -> Iterator[Batch]:
        closings = _Closings(None if self._folder is None else self._folder / CLOSINGS)
        closings.forget_before(start)
        with KafkaClient(self.config) as client:
            with self._lock:
                self._client = client
            try:
                yield from _Reading(self, client, closings, start).batches(batch_size)
            finally:
                with self._lock:
                    self._client, self._is_read = None, False

    def is_leaving(self) -> bool:
        """Whether `leave` was called."""
        return self._leaving.is_set()

    def count(self, name: str) -> None:
        """Count what happened while it was read."""
        with self._lock:
            self._counts[name] += 1

    def see_partitions(self, there: int) -> None:
        """Take note of how many partitions the topic has."""
        more = there - self.partitions
        with self._lock:
            known = self._counts["unread_partitions"]
            self._counts["unread_partitions"] = max(known, more)
        if more > known:
            log.error(
                "%s has %d partitions now, and %d are read: events of the others are not learned. "
                "Stop this run, and train in a new folder",
                self.config,
                there,
                self.partitions,
            )

    def say_read(self, whether: bool) -> None:
        """Take note of whether all that the broker has was read."""
        with self._lock:
            self._is_read = whether

    def tell(self, behind: int, failed_commits: int) -> int | None:
        """Take note of how far the reading is; return the newest checkpoint's place, once."""
        with self._lock:
            self._behind = behind
            self._counts["failed_commits"] += failed_commits
            place, self._checkpointed = self._checkpointed, None
            return place

    def payloads(self) -> Payloads[Any]:
        """The reader of messages."""
        return self._payloads


class _Reading:
    """One pass over a partition. Of one thread."""

    def __init__(
        self, source: KafkaPartition, client: KafkaClient, closings: _Closings, start: int
    ) -> None:
        self._source = source
        self._config = source.config
        self._client = client
        self._closings = closings
        self._start = start
        self._next = start  # event index after what was read
        self._end: int | None = None  # offset at which the client found nothing more
        self._away_s: float | None = None  # since when brokers do not answer
        self._older: int | None = None  # a checkpoint may turn out harmed
        self._counted_s = time.monotonic()  # when the topic's partitions were

    def batches(self, batch_size: int) -> Iterator[Batch]:
        exact = self._place()
        if exact is None:
            return
        source = self._source
        assembler = Assembler(source.schema, source.dead_letters, self._start if exact else 0)
        cutter = Cutter(source.path, batch_size)
        again = deque(self._closings.closed)
        while again and again[0][0] < self._start:
            assembler.go_on_after(again.popleft()[1])
        for messages in self._messages():
            if messages is None and assembler.may_close(cutter):
                again.appendleft((self._next, assembler.latest_ms))
                self._closings.close(*again[0])
                source.count("closed")
            for run in self._runs(messages or (), again):
                for chunk in self._chunks(run):
                    yield from cutter.add(assembler.accept(chunk))
                while again and again[0][0] <= self._next:
                    at, ts_ms = again.popleft()
                    for rows in assembler.close(ts_ms):
                        yield from cutter.add(rows)
                    yield from cutter.finish(at)

    def _runs(
        self, messages: Sequence[Message], again: deque[tuple[int, int]]
    ) -> Iterator[list[Message]]:
        """Yield messages in pieces that end where a group was closed, the first one empty."""
        yield []
        run: list[Message] = []
        for message in messages:
            if again and again[0][0] <= _offset(message) * ROWS and run:
                yield run
                run = []
            run.append(message)
        if run:
            yield run

    def _chunks(self, messages: Sequence[Message]) -> Iterator[Chunk]:
        """Yield the events of messages; those that do not decode are put aside."""
        source, payloads = self._source, self._source.payloads()
        rows_of, indices, came_ms = [], [], []
        for message in messages:
            offset = _offset(message)
            first = offset * ROWS
            self._next = first + ROWS
            try:
                data = message.value()
                if data is None:
                    raise PayloadError("it has no value")
                rows = payloads.rows(data, source.schema)
            except PayloadError as error:
                source.dead_letters.add_range(
                    first, 1, "malformed message", f"offset {offset}: {error}"
                )
                continue
            skipped = max(0, self._start - first)
            rows = rows[skipped:]
            if not len(rows):
                continue
            rows_of.append(rows)
            indices.append(np.arange(first + skipped, first + skipped + len(rows)))
            came_ms.append(np.full(len(rows), _came_ms(message)))
        at = 0
        for count, columns in payloads.columns(rows_of, source.schema):
            event_N = np.concatenate(indices[at : at + count])
            yield Chunk(
                event_N=event_N,
                columns=columns,
                end=int(event_N[-1]) // ROWS * ROWS + ROWS,
                came_ms=np.concatenate(came_ms[at : at + count]),
            )
            at += count

    def _messages(self) -> Iterator[list[Message] | None]:
        """Yield what came; None where the broker has had nothing more for `quiet_s`."""
        config, consumer = self._config, self._client.consumer
        heard_s = time.monotonic()
        while not self._source.is_leaving():
            first = consumer.poll(min(POLL_S, config.quiet_s))
            if first is not None:
                found = [first]
                if config.messages > 1:
                    found += consumer.consume(config.messages - 1, timeout=0)
                good = [message for message in found if message.error() is None]
                if good:
                    self._came_back()
                    self._source.say_read(False)
                    yield good
                    heard_s = time.monotonic()
                    self._tell()
                for message in found:
                    error = message.error()
                    if error is None:
                        self._end = None
                    elif error.code() == KafkaError._PARTITION_EOF:
                        self._end = message.offset()
                    else:
                        self._trouble(error)
                continue
            if time.monotonic() >= heard_s + config.quiet_s:
                if self._has_no_more():
                    yield None
                    self._source.say_read(True)  # for what was held has been given
                heard_s = time.monotonic()

    # --- places -----------------------------------------------------------------------------------

    def _place(self) -> bool | None:
        """Have the client read on from `_next`: where its event lies, or what is left after it.

        Returns:
            Whether that is where whoever read before stopped; None: we are to leave.
        """
        config, partition = self._config, self._source.partition
        while True:
            if self._source.is_leaving():
                return None
            try:
                low, _ = self._client.bounds(partition)
                break
            except KafkaException as error:
                self._is_away(text_of(error))
        self._came_back()
        exact = True
        if self._next == 0 and self._closings.begin is None:
            self._closings.begin_at(low)
        offset = self._next // ROWS or self._closings.begin or 0
        if offset < low:
            self._lost(offset, low)
            offset, exact = low, False
        self._end = None
        self._client.consumer.assign([TopicPartition(config.topic, partition, offset)])
        return exact

    def _lost(self, offset: int, low: int) -> None:
        what = f"offsets {offset} to {low - 1}, {low - offset} messages at most,"
        if self._config.lost == "stop":
            raise DataError(
                self._source.path,
                f"{what} are gone: the topic's retention dropped them before they were read. To go "
                "on without them, and count them as dead letters, add lost=skip to the URL; to "
                "keep more, raise the topic's retention.ms or retention.bytes",
            )
        log.warning("%s: %s were dropped before they were read", self._source.path, what)
        self._source.dead_letters.add_range(
            offset * ROWS, low - offset, "dropped before it was read", what
        )

    def _is_beyond(self) -> None:
        """Raises, if the topic ends before the place to read from."""
        offset = self._next // ROWS
        try:
            _, high = self._client.bounds(self._source.partition)
        except KafkaException:
            return
        if offset > high:
            raise DataError(
                self._source.path,
                f"offset {offset} lies beyond its {high} messages: was the topic made anew? To "
                "learn what it holds from the beginning, train in a new folder and keep this one",
            )

    def _trouble(self, error: KafkaError) -> None:
        """Do what an error of the client asks for.

        Raises:
            TrainerError: It asks for a person.
        """
        code = error.code()
        if code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            self._is_beyond()
            self._place()
        elif code in (
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        ):
            raise FinalError(
                f"{self._source.path} may not be read: {error.str()}; allow it to the user of "
                f"{self._config.client or 'client=FILE'}"
            )
        else:
            self._is_away(error.str())

    # --- whether brokers answer -------------------------------------------------------------------

    def _has_no_more(self) -> bool:
        """Ask the broker whether all it has was read; False too if it does not answer."""
        try:
            _, high = self._client.bounds(self._source.partition)
        except KafkaException as error:
            self._is_away(text_of(error))
            return False
        self._came_back()
        self._tell()
        return self._end is not None and high <= self._end

    def _is_away(self, why: str) -> None:
        self._source.say_read(False)
        now_s = time.monotonic()
        if self._away_s is None:
            self._away_s = now_s
            self._source.count("outages")
            log.warning("%s is away (%s); trying again", self._source.path, why)
        if now_s - self._away_s >= self._config.patience_s:
            raise TrainerError(
                f"{self._source.path} was away for {self._config.patience_s:.0f} s: {why}; start "
                "the trainer again when it is back"
            )

    def _came_back(self) -> None:
        self._away_s = None

    def _look_for_partitions(self) -> None:
        now = time.monotonic()
        if not self._source.partitions or now < self._counted_s + _PARTITIONS_EVERY_S:
            return
        self._counted_s = now
        with contextlib.suppress(TrainerError):  # brokers are away: that is said elsewhere
            self._source.see_partitions(len(self._client.partitions()))

    def _tell(self) -> None:
        """Tell the source how far this is, and forget what no checkpoint needs any more."""
        self._look_for_partitions()
        place = TopicPartition(self._config.topic, self._source.partition)
        behind = 0
        with contextlib.suppress(KafkaException):
            # Positions from the last answer with messages; no question is asked.
            found: Any = self._client.consumer.get_watermark_offsets(place, cached=True)
            behind = max(0, found[1] - max(self._next // ROWS, self._end or 0))
        failed, self._client.failed_commits = self._client.failed_commits, 0
        done = self._source.tell(behind, failed)
        if done is not None:
            if self._older is not None:
                self._closings.forget_before(self._older)
            self._older = done


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None, "of a message that the broker has"
    return offset


def _came_ms(message: Message) -> int:
    """When the broker took it, where the topic says so; what a producer says is not that."""
    kind, ms = message.timestamp()
    return ms if kind == TIMESTAMP_LOG_APPEND_TIME else UNKNOWN_MS
