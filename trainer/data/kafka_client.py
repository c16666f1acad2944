"""Where a topic of Kafka is, and the client that asks its brokers.

What the client raises says what is wrong, and no setting's value: passwords are among them.
"""

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from embertide.trainer.data.payloads import JSON
from embertide.trainer.data.rows import check_waits
from embertide.trainer.errors import ConfigurationError, FinalError, TrainerError

POLL_S = 0.2
"""Between looks at whether to leave."""

_LOSSES = ("stop", "skip")
_MAX_PARTITIONS = 256  # each has a consumer and a thread
_ASK_S = 5.0  # for an answer of the broker
_MAX_LINES = 1 << 20  # of a file of settings, in characters
_LONGEST_NAME = 249  # Kafka's own bound of a topic's name
# Options that are set here, and those that would change what is read.
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
        topic: The topic to read, with all its partitions.
        format: Format of the messages: "json", "avro", "confluent-avro" or "arrow".
        avro_schema: File of the schema (.avsc) that Avro was written with.
        client: File of settings of the client, such as those of TLS and SASL: librdkafka's names,
            `name=value` a line. Passwords stand there, and nowhere else.
        group: Consumer group whose offsets are written after checkpoints, for other tools to see.
        quiet_s: Where a partition had nothing for so long, events held back count as complete, and
            after twice as long it holds up the others no more.
        messages: Messages of one partition taken at a time, at most.
        buffer_kib: Bound on the KiB of each partition that the client may have fetched ahead.
        patience_s: Brokers that are away for longer end the run, which goes on when started again.
        lost: The treatment of messages that the topic's retention dropped before they were read:
            "stop" with an error, or "skip" them and count them as dead letters.
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
        check_waits(self.quiet_s, self.patience_s)
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


class KafkaClient:
    """A consumer of librdkafka; what it raises says what is wrong, and none of the settings."""

    def __init__(self, config: KafkaConfig) -> None:
        """Starts it; it connects when it is first used.

        Raises:
            ConfigurationError: A setting of the client's file will not do.
        """
        self._config = config
        self.ask_s = min(_ASK_S, max(POLL_S, config.patience_s))
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
                f"{config}: the client does not start: {text_of(error)}; see "
                f"{config.client or 'the URL'}"
            ) from None

    def __enter__(self) -> "KafkaClient":
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
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
            f"{self._config} cannot be reached: {text_of(error)}{more}; start it, give another "
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
            raise FinalError(f"{self._config}: {why}; make the topic first, or name another")
        if len(topic.partitions) > _MAX_PARTITIONS:
            raise ConfigurationError(
                f"{self._config} has {len(topic.partitions)} partitions; {_MAX_PARTITIONS} are "
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
                message = self.consumer.poll(POLL_S)
                error = None if message is None else message.error()
                if error is not None and error.code() == KafkaError._PARTITION_EOF:
                    return
                if message is not None and error is None:
                    yield message.value() or b""
        except KafkaException as error:
            raise self.failed(error) from None
        finally:
            self.consumer.unassign()


def _settings(path: str) -> dict[str, Any]:
    """Settings of a client's file; its errors name lines and names, and never a value."""
    if not path:
        return {}
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_MAX_LINES)
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


def text_of(error: BaseException) -> str:
    """Return the text of an exception of the client, without its code."""
    inner = error.args[0] if error.args else error
    return inner.str() if hasattr(inner, "str") else str(inner)
