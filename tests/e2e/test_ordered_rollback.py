"""A rollback by the control plane: real processes, and the state of an older version."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.promotion import PromotionRecord

ROOT = Path(__file__).parents[2]
EMBERTIDE = (sys.executable, "-m", "embertide.server.cli")


class Site:
    """A Redis, a control plane that reads it, and a trainer that publishes for long."""

    def __init__(self, folder: Path, bus: RedisServer) -> None:
        (port,) = free_ports(1)
        self.control = f"127.0.0.1:{port}"
        self.publication = Publication(folder / "publication")
        trains = (sys.executable, "-m", "embertide.trainer", "train", str(self.publication.path))
        cache = ("--cache", str(ROOT / "build" / "cache" / "dense"))
        demo = ("--demo", "--hours", "5000", "--snapshot-every", "1000")
        self.trainer = Child([*trains, *demo, *cache, "--bus", bus.url], log=folder / "trainer.log")
        words = ("--model", "news", "--listen", self.control, "--expect-nodes", "1")
        stores = ("--state", bus.url, "--bus", bus.url, "--directory", str(folder / "control"))
        self.plane = Child([*EMBERTIDE, "control", *words, *stores], log=folder / "control.log")

    def ask(self, *words: str) -> tuple[int, dict[str, Any]]:
        """Return the exit status of a command with --json, and what it says."""
        done = subprocess.run(
            [*EMBERTIDE, *words, "--control", self.control, "--json"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        said = json.loads(done.stdout or "{}")
        assert isinstance(said, dict)
        return done.returncode, said

    def versions(self) -> list[int]:
        status, said = self.ask("versions")
        return [each["number"] for each in said["versions"]] if status == 0 else []


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with RedisServer(RedisOptions(log=tmp_path / "redis.log")) as bus:
        made = Site(tmp_path, bus)
        yield made
        made.trainer.stop()
        made.plane.stop()


def test_a_version_is_restored_by_a_command_that_reaches_no_file(site: Site) -> None:
    wait_until(lambda: bool(site.versions()) and site.versions()[0] >= 4, 120)
    to = 2
    status, preview = site.ask("versions", "rollback", str(to), "--dry-run")
    assert status == 0
    assert int(preview["newest"]["number"]) >= 4
    assert not PromotionRecord(site.publication).read().undone
    status, failed = site.ask("versions", "rollback", "1000000")
    assert status == 1
    assert "not older than" in failed["error"]
    status, said = site.ask("versions", "rollback", str(to), "--reason", "a test")
    assert status == 0, said
    restored = int(said["version"])
    (undone,) = PromotionRecord(site.publication).read().undone
    assert (undone.number, undone.to) == (restored, to)
    assert "by trainer@" in undone.by
    newest = site.publication.versions()[-1]
    commit = site.publication.read_commit(newest).commit
    assert (newest.number, commit.rollback_to) == (restored, to)
    assert site.trainer.wait(120) == 1, site.trainer.log_text()
    assert f"version {restored} rolled back to version {to}" in site.trainer.log_text()

    def told() -> bool:
        _, timeline = site.ask("timeline")
        return f"version {restored} restores the state of version {to}" in json.dumps(timeline)

    wait_until(told, 30)
    status, refused = site.ask("versions", "rollback", str(to))
    assert status == 1
    assert "start it again; or run `embertide rollback" in refused["error"]
