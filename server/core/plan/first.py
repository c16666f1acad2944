"""Plans that no operation makes: the first one, and those that follow the machines.

Positions in a topology never change, because operations keep them: nodes are added at the end.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from embertide.server.core.plan.layout import Bucket, Holders, Place, assignments_of
from embertide.v1 import plan_pb2


def first_plan(
    nodes: Iterable[plan_pb2.Node], tables: Sequence[plan_pb2.PlannedTable]
) -> plan_pb2.Plan:
    """Spread all buckets round robin over the devices of each group."""
    ordered = sorted(nodes, key=lambda node: (node.group, node.name))
    rings = []
    for group in sorted({node.group for node in ordered}):
        members = [(at, node) for at, node in enumerate(ordered) if node.group == group]
        # Device by device over the nodes, so that few buckets still meet all nodes.
        places = sorted(
            (Place(at, device.index) for at, node in members for device in node.devices),
            key=lambda at: (at.device, at.node),
        )
        rings.append(itertools.cycle(places))
    layout = {
        Bucket(table.id, bucket): Holders(tuple(next(ring) for ring in rings))
        for table in tables
        for bucket in range(1 << table.bucket_bits)
    }
    return plan_pb2.Plan(
        epoch=1,
        tables=tables,
        topology=plan_pb2.Topology(nodes=ordered),
        assignments=assignments_of(layout),
        planner="first",
    )


def follow_machines(
    plan: plan_pb2.Plan, registered: Mapping[str, plan_pb2.Node]
) -> plan_pb2.Topology | None:
    """Return the topology that the registered nodes make, or None if it is the plan's.

    A known node is taken as it registered last, a new one of a known group is added. A group that
    is new cannot be: it would have to own every bucket at once (rule 3).
    """
    nodes = [registered.get(node.name, node) for node in plan.topology.nodes]
    groups = {node.group for node in plan.topology.nodes}
    known = {node.name for node in nodes}
    nodes += [
        registered[name]
        for name in sorted(registered)
        if name not in known and registered[name].group in groups
    ]
    grown = plan_pb2.Topology(nodes=nodes)
    return None if grown == plan.topology else grown


def forget_last(plan: plan_pb2.Plan, name: str) -> plan_pb2.Topology | None:
    """Return the topology without a node that owns nothing, if it stands last; else None.

    One that does not stand last keeps its place, unused.
    """
    nodes = plan.topology.nodes
    if len(nodes) < 2 or nodes[-1].name != name:
        return None
    return plan_pb2.Topology(nodes=nodes[:-1])
