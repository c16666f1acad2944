"""A plan's assignments bucket by bucket, which is how they are changed, and back as runs.

A layout has one entry per (table id, bucket) of the plan, in ascending order; a plan on the wire
has one assignment per run of neighbours that agree.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from embertide.v1 import plan_pb2


class Place(NamedTuple):
    """A device: positions of the node in the topology and of the device in the node."""

    node: int
    device: int


class Bucket(NamedTuple):
    """What is owned and moved."""

    table: int
    bucket: int


class Holders(NamedTuple):
    """Who holds a bucket, as the three lists of an Assignment."""

    owners: tuple[Place, ...]
    joining: tuple[Place, ...] = ()
    leaving: tuple[Place, ...] = ()


Layout = dict[Bucket, Holders]


def place(owner: plan_pb2.Owner) -> Place:
    """Read an Owner."""
    return Place(owner.node, owner.device)


def owner(at: Place) -> plan_pb2.Owner:
    """Write an Owner."""
    return plan_pb2.Owner(node=at.node, device=at.device)


def holders(assignment: plan_pb2.Assignment) -> Holders:
    """Read who holds the buckets of an assignment."""
    return Holders(
        tuple(map(place, assignment.owners)),
        tuple(map(place, assignment.joining)),
        tuple(map(place, assignment.leaving)),
    )


def layout_of(assignments: Iterable[plan_pb2.Assignment]) -> Layout:
    """Spread assignments over their buckets."""
    layout: Layout = {}
    for each in assignments:
        held = holders(each)
        for bucket in range(each.bucket_begin, each.bucket_begin + each.bucket_count):
            layout[Bucket(each.table_id, bucket)] = held
    return layout


def assignments_of(layout: Mapping[Bucket, Holders]) -> list[plan_pb2.Assignment]:
    """Join neighbours that agree into runs, ascending by (table, bucket)."""
    runs: list[plan_pb2.Assignment] = []
    last: tuple[Bucket, Holders] | None = None
    for at in sorted(layout):
        held = layout[at]
        if last == (Bucket(at.table, at.bucket - 1), held):
            runs[-1].bucket_count += 1
        else:
            runs.append(
                plan_pb2.Assignment(
                    table_id=at.table,
                    bucket_begin=at.bucket,
                    bucket_count=1,
                    owners=map(owner, held.owners),
                    joining=map(owner, held.joining),
                    leaving=map(owner, held.leaving),
                )
            )
        last = (at, held)
    return runs


def devices(topology: plan_pb2.Topology) -> dict[Place, plan_pb2.Device]:
    """Return every device of a topology by its place."""
    return {
        Place(position, device.index): device
        for position, node in enumerate(topology.nodes)
        for device in node.devices
    }


def budget_bytes(device: plan_pb2.Device) -> int:
    """Return what all tiers of a device may hold together."""
    return sum(each.budget_bytes for each in device.budgets)


def place_name(topology: plan_pb2.Topology, at: Place) -> str:
    """Name a device as operators write it: NODE/DEVICE."""
    return f"{topology.nodes[at.node].name}/{at.device}"


def bucket_name(tables: Iterable[plan_pb2.PlannedTable], at: Bucket) -> str:
    """Name a bucket as operators read it."""
    names = {table.id: table.name for table in tables}
    return f"bucket {at.bucket} of table {names.get(at.table, at.table)!r}"
