"""Figures of a fleet in arrays equal those that are counted bucket by bucket."""

import collections
import random

import pytest
from simulation import make_node

from embertide.server.core.plan.fleet_figures import (
    bucket_columns,
    device_figures,
    unowned_buckets,
)
from embertide.server.core.plan.layout import Bucket, Holders, Place, packed
from embertide.server.core.plan.workload import device_work, measured
from embertide.v1 import node_pb2, plan_pb2

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
            )
    return plan_pb2.Topology(nodes=nodes), layout, loads


@pytest.mark.parametrize("seed", range(20))
def test_figures_are_those_of_a_count_bucket_by_bucket(seed: int) -> None:
    dice = random.Random(seed)
    topology, layout, loads = drawn(dice)
    columns = {name: bucket_columns(load) for name, load in loads.items()}
    found = device_figures(topology, packed(layout), columns)
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
