"""The planner `greedy`: buckets go from the most loaded device of a group to the least.

It starts from today's plan and moves as few buckets as bring the most loaded device near the mean:
each time the hottest one that fits the gap. Every move lowers the larger of two loads, so it ends.
A load is reads, each weighed by what the cost model says that a lookup in its table costs; where
all tables cost the same, it is reads. It also places the buckets of a node that shall own nothing.
"""

import bisect
import dataclasses
from collections.abc import Iterable

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.cost import lookup_us
from embertide.server.core.plan.layout import (
    Bucket,
    Place,
    bucket_name,
    budget_bytes,
    devices,
    place_name,
)
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.workload import Work, device_work, skew

# Below this max/mean a further move costs more than the evenness gains.
GOAL = 1.1
_NAMED_MOVES = 5
# A move narrows a gap by more than rounding does, so that moves end.
_NARROWS = 1 - 1e-9


class _Group:
    """The devices of a group with their loads and buckets, as moves change them."""

    def __init__(
        self, problem: Problem, group: int, owners: dict[Bucket, tuple[Place, ...]]
    ) -> None:
        """Gather the loads of a group; `owners` is changed in place."""
        self.problem = problem
        self.owners = owners
        self.partial = group in problem.plan.topology.partial_groups  # need not own every bucket
        nodes = problem.plan.topology.nodes
        known = devices(problem.plan.topology)
        work = device_work(problem.plan.topology, problem.layout, problem.workload)
        # All devices of the group, those of shunned nodes too: they hold what is to be moved.
        self.load = {at: work[at] for at in known if nodes[at.node].group == group}
        self.weight = _weights(problem)
        self.room = {at: budget_bytes(known[at]) - work[at].bytes for at in self.load}
        self.open = [at for at in self.load if at.node not in problem.shunned]
        # Per device its buckets, ascending by cost, and the sum of those.
        self.held: dict[Place, list[tuple[float, Bucket]]] = {at: [] for at in self.load}
        for bucket, held in problem.layout.items():
            for at in held.owners:
                if at in self.held:
                    work_here = problem.workload.of(bucket, at.node)
                    self.held[at].append((self._cost(bucket, work_here), bucket))
        for buckets in self.held.values():
            buckets.sort()
        self.cost = {at: sum(cost for cost, _ in held) for at, held in self.held.items()}
        self.moved: list[tuple[Bucket, Place, Place, int]] = []
        # Where a bucket began, and its work there: a measurement goes with the bucket.
        self.came: dict[tuple[Bucket, Place], Work] = {}

    def _work(self, bucket: Bucket, at: Place) -> Work:
        return self.came.get((bucket, at)) or self.problem.workload.of(bucket, at.node)

    def _cost(self, bucket: Bucket, work: Work) -> float:
        return work.reads * self.weight.get(bucket.table, 1.0)

    def may(self, bucket: Bucket, source: Place, target: Place) -> bool:
        """Whether a device has room, and its node does not own the bucket already."""
        if self._work(bucket, source).bytes > self.room[target]:
            return False
        if source.node == target.node:
            return True
        return all(at.node != target.node for at in self.owners[bucket])

    def move(self, bucket: Bucket, source: Place, target: Place) -> None:
        """Move a bucket."""
        work = self._work(bucket, source)
        cost = self._cost(bucket, work)
        self.held[source].remove((cost, bucket))
        bisect.insort(self.held[target], (cost, bucket))
        self.cost[source] -= cost
        self.cost[target] += cost
        for at, sign in ((source, -1), (target, 1)):
            had = self.load[at]
            self.load[at] = Work(had.reads + sign * work.reads, had.bytes + sign * work.bytes)
            self.room[at] -= sign * work.bytes
        self.owners[bucket] = tuple(
            target if each == source else each for each in self.owners[bucket]
        )
        self.came[bucket, target] = work
        self.moved.append((bucket, source, target, work.reads))

    def improve(self) -> bool:
        """Make the best move off the most loaded device; False if none pays."""
        source = max(self.open, key=lambda at: (self.cost[at], at))
        total = sum(self.cost[at] for at in self.open)
        if not total or self.cost[source] * len(self.open) <= GOAL * total:
            return False
        buckets = self.held[source]
        for target in sorted(self.open, key=lambda at: (self.cost[at], at)):
            gap = self.cost[source] - self.cost[target]
            # The hottest that at most evens the two; else the coolest that still narrows the gap.
            fits = bisect.bisect_right(buckets, gap / 2, key=lambda each: each[0])
            for cost, bucket in (*reversed(buckets[:fits]), *buckets[fits:]):
                if 0 < cost < gap * _NARROWS and self.may(bucket, source, target):
                    self.move(bucket, source, target)
                    return True
        return False

    def empty(self, node: int) -> None:
        """Move everything off a node, hottest first.

        Raises:
            RefusedError: A bucket finds no device with room.
        """
        for source in [at for at in self.load if at.node == node]:
            for _, bucket in list(reversed(self.held[source])):
                targets = [at for at in self.open if self.may(bucket, source, at)]
                if targets:
                    self.move(bucket, source, min(targets, key=lambda at: (self.cost[at], at)))
                elif self.partial or any(
                    at in self.load for at in self.owners[bucket] if at.node != node
                ):
                    self.owners[bucket] = tuple(at for at in self.owners[bucket] if at.node != node)
                else:
                    raise self._no_room(bucket, node)

    def _no_room(self, bucket: Bucket, drained: int) -> RefusedError:
        """Say why a bucket of a drained node finds no device: the others are dead, or full."""
        nodes = self.problem.plan.topology.nodes
        others = {at.node for at in self.load} - {drained}
        dead = [nodes[at].name for at in sorted(others & self.problem.shunned)]
        group = nodes[drained].group
        if not others:
            return RefusedError(
                Code.FAILED_PRECONDITION,
                f"node {nodes[drained].name!r} is the only one of group {group}: start another "
                "first",
            )
        if not self.open:
            return RefusedError(
                Code.FAILED_PRECONDITION,
                f"all other nodes of group {group} are dead ({', '.join(dead)}): start one first",
            )
        return RefusedError(
            Code.RESOURCE_EXHAUSTED,
            "no other device of the group has room for "
            f"{bucket_name(self.problem.plan.tables, bucket)}; raise a budget or add a node"
            + (f", or start {', '.join(dead)}, which is dead" if dead else ""),
        )

    def story(self, before: Iterable[int]) -> str:
        """Say what was moved and why."""
        topology = self.problem.plan.topology
        group = topology.nodes[next(iter(self.load)).node].group
        after = skew(self.load[at].reads for at in self.open)
        said = f"group {group}: max/mean of reads {skew(before):.2f} -> {after:.2f}"
        if not self.moved:
            return f"{said}; nothing that moves would pay"
        named = "; ".join(
            f"{bucket_name(self.problem.plan.tables, bucket)} ({reads:,} reads) "
            f"{place_name(topology, source)} -> {place_name(topology, target)}"
            for bucket, source, target, reads in self.moved[:_NAMED_MOVES]
        )
        rest = len(self.moved) - _NAMED_MOVES
        return f"{said} by {len(self.moved)} moves, hottest first: {named}" + (
            f"; and {rest} more" if rest > 0 else ""
        )


def _weights(problem: Problem) -> dict[int, float]:
    """Return what a read of each table costs, in reads of the table that costs most."""
    asking = problem.workload.asking
    if asking is None:
        return {}
    cost = {id: lookup_us(table, problem.prices) for id, table in asking.traits.items()}
    most = max(cost.values(), default=0.0)
    return {id: each / most for id, each in cost.items()} if most else {}


@dataclasses.dataclass(frozen=True, slots=True)
class Greedy:
    """Evens the reads of the devices of each group.

    Attributes:
        drained: Position of a node that shall own nothing; None: none.
    """

    drained: int | None = None

    def propose(self, problem: Problem) -> Proposal:
        """Return the owners that even the load, or that empty the drained node.

        Raises:
            RefusedError: A bucket of the drained node has nowhere to go.
        """
        if self.drained is not None:
            problem = dataclasses.replace(problem, shunned=problem.shunned | {self.drained})
        stories: list[str] = []
        owners = {at: held.owners for at, held in problem.layout.items()}
        for number in sorted({node.group for node in problem.plan.topology.nodes}):
            group = _Group(problem, number, owners)
            if group.partial and self.drained is None:
                continue  # an operation fills it, or empties it
            before = [group.load[at].reads for at in group.open]
            if self.drained is None:
                while group.open and group.improve():
                    pass
            elif any(at.node == self.drained for at in group.load):
                group.empty(self.drained)
            else:
                continue
            stories.append(group.story(before))
        moved = {at: now for at, now in owners.items() if now != problem.layout[at].owners}
        return Proposal(owners=moved, explanation="; ".join(stories))
