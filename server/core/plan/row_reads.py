"""The reads of a table's rows: a Zipf law fitted to the share of its hottest keys.

Nodes report their hottest keys, and how many rows there are. Of the laws reads(rank) ~ rank^-s over
those rows, one gives the hottest keys the share that was measured: s = 0 where all rows are alike.
"""

import functools

import numpy as np
from numpy.typing import NDArray

from embertide.server.core.plan.workload import TableTraits

Floats = NDArray[np.float64]
_EXPONENT_MAX = 4.0
_EXACT_RANKS = 1000  # beyond, sums of powers are integrals


def _sum_of_powers(exponent: float, ranks: float) -> float:
    """Return sum of i^-exponent for i = 1 .. ranks, which need not be whole."""
    exact = int(min(ranks, _EXACT_RANKS))
    total = float((np.arange(1, exact + 1, dtype=np.float64) ** -exponent).sum())
    if ranks <= exact:
        return total
    # By the midpoint rule, from half a rank after the last exact one.
    low, high = exact + 0.5, ranks + 0.5
    if abs(exponent - 1) < 1e-9:
        return total + float(np.log(high / low))
    return total + float((high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent))


def share_of_first(exponent: float, keys: float, rows: float) -> float:
    """Return the share of reads that the `keys` hottest of `rows` rows get."""
    if keys <= 0:
        return 0.0
    return min(1.0, _sum_of_powers(exponent, min(keys, rows)) / _sum_of_powers(exponent, rows))


@functools.lru_cache(maxsize=4096)
def fit_exponent(rows: float, head_keys: int, head_share: float) -> float:
    """Return the exponent that gives the hottest keys their share."""
    if not 0 < head_keys < rows:
        return 0.0
    low, high = 0.0, _EXPONENT_MAX
    for _ in range(40):
        middle = (low + high) / 2
        if share_of_first(middle, head_keys, rows) < head_share:
            low = middle
        else:
            high = middle
    return low


class RowReads:
    """The law of one table."""

    def __init__(self, traits: TableTraits) -> None:
        """Fit it."""
        self.rows = max(1.0, traits.rows)
        self.exponent = fit_exponent(self.rows, traits.head_keys, traits.head_share)
        self._total = _sum_of_powers(self.exponent, self.rows)

    def first(self, keys: float) -> float:
        """Return the share of reads that the hottest keys get."""
        return share_of_first(self.exponent, keys, self.rows)

    def of_rank(self, rank: float) -> float:
        """Return the share of reads that one key of a rank gets, from 1 on."""
        return float(max(rank, 1.0) ** -self.exponent / self._total)

    def rank_of(self, share: float) -> float:
        """Return how many keys get at least such a share of the reads each."""
        if share * self._total >= 1:
            return 0.0
        if self.exponent < 1e-6 or share * self._total <= self.rows**-self.exponent:
            return self.rows
        return float(min(self.rows, (share * self._total) ** (-1 / self.exponent)))
