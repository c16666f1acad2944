"""`status` of a fleet: who lives, what nobody owns, whether the trainer is alive."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import redis
from commands import embertide
from control_bench import Bench
from waiting import wait_until

from embertide.trainer.publish.sign import Place, SignOfLife
from embertide.v1 import control_pb2

STATUS = control_pb2.ControlServiceGetStatusRequest()
AT = Place(version=41, watermark_ms=1_700_000_000_000, learned_ms=1, events=900, unread=12)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERTIDE_CONFIG", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")


def status(*options: str, exit_code: int = 0) -> str:
    done = embertide("status", *options)
    assert done.exit_code == exit_code, done.output
    return done.output


def facts(*options: str, exit_code: int = 0) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(status(*options, "--json", exit_code=exit_code))
    return said


def sign(bench: Bench, **more: Any) -> SignOfLife:
    return SignOfLife(
        bench.url, "news", folder=Path("/srv/news"), lineage=3, place=lambda: AT, **more
    )


def test_a_dead_node_and_what_nobody_owns(bench: Bench) -> None:
    control = bench.control(expect=2, heartbeat_ms=200)
    nodes = [bench.node(f"node-{at}", control.address) for at in range(2)]
    client = bench.client(control.address)
    wait_until(lambda: all(node.held().epoch for node in nodes))
    where = ("--control", control.address)
    healthy = facts(*where, "--check")
    assert healthy["faults"] == []
    assert healthy["unowned_buckets"] == 0
    assert [node["versions_behind"] for node in healthy["nodes"]] == [0, 0]

    nodes[1].beating.clear()
    dead = control_pb2.NODE_STATE_DEAD
    wait_until(lambda: any(node.state == dead for node in client.call("GetStatus", STATUS).nodes))
    said = facts(*where, "--check", exit_code=1)
    owned = sum(each["buckets"] for each in said["devices"] if each["device"].startswith("node-1"))
    assert said["unowned_buckets"] == owned > 0
    node = said["nodes"][1]
    assert (node["state"], node["staleness_ms"], node["versions_behind"]) == ("dead", None, None)
    shown = status(*where)
    assert re.search(r"node-1 +0 +dead .* - +\d+ +- ", shown)
    assert f"{owned} buckets have no live owner" in " ".join(shown.split())
    assert "`embertide node drain node-1`" in " ".join(shown.split())
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC: plan ", shown)
    rows = [line for line in shown.splitlines() if line.startswith("node")]
    assert all(len(line) <= 80 for line in rows)


def test_a_node_of_the_time_before_has_not_beaten_yet(bench: Bench) -> None:
    first = bench.control(expect=1)
    node = bench.node("node-0", first.address)
    wait_until(lambda: node.held().epoch > 0)
    node.beating.clear()
    second = bench.control(expect=1)
    said = facts("--control", second.address)
    assert said["nodes"][0]["last_beat_ms"] is None
    assert "none yet" in status("--control", second.address)


def test_the_trainer_is_alive_or_it_is_not(bench: Bench) -> None:
    control = bench.control(expect=1, bus=bench.url)
    where = ("--control", control.address)
    assert "trainer: not known" in status(*where)
    with redis.Redis.from_url(bench.url) as client, sign(bench):
        fresh = bench.control(expect=1, bus=bench.url)  # it looks at the bus once a second
        alive = status("--control", fresh.address, "--check")
        assert f"trainer: alive on {socket.gethostname()} (pid " in alive
        assert "version 41, 900 events, last event 2023-11-14 22:13:20 UTC" in _flat(alive)
        assert "12 messages unread" in _flat(alive)
        assert status("--bus", bench.url, "--check").startswith("news: trainer: alive on ")
        client.pexpire("e:{news:commit}:trainer", 7 * 86_400_000 - 34_000)
        silent = _flat(status("--bus", bench.url, "--check", exit_code=1))
        assert "trainer: SILENT for 34 s on" in silent
        assert "start it again with the same command" in silent
    with redis.Redis.from_url(bench.url) as client:
        assert "ended" in status("--bus", bench.url, "--check")
        try:
            with sign(bench):
                raise OSError(28, "No space left on device")
        except OSError:
            pass
        failed = _flat(status("--bus", bench.url, "--check", exit_code=1))
        assert "exit status 1: [Errno 28] No space left on device" in failed
        with sign(bench, stopped=lambda: True):
            pass
        assert "was stopped" in _flat(status("--bus", bench.url, "--check"))
        assert facts("--bus", bench.url)["trainers"]["news"]["exit_status"] == 143
        client.flushall()
    assert "no trainer has run on this bus" in status("--bus", bench.url)


def test_what_is_no_page_of_metrics_is_named(bench: Bench) -> None:
    control = bench.control(expect=1)
    said = status("--url", f"http://{control.address}/metrics", exit_code=1)
    assert "is no page of metrics" in said
    assert "8002" in said
    nowhere = status("--url", "http://127.0.0.1:1/metrics", exit_code=1)
    assert "no node answers at http://127.0.0.1:1/metrics" in nowhere
    assert "or give --url" in status("--url", "http://127.0.0.1:99999/metrics", exit_code=1)
    for odd in ("127.0.0.1:8002", "ftp//x", "http://[::1"):
        assert "give --url http://" in status("--url", odd, exit_code=2)


def _flat(said: str) -> str:
    return " ".join(said.split())
