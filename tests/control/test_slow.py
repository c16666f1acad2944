"""`embertide slow`: the slowest requests of a fleet, from nodes to the command."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from commands import embertide
from control_bench import Bench
from waiting import wait_until

from embertide.v1 import node_pb2

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERTIDE_CONFIG", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")


def slow(whole_us: int, **more: Any) -> node_pb2.SlowRequest:
    return node_pb2.SlowRequest(
        ended_ms=round(time.time() * 1000),
        whole_us=whole_us,
        samples=8,
        keys=96,
        requests=1,
        **more,
    )


def lookup(whole_us: int, **more: Any) -> node_pb2.SlowLookup:
    ended_ms = round(time.time() * 1000)
    return node_pb2.SlowLookup(ended_ms=ended_ms, whole_us=whole_us, keys=48, **more)


def test_the_slowest_of_all_nodes_come_first_with_their_stages(bench: Bench) -> None:
    control = bench.control(expect=2)
    nodes = [bench.node(f"node-{at}", control.address) for at in range(2)]
    wait_until(lambda: all(node.held().epoch for node in nodes))
    nodes[0].slow = [
        slow(9000, trace=TRACE, version=5, peers_us=6000, lookup_us=500, net_us=2000),
        slow(100, refusal="degraded", trace="\x1b[2J<b>"),
    ]
    nodes[1].slow = [slow(5000, version=6)]
    where = ("--control", control.address)

    def found(*words: str) -> list[dict[str, Any]]:
        done = embertide("slow", *words, *where, "--json")
        assert done.exit_code == 0, done.output
        facts: list[dict[str, Any]] = json.loads(done.output)["slow"]
        return facts

    wait_until(lambda: len(found()) == 3)
    assert [(each["node"], each["whole_us"]) for each in found()] == [
        ("node-0", 9000),
        ("node-1", 5000),
        ("node-0", 100),
    ]
    first, last = found()[0], found()[2]
    assert first["stages_us"] == {"peers": 6000, "lookup": 500, "net": 2000}
    assert (first["other_us"], first["trace"]) == (500, TRACE)
    assert (last["refusal"], last["trace"]) == ("degraded", "")
    assert [each["whole_us"] for each in found("node-1")] == [5000]
    assert [each["whole_us"] for each in found("--trace", TRACE)] == [9000]
    assert len(found("--count", "2")) == 2

    shown = embertide("slow", *where).output
    assert f"trace of 9.0 ms at node-0: {TRACE}" in shown
    assert "\x1b" not in shown
    assert "version 6" in shown
    missing = embertide("slow", "node-7", *where)
    assert missing.exit_code == 1
    assert (
        "node 'node-7' has reported no load; give one of those that have: node-0, node-1"
        in missing.output
    )
    nodes[1].slow_lookups = [lookup(4000, asker="node-0", trace=TRACE), lookup(50)]
    nodes[0].slow_lookups = [lookup(90, asker="\x1b[2J<b>", trace="\x1b[2J<b>")]

    def lookups(*words: str) -> list[dict[str, Any]]:
        done = embertide("slow", *words, *where, "--json")
        facts: list[dict[str, Any]] = json.loads(done.output)["lookups"]
        return facts

    wait_until(lambda: len(lookups()) == 3)
    assert [(each["node"], each["whole_us"]) for each in lookups()] == [
        ("node-1", 4000),
        ("node-0", 90),
        ("node-1", 50),
    ]
    slowest = lookups()[0]
    assert (slowest["asker"], slowest["keys"], slowest["trace"]) == ("node-0", 48, TRACE)
    assert lookups()[1]["trace"] == ""
    assert [each["whole_us"] for each in lookups("--trace", TRACE)] == [4000]
    assert [each["whole_us"] for each in lookups("node-0")] == [90]
    assert len(lookups("--count", "1")) == 1
    shown = embertide("slow", *where).output
    assert f"trace of 4.0 ms at node-1 for node-0: {TRACE}" in shown
    assert "\x1b" not in shown

    none = embertide("slow", "--trace", "0" * 32, *where)
    assert "none of the slowest requests" in none.output
