"""A plan of what nodes hold, for a state store that lost the one that they act by.

A bucket belongs to every node that says that it holds it: each of them has a complete copy. A
bucket that no node of a group holds goes to the device of the group with most room for its budget;
it is loaded from files. A group whose nodes hold nothing is partial, as one that is being added.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.bootstrap import sites_of
from embertide.server.core.plan.layout import Bucket, Holders, LaidPlan, Place, packed
from embertide.server.core.plan.spread import Site
from embertide.server.core.plan.validity import OWNERS_MAX
from embertide.v1 import node_pb2, plan_pb2

# By how much an adopted plan's epoch is above the highest that was told: a node that is away may
# have one that the others never heard of.
EPOCHS_ABOVE = 1000
PLANNER = "adopted"


class AdoptedPlan(NamedTuple):
    """A plan of what nodes hold.

    Attributes:
        plan: It.
        held: Buckets that each node holds, by name.
        unheld: Buckets that a group lacked, over all groups.
    """

    plan: LaidPlan
    held: Mapping[str, int]
    unheld: int


def adopted_plan(
    nodes: Sequence[plan_pb2.Node],
    tables: Sequence[plan_pb2.PlannedTable],
    loads: Mapping[str, node_pb2.NodeServiceGetLoadResponse],
    epoch: int,
) -> AdoptedPlan:
    """Return the plan that nodes follow already.

    Args:
        nodes: All members, in the order that they get in the topology.
        tables: The model's.
        loads: The buckets that the live ones hold, as they say, by name.
        epoch: The plan's.

    Raises:
        RefusedError: No node holds anything, or a bucket finds no room.
    """
    owners, sizes, held = _held(nodes, tables, loads)
    if not any(held.values()):
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            "no node holds a bucket: there is nothing to adopt; start the control plane with an "
            "empty state store and restart the nodes without their plan files",
        )
    holding = {nodes[at.node].group for places in owners.values() for at in places}
    unheld = 0
    for group in sorted(holding):
        sites = [site for site in sites_of(nodes, group) if site.name.rpartition("/")[0] in loads]
        unheld += _fill(group, sites, nodes, tables, owners, sizes)
    plan = plan_pb2.Plan(
        epoch=epoch,
        tables=tables,
        topology=plan_pb2.Topology(
            nodes=nodes, partial_groups=sorted({node.group for node in nodes} - holding)
        ),
        planner=PLANNER,
    )
    layout = {at: Holders(tuple(sorted(places)[:OWNERS_MAX])) for at, places in owners.items()}
    return AdoptedPlan(LaidPlan(plan, packed(layout)), held, unheld)


def _held(
    nodes: Sequence[plan_pb2.Node],
    tables: Sequence[plan_pb2.PlannedTable],
    loads: Mapping[str, node_pb2.NodeServiceGetLoadResponse],
) -> tuple[dict[Bucket, list[Place]], dict[Bucket, int], dict[str, int]]:
    """Return who holds each bucket, the bytes of its largest copy, and how many each node has."""
    bits = {table.id: table.bucket_bits for table in tables}
    owners = {Bucket(id, at): list[Place]() for id in bits for at in range(1 << bits[id])}
    sizes: dict[Bucket, int] = collections.defaultdict(int)
    held = dict.fromkeys(sorted(loads), 0)
    for position, node in enumerate(nodes):
        for each in loads[node.name].buckets if node.name in loads else ():
            at = Bucket(each.table_id, each.bucket)
            if each.held and at in owners and each.device < len(node.devices):
                owners[at].append(Place(position, each.device))
                sizes[at] = max(sizes[at], each.resident_bytes)
                held[node.name] += 1
    return owners, sizes, held


def _fill(
    group: int,
    sites: Sequence[Site],
    nodes: Sequence[plan_pb2.Node],
    tables: Sequence[plan_pb2.PlannedTable],
    owners: dict[Bucket, list[Place]],
    sizes: Mapping[Bucket, int],
) -> int:
    """Give a group's devices the buckets that none of its nodes holds; return how many."""
    used = dict.fromkeys((site.place for site in sites), 0)
    known: dict[int, list[int]] = collections.defaultdict(list)
    missing = []
    for at, places in owners.items():
        known[at.table] += [sizes[at]] if at in sizes else []
        if not any(nodes[place.node].group == group for place in places):
            missing.append(at)
        for place in places:
            if place in used:
                used[place] += sizes[at]
    # A bucket that nobody holds counts as those of its table do on average.
    mean = {table.id: sum(known[table.id]) // max(1, len(known[table.id])) for table in tables}
    for at in missing:
        size = sizes.get(at, mean[at.table])
        fits = [each for each in sites if used[each.place] + size <= each.bytes or not each.bytes]
        if not fits:
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED,
                f"no live node of group {group} has room for {len(missing)} buckets that none of "
                "them holds; start those that held them, or raise a budget",
            )
        best = min(fits, key=lambda each: (used[each.place] / max(each.bytes, 1), each.place))
        owners[at].append(best.place)
        used[best.place] += max(size, 1)
    return len(missing)
