"""A look at the drift: signals, and a planner's proposal if a detector fired.

It is computed where planners are, in a process of its own: a tick never waits for it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from embertide.server.core.drift.signals import Signals, fired, observe
from embertide.server.core.plan.cost import MEAN_WEIGHT, Score, fleet_cost, work_DF
from embertide.server.core.plan.figures import Cost
from embertide.server.core.plan.instance import Floats, Instance, instances, owned_after
from embertide.server.core.plan.layout import Bucket, Place, budget_bytes, devices
from embertide.server.core.plan.moves import moves_to
from embertide.server.core.plan.planner import Planner, Problem, Proposal
from embertide.server.core.plan.prices import Prices
from embertide.server.core.plan.workload import Asking, device_work, predicted


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LookFindings(Proposal):
    """The findings of a look. Without a trigger nothing is proposed.

    Attributes:
        signals: Signals that the detectors see.
        triggers: Those that fired.
        work: What devices do a second under today's plan, by group and kind of work: its cost by
            any prices follows.
        spent: Time that the fleet spends, as measured (`spent_us`); 0: not known.
        before: Cost of today's plan over the horizon.
        after: Cost of the proposed one over the horizon.
        whole: Cost of the planner's, of which the proposed one is a part; None: it is all of it.
    """

    signals: Signals
    triggers: tuple[str, ...] = ()
    work: tuple[Floats, ...] = ()
    spent: float = 0.0
    before: Cost = dataclasses.field(default_factory=Cost)
    after: Cost = dataclasses.field(default_factory=Cost)
    whole: Cost | None = None


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
        newest: Who asks for what by the newest reads alone, which gains are predicted by: right
            after a change of demand, most reads that the planner goes by are from before it. None:
            gains are predicted by what the planner goes by.
        probe_share: Share of the planner's buckets that is proposed; 0: all.
    """

    planner: Planner
    reference: Signals | None
    seen: Signals
    due: str = ""
    growth_N: Floats | None = None
    growth_T: Floats | None = None
    newest: Asking | None = None
    probe_share: float = 0.0

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
        newest = self._by_newest(problem)
        groups = list(instances(newest or ahead))
        before = fleet_cost([(each, each.owned_DB) for each in groups], problem.prices)
        probed = probe_of(proposal, problem, self.probe_share)
        after, whole = (_cost_after(groups, of, problem) for of in (probed, proposal))
        if after.value >= before.value:  # a part of an exchange may cost more
            probed, after = proposal, whole
        explanation = probed.explanation
        if newest is not None:
            groups = list(instances(ahead))
            planned = fleet_cost([(each, each.owned_DB) for each in groups], problem.prices)
            share = gain(planned, _cost_after(groups, probed, problem))
            explanation += f"; by the reads that it was planned by, it saves {share:.1%}"
        return LookFindings(
            owners=probed.owners,
            explanation=explanation,
            hot_rows=probed.hot_rows,
            tier_shares=probed.tier_shares,
            signals=now,
            triggers=triggers,
            work=tuple(work_DF(each, each.owned_DB)[each.open_D] for each in today),
            spent=spent_us(problem),
            before=before,
            after=after,
            whole=whole if probed is not proposal else None,
        )

    def _by_newest(self, problem: Problem) -> Problem | None:
        """Return the problem by the newest reads, as expected over the horizon; None: no reads."""
        if self.newest is None or not self.newest.wanted_NB.any():
            return None
        workload = dataclasses.replace(problem.workload, asking=self.newest)
        return self._ahead(dataclasses.replace(problem, workload=workload))

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


def _cost_after(groups: Sequence[Instance], proposal: Proposal, problem: Problem) -> Cost:
    """Return what the fleet spends once a proposal has moved."""
    owned = [(each, owned_after(each, proposal.owners)) for each in groups]
    return fleet_cost(owned, problem.prices)


def probe_of(proposal: Proposal, problem: Problem, share: float) -> Proposal:
    """Return a part of a proposal that shows what the whole is worth, at little cost.

    Buckets of a table are alike, since keys are hashed: the part is evenly spread over the buckets
    in order, and changes nothing else. Where a part has no room, it is the whole proposal.
    """
    count = math.ceil(share * len(proposal.owners))
    if not 0 < count < len(proposal.owners):
        return proposal
    buckets = sorted(proposal.owners)
    chosen = [buckets[at * len(buckets) // count] for at in range(count)]
    owners = {bucket: proposal.owners[bucket] for bucket in chosen}
    if not _fits(owners, problem):
        return proposal
    text = f"{proposal.explanation}; a probe: {count:,} of its {len(buckets):,} buckets"
    return Proposal(owners=owners, explanation=text)


def _fits(owners: Mapping[Bucket, tuple[Place, ...]], problem: Problem) -> bool:
    """Whether devices have room for these buckets alone, or hold no more than before."""
    plan, workload = problem.plan, problem.workload
    before = device_work(plan.topology, problem.layout, workload)
    after = predicted(before, moves_to(plan, problem.layout, owners), workload)
    return all(
        after[at].bytes <= max(budget_bytes(device), before[at].bytes)
        for at, device in devices(plan.topology).items()
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GainCosts(Proposal):
    """A fleet's spending, and its spending had its last operation not been.

    Attributes:
        spent: Time that it spends, as measured (`spent_us`); 0: not known.
        undone: Cost of the plan before by today's demand.
        before_value: Cost of that plan by the demand before, by the same prices.
    """

    spent: float
    undone: Cost
    before_value: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GainComparison:
    """Not a planner: says what an operation's buckets would cost had they stayed.

    Attributes:
        owners: Former owners of the buckets that it moved.
        work: `LookFindings.work` before it.
    """

    owners: Mapping[Bucket, tuple[Place, ...]]
    work: tuple[Floats, ...] = ()

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
            before_value=_value_of(self.work, problem.prices),
        )


def _value_of(work: Sequence[Floats], prices: Prices) -> float:
    """Return the cost of work, as `fleet_cost` has it."""
    busy = [each_DF @ prices.us_F for each_DF in work if len(each_DF)]
    return sum(Score(float(us_D.max()), float(us_D.mean())).value for us_D in busy)


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
