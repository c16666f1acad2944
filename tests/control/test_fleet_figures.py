"""Figures of a fleet in arrays equal those that are counted bucket by bucket."""

import collections
import itertools
import random
from typing import Any

import pytest
from simulation import make_node

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.figures import ALL_RANGES_MAX, FleetFigures, FleetSnapshot
from embertide.server.core.plan.bucket_columns import FleetColumns, bucket_columns
from embertide.server.core.plan.fleet_figures import (
    device_figures,
    range_figures,
    unowned_buckets,
)
from embertide.server.core.plan.layout import Bucket, Holders, Place, packed
from embertide.server.core.plan.workload import device_work, measured
from embertide.server.services.figures import Figures
from embertide.v1 import control_pb2, node_pb2, plan_pb2

NODES = 5


def drawn(
    dice: random.Random,
) -> tuple[
    plan_pb2.Topology, dict[Bucket, Holders], dict[str, node_pb2.NodeServiceGetLoadResponse]
]:
    """Two groups, a layout with moves under way, and loads, of strange buckets too."""
    nodes = [make_node(f"n-{at}", group=at % 2, devices=2) for at in range(NODES)]

    def places(most: int) -> tuple[Place, ...]:
        count = dice.randint(0, most)
        return tuple(Place(n, dice.randrange(2)) for n in dice.sample(range(NODES), count))

    layout = {
        Bucket(table, bucket): Holders(places(3) or (Place(0, 0),), places(1), places(1))
        for table, buckets in ((0, 64), (3, 16))
        for bucket in range(buckets)
    }
    loads = {}
    for node in nodes[:-1]:
        load = loads[node.name] = node_pb2.NodeServiceGetLoadResponse()
        for at in (*dice.sample(sorted(layout), 40), Bucket(0, 999), Bucket(9, 1)):
            load.buckets.add(
                table_id=at.table,
                bucket=at.bucket,
                reads=dice.randrange(1 << 40),
                resident_bytes=dice.randrange(1 << 40),
                peer_reads=dice.randrange(1 << 20),
                asked=dice.randrange(1 << 40),
                hot_reads=dice.randrange(1 << 40),
                reads_by_source=[dice.randrange(99) for _ in range(dice.randrange(5))],
            )
    return plan_pb2.Topology(nodes=nodes), layout, loads


@pytest.mark.parametrize("seed", range(20))
def test_figures_are_those_of_a_count_bucket_by_bucket(seed: int) -> None:
    dice = random.Random(seed)
    topology, layout, loads = drawn(dice)
    columns = {name: bucket_columns(load) for name, load in loads.items()}
    found = device_figures(topology, packed(layout), FleetColumns.of(columns))
    work = device_work(topology, layout, measured(topology, loads))
    owned = collections.Counter(at for held in layout.values() for at in held.owners)
    moving = collections.Counter(
        at for held in layout.values() for at in (*held.joining, *held.leaving)
    )
    assert {at: (each.reads, each.bytes) for at, each in found.items()} == work
    assert all((each.buckets, each.moving) == (owned[at], moving[at]) for at, each in found.items())

    living = set(dice.sample([node.name for node in topology.nodes], 2))
    none, by_group = 0, collections.Counter[int]()
    for held in layout.values():
        groups = {topology.nodes[at.node].group for at in held.owners}
        answering = {
            topology.nodes[at.node].group
            for at in held.owners
            if topology.nodes[at.node].name in living
        }
        none += not answering
        by_group.update((groups - answering) if answering else ())
    assert unowned_buckets(topology, packed(layout), living) == (none, dict(by_group))


TABLES = [
    plan_pb2.PlannedTable(id=0, name="user", bucket_bits=6, chunks=1),
    plan_pb2.PlannedTable(id=3, name="ad", bucket_bits=4, chunks=1),
]


def snapshot(seed: int) -> FleetSnapshot:
    topology, layout, loads = drawn(random.Random(seed))
    return FleetSnapshot(
        plan=plan_pb2.Plan(epoch=7, topology=topology, tables=TABLES),
        layout=packed(layout),
        no_plan="",
        living=frozenset(node.name for node in topology.nodes[1:]),
        loads_version=seed,
        loads=loads,
        columns={name: bucket_columns(load) for name, load in loads.items()},
    )


@pytest.mark.parametrize("seed", range(20))
def test_ranges_are_those_of_a_count_bucket_by_bucket(seed: int) -> None:
    fleet = snapshot(seed)
    wanted = dict.fromkeys(((table, b) for table, n in ((0, 64), (3, 16)) for b in range(n)), 0)
    asked, ssd, resident = dict(wanted), dict(wanted), dict(wanted)
    for load in fleet.loads.values():
        for each in load.buckets:
            at = (each.table_id, each.bucket)
            if at in wanted:
                wanted[at] += each.reads - each.peer_reads + each.asked + each.hot_reads
                asked[at] += each.asked
                ssd[at] += sum(each.reads_by_source[2:3])
                resident[at] += each.resident_bytes
    ranges = random.Random(seed).choice((1, 3, 5, 16, 64, 1000))
    found = range_figures(TABLES, FleetColumns.of(fleet.columns).columns, ranges)
    for table, buckets in ((0, 64), (3, 16)):
        seen = []
        for begin, count, *figures in zip(
            *(column.tolist() for column in found[table]), strict=True
        ):
            here = [(table, bucket) for bucket in range(begin, begin + count)]
            seen += here
            assert figures == [
                sum(wanted[at] for at in here),
                max(wanted[at] for at in here),
                sum(asked[at] for at in here),
                sum(ssd[at] for at in here),
                sum(resident[at] for at in here),
            ]
        assert seen == [(table, bucket) for bucket in range(buckets)]
        assert len(found[table].begin) <= ranges


@pytest.mark.parametrize("seed", range(5))
def test_one_bucket_and_reads_of_all_are_what_nodes_reported(seed: int) -> None:
    fleet = snapshot(seed)
    read = {(table, b): [0, 0] for table, n in ((0, 64), (3, 16)) for b in range(n)}
    for load in fleet.loads.values():
        for each in load.buckets:
            if (each.table_id, each.bucket) in read:
                read[each.table_id, each.bucket][0] += each.reads
                read[each.table_id, each.bucket][1] += each.bytes_read
    told = FleetFigures(fleet).answer(control_pb2.GetFleetFiguresRequest(table_reads=True))
    assert {
        (table.table_id, bucket): list(counts)
        for table in told.table_reads
        for bucket, counts in enumerate(zip(table.reads, table.bytes_read, strict=True))
    } == read
    assert not told.bucket_loads

    for table, bucket in ((0, 0), (0, 5), (3, 15), (3, 16), (9, 0)):
        wanted = control_pb2.BucketOfTable(table_id=table, bucket=bucket)
        one = FleetFigures(fleet).answer(control_pb2.GetFleetFiguresRequest(bucket=wanted))
        assert {each.node: each.load for each in one.bucket_loads} == {
            name: each
            for name, load in fleet.loads.items()
            for each in load.buckets
            if (each.table_id, each.bucket) == (table, bucket)
        }
        assert not one.table_reads


def test_what_is_asked_for_is_answered_and_no_more() -> None:
    fleet = snapshot(1)
    everything = control_pb2.GetFleetFiguresRequest(ranges=8, hot_keys=10)
    answer = FleetFigures(fleet).answer(everything)
    assert [each.bucket_count for each in answer.ranges] == [8] * 8 + [2] * 8
    assert answer.plan_epoch == 7
    assert len(answer.nodes) == NODES - 1
    own = {each.node: each.here + each.hot + each.asked for each in answer.nodes}
    assert own == {name: int(each.wanted.sum()) for name, each in fleet.columns.items()}

    alone = control_pb2.GetFleetFiguresRequest(ranges=8, tables=["ad"])
    assert {each.table_id for each in FleetFigures(fleet).answer(alone).ranges} == {3}
    assert not FleetFigures(fleet).answer(control_pb2.GetFleetFiguresRequest()).ranges

    many = [
        plan_pb2.PlannedTable(id=at, name=f"t{at}", bucket_bits=10, chunks=1) for at in range(100)
    ]
    assert fleet.plan is not None
    large = fleet._replace(plan=plan_pb2.Plan(topology=fleet.plan.topology, tables=many))
    asked = control_pb2.GetFleetFiguresRequest(ranges=1024)
    assert 100 < len(FleetFigures(large).answer(asked).ranges) <= ALL_RANGES_MAX


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        ({"ranges": 1025}, Code.INVALID_ARGUMENT, "ranges is 1025; at most 1024"),
        ({"slow_requests": 1001}, Code.INVALID_ARGUMENT, "slow_requests is 1001; at most 1000"),
        ({"hot_keys": 1001}, Code.INVALID_ARGUMENT, "hot_keys is 1001; at most 1000"),
        ({"tables": ["of"]}, Code.NOT_FOUND, "no such table: 'of'; there is ad, user"),
    ],
)
def test_too_much_and_what_there_is_not_is_refused(
    asked: dict[str, Any], code: Code, words: str
) -> None:
    with pytest.raises(RefusedError, match=words) as caught:
        FleetFigures(snapshot(1)).answer(control_pb2.GetFleetFiguresRequest(**asked))
    assert caught.value.code is code


def test_an_answer_is_made_once_while_the_fleet_is_the_same() -> None:
    now, clock_s = [snapshot(1)], itertools.count(step=1000)
    figures = Figures(lambda: now[0], lambda: float(next(clock_s)))
    asked = control_pb2.GetFleetFiguresRequest(ranges=4)
    first = figures.answer(asked)
    now[0] = now[0]._replace(loads=dict(now[0].loads))
    assert figures.answer(asked) is first
    changes: tuple[FleetSnapshot, ...] = (
        now[0]._replace(loads_version=2),
        now[0]._replace(living=frozenset()),
        snapshot(2),
    )
    for at, change in enumerate(changes):
        now[0] = change
        assert figures.answer(asked) == FleetFigures(change).answer(asked)
        assert figures.made == 2 + at
    for ranges in range(1, 40):
        figures.answer(control_pb2.GetFleetFiguresRequest(ranges=ranges))
    assert len(figures._kept) == 16


def test_loads_alone_are_told_as_soon_as_the_last_answers_took_a_hundredth_of_the_time() -> None:
    now, clock_s = [snapshot(1)], [0.0]
    figures = Figures(lambda: now[0], lambda: clock_s[0])
    asked = control_pb2.GetFleetFiguresRequest(ranges=4)
    first = figures.answer(asked)
    assert 0 < figures._spent_s < 0.05  # so it may be made again before the 5 s
    now[0] = now[0]._replace(loads_version=2)
    clock_s[0] = 99 * figures._spent_s
    assert figures.answer(asked) is first
    more = control_pb2.GetFleetFiguresRequest(ranges=4, hot_keys=3)
    assert figures.answer(more) == FleetFigures(snapshot(1)).answer(more)  # of the same moment
    clock_s[0] = 101 * figures._spent_s
    assert figures.answer(asked) is not first

    figures._spent_s, now[0] = 1000.0, now[0]._replace(loads_version=3)
    second = figures.answer(asked)
    clock_s[0] += 5.1  # however long it took
    assert figures.answer(asked) is not second


def test_a_change_of_who_lives_is_told_at_once() -> None:
    now = [snapshot(1)]
    figures = Figures(lambda: now[0], lambda: 0.0)
    asked = control_pb2.GetFleetFiguresRequest()
    figures.answer(asked)
    now[0] = now[0]._replace(living=frozenset())
    assert figures.answer(asked).buckets_unowned == 80


def test_a_fleet_without_a_plan_says_why() -> None:
    fleet = snapshot(1)._replace(plan=None, no_plan="no plan has been made: wait")
    answer = FleetFigures(fleet).answer(control_pb2.GetFleetFiguresRequest(ranges=4))
    assert answer == control_pb2.GetFleetFiguresResponse(no_plan="no plan has been made: wait")
