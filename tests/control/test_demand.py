"""Nodes' reads, in counts that halve; and the demand of a plan from them."""

import numpy as np
import pytest
from simulation import make_node, make_tables

from embertide.server.core import demand as demands
from embertide.server.core.demand import HALF_LIVES_S, UNKNOWN_AFTER_MS, Demand
from embertide.server.core.plan.bootstrap import first_plan
from embertide.server.core.plan.layout import Bucket, Holders, Layout, Place, layout_of
from embertide.server.core.plan.workload import Work
from embertide.v1 import node_pb2, plan_pb2

TABLES = make_tables(user=1)  # two buckets
NODES = [make_node("a"), make_node("b"), make_node("c")]
TOPOLOGY = plan_pb2.Topology(nodes=NODES)
LAYOUT: Layout = {Bucket(0, 0): Holders((Place(0, 0),)), Bucket(0, 1): Holders((Place(1, 0),))}


def load(
    window: int = 0, watermark_ms: int = 0, **of: tuple[int, int, int, int]
) -> node_pb2.NodeServiceGetLoadResponse:
    """Say what was read of user/0 (`first`) and user/1 (`second`): here, for peers, asked, hot."""
    answer = node_pb2.NodeServiceGetLoadResponse(
        window_ms=5000, window=window, watermark_ms=watermark_ms
    )
    for name, (here, for_peers, asked, hot) in of.items():
        answer.buckets.add(
            table_id=TABLES[0].id,
            bucket=0 if name == "first" else 1,
            reads=here + for_peers,
            peer_reads=for_peers,
            asked=asked,
            hot_reads=hot,
            resident_bytes=100 if here + for_peers else 0,
        )
    return answer


def rate(demand: Demand, half_life_s: int, kind: str = "here", node: str = "a") -> float:
    return float(demand.rates(node, half_life_s)[kind][0])


def test_the_first_window_is_a_rate_at_once() -> None:
    demand = Demand()
    demand.take("a", load(1, first=(500, 0, 0, 0)), TABLES, 0)
    for half_life in HALF_LIVES_S:
        assert rate(demand, half_life) == pytest.approx(100)


def test_what_changes_is_seen_by_the_short_windows_first() -> None:
    demand = Demand()
    for window in range(1, 1000):
        demand.take("a", load(window, first=(500, 0, 0, 0)), TABLES, 5000 * window)
    for window in range(1000, 1000 + 24):  # two minutes
        demand.take("a", load(window, first=(0, 0, 0, 0)), TABLES, 5000 * window)
    rates = [rate(demand, half_life) for half_life in HALF_LIVES_S]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(25, rel=0.01)  # two half-lives
    assert rates[1] == pytest.approx(100 * 0.5 ** (120 / 600), rel=0.01)
    assert rates[3] > 90


def test_the_newest_reads_are_those_of_the_last_seconds() -> None:
    demand = Demand()
    topology = plan_pb2.Topology(nodes=[plan_pb2.Node(name="a")])
    assert demand.newest(topology) is None  # no table is known
    for window in range(1, 1000):
        demand.take("a", load(window, first=(500, 0, 0, 0)), TABLES, 5000 * window)
    for window in range(1000, 1006):  # half a minute
        demand.take("a", load(window, first=(0, 0, 0, 0)), TABLES, 5000 * window)
    newest = demand.newest(topology)
    assert newest is not None
    assert newest.wanted_NB[0, 0] == pytest.approx(100 * 0.5 ** (30 / 15), rel=0.01)


def test_a_window_counts_once_and_one_that_was_missed_is_counted() -> None:
    demand = Demand()
    demand.take("a", load(1, first=(500, 0, 0, 0)), TABLES, 0)
    demand.take("a", load(1, first=(500, 0, 0, 0)), TABLES, 2000)
    demand.take("a", load(2, first=(0, 0, 0, 0)), TABLES, 5000)
    assert rate(demand, 86_400) == pytest.approx(50, rel=0.01)
    demand.take("a", load(5, first=(0, 0, 0, 0)), TABLES, 20_000)
    assert demand.missed_windows == 2


# A day is replayed in minutes: a window counts as long as the watermark moved. Rates are for each
# second of the wall clock all the same.
def test_event_time_lasts_as_long_as_the_watermark_moves() -> None:
    demand = Demand("event")
    demand.take("a", load(1, watermark_ms=1, first=(3600, 0, 0, 0)), TABLES, 0)
    for window in range(2, 30):
        hours = (window - 1) * 3_600_000
        demand.take("a", load(window, hours, first=(3600, 0, 0, 0)), TABLES, 5000 * window)
    assert rate(demand, 3600) == pytest.approx(720)
    demand.take("a", load(30, 29 * 3_600_000), TABLES, 150_000)  # an hour in which nobody reads
    assert rate(demand, 3600) == pytest.approx(360, rel=0.01)
    assert rate(demand, 600) < 30


def test_a_node_that_says_nothing_is_unknown_and_not_idle() -> None:
    demand = Demand()
    demand.take("a", load(1, first=(500, 0, 0, 0)), TABLES, 0)
    assert demand.unknown(["a", "b"], 1000) == ["b"]
    assert demand.unknown(["a"], UNKNOWN_AFTER_MS + 1) == ["a"]
    assert rate(demand, 600) == pytest.approx(100)
    demand.take("a", load(9), TABLES, UNKNOWN_AFTER_MS + 2)
    assert demand.unknown(["a"], UNKNOWN_AFTER_MS + 3) == []


# a owns the first bucket: it reads what it wants itself, and what b and c ask for, but not what
# their copies answered.
def test_an_owner_does_what_it_wants_and_what_others_ask() -> None:
    demand = Demand()
    demand.take("a", load(1, first=(100, 500, 0, 0)), TABLES, 0)
    demand.take("b", load(1, first=(0, 0, 200, 70), second=(10, 0, 0, 0)), TABLES, 0)
    demand.take("c", load(1, first=(0, 0, 300, 80)), TABLES, 0)
    workload = demand.workload(TOPOLOGY, LAYOUT)
    assert workload.of(Bucket(0, 0), 0) == Work(600, 100)
    assert workload.of(Bucket(0, 1), 1) == Work(10, 100)


# The bucket has just moved to b: what it will do there is known at once.
def test_what_nodes_want_goes_with_a_bucket() -> None:
    demand = Demand()
    demand.take("a", load(1, first=(100, 500, 0, 0)), TABLES, 0)
    demand.take("b", load(1, first=(0, 0, 200, 0)), TABLES, 0)
    demand.take("c", load(1, first=(0, 0, 300, 0)), TABLES, 0)
    demand.take("a", load(2, first=(0, 0, 100, 0)), TABLES, 5000)
    moved: Layout = {**LAYOUT, Bucket(0, 0): Holders((Place(1, 0),))}
    assert demand.workload(TOPOLOGY, moved).of(Bucket(0, 0), 1).reads == pytest.approx(350, abs=3)


def test_owners_of_a_bucket_share_what_others_ask() -> None:
    demand = Demand()
    for name, wants in (("a", (100, 0, 0, 0)), ("b", (50, 0, 0, 0)), ("c", (0, 0, 300, 0))):
        demand.take(name, load(1, first=wants), TABLES, 0)
    both: Layout = {**LAYOUT, Bucket(0, 0): Holders((Place(0, 0), Place(1, 0)))}
    workload = demand.workload(TOPOLOGY, both)
    assert workload.of(Bucket(0, 0), 0).reads == 250
    assert workload.of(Bucket(0, 0), 1).reads == 200


# c is not heard: what the owner read for peers stands in for what it asked.
def test_what_nobody_says_was_asked_the_owner_has_counted() -> None:
    demand = Demand()
    demand.take("a", load(1, first=(100, 500, 0, 0)), TABLES, 0)
    demand.take("b", load(1, first=(0, 0, 200, 0)), TABLES, 0)
    assert demand.workload(TOPOLOGY, LAYOUT).of(Bucket(0, 0), 0).reads == 600


def test_groups_ask_their_own_owners() -> None:
    nodes = [make_node("a"), make_node("b"), make_node("x", group=1), make_node("y", group=1)]
    plan = first_plan(nodes, TABLES)
    layout = layout_of(plan.assignments)
    demand = Demand()
    names = [node.name for node in plan.topology.nodes]
    for name in names:
        wants = (0, 0, 100, 0) if name in ("b", "y") else (10, 0, 0, 0)
        demand.take(name, load(1, first=wants), plan.tables, 0)
    workload = demand.workload(plan.topology, layout)
    reads = {
        names[at.node]: workload.of(Bucket(0, 0), at.node).reads
        for at in layout[Bucket(0, 0)].owners
    }
    assert reads == {"a": 110, "x": 110}


def test_a_node_of_many_buckets_keeps_those_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demands, "PLACES_MAX", 4)
    demand = Demand()
    tables = [plan_pb2.PlannedTable(id=0, name="user", bucket_bits=17, chunks=1)]
    load = node_pb2.NodeServiceGetLoadResponse(window_ms=5000)
    for bucket in range(0, 100_000, 10_000):
        load.buckets.add(bucket=bucket, reads=bucket, resident_bytes=1)
    demand.take("node-0", load, tables, 0)
    rates = demand.rates("node-0", 600)["here"]
    assert np.flatnonzero(rates).tolist() == [60_000, 70_000, 80_000, 90_000]
    topology = plan_pb2.Topology(nodes=[plan_pb2.Node(name="node-0")])
    layout: Layout = {Bucket(0, at): Holders((Place(0, 0),)) for at in (60_000, 90_000)}
    assert demand.workload(topology, layout).work.keys() == {
        (Bucket(0, 60_000), 0),
        (Bucket(0, 90_000), 0),
    }


def test_who_asks_for_what_is_not_told_of_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demands, "ASKING_MAX", 3)
    demand = Demand()
    tables = [plan_pb2.PlannedTable(id=0, name="user", bucket_bits=1, chunks=1)]
    load = node_pb2.NodeServiceGetLoadResponse(window_ms=5000)
    load.buckets.add(bucket=1, reads=50, resident_bytes=7)
    demand.take("a", load, tables, 0)
    workload = demand.workload(TOPOLOGY, {Bucket(0, 1): Holders((Place(0, 0),))})
    assert workload.asking is None
    assert workload.of(Bucket(0, 1), 0) == (50, 7)
