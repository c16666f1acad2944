"""The planner `auto`: asks several planners, and takes the plan that costs least.

All plans are compared by the score of the cost model (cost.py) over all groups; of two that cost
the same, the one that moves fewer bytes wins. Not to move at all is one of the answers. A planner
that fails, refuses or proposes what would not be accepted is left out and named.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.cost import fleet_cost
from embertide.server.core.plan.instance import Bools, Instance, instances, owned_after
from embertide.server.core.plan.owner_options import moved_bytes
from embertide.server.core.plan.planner import Planner, Problem, Proposal
from embertide.server.core.plan.validity import OWNERS_MAX

# Scores that differ by less are equal: the model is not that exact.
_SAME = 1e-4
# Share of the limit that each planner gets. Two search, and stop at half of it; others take little.
_SHARE = 0.5


class _Candidate(NamedTuple):
    """A plan that was proposed, and what it comes to."""

    name: str
    proposal: Proposal
    score: float
    bytes: float
    story: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Auto:
    """The best of several planners.

    Attributes:
        planners: Those that are asked, by name, in this order.
        clock: Tells how long each took, in s, for people; None: nobody says.
    """

    planners: Mapping[str, Planner]
    clock: Callable[[], float] | None = None

    def propose(self, problem: Problem) -> Proposal:
        """Return the best of the planners' plans.

        Raises:
            RefusedError: Nobody has reported what nodes ask for, or no planner has an answer.
        """
        groups = list(instances(problem))
        before = fleet_cost([(each, each.owned_DB) for each in groups], problem.prices).value
        stay = Proposal(owners={}, explanation="nothing that moves would pay")
        candidates = [_Candidate("stay", stay, before, 0.0, f"stay: score {before:,.0f}")]
        left_out: list[str] = []
        share = dataclasses.replace(problem, limit_s=problem.limit_s * _SHARE)
        for name, planner in self.planners.items():
            began_s = self.clock() if self.clock else 0.0
            try:
                candidates.append(_candidate(name, planner.propose(share), share, groups))
            except RefusedError as error:
                left_out.append(f"{name} left out: {error.message}")
            except Exception as error:
                left_out.append(f"{name} left out: it failed ({type(error).__name__}: {error})")
            else:
                if self.clock:
                    took = f", {self.clock() - began_s:.1f} s"
                    candidates[-1] = candidates[-1]._replace(story=candidates[-1].story + took)
        if len(candidates) == 1:
            raise RefusedError(
                Code.FAILED_PRECONDITION, "no planner answers: " + "; ".join(left_out)
            )
        best = min(candidates, key=lambda each: each.score).score
        near = [each for each in candidates if each.score <= best + _SAME * before]
        chosen = min(near, key=lambda each: each.bytes)
        said = "; ".join([*(each.story for each in candidates), *left_out])
        return dataclasses.replace(
            chosen.proposal,
            explanation=f"{chosen.name} is best ({said}). {chosen.proposal.explanation}",
        )


def _candidate(
    name: str, proposal: Proposal, problem: Problem, groups: list[Instance]
) -> _Candidate:
    """Return a proposal with its score.

    Raises:
        RefusedError: It would not be accepted.
    """
    found = [(each, owned_after(each, proposal.owners)) for each in groups]
    owners = sum(_max_owners(instance, owned_DB) for instance, owned_DB in found)
    if owners > OWNERS_MAX:
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            f"a bucket would have {owners} owners while it moves; at most {OWNERS_MAX}",
        )
    for instance, owned_DB in found:
        limit_D = np.maximum(instance.budget_D, instance.bytes_D(instance.owned_DB))
        if (instance.bytes_D(owned_DB) > limit_D + 0.5).any():
            raise RefusedError(Code.RESOURCE_EXHAUSTED, "a device would have no room")
    score = fleet_cost(found, problem.prices).value
    size = sum(moved_bytes(instance, owned_DB) for instance, owned_DB in found)
    return _Candidate(name, proposal, score, size, f"{name}: score {score:,.0f}, {size:,.0f} bytes")


def _max_owners(instance: Instance, owned_DB: Bools) -> int:
    """Return the most owners that a bucket of a group has while it moves."""
    return int((owned_DB | instance.owned_DB).sum(axis=0).max(initial=0))
