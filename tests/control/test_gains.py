"""Gains predicted and measured in virtual time: each operation is predicted from those before it.

Every ten minutes two pairs of four nodes exchange, to a varying degree, what their clients read,
and real decisions follow: the day of bench/drift/pays.py, without its machine. The nodes spend more
than the cost model can fit: a key that is asked of a peer costs more, the more keys are.
`pytest -m long -s` prints the figures.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from virtual import Floats, VirtualFleet, Work, make_nodes, make_tables

from embertide.server.core.drift.options import DriftOptions
from embertide.server.core.plan.prices import Prices

NODES, TABLES, BITS = 4, 8, 3
BUCKETS = TABLES << BITS
BUCKET_BYTES = 1 << 16
KEYS_PER_S = 40_000.0
HOUR_S = 600
OPTIONS = DriftOptions(
    mode="auto", planner="oper", half_life_s=60, interval_s=30, cooldown_s=1, operations_per_day=999
)


class CrowdedWork(Work):
    """Work whose keys asked of peers cost up to four times as much where all keys are asked."""

    def busy_us_N(self, prices: Prices, seconds: float) -> Floats:
        asked_N = self.asked_NB.sum(axis=1)
        keys_N = asked_N + self.here_NB.sum(axis=1) + self.hot_NB.sum(axis=1)
        more_N = 3 * prices.asked_row_us * asked_N**2 / np.maximum(keys_N, 1e-9)
        busy_N: Floats = super().busy_us_N(prices, seconds) + more_N
        return busy_N


class CrowdedFleet(VirtualFleet):
    """Nodes that spend what the cost model cannot fit."""

    def _work(self, wanted_NB: Floats, held_NB: NDArray[np.bool_], hot_NB: Floats) -> Work:
        work = super()._work(wanted_NB, held_NB, hot_NB)
        return CrowdedWork(
            **{each.name: getattr(work, each.name) for each in dataclasses.fields(work)}
        )


def customs(seed: int, hours: int) -> list[Floats]:
    """Return, hour by hour, what nodes want of buckets: [N,B]."""
    random = np.random.default_rng(seed)
    first_N = np.arange(NODES) * 2
    found = []
    for _ in range(hours):
        share_NT = np.zeros((NODES, TABLES))
        for n, first in enumerate(first_N):
            main = random.uniform(0.65, 0.95)
            share_NT[n] = (1 - main) / (TABLES - 2)
            share_NT[n, [first, first + 1]] = main / 2
        found.append(KEYS_PER_S / NODES * np.repeat(share_NT, 1 << BITS, axis=1) / (1 << BITS))
        a, b, c, d = random.permutation(NODES)
        first_N[[a, b, c, d]] = first_N[[b, a, d, c]]
    return found


def serve(hours: int, seed: int = 1, fleet_of: type[VirtualFleet] = CrowdedFleet) -> VirtualFleet:
    wanted = customs(seed, hours)
    fleet = fleet_of(
        nodes=make_nodes(NODES, BUCKETS * BUCKET_BYTES),
        tables=make_tables([BITS] * TABLES),
        demand=lambda seconds: wanted[min(int(seconds) // HOUR_S, hours - 1)],
        bytes_B=np.full(BUCKETS, BUCKET_BYTES),
        drift=OPTIONS,
        keys_a_request=1024,
        seed=seed,
    )
    fleet.run(hours * HOUR_S)
    return fleet


def accuracy(gains: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return Spearman's rank correlation and the median error of predicted and measured gains."""
    predicted, measured = zip(*gains, strict=True)
    errors = [abs(one - other) / max(abs(other), 1e-3) for one, other in gains]
    return float(stats.spearmanr(predicted, measured).statistic), float(np.median(errors))


def gains_of(fleet: VirtualFleet, name: str) -> list[tuple[float, float]]:
    """Return the gains by the name of a field, and as measured, of operations in order."""
    return [(getattr(each, name), each.measured_gain) for each in fleet.acted() if each.measured_ms]


def test_the_fifth_prediction_is_nearer_than_the_cost_model() -> None:
    fleet = serve(6)
    predicted, expected = (gains_of(fleet, name) for name in ("predicted_gain", "expected_gain"))
    assert len(expected) >= 5
    assert expected[0] == pytest.approx(predicted[0])
    assert accuracy(expected[3:])[1] < 0.5 * accuracy(predicted[3:])[1]


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_day_of_operations_is_predicted_within_a_quarter(seed: int) -> None:
    fleet = serve(28, seed)
    predicted, expected = (gains_of(fleet, name) for name in ("predicted_gain", "expected_gain"))
    for name, found in (("predicted", predicted), ("expected", expected)):
        rank, error = accuracy(found)
        print(f"seed {seed}, {len(found)} operations, {name}: {rank:.2f}, error {error:.3f}")
    assert len(expected) >= 20
    # By the reads that the planner goes by, predictions were 64 % off, and 12 % once corrected.
    assert accuracy(predicted)[1] <= 0.25
    assert accuracy(expected)[1] <= 0.1
