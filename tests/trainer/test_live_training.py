"""Training on a Redis Stream: killed anywhere, it ends with the bytes of a run over a file."""

import itertools
import json
import re
import shutil
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from killing import CACHE, Killed
from snapshots import newest_files
from waiting import wait_until

from embertide.server.adapters.bus import Bus
from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.config import RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.data.redis_stream import (
    STREAM,
    EventSender,
    RedisStreamSource,
    StreamConfig,
)
from embertide.trainer.presets import news_model, news_rates
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress

RUN = RunConfig(
    model=news_model(), optimizer=news_rates(), batch_size=24, publish_every_s=600, snapshot_every=4
)
NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5))
TOTAL = NEWS.total_events()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Publication:
    """A run over the events themselves that nothing stopped."""
    publication = Publication(tmp_path_factory.mktemp("whole") / "pub")
    Trainer(RUN, publication, program_cache=CACHE).fit(NEWS)
    return publication


@pytest.fixture
def fresh(whole: Publication, tmp_path: Path) -> Publication:
    """An empty publication, with the program that all share."""
    (tmp_path / "news").mkdir()
    shutil.copyfile(whole.program, tmp_path / "news" / "program.pt2")
    return Publication(tmp_path / "news")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(RedisOptions(log=tmp_path / "redis.log")) as started:
        yield started


def send(server: RedisServer, begin: int, end: int) -> None:
    """Add the batches that begin at event `begin` and before `end`, in entries of odd sizes."""
    sender = EventSender(StreamConfig(url=server.url), NEWS.schema)
    for batch in NEWS.batches(batch_size=31):
        if begin <= batch.first < end:
            assert sender.send(batch) == batch.first


def open_live(server: RedisServer) -> RedisStreamSource:
    return RedisStreamSource(StreamConfig(url=server.url, group="news", quiet_s=0.2))


def pending(server: RedisServer) -> int:
    with redis.Redis.from_url(server.url) as client:
        found: Any = client.xpending(STREAM, "news")
        return int(found["pending"])


def closed(server: RedisServer) -> int:
    with redis.Redis.from_url(server.url) as client:
        entries: Any = client.xrange(STREAM)
        return sum(b"closed" in fields for _, fields in entries)


def told(trainer: Child) -> int:
    """Return the number of events in the newest line of --json."""
    lines = [line for line in trainer.log_text().splitlines() if line.startswith('{"progress"')]
    return int(json.loads(lines[-1])["progress"]["events"])


def on_page(port: int) -> float:
    """Return the number of events on the page of metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        found = re.search(r"^embertide_trainer_events_total (\S+)$", page.read().decode(), re.M)
    return float(found[1]) if found else 0.0


def killer(call: int) -> Callable[[object], None]:
    """Return a function that dies when it is called for the n-th time."""
    calls = itertools.count(1)

    def kill(_: object) -> None:
        if next(calls) == call:
            raise Killed

    return kill


@pytest.mark.parametrize(
    ("place", "calls"), [("between batches", (9, 12)), ("before it acknowledges", (1, 2))]
)
def test_a_live_run_killed_twice_ends_as_a_run_over_a_file(
    server: RedisServer,
    whole: Publication,
    fresh: Publication,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    calls: tuple[int, int],
) -> None:
    send(server, 0, TOTAL)
    for call in calls:
        live, progress = open_live(server), None
        if place == "between batches":
            progress = killer(call)
        else:
            monkeypatch.setattr(live, "checkpointed", killer(call))
        trainer = Trainer(RUN, fresh, program_cache=CACHE)
        with pytest.raises(Killed):
            trainer.fit(FirstEvents(live, TOTAL), progress=progress, every_s=0)
        assert pending(server) > 0
    live = open_live(server)
    said: list[Progress] = []
    trainer = Trainer(RUN, fresh, program_cache=CACHE)
    trainer.fit(FirstEvents(live, TOTAL), progress=said.append)
    assert (trainer.state.events, trainer.state.offset) == (TOTAL, TOTAL)
    assert live.dead_letters.count == 0
    assert newest_files(fresh) == newest_files(whole)
    assert said[-1].checkpoints > 0
    # The mark that closed the last group, whichever run wrote it, comes again to whoever goes on.
    assert closed(server) == 1
    assert pending(server) == 1


def test_the_command_killed_half_way_ends_as_a_run_over_a_file(
    server: RedisServer, whole: Publication, fresh: Publication, tmp_path: Path
) -> None:
    half = next(b.first for b in NEWS.batches(batch_size=31) if b.first >= TOTAL // 2)
    send(server, 0, half)
    command = [sys.executable, "-m", "embertide.trainer", "train", str(fresh.path), "--json"]
    command += ["--data", server.url, "--events", str(TOTAL), "--cache", str(CACHE)]
    command += ["--batch-size", "24", "--snapshot-every", "4", "--bus", server.url]
    (port,) = free_ports(1)
    command += ["--metrics-port", str(port)]
    bus = Bus(server.url, "news")
    trainer = Child(command, log=tmp_path / "first.log")
    # It has read all there is, a checkpoint is behind it, and it waits for more.
    wait_until(lambda: bool(fresh.versions()) and fresh.versions()[-1].number >= 8, 60)
    # Nothing comes, and all that it has learned is told.
    wait_until(lambda: told(trainer) == on_page(port) == half)
    trainer.kill()
    assert trainer.code == -signal.SIGKILL
    dead = bus.trainer()
    assert dead is not None
    assert (dead.sign.pid, dead.sign.ended_ms) == (trainer.pid, 0)
    assert dead.sign.folder == str(fresh.path)
    send(server, half, TOTAL)
    again = Child(command, log=tmp_path / "second.log")
    assert again.wait(60) == 0, again.log_text()
    wait_until(lambda: bus.trainer() != dead)
    ended = bus.trainer()
    assert ended is not None
    assert ended.sign.ended_ms > 0
    assert (ended.sign.exit_status, ended.sign.events) == (0, TOTAL)
    result = json.loads(again.log_text().splitlines()[-1])["result"]
    assert (result["events"], result["rejected"]) == (TOTAL, {})
    assert newest_files(fresh) == newest_files(whole)
