"""The interface of planners: workload + topology + budgets -> who owns what."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from embertide.server.core.plan.figures import Cost
from embertide.server.core.plan.hot import HotRows
from embertide.server.core.plan.layout import Bucket, Layout, Place
from embertide.server.core.plan.prices import Prices
from embertide.server.core.plan.shares import TierShares
from embertide.server.core.plan.workload import Workload
from embertide.v1 import plan_pb2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The facts that a planner goes by. Topology and tier budgets are those of the plan.

    Attributes:
        plan: Today's plan, from which as little as possible should move.
        layout: The same, bucket by bucket; nothing joins or leaves.
        workload: The work measured under it.
        shunned: Positions of nodes that shall get nothing.
        prices: Prices of a node's work, as fitted to this fleet.
        filled: Share of a device's budgets that planners may fill.
        limit_s: Time that the planner has; one that searches stops well before.
    """

    plan: plan_pb2.Plan
    layout: Layout
    workload: Workload
    shunned: frozenset[int] = frozenset()
    prices: Prices = dataclasses.field(default_factory=Prices)
    filled: float = 1.0
    limit_s: float = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A planner's answer to a problem.

    Attributes:
        owners: The new owners of the buckets that change.
        explanation: For people: what it went by, what it moves and why.
        hot_rows: Room for hot rows of the tables for which it is to change (plan/hot.py).
        tier_shares: Shares of tiers that are to change (plan/shares.py).
        before: Cost of today's plan; None: planners need not say (plan/cost.py does).
        after: Cost of the proposed one, likewise.
    """

    owners: Mapping[Bucket, tuple[Place, ...]]
    explanation: str
    hot_rows: HotRows = dataclasses.field(default_factory=dict)
    tier_shares: TierShares = dataclasses.field(default_factory=dict)
    before: Cost | None = None
    after: Cost | None = None


class Planner(Protocol):
    """Decides where buckets shall be. It is a function: the same problem, the same proposal."""

    def propose(self, problem: Problem) -> Proposal:
        """Return the owners that it wants.

        Raises:
            RefusedError: The problem has no answer; the message says what to change.
        """
