"""The topology follows the machines; groups of nodes come and go as a whole.

A group answers requests by itself, so it must own every bucket (rule 3). While
it is added or removed it is partial: the topology says so, the rule does not hold for it, and its
nodes are not ready.

    add:     its nodes stand in the topology, partial -> they join every bucket -> whole
    remove:  partial -> its owners leave every bucket -> its nodes hold nothing, and may be removed

Whether a group is partial follows from the layout and from the operation at work alone, so a
control plane that starts again finds the same.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Set

import numpy as np

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.bootstrap import sites_of
from embertide.server.core.plan.layout import Bucket, PackedLayout, Place
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.spread import spread
from embertide.v1 import control_pb2, plan_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """A change of a group by an operation: it comes, or goes."""

    group: int
    comes: bool


def wish_of(
    request: control_pb2.StartReshardRequest, operations: Mapping[str, control_pb2.OperationRecord]
) -> Wish | None:
    """Return what a request does with a group, if anything."""
    goal = request.WhichOneof("goal")
    if goal == "add_group":
        return Wish(request.add_group, True)
    if goal == "remove_group":
        return Wish(request.remove_group, False)
    if goal == "undo_operation" and request.undo_operation in operations:
        undone = operations[request.undo_operation].request
        if undone.WhichOneof("goal") == "add_group":
            return Wish(undone.add_group, False)
    return None


def groups_of(topology: plan_pb2.Topology) -> set[int]:
    """Return the groups that have nodes."""
    return {node.group for node in topology.nodes}


def whole_groups(topology: plan_pb2.Topology) -> set[int]:
    """Return the groups that own every bucket."""
    return groups_of(topology) - set(topology.partial_groups)


def lacking(topology: plan_pb2.Topology, layout: PackedLayout, groups: Iterable[int]) -> set[int]:
    """Return those of some groups that do not own every bucket."""
    group_of = [node.group for node in topology.nodes]
    lacks: set[int] = set()
    wanted = set(groups)
    for held in layout.in_use() if wanted else ():
        lacks |= wanted - {group_of[at.node] for at in held.owners}
    return lacks


def followed(
    plan: plan_pb2.Plan,
    layout: PackedLayout,
    registered: Mapping[str, plan_pb2.Node],
    *,
    wish: Wish | None = None,
    moving: bool = False,
) -> plan_pb2.Topology | None:
    """Return the topology that the registered nodes make, or None if it is the plan's.

    A known node is taken as it registered last. A new one is added at the end if its group is
    known, or is wished for. No position changes, also while an operation is at work; nodes that
    have left go when none is (names.py).

    Args:
        plan: Today's.
        layout: Its buckets.
        registered: Nodes by name.
        wish: The change of a group by the operation whose turn it is.
        moving: Whether an operation is at work: while it is, no group becomes whole, since what it
            has done may be taken back.
    """
    before = plan.topology
    groups = groups_of(before) | ({wish.group} if wish is not None and wish.comes else set())
    welcome = {name: node for name, node in registered.items() if node.group in groups}
    nodes = [welcome.get(node.name, node) for node in before.nodes]
    known = {node.name for node in nodes}
    nodes += [welcome[name] for name in sorted(welcome) if name not in known]
    grown = plan_pb2.Topology(nodes=nodes)
    partial = set(before.partial_groups)
    partial = partial if moving else lacking(before, layout, partial)
    partial = (partial & groups_of(grown)) | (groups_of(grown) - groups_of(before))
    # One group is always whole: what would leave none is refused when it is its turn.
    if wish is not None and not wish.comes and groups_of(grown) - partial > {wish.group}:
        partial = partial | {wish.group}
    grown.partial_groups.extend(sorted(partial))
    return None if grown == before else grown


def is_announced(topology: plan_pb2.Topology, wish: Wish) -> bool:
    """Whether a topology says that a group comes, or goes."""
    return wish.group in topology.partial_groups


@dataclasses.dataclass(frozen=True, slots=True)
class AddGroup:
    """The planner `add-group`: each bucket gets an owner more, on a node of a group.

    Buckets are spread by the byte budgets of the devices, as in a first plan. What the group owns
    already stays.
    """

    group: int

    def propose(self, problem: Problem) -> Proposal:
        """Return the owners.

        Raises:
            RefusedError: The group has no nodes, is whole already, or has no room.
        """
        topology = problem.plan.topology
        if self.group in whole_groups(topology):
            raise RefusedError(
                Code.FAILED_PRECONDITION, f"group {self.group} owns every bucket already"
            )
        if self.group not in groups_of(topology):
            raise RefusedError(
                Code.NOT_FOUND,
                f"no node of group {self.group} has registered; start its nodes with --group "
                f"{self.group}",
            )
        sites = [
            site
            for site in sites_of(topology.nodes, self.group)
            if site.place.node not in problem.shunned
        ]
        if not sites:
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"all nodes of group {self.group} are dead; start them, and try again",
            )
        runs = spread(problem.plan.tables, sites, _table_bytes(problem))
        members = _members(topology, self.group)
        owners: dict[Bucket, tuple[Place, ...]] = {}
        for table, of_table in runs.items():
            for run in of_table:
                for number in range(run.begin, run.begin + run.count):
                    at = Bucket(table, number)
                    now = problem.layout[at].owners
                    if not any(place.node in members for place in now):
                        owners[at] = (*now, run.place)
        return Proposal(
            owners=owners,
            explanation=f"group {self.group} gets {len(owners):,} buckets on {len(sites)} devices",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class RemoveGroup:
    """The planner `remove-group`: no node of a group owns anything."""

    group: int

    def propose(self, problem: Problem) -> Proposal:
        """Return the owners.

        Raises:
            RefusedError: There is no such group, or no other that is whole.
        """
        topology = problem.plan.topology
        if self.group not in groups_of(topology):
            raise RefusedError(
                Code.NOT_FOUND,
                f"no such group: {self.group}; the plan has {sorted(groups_of(topology))}",
            )
        if not whole_groups(topology) - {self.group}:
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"group {self.group} is the only one that owns every bucket; add another first "
                "(embertide node add-group)",
            )
        members = _members(topology, self.group)
        owners = {
            at: tuple(place for place in held.owners if place.node not in members)
            for at, held in problem.layout.items()
            if any(place.node in members for place in held.owners)
        }
        return Proposal(
            owners=owners,
            explanation=f"group {self.group} gives {len(owners):,} buckets up; others have them",
        )


def _members(topology: plan_pb2.Topology, group: int) -> Set[int]:
    return {at for at, node in enumerate(topology.nodes) if node.group == group}


def _table_bytes(problem: Problem) -> dict[int, int] | None:
    """Return the bytes of one copy of each table, if they were measured."""
    asking = problem.workload.asking
    if asking is None or not asking.bytes_B.any():
        return None
    sizes, begin = {}, 0
    for table in problem.plan.tables:
        end = begin + (1 << table.bucket_bits)
        sizes[table.id] = int(np.sum(asking.bytes_B[begin:end]))
        begin = end
    return sizes
