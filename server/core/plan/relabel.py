"""Renames the devices of a placement so that less has to move."""

import numpy as np
from scipy.optimize import linear_sum_assignment

from embertide.server.core.plan.instance import Instance
from embertide.server.core.plan.polish import Placed, fits
from embertide.server.core.plan.shard_costs import ShardCosts

_AS_GOOD = 1.0001


def relabelled(instance: Instance, costs: ShardCosts, placed: Placed, owners_max: int) -> Placed:
    """Return the placement with devices exchanged, if as good: each keeps most of what it has."""
    weighted_DB = placed.owned_DB * np.maximum(instance.bytes_B, 1.0)
    kept_DD = weighted_DB @ instance.owned_DB.T.astype(np.float64)
    _, device_D = linear_sum_assignment(kept_DD, maximize=True)
    owned_DB = np.zeros_like(placed.owned_DB)
    owned_DB[device_D] = placed.owned_DB
    if not fits(instance, owned_DB, owners_max):
        return placed
    value = float(costs.values(costs.all_contributions(owned_DB).sum(axis=0)[None])[0])
    return Placed(owned_DB, value) if value <= placed.value * _AS_GOOD else placed
