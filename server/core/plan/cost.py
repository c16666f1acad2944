"""What a plan costs: the time that each device spends a second, and one figure to compare plans by.

All planners are compared by `Score`, and the decision to move goes by it too (core/drift). Letters
of shapes are those of instance.py.
"""

from typing import NamedTuple

import numpy as np

from embertide.server.core.plan.instance import Bools, Floats, Instance, rates
from embertide.server.core.plan.prices import Prices


class Score(NamedTuple):
    """A plan's cost; less is better. Compared by `value`.

    Attributes:
        busiest_us: Time a second that the busiest device spends.
        mean_us: Mean over the devices.
    """

    busiest_us: float
    mean_us: float

    @property
    def value(self) -> float:
        """One figure: throughput ends where the busiest device does; work saved counts a little."""
        return self.busiest_us + MEAN_WEIGHT * self.mean_us


# Of two plans whose busiest devices are equal, the one with less work in all is better.
MEAN_WEIGHT = 0.25


def lookup_us_T(instance: Instance, prices: Prices) -> Floats:
    """Return what a key looked up costs, by table, as the tiers have its rows today."""
    return np.array(
        [
            float(np.dot(prices.hit_us, table.tier_share))
            + prices.default_us * max(0.0, 1.0 - sum(table.tier_share))
            for table in instance.tables
        ]
    )


def asked_us_T(instance: Instance, prices: Prices) -> Floats:
    """Return what a key asked of a peer costs the asker, by table."""
    sums_T = np.array([table.sum_share for table in instance.tables])
    return sums_T * prices.asked_sum_us + (1 - sums_T) * prices.asked_row_us


def busy_us_D(instance: Instance, owned_DB: Bools, prices: Prices) -> Floats:
    """Return the time that each device spends a second under an ownership.

    What a node does beside lookups is shared evenly by its devices.
    """
    now = rates(instance, owned_DB)
    lookup_T = lookup_us_T(instance, prices)
    device_us_D = now.here_DT @ lookup_T + now.for_peers_DT @ (lookup_T + prices.answered_us)
    node_us_N = (
        now.asked_NT @ asked_us_T(instance, prices)
        + now.copied_NT.sum(axis=1) * prices.copied_us
        + prices.base_us
    )
    devices_N = np.bincount(instance.node_D, minlength=len(instance.nodes_N))
    shared_us_N: Floats = node_us_N / np.maximum(devices_N, 1)
    busy_us: Floats = device_us_D + shared_us_N[instance.node_D]
    return busy_us


def score(instance: Instance, owned_DB: Bools, prices: Prices) -> Score:
    """Return the cost of an ownership."""
    busy_D = busy_us_D(instance, owned_DB, prices)[instance.open_D]
    if not len(busy_D):
        return Score(0.0, 0.0)
    return Score(float(busy_D.max()), float(busy_D.mean()))
