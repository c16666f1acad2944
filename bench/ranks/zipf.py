"""Zipf's law over tables of any size: draws in constant memory, and how many are distinct.

The i-th most frequent of R keys has weight i^-s. The first `_HEAD` ranks are exact. The tail's sum
is its integral from half a rank below to half a rank above, which is wrong by less than 10^-6 of it
that far out: 3 * 10^8 rows then cost no more than 3 * 10^5.

Shapes: N draws, H ranks of the head, G pieces of the tail.
"""

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ranks = NDArray[np.int64]

_HEAD = 4096
_PIECES = 512  # of the tail, geometric: frequencies within one differ by a few per cent
# Odd and prime: rank -> key is a bijection that scatters the frequent keys over the table.
_SCATTER = 2_654_435_761


@dataclasses.dataclass(frozen=True)
class Zipf:
    """Zipf's law.

    Attributes:
        rows: How many keys there are.
        exponent: 0 is uniform; more is steeper.
    """

    rows: int
    exponent: float

    def __post_init__(self) -> None:
        """Refuse laws over nothing."""
        if self.rows < 1 or self.exponent < 0:
            raise ValueError(f"{self}: give at least 1 row and an exponent of at least 0")

    @functools.cached_property
    def _head_H(self) -> Floats:
        """Cumulative weights of the head."""
        ranks_H = np.arange(1, min(self.rows, _HEAD) + 1, dtype=np.float64)
        return np.cumsum(ranks_H**-self.exponent)

    @functools.cached_property
    def total(self) -> float:
        """The weights of all keys."""
        return float(self._head_H[-1]) + self._tail(self.rows + 0.5)

    def draw_ranks(self, rng: np.random.Generator, count: int) -> Ranks:
        """Draw ranks, 0 the most frequent."""
        weight_N = rng.random(count) * self.total
        ranks_N = np.searchsorted(self._head_H, weight_N, side="right")
        in_tail_N = ranks_N == len(self._head_H)
        if self.rows > len(self._head_H):
            at_N = self._inverse(weight_N[in_tail_N] - self._head_H[-1])
            ranks_N[in_tail_N] = np.floor(at_N - 0.5)
        return np.minimum(ranks_N, self.rows - 1)

    def draw_keys(self, rng: np.random.Generator, count: int) -> Ranks:
        """Draw keys from 0 to rows - 1, the frequent ones scattered among them."""
        scattered_N: Ranks = self.draw_ranks(rng, count) * _SCATTER % self.rows
        return scattered_N

    def expected_distinct(self, draws: float) -> float:
        """Return how many distinct keys so many draws have in the mean."""
        head_H = np.diff(self._head_H, prepend=0.0) / self.total
        found = float(-np.expm1(draws * np.log1p(-np.minimum(head_H, 1 - 1e-15))).sum())
        if self.rows <= len(self._head_H):
            return found
        edges_G = np.geomspace(len(self._head_H) + 0.5, self.rows + 0.5, _PIECES + 1)
        keys_G = np.diff(edges_G)
        mass_G = np.diff([self._tail(edge) for edge in edges_G]) / self.total
        return found + float((keys_G * -np.expm1(draws * np.log1p(-mass_G / keys_G))).sum())

    def _tail(self, end: float) -> float:
        """Return the weights of the tail's ranks before `end`."""
        begin = len(self._head_H) + 0.5
        if self.rows <= len(self._head_H):
            return 0.0
        if self.exponent == 1:
            return math.log(end / begin)
        power = 1 - self.exponent
        return float((end**power - begin**power) / power)

    def _inverse(self, weight_N: Floats) -> Floats:
        """Return where the tail's weights reach `weight_N`."""
        begin = len(self._head_H) + 0.5
        if self.exponent == 1:
            return np.asarray(begin * np.exp(weight_N))
        power = 1 - self.exponent
        return np.asarray((begin**power + power * weight_N) ** (1 / power))
