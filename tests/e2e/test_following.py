"""A node that follows a publisher: one version an answer, no step back, whatever happens to Redis.

`EMBERTIDE_CHECK_SECONDS` sets how long the traffic test runs (5 by default; 300 for the record).
"""

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from checker import (
    CONFIG,
    DIM,
    KEYS,
    OUTPUTS,
    TABLES,
    CheckerPublisher,
    Findings,
    Traffic,
    bucket_of,
    changes,
    check_once,
    write_models,
)
from numpy.typing import NDArray
from serving import Client, beside, metric
from tritonclient.utils import InferenceServerException
from waiting import wait_until

from embertide import _store
from embertide.server.adapters import triton
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.publish.folder import VersionId
from embertide.trainer.publish.publisher import BusError, SupersededError
from embertide.v1 import update_pb2

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "cache" / "dense"
SECONDS = float(os.environ.get("EMBERTIDE_CHECK_SECONDS", "5"))
VERSIONS_PER_S = 20 / 60 if SECONDS >= 60 else 8


@dataclasses.dataclass
class Site:
    """A Redis, a publisher and a node that follows it."""

    directory: Path
    redis_options: RedisOptions
    redis: RedisServer
    publisher: CheckerPublisher
    server_options: triton.ServerOptions
    server: triton.TritonServer

    def served(self) -> int:
        """The version that both models answer with; proves the answers."""
        findings = Findings()
        client = Client("grpc", self.server)
        version = check_once(client, np.random.default_rng(1), findings, 0)
        client.raw.close()
        assert findings.mixed == 0
        return version if findings.versions == {version} else 0

    def wait_for(self, version: int) -> None:
        wait_until(lambda: self.served() == version)

    def publish_next(self) -> int:
        version = self.publisher.newest + 1
        self.publisher.publish(version)
        return version

    def events(self, event: str) -> float:
        page = self.server.metrics()
        return metric(page, "embertide_bus_events_total", model="rank", event=event)


@pytest.fixture
def site(tmp_path: Path, server_options: triton.ServerOptions) -> Iterator[Site]:
    redis_options = RedisOptions(log=tmp_path / "redis.log")
    bus = RedisServer(redis_options)
    publisher = CheckerPublisher(tmp_path / "pub", bus.url, CACHE)
    models = write_models(tmp_path / "models", tmp_path / "pub", bus.url)
    options = beside(server_options, tmp_path / "models", tmp_path / "triton.log", models)
    made = Site(tmp_path, redis_options, bus, publisher, options, triton.TritonServer(options))
    yield made
    made.server.stop()
    made.redis.stop()


def test_no_answer_mixes_versions_and_none_goes_back(site: Site) -> None:
    traffic = Traffic(site.server)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        newest = site.publish_next()
        time.sleep(1 / VERSIONS_PER_S)
    site.wait_for(newest)
    findings = traffic.stop()
    assert not traffic.errors
    assert (findings.mixed, findings.back) == (0, 0)
    assert len(findings.versions) >= 0.8 * newest
    assert findings.answers > 100
    assert site.events("gap") == 0
    page = site.server.metrics()
    assert 0 < metric(page, "embertide_freshness_ms", model="rank") < 5000
    name = "embertide_version_age_ms"  # it grows while no version comes
    age_ms = metric(page, name, model="rank")
    wait_until(lambda: metric(site.server.metrics(), name, model="rank") > age_ms > 0)
    print(f"{findings.answers} answers, {newest} versions, 0 mixed, 0 steps back")


def test_a_request_gets_the_version_that_it_names(site: Site) -> None:
    for version in range(2, 13):  # more than a node holds
        site.publisher.publish(version)
    wait_until(lambda: site.served() == 12)
    keys = np.random.default_rng(3).integers(0, KEYS, (16, 2))
    client = Client("grpc", site.server)

    def ask(
        client: Client = client, **parameters: Any
    ) -> dict[str, tuple[int, NDArray[np.float32]]]:
        answers = {}
        for model, output in OUTPUTS.items():
            got = client.send({"KEYS": keys}, model=model, parameters=parameters)
            version = int(got.as_numpy("VERSION").reshape(-1)[0])
            answers[model] = version, got.as_numpy(output)
        return answers

    for wanted in (12, 6, 9, 12):
        for version, values in ask(version=wanted).values():
            assert version == wanted
            assert np.all(values == wanted)
    for wanted in (2, 13):
        with pytest.raises(InferenceServerException, match=f"version {wanted} is not held; .* "):
            ask(version=wanted)
    for nonsense in (0, -1, "new"):
        with pytest.raises(InferenceServerException, match="must be a positive integer"):
            ask(version=nonsense)
    client.raw.close()
    refused = "embertide_requests_refused_total"
    wait_until(lambda: metric(site.server.metrics(), refused, reason="version") == 5)


def test_a_row_applied_early_is_found(site: Site) -> None:
    version = site.publisher.newest + 1
    early = [(table, bucket, rows) for table, bucket, rows in changes(version)]
    # One bucket of the next version slips into this one.
    early[0] = changes(version + 1)[0]
    site.publisher.publish(version, early)
    findings = Findings()
    client = Client("grpc", site.server)
    rng = np.random.default_rng(0)

    def found() -> bool:
        check_once(client, rng, findings, 0)
        return findings.mixed > 0

    wait_until(found)
    client.raw.close()


def test_a_row_has_the_same_bytes_in_trainer_bus_file_and_node(site: Site) -> None:
    key, table = 7, TABLES[0]
    store = _store.TrainingStore(tables=[table], ddr_budget_bytes=16 << 20)
    store.ensure_rows(0, np.array([key]))
    gradient = np.linspace(-1, 1, DIM, dtype=np.float32)[np.newaxis]
    store.apply_gradients([(0, np.array([key]), None, gradient)], learning_rate=0.1)
    bucket = bucket_of(table, key)
    records = store.take_changes(0, bucket)
    trained, _, _ = store.lookup(0, np.array([key]))
    version = site.publisher.newest + 1
    site.publisher.publish(version, [(table, bucket, records)])

    with redis.Redis.from_url(site.redis.url) as client:
        stream = f"e:{{{CONFIG.name}:{bucket % 64}}}:{table.id}:{bucket}"
        sent = update_pb2.RowBatch.FromString(client.xrevrange(stream, count=1)[0][1][b"m"])
    publication = site.publisher.publication
    (written,) = publication.read_batches(VersionId(version, site.publisher.publisher.lineage))
    assert sent.records == written.records == records
    assert records.endswith(trained.tobytes())

    client = Client("grpc", site.server)

    def served() -> Any:
        return client.send({"KEYS": np.array([[key, 0]])}, model="look")

    wait_until(lambda: int(served().as_numpy("VERSION").item()) == version)
    assert served().as_numpy("EMBEDDING")[0, :DIM].tobytes() == trained.tobytes()
    client.raw.close()


def test_serving_goes_on_without_redis_and_catches_up(site: Site) -> None:
    site.wait_for(site.publish_next())
    site.redis.process.kill()
    newest = site.publish_next()  # by files alone
    assert site.publisher.publisher.stats.bus_failures > 0
    site.wait_for(newest)
    wait_until(lambda: metric(site.server.metrics(), "embertide_bus_connected", model="rank") == 0)
    site.redis = RedisServer(site.redis_options)  # it comes back having lost everything
    site.wait_for(site.publish_next())
    wait_until(lambda: metric(site.server.metrics(), "embertide_bus_connected", model="rank") == 1)
    site.wait_for(site.publish_next())


def test_redis_absent_at_start_serves_the_files_and_refuses_the_publisher(site: Site) -> None:
    site.publish_next()
    site.server.stop()
    site.redis.process.kill()
    site.server = triton.TritonServer(site.server_options)
    site.wait_for(site.publisher.newest)
    with pytest.raises(BusError, match="cannot be reached"):
        CheckerPublisher(site.directory / "pub", site.redis.url, CACHE)


def test_a_restarted_node_joins_at_the_newest_version(site: Site) -> None:
    for _ in range(3):
        newest = site.publish_next()
    site.wait_for(newest)
    os.kill(site.server.pid, signal.SIGKILL)
    site.server.stop()
    site.publisher.snapshot(newest)
    for _ in range(3):
        newest = site.publish_next()
    site.server = triton.TritonServer(site.server_options)
    site.wait_for(newest)
    wait_until(lambda: site.events("catch_up") > 0)


def test_a_gap_on_the_bus_is_closed_from_files(site: Site) -> None:
    site.wait_for(site.publish_next())
    os.kill(site.server.pid, signal.SIGSTOP)
    newest = site.publish_next()
    with redis.Redis.from_url(site.redis.url) as client:
        for stream in client.keys("e:*:?:*"):
            client.delete(stream)
    os.kill(site.server.pid, signal.SIGCONT)
    site.wait_for(newest)
    wait_until(lambda: site.events("gap") > 0)


def harm_batch(client: Any, stream: bytes) -> None:
    """Replace the newest batch of a stream by one with a flipped byte."""
    entry_id, fields = client.xrevrange(stream, count=1)[0]
    batch = update_pb2.RowBatch.FromString(fields[b"m"])
    data = bytearray(batch.records)
    data[-1] ^= 1
    batch.records = bytes(data)
    entries = client.xrange(stream)
    client.delete(stream)
    for other, kept in entries:
        client.xadd(stream, kept if other != entry_id else {"m": batch.SerializeToString()}, other)


def test_a_corrupted_batch_is_found_and_fetched_again_from_files(site: Site) -> None:
    site.wait_for(site.publish_next())
    os.kill(site.server.pid, signal.SIGSTOP)
    newest = site.publish_next()
    with redis.Redis.from_url(site.redis.url) as client:
        harm_batch(client, client.keys("e:*:0:*")[0])
    os.kill(site.server.pid, signal.SIGCONT)
    site.wait_for(newest)
    wait_until(lambda: site.events("corrupt") > 0)


def test_a_newer_publisher_takes_over_and_the_old_one_is_fenced_off(site: Site) -> None:
    site.wait_for(site.publish_next())
    successor = CheckerPublisher(site.directory / "pub", site.redis.url, CACHE)
    assert successor.publisher.lineage > site.publisher.publisher.lineage
    successor.publish(successor.newest + 1)
    site.wait_for(successor.newest)
    with pytest.raises(SupersededError, match="taken over"):
        site.publisher.publish(successor.newest + 5)
    # The late messages of an old publisher are dropped and counted.
    late = update_pb2.GlobalCommit(schema_id=1, committed_ms=1)
    late.version.lineage = site.publisher.publisher.lineage
    late.version.number = successor.newest + 7
    with redis.Redis.from_url(site.redis.url) as client:
        log = f"e:{{{CONFIG.name}:commit}}:log"
        client.xadd(log, {"m": late.SerializeToString()}, id=f"{late.version.number}-1")
    wait_until(lambda: site.events("stale_lineage") == 1)
    assert site.served() == successor.newest


def test_a_publication_without_a_snapshot_is_refused_with_the_remedy(
    site: Site, tmp_path: Path
) -> None:
    triton.write_model(
        site.server_options.repository, "bad", triton.ModelOptions(publication=tmp_path / "none")
    )
    client = Client("grpc", site.server)
    with pytest.raises(InferenceServerException, match="holds no snapshot yet"):
        client.raw.load_model("bad")
    client.raw.close()
