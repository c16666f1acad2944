"""A fleet whose demand does not drift is left alone: the real core decides, in virtual time.

Demand is stationary, or rises and falls by half with the time of day, its mix unchanged. Counts are
random. The fleet has time to settle before the time that counts.
"""

import math

import numpy as np
import pytest
from virtual import Floats, VirtualFleet, make_nodes, make_tables, zipf_demand

from embertide.server.core.drift.options import DriftOptions

NODES = 4
BITS = (5, 5, 4, 4, 3, 2, 0, 0)
BUCKETS = sum(1 << bits for bits in BITS)
BUCKET_BYTES = 1 << 20
ROOM = 0.4  # of the model's bytes, on each node
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def check_left_alone(seed: int, *, swing: float, settle_s: float, counts_s: float) -> None:
    mean_NB = zipf_demand(make_tables(BITS), NODES, 20_000, seed=seed)

    def demand(seconds: float) -> Floats:
        return mean_NB * (1 + swing * math.sin(2 * math.pi * seconds / DAY_S))

    fleet = VirtualFleet(
        nodes=make_nodes(NODES, int(BUCKETS * BUCKET_BYTES * ROOM)),
        tables=make_tables(BITS),
        demand=demand,
        bytes_B=np.full(BUCKETS, BUCKET_BYTES),
        drift=DriftOptions(mode="auto"),
        seed=seed,
    )
    fleet.run(settle_s)
    before = len(fleet.acted())
    fleet.run(counts_s)
    assert [each.why for each in fleet.acted()[before:]] == []


@pytest.mark.parametrize("swing", [0.0, 0.5])
def test_a_fleet_at_rest_is_left_alone(swing: float) -> None:
    check_left_alone(1, swing=swing, settle_s=120, counts_s=120)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_stationary_hour_is_left_alone(seed: int) -> None:
    check_left_alone(seed, swing=0.0, settle_s=HOUR_S, counts_s=HOUR_S)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_day_of_the_same_mix_is_left_alone(seed: int) -> None:
    check_left_alone(seed, swing=0.5, settle_s=DAY_S, counts_s=HOUR_S)
