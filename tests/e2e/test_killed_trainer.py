"""A trainer killed twice while a node follows it: the end is that of a trainer never killed."""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checker import bucket_of
from numpy.typing import NDArray
from serving import Client, beside, metric
from snapshots import snapshot_files
from waiting import wait_until

from embertide import _store
from embertide.server.adapters import process, triton
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.embedding.store import store_table
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.publisher import Publisher
from embertide.trainer.publish.snapshot import read_manifest

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
HOURS = 8
SEED = 20
# The index of the article shown, among the model's tables and KEYS' columns.
CAND = 2
FOREIGN_KEY = 123_456_789_012


def train(publication: Path, bus: str | None, log: Path) -> process.Child:
    """Start the trainer's command, as anybody would."""
    command = [sys.executable, "-m", "embertide.trainer", "train", str(publication)]
    command += [
        "--demo",
        "--hours",
        str(HOURS),
        "--snapshot-every",
        "5",
        "--cache",
        str(CACHE),
        "--json",
    ]
    return process.Child([*command, *(["--bus", bus] if bus else [])], log=log)


def finish(trainer: process.Child) -> dict[str, Any]:
    """Wait for its end and return what it says of itself."""
    assert trainer.wait(60) == 0, trainer.log_text()
    result = json.loads(trainer.log_text().splitlines()[-1])["result"]
    assert isinstance(result, dict)
    return result


@dataclasses.dataclass
class Site:
    """A Redis, a publication that a trainer fills, a server that is not started yet."""

    bus: RedisServer
    publication: Publication
    logs: Path
    options: triton.ServerOptions
    server: triton.TritonServer | None = None
    trainer: process.Child | None = None

    def start_trainer(self) -> process.Child:
        runs = len(list(self.logs.glob("train-*.log")))
        log = self.logs / f"train-{runs}.log"
        self.trainer = train(self.publication.path, self.bus.url, log)
        return self.trainer

    def start_node(self) -> Client:
        for kind, name in (("ranking", "rank"), ("lookup", "look")):
            options = triton.ModelOptions(
                publication=self.publication.path,
                bus=self.bus.url,
                kind=kind,
            )
            triton.write_model(self.options.repository, name, options)
        self.server = triton.TritonServer(self.options)
        return Client("grpc", self.server)

    def newest(self) -> int:
        versions = self.publication.versions()
        return versions[-1].number if versions else 0

    def reach(self, number: int) -> None:
        wait_until(lambda: self.newest() >= number, timeout_s=60)


@pytest.fixture
def site(tmp_path: Path, server_options: triton.ServerOptions) -> Iterator[Site]:
    redis_options = RedisOptions(log=tmp_path / "redis.log")
    with RedisServer(redis_options) as bus:
        log = tmp_path / "triton.log"
        options = beside(server_options, tmp_path / "models", log, ("rank", "look"))
        made = Site(bus, Publication(tmp_path / "pub"), tmp_path, options)
        yield made
        if made.trainer is not None:
            made.trainer.stop()
        if made.server is not None:
            made.server.stop()


def version_of(client: Client, model: str) -> int:
    keys = np.zeros((1, len(news_model().features)), np.int64)
    answer = client.send({"KEYS": keys}, model=model)
    return int(answer.as_numpy("VERSION").reshape(-1)[0])


def _serves(client: Client, model: str, number: int) -> bool:
    return version_of(client, model) == number


def wait_served(client: Client, number: int) -> None:
    for model in ("rank", "look"):
        wait_until(partial(_serves, client, model, number))


def foreign_version(site: Site) -> int:
    """Publish a version as the killed trainer could have, had it seen a key that nobody else does.

    Returns:
        Its number.
    """
    newest = site.publication.snapshots()[-1]
    schema = read_manifest(site.publication.snapshot_path(newest))["schema_id"]
    publisher = Publisher(
        site.publication, bus=site.bus.url, model=news_model().name, schema_id=schema
    )
    table = store_table(news_model().tables[CAND], CAND, 1)
    payload = _store.encode_payload(table.layout, 1, np.full(table.layout.dim, 9, np.float32))
    record = _store.encode_record(FOREIGN_KEY, 1, 0, payload)
    assert publisher.newest is not None
    dense = site.publication.snapshot_path(newest) / "dense" / "tensors.safetensors"
    return publisher.publish(
        publisher.newest.number + 1,
        watermark_ms=0,
        changes=[(table, bucket_of(table, FOREIGN_KEY), record)],
        dense=dense.read_bytes(),
    ).number


def some_keys() -> NDArray[np.int64]:
    """Events of the stream, a few hundred keys of each large column, and keys of no event."""
    rng = np.random.default_rng(SEED)
    source = NewsSource(NewsConfig(hours=HOURS))
    batch = next(iter(source.batches(batch_size=1000, start=source.first_event(HOURS - 1))))
    known = batch.keys_BF[rng.permutation(len(batch))[:300]]
    unknown = rng.integers(1 << 40, 1 << 62, known.shape)
    mixed = np.where(rng.random(known.shape) < 0.5, known, unknown)
    keys = np.concatenate([known, unknown, mixed])
    keys[0, CAND] = FOREIGN_KEY
    return np.ascontiguousarray(keys)


def answers(client: Client, rank: str, look: str) -> tuple[NDArray[Any], ...]:
    """(scores, embeddings, sources) of `some_keys`."""
    keys = some_keys()
    scores = client.send({"KEYS": keys}, model=rank)
    looked = client.send({"KEYS": keys}, model=look)
    return scores.as_numpy("SCORE"), looked.as_numpy("EMBEDDING"), looked.as_numpy("SOURCE")


def test_a_trainer_killed_twice_ends_as_one_never_killed_and_so_does_the_node(
    site: Site, tmp_path: Path
) -> None:
    rng = np.random.default_rng(SEED)
    never_killed = train(tmp_path / "never", None, tmp_path / "never.log")
    trainer = site.start_trainer()
    site.reach(2)  # its first snapshot is there
    os.kill(trainer.pid, signal.SIGSTOP)
    client = site.start_node()
    os.kill(trainer.pid, signal.SIGCONT)
    for first, last in ((8, 16), (22, 34)):
        site.reach(int(rng.integers(first, last)))
        trainer.kill()
        assert trainer.code == -signal.SIGKILL
        assert site.newest() < HOURS * 6, "it was at its end: raise HOURS"
        if first == 8:
            wait_served(client, foreign_version(site))
            _, embeddings, _ = answers(client, "rank", "look")
            assert (embeddings[0] == 9).sum() == 16  # the node took it
        trainer = site.start_trainer()
    result, reference = finish(trainer), finish(never_killed)
    for name in ("events", "version", "auc_by_day", "calibration_by_day"):
        assert result[name] == reference[name]
    assert result["lineage"] > reference["lineage"]

    last_version = site.publication.snapshots()[-1]
    final = site.publication.snapshot_path(last_version)
    never = Publication(tmp_path / "never")
    assert snapshot_files(final) == snapshot_files(never.snapshot_path(never.snapshots()[-1]))

    wait_served(client, last_version.number)
    for kind, name in (("ranking", "rank_final"), ("lookup", "look_final")):
        options = triton.ModelOptions(snapshot=final, kind=kind)
        triton.write_model(site.options.repository, name, options)
        client.raw.load_model(name)
    followed, loaded = answers(client, "rank", "look"), answers(client, "rank_final", "look_final")
    for one, other in zip(followed, loaded, strict=True):
        assert one.tobytes() == other.tobytes()
    # Rows that only the killed lineage had are gone; those of the stream are there.
    scores, embeddings, sources = followed
    assert not (embeddings[0] == 9).any()
    sources = sources.reshape(len(embeddings), -1)
    assert sources[0, CAND] == sources[300, CAND] != sources[1, CAND]
    assert len(np.unique(scores)) > 500
    client.raw.close()
    assert site.server is not None
    page = site.server.metrics()
    assert metric(page, "embertide_bus_events_total", model="rank", event="corrupt") == 0
    assert site.server.alive()
