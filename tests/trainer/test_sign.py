"""The trainer's sign of life: set while it runs, and at its end; not by one that is superseded."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from waiting import wait_until

from embertide.server.adapters.bus import Bus
from embertide.server.adapters.process import free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.config import RunConfig
from embertide.trainer.errors import ConfigurationError, TrainerError
from embertide.trainer.presets import news_model
from embertide.trainer.publish import sign
from embertide.trainer.publish.bus import BusError
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.sign import KEPT_S, Place, SignOfLife, read_sign
from embertide.trainer.run.loop import Trainer
from embertide.v1 import control_pb2

AT = Place(version=7, watermark_ms=1_700_000_000_000, learned_ms=5, events=900, unread=12)
LINEAGE = "e:{news:commit}:lineage"
KEY = "e:{news:commit}:trainer"
CHILD = """
import sys, time
from pathlib import Path
from embertide.trainer.publish.sign import Place, SignOfLife
at = Place(version=1, watermark_ms=0, learned_ms=0, events=0, unread=None)
with SignOfLife(sys.argv[1], "news", folder=Path("x"), lineage=3, place=lambda: at):
    print("there", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    log = tmp_path_factory.mktemp("redis") / "redis.log"
    with RedisServer(RedisOptions(log=log, adjustable=True)) as started:
        yield started


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as connected:
        connected.flushall()
        yield connected


def made(server: RedisServer, lineage: int = 3, *, stopped: bool = False) -> SignOfLife:
    return SignOfLife(
        server.url,
        "news",
        folder=Path("build/news"),
        lineage=lineage,
        place=lambda: AT,
        stopped=lambda: stopped,
    )


def shown(server: RedisServer) -> control_pb2.TrainerStatus | None:
    """Return the trainer's status as the control plane sees it."""
    bus = Bus(server.url, "news")
    try:
        return bus.trainer()
    finally:
        bus.close()


def test_it_says_who_trains_where_and_up_to_what(server: RedisServer, client: Any) -> None:
    assert shown(server) is None
    with made(server):
        seen = shown(server)
        assert seen is not None
        said = seen.sign
        assert (said.host, said.pid) == (socket.gethostname(), os.getpid())
        assert said.folder == str(Path("build/news").absolute())
        assert (said.lineage, said.version, said.events, said.unread) == (3, 7, 900, 12)
        assert said.ended_ms == 0
        assert seen.age_ms < 60_000
    assert 0 < client.pttl(KEY) <= KEPT_S * 1000  # nothing is left of it for ever


@pytest.mark.parametrize(
    ("error", "stopped", "status", "text"),
    [
        (None, False, 0, ""),
        (None, True, 143, ""),
        (TrainerError("the drive is full"), False, 1, "the drive is full"),
        (ConfigurationError("no such column"), False, 2, "no such column"),
        (KeyboardInterrupt(), False, 130, "no reason given"),
        (ZeroDivisionError("division by zero"), False, 1, "division by zero"),
    ],
)
def test_its_end_has_the_exit_status(
    server: RedisServer,
    client: Any,
    error: BaseException | None,
    stopped: bool,
    status: int,
    text: str,
) -> None:
    try:
        with made(server, stopped=stopped):
            if error is not None:
                raise error
    except type(error or ValueError()):
        pass
    seen = shown(server)
    assert seen is not None
    assert seen.sign.ended_ms > 0
    assert seen.sign.exit_status == status
    assert text in seen.sign.error


def test_a_superseded_trainer_does_not_speak_for_its_successor(
    server: RedisServer, client: Any
) -> None:
    with made(server, lineage=3):
        client.set(LINEAGE, 4)
        with made(server, lineage=4):
            pass
        newer = read_sign(client, "news")
        assert newer is not None
        assert newer[0].lineage == 4
    # The end of the older one is not set, either.
    last = read_sign(client, "news")
    assert last is not None
    assert (last[0].lineage, last[0].SerializeToString()) == (4, newer[0].SerializeToString())


def test_a_killed_trainer_falls_silent(server: RedisServer, client: Any) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, server.url], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "there\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    client.pexpire(KEY, KEPT_S * 1000 - 34_000)  # as if it had been set 34 s before
    seen = shown(server)
    assert seen is not None
    assert seen.sign.pid == child.pid
    assert seen.sign.ended_ms == 0
    assert 34_000 <= seen.age_ms < 40_000


def test_a_redis_that_lost_it_has_it_again(
    server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign, "_EVERY_S", 0.01)
    with made(server):
        client.flushall()
        wait_until(lambda: client.exists(KEY) == 1)


def test_a_full_redis_takes_it(server: RedisServer, client: Any) -> None:
    client.config_set("maxmemory", "1")
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("filler", "x")
        made(server)
        assert shown(server) is not None
    finally:
        client.config_set("maxmemory", str(1 << 30))


def test_redis_away_costs_the_sign_alone(tmp_path: Path) -> None:
    nobody = f"redis://127.0.0.1:{free_ports(1)[0]}/0"
    began = time.monotonic()
    with SignOfLife(nobody, "news", folder=tmp_path, lineage=1, place=lambda: AT):
        pass
    assert time.monotonic() - began < 10


def test_a_bus_that_is_away_is_told_before_anything_is_made(tmp_path: Path) -> None:
    nobody = f"redis://127.0.0.1:{free_ports(1)[0]}/0"
    folder = tmp_path / "pub"
    with pytest.raises(BusError, match=r"cannot be reached: .*start it, or give another --bus"):
        Trainer(RunConfig(model=news_model()), Publication(folder), bus=nobody)
    assert not folder.exists()


def test_a_bus_that_stands_still_is_told_before_anything_is_made(
    server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("embertide.trainer.publish.bus._ANSWER_S", 0.2)
    client.execute_command("CLIENT", "PAUSE", "1000")
    with pytest.raises(BusError, match="cannot be reached in time"):
        Trainer(RunConfig(model=news_model()), Publication(tmp_path / "pub"), bus=server.url)


def test_ranks_do_not_start_for_a_bus_that_is_away(tmp_path: Path) -> None:
    nobody = f"redis://127.0.0.1:{free_ports(1)[0]}/0"
    words = ["train", str(tmp_path / "pub"), "--demo", "--nproc", "2", "--bus", nobody]
    done = subprocess.run(
        [sys.executable, "-m", "embertide.trainer", *words], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1  # a rank would have said it, too
    assert "start it, or give another --bus" in done.stderr
