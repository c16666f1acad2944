"""Live events from a topic of Kafka, read so that a trainer that was killed goes on exactly.

Each partition is an input of its own, read by a consumer and a thread of its own, and
`MergedSource` brings them into one order of time. The event index of a row is the offset of its
message times `ROWS`, plus its place in the message. The places to read from are in the trainer's
checkpoint. The offsets that the consumer group has at the broker are written for other tools, and
never read.

A batch may be given only when its last group of one ts is complete: when a later event came, or
when the broker had nothing more for `quiet_s`. Reading again would not show the second, and the
topic is not ours to write to, so it is written down beside the publication first (journal.py).
"""

import contextlib
import dataclasses
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from confluent_kafka import (
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
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
    known_schema,
)
from embertide.trainer.data.journal import Journal
from embertide.trainer.data.merge import MergedSource
from embertide.trainer.data.order import UNKNOWN_MS
from embertide.trainer.data.payloads import JSON, PayloadError, Payloads, payloads_of
from embertide.trainer.data.rows import Cutter, check_bounds
from embertide.trainer.errors import ConfigurationError, DataError, TrainerError

ROWS = MAX_GROUP
"""Events of a message, at most: an event index is offset * ROWS + place."""
JOURNAL = "closed.jsonl"

_LOSSES = ("stop", "skip")
_MOST_PARTITIONS = 256  # each has a consumer and a thread
_MESSAGES_TO_RECOGNISE = 16
_POLL_S = 0.2  # between looks at whether to leave
_ASK_S = 5.0  # for an answer of the broker
_MOST_LINES = 1 << 20  # of a file of settings, in characters
_LONGEST_NAME = 249  # Kafka's own bound of a topic's name
# What is decided here, and what would change what is read.
_OURS = {
    "bootstrap.servers": "it stands in the URL",
    "metadata.broker.list": "brokers stand in the URL",
    "group.id": "give group= in the URL",
    "enable.auto.commit": "offsets are in the trainer's checkpoints",
    "enable.auto.offset.store": "offsets are in the trainer's checkpoints",
    "auto.offset.reset": "give lost= in the URL",
    "enable.partition.eof": "a topic has no end",
    "max.poll.interval.ms": "a trainer that waits is not gone",
    "queued.max.messages.kbytes": "give buffer_kib= in the URL",
    "group.instance.id": "a trainer reads all partitions",
}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KafkaConfig:
    """Where a topic is, and how it is read.

    Attributes:
        brokers: HOST:PORT of some brokers, with commas between.
        topic: Whose partitions are read, all of them.
        format: Of the messages: "json", "avro", "confluent-avro" or "arrow".
        avro_schema: File of the schema (.avsc) that Avro was written with.
        client: File of settings of the client, such as those of TLS and SASL: librdkafka's names,
            `name=value` a line. Passwords stand there, and nowhere else.
        group: Consumer group whose offsets are written after checkpoints, for other tools to see.
        quiet_s: Where a partition had nothing for so long, events held back count as complete, and
            after twice as long it holds up the others no more.
        messages: Of one partition at a time, at most.
        buffer_kib: Of each partition that the client may have fetched ahead.
        patience_s: Brokers that are away for longer end the run, which goes on when started again.
        lost: What is done where messages were dropped by the topic's retention before they were
            read: "stop" with an error, or "skip" them and count them as dead letters.
    """

    brokers: str
    topic: str
    format: str = JSON
    avro_schema: str = ""
    client: str = ""
    group: str = "reader"
    quiet_s: float = 5.0
    messages: int = 500
    buffer_kib: int = 4096
    patience_s: float = 600.0
    lost: str = "stop"

    def __post_init__(self) -> None:
        """Refuses what cannot be read."""
        if not self.brokers or "@" in self.brokers:
            raise ValueError(
                "a URL of Kafka has brokers and no user or password: kafka://HOST:PORT/TOPIC?"
                "client=FILE, with the credentials in that file"
            )
        if not re.fullmatch(r"[a-zA-Z0-9._-]+", self.topic) or len(self.topic) > _LONGEST_NAME:
            raise ValueError(f"{self.topic!r} is no topic; give kafka://HOST:PORT/TOPIC")
        if not self.group:
            raise ValueError("group is empty; name one")
        if self.messages < 1 or self.buffer_kib < 1:
            raise ValueError(
                f"messages is {self.messages} and buffer_kib {self.buffer_kib}; give 1 or more"
            )
        if self.quiet_s <= 0 or self.patience_s < 0:
            raise ValueError(
                f"quiet_s is {self.quiet_s} and patience_s {self.patience_s}; give seconds"
            )
        if self.lost not in _LOSSES:
            raise ValueError(f"lost is {self.lost!r}; use one of {', '.join(_LOSSES)}")

    @classmethod
    def of(cls, url: str, **settings: Any) -> "KafkaConfig":
        """Takes kafka://HOST:PORT,HOST:PORT/TOPIC?NAME=VALUE&..., the names those of settings.

        Raises:
            ValueError: A name does not exist, or a value will not do.
        """
        parts = urlsplit(url)
        kinds: dict[str, Callable[[str], Any]] = {
            field.name: type(field.default)
            for field in dataclasses.fields(cls)
            if field.name not in ("brokers", "topic")
        }
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name not in kinds:
                raise ValueError(f"{name!r} is no setting of Kafka's URL: {', '.join(kinds)}")
            try:
                settings[name] = kinds[name](value)
            except ValueError as error:
                raise ValueError(f"{name}={value!r} of Kafka's URL is no number") from error
        return cls(brokers=parts.netloc, topic=parts.path.strip("/"), **settings)

    def __str__(self) -> str:
        """Brokers and topic."""
        return f"kafka://{self.brokers}/{self.topic}"


def open_topic(
    config: KafkaConfig,
    schema: EventSchema | None = None,
    *,
    dead_letters: DeadLetters | None = None,
) -> MergedSource:
    """Opens all partitions of a topic as one live source.

    Args:
        config: Where it is.
        schema: What to read; by default the known one that the newest messages fit.
        dead_letters: Whose file takes what is rejected; each partition counts its own.

    Raises:
        ConfigurationError: The format, the settings or the schema will not do.
        TrainerError: No broker answers, there is no such topic, or no message tells the schema.
    """
    payloads = payloads_of(config.format, config.avro_schema)
    with _Client(config) as client:
        partitions = client.partitions()
        schema = schema or _recognise(config, client, payloads, partitions)
    payloads.check(schema)
    letters = dead_letters or DeadLetters()
    parts = [
        KafkaPartition(
            config,
            partition,
            schema,
            dead_letters=DeadLetters(
                path=letters.path, max_lines=letters.max_lines, input=f"{config.topic}-{partition}"
            ),
        )
        for partition in partitions
    ]
    return MergedSource(parts, silent_s=2 * config.quiet_s)


def _recognise(
    config: KafkaConfig, client: "_Client", payloads: Payloads[Any], partitions: Sequence[int]
) -> EventSchema:
    columns: list[str] = []
    for partition in partitions:
        for data in client.newest(partition, _MESSAGES_TO_RECOGNISE):
            try:
                columns = payloads.names(data)
            except PayloadError:
                continue
            schema = known_schema(columns)
            if schema is not None:
                return schema
    raise TrainerError(
        f"{config} has no message of a known schema"
        f"{': columns ' + ', '.join(columns) if columns else ''}; add events first, or give "
        "schema= in a run's file (embertide train --config)"
    )


class _Client:
    """A consumer of librdkafka; what it raises says what is wrong, and none of the settings."""

    def __init__(self, config: KafkaConfig) -> None:
        """Starts it; it connects when it is first used.

        Raises:
            ConfigurationError: A setting of the client's file will not do.
        """
        self._config = config
        self.ask_s = min(_ASK_S, max(_POLL_S, config.patience_s))
        self.last_error = ""
        settings = _settings(config.client) | {
            "bootstrap.servers": config.brokers,
            "group.id": config.group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "queued.max.messages.kbytes": config.buffer_kib,
            # A reader that waits for the trainer is not gone.
            "max.poll.interval.ms": 86_400_000,
            "error_cb": self._took_note,
            "on_commit": self._committed,
            "logger": log,
        }
        self.failed_commits = 0
        try:
            self.consumer: Consumer = Consumer(settings)
        except (KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{config}: the client does not start: {_text_of(error)}; see "
                f"{config.client or 'the URL'}"
            ) from None

    def __enter__(self) -> "_Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.close()

    def _took_note(self, error: KafkaError) -> None:
        self.last_error = error.str()

    def _committed(self, error: KafkaError | None, _: object) -> None:
        if error is not None:
            self.failed_commits += 1
            log.warning("%s: offsets were not written: %s", self._config, error.str())

    def failed(self, error: BaseException) -> TrainerError:
        """Return what a failed question is raised as."""
        self.consumer.poll(0)  # the reason comes as an event
        more = f" ({self.last_error})" if self.last_error else ""
        return TrainerError(
            f"{self._config} cannot be reached: {_text_of(error)}{more}; start it, give another "
            "URL, or see the file of client="
        )

    def partitions(self) -> list[int]:
        """Return the partitions of the topic.

        Raises:
            TrainerError: No broker answers, or there is no such topic.
            ConfigurationError: There are too many.
        """
        try:
            found = self.consumer.list_topics(self._config.topic, timeout=self.ask_s)
        except KafkaException as error:
            raise self.failed(error) from None
        topic = found.topics[self._config.topic]
        if topic.error is not None or not topic.partitions:
            why = "has no partition" if topic.error is None else topic.error.str()
            raise TrainerError(f"{self._config}: {why}; make the topic first, or name another")
        if len(topic.partitions) > _MOST_PARTITIONS:
            raise ConfigurationError(
                f"{self._config} has {len(topic.partitions)} partitions; {_MOST_PARTITIONS} are "
                "read by one trainer at most"
            )
        return sorted(topic.partitions)

    def bounds(self, partition: int) -> tuple[int, int]:
        """Return the first offset that the broker holds, and that after the last.

        Raises:
            KafkaException: It did not answer.
        """
        found: Any = self.consumer.get_watermark_offsets(
            TopicPartition(self._config.topic, partition), timeout=self.ask_s
        )
        return found[0], found[1]

    def newest(self, partition: int, messages: int) -> Iterator[bytes]:
        """Yield what the newest messages hold, as many as there are.

        Raises:
            TrainerError: The broker does not answer.
        """
        try:
            low, high = self.bounds(partition)
            begin = max(low, high - messages)
            self.consumer.assign([TopicPartition(self._config.topic, partition, begin)])
            end_s = time.monotonic() + self.ask_s
            while time.monotonic() < end_s:
                message = self.consumer.poll(_POLL_S)
                error = None if message is None else message.error()
                if error is not None and error.code() == KafkaError._PARTITION_EOF:
                    return
                if message is not None and error is None:
                    yield message.value() or b""
        except KafkaException as error:
            raise self.failed(error) from None
        finally:
            self.consumer.unassign()


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
    ) -> None:
        """Names it; it connects when it is read.

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
        self._client: _Client | None = None
        self._counts = dict.fromkeys(("closed", "outages", "failed_commits"), 0)
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
                log.warning("%s: offsets were not written: %s", self.path, _text_of(error))

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
        closings = _Closings(None if self._folder is None else self._folder / JOURNAL)
        closings.forget_before(start)
        with _Client(self.config) as client:
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
        """What reads messages."""
        return self._payloads


class _Reading:
    """One pass over a partition. Of one thread."""

    def __init__(
        self, source: KafkaPartition, client: _Client, closings: _Closings, start: int
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
            if messages is None:
                held = cutter.held or assembler.waits
                # Those that came after what waits decide it then; if none came, nothing does.
                if held and not assembler.waits_for_more:
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
            first = consumer.poll(min(_POLL_S, config.quiet_s))
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
                self._is_away(_text_of(error))
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
            raise TrainerError(
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
            self._is_away(_text_of(error))
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

    def _tell(self) -> None:
        """Tell the source how far this is, and forget what no checkpoint needs any more."""
        place = TopicPartition(self._config.topic, self._source.partition)
        behind = 0
        with contextlib.suppress(KafkaException):
            # What the last answer with messages said; no question is asked.
            found: Any = self._client.consumer.get_watermark_offsets(place, cached=True)
            behind = max(0, found[1] - max(self._next // ROWS, self._end or 0))
        failed, self._client.failed_commits = self._client.failed_commits, 0
        done = self._source.tell(behind, failed)
        if done is not None:
            if self._older is not None:
                self._closings.forget_before(self._older)
            self._older = done


def _settings(path: str) -> dict[str, Any]:
    """Settings of a client's file; its errors name lines and names, and never a value."""
    if not path:
        return {}
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_MOST_LINES)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigurationError(f"client={path}: {why}") from None
    found: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigurationError(f"client={path}, line {number}: write NAME=VALUE")
        if name in _OURS:
            raise ConfigurationError(f"client={path}, line {number}: leave {name}: {_OURS[name]}")
        found[name] = value.strip()
    return found


def _text_of(error: BaseException) -> str:
    """What an exception of the client says, without its code."""
    inner = error.args[0] if error.args else error
    return inner.str() if hasattr(inner, "str") else str(inner)


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None, "of a message that the broker has"
    return offset


def _came_ms(message: Message) -> int:
    """When the broker took it, where the topic says so; what a producer says is not that."""
    kind, ms = message.timestamp()
    return ms if kind == TIMESTAMP_LOG_APPEND_TIME else UNKNOWN_MS
