"""A trainer killed again and again, each time on a new machine; a node that follows by S3 alone.

`EMBERTIDE_KILLS` says how often, `EMBERTIDE_SEED` at which moments.
"""

import functools
import json
import os
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from buckets import S3, s3_server
from serving import metric
from snapshots import newest_files
from waiting import wait_until

from embertide.server.adapters.process import Child, free_ports
from embertide.server.cli.common_options import DEFAULT_BACKENDS
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.mirror import Mirror
from embertide.trainer.publish.storage import Storage

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
SEED = int(os.environ.get("EMBERTIDE_SEED", "21"))
KILLS = int(os.environ.get("EMBERTIDE_KILLS", "1"))
HOURS = 3
OPTIONS = (
    "--demo",
    "--hours",
    str(HOURS),
    "--publish-every-s",
    "300",
    "--snapshot-every",
    "2",
    "--json",
)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


def trainer(folder: Path, log: Path, *more: str) -> Child:
    command = [sys.executable, "-m", "embertide.trainer", "train", str(folder), *OPTIONS]
    return Child([*command, "--cache", str(CACHE), *more], log=log)


def brings(child: Child, storage: Storage, seen: int) -> bool:
    """Whether there is more or less in storage than was seen, or the trainer is at its end.

    Before the first snapshot is whole there, a machine that is lost leaves nothing to go on from.
    """
    keys = storage.keys("snapshots")
    whole = any(key.endswith("manifest.json") for key in keys)
    return (whole and len(keys) != seen) or not child.alive()


def test_killed_on_machine_after_machine_it_ends_as_one_never_killed_and_a_node_has_it_all(
    s3: S3, tmp_path: Path
) -> None:
    never = trainer(tmp_path / "never", tmp_path / "never.log")
    assert never.wait(300) == 0, never.log_text()
    wanted = newest_files(Publication(tmp_path / "never"))
    url, rng = s3.bucket(), np.random.default_rng(SEED)
    storage = Storage(url)
    grpc, metrics = free_ports(2)
    serve = [sys.executable, "-m", "embertide.server.cli", "serve", url]
    serve += ["--directory", str(tmp_path / "node"), "--ddr-mib", "64"]
    serve += ["--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    node = Child([*serve, "--backends", str(DEFAULT_BACKENDS)], log=tmp_path / "serve.log")
    try:
        for i in range(KILLS):
            folder = tmp_path / f"machine-{i}"
            child = trainer(folder, tmp_path / f"{i}.log", "--storage", url)
            seen = len(storage.keys("snapshots"))
            # Once it brings something over, at any moment of it.
            wait_until(functools.partial(brings, child, storage, seen), timeout_s=120, every_s=0.02)
            time.sleep(rng.uniform(0, 1.5))
            child.kill()
            shutil.rmtree(folder)
        child = trainer(tmp_path / "last", tmp_path / "last.log", "--storage", url)
        assert child.wait(300) == 0, f"seed {SEED}: {child.log_text()}"
        result = json.loads(child.log_text().splitlines()[-1])["result"]
        assert newest_files(Publication(tmp_path / "last")) == wanted, f"seed {SEED}"
        assert result["events"] == NewsSource(NewsConfig(hours=HOURS)).total_events()

        def version() -> float:
            assert node.alive(), node.log_text()
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=5)
            except OSError:
                return 0
            return metric(page.read().decode(), "embertide_version")

        wait_until(lambda: version() == result["version"], timeout_s=120)
        with_node = Publication(tmp_path / "node" / "publication")
        assert with_node.versions()[-1].number == result["version"]
    finally:
        node.stop()


def test_sigterm_ends_a_run_once_its_checkpoint_is_in_storage(s3: S3, tmp_path: Path) -> None:
    url = s3.bucket()
    child = trainer(tmp_path / "pub", tmp_path / "log", "--storage", url)
    wait_until(lambda: "progress" in child.log_text() or not child.alive(), timeout_s=120)
    s3.harm(3, key="snapshots", wait_s=1.0)
    assert child.stop() == -15, child.log_text()
    mine = Publication(tmp_path / "pub").versions()[-1]
    mirror = Mirror(Storage(url), Publication(tmp_path / "node"))
    mirror.round()
    assert mirror.newest() == mine
    assert mine in Storage(url).names("checkpoints")
