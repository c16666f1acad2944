"""A look at the drift: signals, and a planner's proposal if a detector fired.

It is computed where planners are, in a process of its own: a tick never waits for it.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from embertide.server.core.drift.signals import Signals, fired, observe
from embertide.server.core.plan.cost import score
from embertide.server.core.plan.instance import (
    Bools,
    Floats,
    Instance,
    instances,
    owned_after,
    rates,
)
from embertide.server.core.plan.planner import Planner, Problem, Proposal
from embertide.server.core.plan.prices import Prices
from embertide.v1 import control_pb2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a plan costs the whole fleet.

    Attributes:
        busiest_us: Time a second that the busiest device spends.
        mean_us: Mean over the devices.
        asked_keys: Keys a second that are asked of peers.
        value: The figure that plans are compared by: the scores of the groups added up.
    """

    busiest_us: float = 0.0
    mean_us: float = 0.0
    asked_keys: float = 0.0
    value: float = 0.0

    def message(self) -> control_pb2.PlanCost:
        """Write it."""
        return control_pb2.PlanCost(
            busiest_us=self.busiest_us, mean_us=self.mean_us, asked_keys=self.asked_keys
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Looked(Proposal):
    """What a look found. Without a trigger nothing is proposed.

    Attributes:
        signals: What the detectors see.
        triggers: Those that fired.
        before: Cost of today's plan over the horizon.
        after: Cost of the proposed one.
    """

    signals: Signals
    triggers: tuple[str, ...] = ()
    before: Cost = dataclasses.field(default_factory=Cost)
    after: Cost = dataclasses.field(default_factory=Cost)


def fleet_cost(found: Sequence[tuple[Instance, Bools]], prices: Prices) -> Cost:
    """Return what ownerships of all groups cost together."""
    busiest = total = asked = value = 0.0
    count = 0
    for instance, owned_DB in found:
        each = score(instance, owned_DB, prices)
        devices = int(instance.open_D.sum())
        busiest = max(busiest, each.busiest_us)
        value += each.value
        total += each.mean_us * devices
        count += devices
        asked += float(rates(instance, owned_DB).asked_NT.sum())
    return Cost(busiest_us=busiest, mean_us=total / max(count, 1), asked_keys=asked, value=value)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A planner that first looks whether one is needed.

    Attributes:
        planner: Who is asked if a detector fires.
        reference: Signals when a planner was asked last; None: never.
        seen: Signals that do not follow from the demand: hot set and forecast.
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

    def propose(self, problem: Problem) -> Looked:
        """Return what it finds.

        Raises:
            RefusedError: Nobody has reported what nodes ask for, or the planner has no answer.
        """
        now = observe(list(instances(problem)), problem.prices)._replace(
            hot_set_overlap=self.seen.hot_set_overlap, forecast_error=self.seen.forecast_error
        )
        triggers = fired(now, self.reference)
        if self.due and self.due not in triggers:
            triggers = (*triggers, self.due)
        if not triggers:
            return Looked(owners={}, explanation="", signals=now)
        ahead = self._ahead(problem)
        proposal = self.planner.propose(ahead)
        groups = list(instances(ahead))
        before = [(each, each.owned_DB) for each in groups]
        after = [(each, owned_after(each, proposal.owners)) for each in groups]
        return Looked(
            owners=proposal.owners,
            explanation=proposal.explanation,
            hot_rows=proposal.hot_rows,
            tier_shares=proposal.tier_shares,
            signals=now,
            triggers=triggers,
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


def gain(before: Cost, after: Cost) -> float:
    """Return the share of the cost that a plan saves; 0 where nothing is read."""
    if not before.value or not math.isfinite(before.value):
        return 0.0
    return 1 - after.value / before.value
