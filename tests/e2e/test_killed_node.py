"""A node with an SSD tier that is killed while it follows Redis starts from its last seal."""

import dataclasses
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checker import CheckerPublisher, Findings, check_once
from numpy.typing import NDArray
from serving import Client, metric
from waiting import wait_until

from embertide import _store
from embertide.server.adapters import process, triton
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.cli import doctor
from embertide.trainer.config import FeatureConfig, ModelConfig, TableConfig
from embertide.trainer.embedding.store import store_table
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.publisher import Change, Publisher
from embertide.trainer.publish.snapshot import SnapshotInfo, schema_id, write_snapshot

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
ROWS, DIM, CHANGED = 40_000, 16, 400
CONFIG = ModelConfig(
    name="large",
    tables=(TableConfig(name="item", dim=DIM, bucket_bits=1),),
    features=(FeatureConfig(name="item", table="item"),),
)
TABLE = store_table(CONFIG.tables[0], 0, 1)
# DDR has room for the index and a part of the rows.
TIERS: dict[str, Any] = {"devices": 1, "ddr_budget_bytes": 2 << 20, "ssd_budget_bytes": 32 << 20}


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(RedisOptions(log=tmp_path / "redis.log"))
    yield server
    server.stop()


def start(
    server_options: triton.ServerOptions, directory: Path, models: dict[str, triton.ModelOptions]
) -> triton.TritonServer:
    repository = directory / "models"
    for name, options in models.items():
        if not (repository / name).exists():
            triton.write_model(repository, name, options)
    grpc, metrics = process.free_ports(2)
    return triton.TritonServer(
        dataclasses.replace(
            server_options,
            repository=repository,
            log=directory / "triton.log",
            grpc_port=grpc,
            metrics_port=metrics,
            models=tuple(models),
        )
    )


def kill(server: triton.TritonServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    server.stop()


def opened_from(server: triton.TritonServer, model: str, source: str) -> bool:
    return metric(server.metrics(), "embertide_opened_from", model=model, source=source) == 1


class Stream:
    """Versions that change some rows of many, and what all rows then are."""

    def __init__(self, folder: Path, bus: str) -> None:
        self.publication = Publication(folder)
        info = SnapshotInfo.of(CONFIG, lineage=0, version=0, watermark_ms=0)
        self.publisher = Publisher(
            self.publication, bus=bus, model=CONFIG.name, schema_id=schema_id(info, [TABLE])
        )
        self.values = np.arange(ROWS, dtype=np.float32) % 1000
        self.newest = 1
        info = SnapshotInfo.of(CONFIG, lineage=self.publisher.lineage, version=1, watermark_ms=1)
        path = self.publication.snapshot_path(VersionId(1, self.publisher.lineage))
        write_snapshot(path, info, [TABLE], self._changes(range(ROWS)))
        self.publisher.adopt(1, watermark_ms=1, dense=b"")

    def _changes(self, keys: Iterable[int]) -> list[Change]:
        buckets: list[list[bytes]] = [[], []]
        for key in keys:
            row = np.full(DIM, self.values[key], np.float32)
            payload = _store.encode_payload(TABLE.layout, 1, row)
            record = _store.encode_record(key, 1, 0, payload)
            buckets[_store.hash_key(key) >> 63].append(record)
        return [(TABLE, bucket, b"".join(records)) for bucket, records in enumerate(buckets)]

    def publish(self) -> None:
        self.newest += 1
        rng = np.random.default_rng(self.newest)
        keys = sorted({int(key) for key in rng.integers(0, ROWS, CHANGED)})
        self.values[keys] = 1000 + self.newest
        self.publisher.publish(
            self.newest, watermark_ms=self.newest, changes=self._changes(keys), dense=b""
        )


def served(client: Client) -> tuple[int, NDArray[np.float32]]:
    """Return the version and every row's value."""
    versions, values = set(), []
    for first in range(0, ROWS, 1000):
        keys = np.arange(first, first + 1000, dtype=np.int64)[:, np.newaxis]
        answer = client.send({"KEYS": keys}, model="large", outputs=("EMBEDDING", "VERSION"))
        versions.add(int(answer.as_numpy("VERSION").reshape(-1)[0]))
        values.append(answer.as_numpy("EMBEDDING"))
    rows = np.concatenate(values)
    assert np.all(rows == rows[:, :1])
    return versions.pop() if len(versions) == 1 else 0, rows[:, 0]


def sealed_version(server: triton.TritonServer, model: str) -> float:
    return metric(server.metrics(), "embertide_seal_version", model=model)


def wait_for(client: Client, version: int) -> None:
    wait_until(lambda: served(client)[0] == version)


def wait_for_seal(server: triton.TritonServer, model: str, version: int) -> None:
    wait_until(lambda: sealed_version(server, model) >= version)


def test_a_node_killed_at_any_moment_starts_from_its_seal(
    server_options: triton.ServerOptions, tmp_path: Path, bus: RedisServer
) -> None:
    stream = Stream(tmp_path / "pub", bus.url)
    chance = random.Random(5)
    model = triton.ModelOptions(
        publication=tmp_path / "pub",
        bus=bus.url,
        ssd_directory=tmp_path / "ssd",
        ssd_seal_interval_ms=20,
        **TIERS,
    )
    server = start(server_options, tmp_path, {"large": model})
    for _ in range(3):
        stream.publish()
        wait_for_seal(server, "large", 2)
        # The moment of the kill is to be any, in a seal or between two.
        until = time.monotonic() + 0.2 + 0.5 * chance.random()
        while time.monotonic() < until:
            stream.publish()
        kill(server)
        found = doctor.seal(tmp_path / "ssd")
        assert found.ok, found
        assert f"of large, {ROWS:,} rows" in found.found
        stream.publish()
        server = start(server_options, tmp_path, {"large": model})
        client = Client("grpc", server)
        wait_for(client, stream.newest)
        assert opened_from(server, "large", "seal")
        assert metric(server.metrics(), "embertide_tier_bytes", model="large", tier="ssd") > 0
        version, values = served(client)
        assert version == stream.newest
        assert np.array_equal(values, stream.values)
        client.raw.close()
    server.stop()


def test_rows_and_dense_net_of_a_start_from_a_seal_are_of_one_version(
    server_options: triton.ServerOptions, tmp_path: Path, bus: RedisServer
) -> None:
    publisher = CheckerPublisher(tmp_path / "pub", bus.url, CACHE)
    look = triton.ModelOptions(
        publication=tmp_path / "pub",
        bus=bus.url,
        max_batch_size=256,
        ssd_directory=tmp_path / "ssd-look",
        ssd_seal_interval_ms=20,
        **TIERS,
    )
    rank = look.replace(kind="ranking", ssd_directory=tmp_path / "ssd-rank")
    models = {"look": look, "rank": rank}
    server = start(server_options, tmp_path, models)
    for version in range(2, 8):
        publisher.publish(version)
    for name in models:
        wait_for_seal(server, name, 7)
    kill(server)
    bus.stop()  # what it answers can come from files and seals alone
    server = start(server_options, tmp_path, models)
    assert all(opened_from(server, name, "seal") for name in models)
    client = Client("grpc", server)
    findings = Findings()
    assert check_once(client, np.random.default_rng(1), findings, 0) == 7
    assert (findings.mixed, findings.versions) == (0, {7})
    client.raw.close()
    server.stop()
