"""The planner `ldm`: even loads from scratch, by largest differencing (as in Neo, ISCA 2022).

Each bucket has one owner in a group. What a bucket's keys cost is divided among as many sets as
there are devices; then the sets go to the devices so that the fewest bytes move. Where a set does
not fit its device's budget, buckets with little load a byte leave it for devices with room.
"""

import dataclasses

import numpy as np
import scipy

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.cost import busy_us_D, lookup_us_T, score_of
from embertide.server.core.plan.differencing import difference
from embertide.server.core.plan.instance import Bools, Floats, Instance, instances, owners_of
from embertide.server.core.plan.layout import Bucket, Place, bucket_name
from embertide.server.core.plan.owner_options import weights_B
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.prices import Prices
from embertide.server.core.plan.validity import OWNERS_MAX


def load_B(instance: Instance, prices: Prices) -> Floats:
    """Return what looking up a bucket's keys costs the fleet, whoever owns it."""
    loads: Floats = instance.wanted_NB.sum(axis=0) * lookup_us_T(instance, prices)[instance.table_B]
    return loads


@dataclasses.dataclass(frozen=True, slots=True)
class Ldm:
    """Evens the lookups of the devices of each group, one owner a bucket."""

    def propose(self, problem: Problem) -> Proposal:
        """Return the owners that even the load.

        Raises:
            RefusedError: Nobody has reported what nodes ask for, or buckets do not fit.
        """
        owners: dict[Bucket, tuple[Place, ...]] = {}
        today = {at: held.owners for at, held in problem.layout.items()}
        stories = []
        groups = list(instances(problem))
        if 2 * len(groups) > OWNERS_MAX:
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"{len(groups)} groups move a bucket at once, which has at most {OWNERS_MAX} "
                "owners; use greedy",
            )
        for instance in groups:
            owned_DB = self._even(problem, instance)
            owners.update(owners_of(instance, owned_DB, {**today, **owners}))
            stories.append(_story(instance, owned_DB, problem.prices))
        return Proposal(owners=owners, explanation="; ".join(stories))

    def _even(self, problem: Problem, instance: Instance) -> Bools:
        open_at = np.flatnonzero(instance.open_D)
        if not len(open_at):
            return instance.owned_DB
        load = load_B(instance, problem.prices)
        # One set may take no more than the smallest budget leaves to it; see `_make_room`.
        sets = difference(load.tolist(), len(open_at))
        inside_SB = np.zeros((len(sets), len(load)), np.bool_)
        for at, members in enumerate(sets):
            inside_SB[at, members] = True
        size = weights_B(instance)
        stays = (inside_SB * size) @ instance.owned_DB[open_at].T.astype(np.float64)
        bytes_S = inside_SB @ instance.bytes_B
        over = np.maximum(bytes_S[:, None] - instance.budget_D[open_at][None, :], 0.0)
        # First of all sets shall fit, then stay.
        rows, columns = scipy.optimize.linear_sum_assignment(over * len(sets) - stays)
        owned_DB = np.zeros_like(instance.owned_DB)
        owned_DB[open_at[columns]] = inside_SB[rows]
        _make_room(problem, instance, owned_DB, load)
        return owned_DB


def _make_room(problem: Problem, instance: Instance, owned_DB: Bools, load: Floats) -> None:
    """Move buckets with the least load a byte off devices that hold too much.

    Raises:
        RefusedError: A bucket finds no device with room.
    """
    size = instance.bytes_B
    room_D = np.where(instance.open_D, instance.budget_D - instance.bytes_D(owned_DB), -np.inf)
    for device in np.flatnonzero(instance.open_D & (room_D < 0)):
        held = np.flatnonzero(owned_DB[device] & (size > 0))
        for bucket in held[np.argsort(load[held] / size[held], kind="stable")]:
            if room_D[device] >= 0:
                break
            target = int(room_D.argmax())
            if room_D[target] < size[bucket]:
                raise RefusedError(
                    Code.RESOURCE_EXHAUSTED,
                    "no device of the group has room for "
                    f"{bucket_name(problem.plan.tables, instance.buckets_B[bucket])}; raise a "
                    "budget, or use a planner that starts from today's plan",
                )
            owned_DB[device, bucket], owned_DB[target, bucket] = False, True
            room_D[device] += size[bucket]
            room_D[target] -= size[bucket]


def _story(instance: Instance, owned_DB: Bools, prices: Prices) -> str:
    before = score_of(instance, busy_us_D(instance, instance.owned_DB, prices))
    after = score_of(instance, busy_us_D(instance, owned_DB, prices))
    changed = int((owned_DB != instance.owned_DB).any(axis=0).sum())
    return (
        f"group {instance.group}: score {before.value:,.0f} -> {after.value:,.0f} us/s, busiest "
        f"device {before.busiest_us:,.0f} -> {after.busiest_us:,.0f}; {changed} buckets change"
    )
