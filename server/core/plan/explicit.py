"""The planner `explicit`: the caller has said where buckets shall be."""

import dataclasses
from typing import NamedTuple

from embertide.server.core.errors import Code, RefusedError, invalid
from embertide.server.core.plan.groups import whole_groups
from embertide.server.core.plan.hot import check_hot_rows, hot_rows_of
from embertide.server.core.plan.layout import (
    Bucket,
    Holders,
    Place,
    bucket_name,
    holders,
)
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.shares import shares_of
from embertide.server.core.plan.validity import OWNERS_MAX, check_run
from embertide.v1 import control_pb2, plan_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class Explicit:
    """Owners as a ReshardTarget names them; what it does not name stays."""

    target: control_pb2.ReshardTarget

    def max_moves(self) -> int:
        """Return how many buckets it names; each of them may move."""
        return sum(each.bucket_count for each in self.target.assignments)

    def propose(self, problem: Problem) -> Proposal:
        """Return the target's owners.

        Raises:
            RefusedError: It names what does not exist, or names a bucket twice.
        """
        target = self.target
        if not target.assignments and not target.hot_rows and not target.tier_shares:
            raise invalid(
                "target is empty; name the buckets that shall move, room for hot rows, or shares "
                "of tiers"
            )
        check_hot_rows(problem.plan.tables, self.target.hot_rows)
        wanted: dict[Bucket, tuple[Place, ...]] = {}
        machines = _Machines.of(problem.plan.topology)
        proven: set[Holders] = set()
        for run in self.target.assignments:
            check_run(problem.plan.tables, run)
            held = holders(run)
            if held not in proven:
                first = bucket_name(problem.plan.tables, Bucket(run.table_id, run.bucket_begin))
                _check(machines, held, first)
                proven.add(held)
            for bucket in range(run.bucket_begin, run.bucket_begin + run.bucket_count):
                at = Bucket(run.table_id, bucket)
                if at in wanted:
                    where = bucket_name(problem.plan.tables, at)
                    raise invalid(
                        f"assignments of the target overlap: {where} stands in two; name it once"
                    )
                wanted[at] = held.owners
        said = f"{len(wanted)} buckets as the target says"
        hot_rows = hot_rows_of(self.target.hot_rows)
        if hot_rows:
            said += f", and room for hot rows of {len(hot_rows)} tables"
        shares = shares_of(target.tier_shares)
        if len(shares) < len(target.tier_shares):
            raise invalid("a share of the target stands twice; name each once")
        if shares:
            said += f", and {len(shares)} shares of tiers"
        return Proposal(owners=wanted, explanation=said, hot_rows=hot_rows, tier_shares=shares)


class _Machines(NamedTuple):
    """The topology's facts, read once for all assignments."""

    names: list[str]
    device_counts: list[int]
    group_of: list[int]
    whole: frozenset[int]

    @classmethod
    def of(cls, topology: plan_pb2.Topology) -> "_Machines":
        """Read it."""
        nodes = topology.nodes
        return cls(
            [node.name for node in nodes],
            [len(node.devices) for node in nodes],
            [node.group for node in nodes],
            frozenset(whole_groups(topology)),
        )


def _check(machines: _Machines, held: Holders, where: str) -> None:
    if held.joining or held.leaving:
        raise invalid(f"{where}: a target names owners alone; leave joining and leaving out")
    names = machines.names
    for at in held.owners:
        if at.node >= len(names):
            raise RefusedError(
                Code.NOT_FOUND,
                f"{where}: no such node: position {at.node} of a topology of {len(names)} nodes; "
                "read the plan",
            )
        if at.device >= machines.device_counts[at.node]:
            raise invalid(
                f"{where}: node {names[at.node]!r} has no device {at.device}; it has "
                f"{machines.device_counts[at.node]}"
            )
    owning = [at.node for at in held.owners]
    if len(set(owning)) < len(owning):
        raise invalid(f"{where}: a node stands twice among its owners; name it once")
    if len(owning) > OWNERS_MAX:
        raise invalid(f"{where}: {len(owning)} owners; at most {OWNERS_MAX}")
    missing = machines.whole - {machines.group_of[node] for node in owning}
    if missing:
        raise invalid(f"{where}: group {min(missing)} has no owner; name one of each group")
