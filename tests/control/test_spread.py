"""Whole tables spread over devices by their byte budgets."""

import random

import pytest
from simulation import Simulation, first_beat, make_node, make_registration, make_tables

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.bootstrap import first_plan, sites_of
from embertide.server.core.plan.layout import Place, layout_of
from embertide.server.core.plan.spread import Run, Site, spread
from embertide.v1 import control_pb2, plan_pb2


def make_sites(*budgets: int, devices: int = 1) -> list[Site]:
    nodes = [
        make_node(f"node-{at}", devices=devices, budget=budget) for at, budget in enumerate(budgets)
    ]
    return sites_of(nodes, 0)


def counts(runs: dict[int, list[Run]]) -> dict[Place, int]:
    total: dict[Place, int] = {}
    for run in (run for of_table in runs.values() for run in of_table):
        total[run.place] = total.get(run.place, 0) + run.count
    return total


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_those_of_the_budgets(seed: int) -> None:
    """Any budgets and tables: whole tables, one run a device, shares within two buckets a table."""
    dice = random.Random(seed)
    sites = make_sites(*(dice.randint(1, 9) << 20 for _ in range(dice.randint(1, 6))), devices=2)
    tables = make_tables(**{f"t{at}": dice.randint(6, 10) for at in range(dice.randint(1, 5))})
    runs = spread(tables, sites)
    total, budget = sum(1 << table.bucket_bits for table in tables), sum(s.bytes for s in sites)
    given = counts(runs)
    for site in sites:
        assert abs(given.get(site.place, 0) - total * site.bytes / budget) <= 2 * len(tables)
    for table in tables:
        assert len(runs[table.id]) <= len(sites)
        begin = 0
        for run in runs[table.id]:
            assert run.begin == begin
            begin += run.count
        assert begin == 1 << table.bucket_bits
        assert {run.place.node for run in runs[table.id]} == {site.place.node for site in sites}


def test_equal_devices_get_equal_shares_of_many_small_tables() -> None:
    """Rounding goes against no device twice: 20 tables of two buckets, on three devices."""
    tables = make_tables(**{f"t{at}": 1 for at in range(20)})
    given = counts(spread(tables, make_sites(1 << 20, 1 << 20, 1 << 20)))
    assert sorted(given.values()) == [13, 13, 14]


def test_a_small_node_gets_some_of_each_table_and_one_without_budget_none() -> None:
    sites = make_sites(1 << 30, 1 << 20, 0)
    given = counts(spread(make_tables(user=4, item=4), sites))
    assert given == {Place(0, 0): 30, Place(1, 0): 2}


def test_bytes_are_spread_where_they_are_known() -> None:
    """The table that takes 15 of 16 bytes decides; the small one evens what rounding left."""
    tables = make_tables(large=3, small=3)
    runs = spread(tables, make_sites(30 << 20, 10 << 20), {0: 15 << 20, 1: 1 << 20})
    assert [run.count for run in runs[0]] == [6, 2]
    assert [run.count for run in runs[1]] == [6, 2]
    runs = spread(tables, make_sites(29 << 20, 11 << 20), {0: 15 << 20, 1: 1 << 20})
    assert [run.count for run in runs[0]] == [6, 2]
    assert [run.count for run in runs[1]] == [3, 5]


@pytest.mark.parametrize(
    ("budgets", "says"),
    [
        ((60, 30), "the tables take 100 bytes, and the budgets of 2 devices are 90 together"),
        ((99, 2), "device node-0/0 has no room: its share of the tables is 100 bytes in a budget"),
    ],
)
def test_what_does_not_fit_is_refused(budgets: tuple[int, int], says: str) -> None:
    with pytest.raises(RefusedError, match=says) as refused:
        spread(make_tables(user=2), make_sites(*budgets), {0: 100})
    assert refused.value.code is Code.RESOURCE_EXHAUSTED


def test_no_bucket_goes_where_it_has_no_room() -> None:
    assert counts(spread(make_tables(user=2), make_sites(200, 2), {0: 100})) == {Place(0, 0): 4}


def test_no_first_plan_is_made_of_a_model_that_does_not_fit() -> None:
    """Everybody who asks hears why; a node more, and it is made."""
    fleet = Simulation(make_tables(user=2), expect=2)

    def register(name: str, budget: int) -> None:
        request = make_registration(make_node(name, budget=budget), fleet.tables)
        request.table_bytes.append(100)
        fleet.core.register(request, fleet.now_ms)
        fleet.core.fleet.beat(first_beat(request.node), fleet.now_ms)

    register("node-0", 50)
    register("node-1", 40)
    with pytest.raises(RefusedError, match="budgets of 2 devices are 90 together"):
        fleet.core.tick(fleet.now_ms)
    assert not fleet.core.epoch
    request = control_pb2.StartReshardRequest(operation_id="r1", planner="greedy")
    with pytest.raises(RefusedError, match="no plan yet: the tables take 100 bytes"):
        fleet.core.start(request, fleet.now_ms)
    register("node-2", 80)
    fleet.core.tick(fleet.now_ms)
    assert fleet.core.plan is not None


def test_groups_of_different_sizes_each_own_everything() -> None:
    machines = [
        make_node("a-0", budget=100),
        make_node("a-1", budget=300),
        *(make_node(f"b-{at}", group=1, budget=10) for at in range(3)),
    ]
    plan = first_plan(machines, make_tables(user=4, item=0))
    owned: dict[str, int] = {}
    for held in layout_of(plan.assignments).values():
        assert [plan.topology.nodes[at.node].group for at in held.owners] == [0, 1]
        for at in held.owners:
            name = plan.topology.nodes[at.node].name
            owned[name] = owned.get(name, 0) + 1
    assert owned == {"a-0": 4, "a-1": 13, "b-0": 6, "b-1": 6, "b-2": 5}


def test_the_first_plan_of_a_large_model_is_small() -> None:
    nodes = [make_node(f"node-{at}", devices=8) for at in range(16)]
    plan = first_plan(nodes, make_tables(**{f"t{at}": 17 for at in range(8)}))
    assert len(plan.assignments) == 8 * 16 * 8
    assert isinstance(plan, plan_pb2.Plan)
    assert plan.ByteSize() < 100_000
