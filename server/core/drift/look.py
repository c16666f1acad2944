"""A look at the drift: signals, and a planner's proposal if a detector fired.

It is computed where planners are, in a process of its own: a tick never waits for it.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from embertide.server.core.drift.signals import Signals, fired, observe
from embertide.server.core.plan.cost import MEAN_WEIGHT, fleet_cost
from embertide.server.core.plan.figures import Cost
from embertide.server.core.plan.instance import Floats, instances, owned_after
from embertide.server.core.plan.layout import Bucket, Place
from embertide.server.core.plan.planner import Planner, Problem, Proposal


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LookFindings(Proposal):
    """The findings of a look. Without a trigger nothing is proposed.

    Attributes:
        signals: Signals that the detectors see.
        triggers: Those that fired.
        now: Cost of today's plan.
        spent: Time that the fleet spends, as measured (`spent_us`); 0: not known.
        before: Cost of today's plan over the horizon.
        after: Cost of the proposed one over the horizon.
    """

    signals: Signals
    triggers: tuple[str, ...] = ()
    now: Cost = dataclasses.field(default_factory=Cost)
    spent: float = 0.0
    before: Cost = dataclasses.field(default_factory=Cost)
    after: Cost = dataclasses.field(default_factory=Cost)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A planner that first looks whether one is needed.

    Attributes:
        planner: The planner that is asked if a detector fires.
        reference: Signals when a planner was asked last; None: never.
        seen: Signals that do not follow from the demand alone: hot set, forecast and mix.
        due: Whether the planner is asked anyhow, and why: a name for the record; empty: no.
        growth_N: Factor of each node's demand over the horizon, by position in the topology.
        growth_T: The same of each table's.
    """

    planner: Planner
    reference: Signals | None
    seen: Signals
    due: str = ""
    growth_N: Floats | None = None
    growth_T: Floats | None = None

    def propose(self, problem: Problem) -> LookFindings:
        """Return what it finds.

        Raises:
            RefusedError: Nobody has reported what nodes ask for, or the planner has no answer.
        """
        today = list(instances(problem))
        now = observe(today, problem.prices)._replace(
            hot_set_overlap=self.seen.hot_set_overlap,
            forecast_error=self.seen.forecast_error,
            mix_change=self.seen.mix_change,
        )
        triggers = fired(now, self.reference)
        if self.due and self.due not in triggers:
            triggers = (*triggers, self.due)
        if not triggers:
            return LookFindings(owners={}, explanation="", signals=now)
        ahead = self._ahead(problem)
        proposal = self.planner.propose(ahead)
        groups = list(instances(ahead))
        before = [(each, each.owned_DB) for each in groups]
        after = [(each, owned_after(each, proposal.owners)) for each in groups]
        return LookFindings(
            owners=proposal.owners,
            explanation=proposal.explanation,
            hot_rows=proposal.hot_rows,
            tier_shares=proposal.tier_shares,
            signals=now,
            triggers=triggers,
            now=fleet_cost([(each, each.owned_DB) for each in today], problem.prices),
            spent=spent_us(problem),
            before=fleet_cost(before, problem.prices),
            after=fleet_cost(after, problem.prices),
        )

    def _ahead(self, problem: Problem) -> Problem:
        """Return the problem with the demand as it is expected over the horizon."""
        asking = problem.workload.asking
        if asking is None or self.growth_N is None or self.growth_T is None:
            return problem
        buckets_T = [1 << table.bucket_bits for table in problem.plan.tables]
        grown_NB = asking.wanted_NB * self.growth_N[:, None]
        total, grown = float(asking.wanted_NB.sum()), float(grown_NB.sum())
        if not total or not grown:
            return problem
        # Nodes' and tables' growth both hold the fleet's: it is counted once.
        wanted_NB = grown_NB * np.repeat(self.growth_T, buckets_T) * (total / grown)
        asking = dataclasses.replace(asking, wanted_NB=wanted_NB)
        return dataclasses.replace(
            problem, workload=dataclasses.replace(problem.workload, asking=asking)
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GainCosts(Proposal):
    """A fleet's spending, and its spending had its last operation not been.

    Attributes:
        spent: Time that it spends, as measured (`spent_us`); 0: not known.
        undone: Cost of the plan before by today's demand.
    """

    spent: float
    undone: Cost


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GainComparison:
    """Not a planner: says what an operation's buckets would cost had they stayed.

    Attributes:
        owners: Former owners of the buckets that it moved.
    """

    owners: Mapping[Bucket, tuple[Place, ...]]

    def propose(self, problem: Problem) -> GainCosts:
        """Return the cost of both plans by today's demand.

        Raises:
            RefusedError: Nobody has reported what nodes ask for.
        """
        undone = [(each, owned_after(each, self.owners)) for each in instances(problem)]
        return GainCosts(
            owners={},
            explanation="",
            spent=spent_us(problem),
            undone=fleet_cost(undone, problem.prices),
        )


def spent_us(problem: Problem) -> float:
    """Return what the nodes themselves say that they spend, as one figure; 0: not known.

    It is the score of the cost model (cost.Score) of CPU time, by nodes in place of devices, summed
    over the groups.
    """
    asking = problem.workload.asking
    nodes = problem.plan.topology.nodes
    if asking is None or len(asking.busy_us_N) != len(nodes):
        return 0.0
    groups: dict[int, list[float]] = {}
    for at, node in enumerate(nodes):
        if at not in problem.shunned:
            groups.setdefault(node.group, []).append(float(asking.busy_us_N[at]))
    if not all(min(busy_us) > 0 for busy_us in groups.values()):
        return 0.0
    return sum(max(each) + MEAN_WEIGHT * float(np.mean(each)) for each in groups.values())


def gain(before: Cost, after: Cost) -> float:
    """Return the share of the cost that a plan saves; 0 where nothing is read."""
    if not before.value or not math.isfinite(before.value):
        return 0.0
    return 1 - after.value / before.value
