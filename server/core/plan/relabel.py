"""Renames the devices of a placement so that less has to move."""

import numpy as np
import scipy

from embertide.server.core.plan.instance import Instance
from embertide.server.core.plan.owner_options import weights_B
from embertide.server.core.plan.polish import Placement, fits, pinned
from embertide.server.core.plan.shard_costs import ShardCosts

_AS_GOOD = 1.0001


def relabelled(
    instance: Instance, costs: ShardCosts, placed: Placement, owners_max: int
) -> Placement:
    """Return the placement with devices exchanged, if as good: each keeps most of what it has."""
    open_D, free_B = instance.open_D, ~pinned(instance)
    placed_OB, today_OB = placed.owned_DB[open_D], instance.owned_DB[open_D]
    kept_OO = (placed_OB * np.where(free_B, weights_B(instance), 0.0)) @ today_OB.T.astype(float)
    _, device_O = scipy.optimize.linear_sum_assignment(kept_OO, maximize=True)
    exchanged_OB = np.empty_like(placed_OB)
    exchanged_OB[device_O] = placed_OB
    owned_DB = placed.owned_DB.copy()
    owned_DB[np.ix_(open_D, free_B)] = exchanged_OB[:, free_B]
    if not fits(instance, owned_DB, owners_max):
        return placed
    value = float(costs.values(costs.all_contributions(owned_DB).sum(axis=0)[None])[0])
    return Placement(owned_DB, value) if value <= placed.value * _AS_GOOD else placed
