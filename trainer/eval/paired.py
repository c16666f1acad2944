"""Two models on the same events: differences of their figures, with confidence intervals.

Paired: both score the same events, so what differs between events cancels. Events of one user, or
of one block of time, depend on one another; so users or blocks are resampled whole and not events
(cluster bootstrap: Efron & Tibshirani 1993, "An Introduction to the Bootstrap", chapter 8; Owen &
Eckles 2012, "Bootstrapping data arrays of arbitrary order"). Intervals are percentiles.

Shapes: B events, C clusters (users or blocks), R replicates, G groups of equal scores.
"""

import dataclasses
import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.eval.grouped import user_aucs
from embertide.trainer.eval.metrics import SCORE_FLOOR, Array, entropy

Verdict = Literal["first is better", "second is better", "tie"]

MIN_CLUSTERS = 20
"""With fewer users or blocks an interval says little."""

HIGHER_IS_BETTER = {
    "normalised_entropy": False,
    "log_loss": False,
    "auc": True,
    "gauc": True,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure of two models.

    Attributes:
        first: The figure of one model.
        second: The figure of the other.
        difference: second - first.
        low, high: The ends of the confidence interval of the difference.
        verdict: "tie" where the interval has 0 in it.
    """

    first: float
    second: float
    difference: float
    low: float
    high: float
    verdict: Verdict


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences by figure, and what they were made from."""

    differences: dict[str, Difference]
    events: int
    clusters: int
    replicates: int
    confidence: float
    seed: int


def compare(
    label_B: Array,
    first_B: Array,
    second_B: Array,
    *,
    cluster_B: NDArray[np.int64],
    user_B: NDArray[np.int64] | None = None,
    replicates: int = 1000,
    confidence: float = 0.95,
    seed: int = 1,
) -> Comparison:
    """Compare two models' scores of the same events; equal arguments give equal intervals.

    Args:
        label_B: 0 or 1.
        first_B: Probabilities of one model.
        second_B: The scores of the other.
        cluster_B: The unit that is resampled whole: the user, or the block of time, of each event.
        user_B: Users, for GAUC; None: none.
        replicates: Times that clusters are drawn. The time is replicates times events.
        confidence: Confidence of the intervals.
        seed: Seed of the draws.

    Raises:
        ValueError: There are fewer than 2 clusters, or one class alone.
    """
    positive_B = (label_B != 0).astype(np.float64)
    _, place_B = np.unique(cluster_B, return_inverse=True)
    clusters = int(place_B.max()) + 1 if len(place_B) else 0
    if clusters < 2:
        raise ValueError(f"{clusters} user or block of time; give events of at least 2")
    if not 0 < positive_B.mean() < 1:
        raise ValueError("all labels are one; give events of both")
    sides = [_Side(place_B, clusters, positive_B, score_B) for score_B in (first_B, second_B)]
    gaucs = (
        []
        if user_B is None
        else [
            _UserSums(user_B, place_B, clusters, label_B, score_B)
            for score_B in (first_B, second_B)
        ]
    )
    events_C = np.bincount(place_B, minlength=clusters).astype(np.float64)
    positives_C = np.bincount(place_B, positive_B, clusters)

    def figures(weight_C: NDArray[np.float64]) -> dict[str, tuple[float, float]]:
        events, positives = float(weight_C @ events_C), float(weight_C @ positives_C)
        losses = [float(weight_C @ side.loss_C) / events for side in sides]
        of_mean = entropy(positives / events)
        aucs = [side.auc(weight_C) for side in sides]
        found = {
            "normalised_entropy": (losses[0] / of_mean, losses[1] / of_mean),
            "log_loss": (losses[0], losses[1]),
            "auc": (aucs[0], aucs[1]),
        }
        if gaucs:
            found["gauc"] = (gaucs[0].gauc(weight_C), gaucs[1].gauc(weight_C))
        return found

    exact = figures(np.ones(clusters))
    rng = np.random.default_rng(seed)
    draws: dict[str, list[float]] = {name: [] for name in exact}
    for _ in range(replicates):
        drawn = rng.integers(clusters, size=clusters)
        weight_C = np.bincount(drawn, minlength=clusters).astype(np.float64)
        for name, (one, other) in figures(weight_C).items():
            draws[name].append(other - one)
    tail = (1 - confidence) / 2
    return Comparison(
        differences={
            name: _difference(name, one, other, np.array(draws[name]), tail)
            for name, (one, other) in exact.items()
        },
        events=len(label_B),
        clusters=clusters,
        replicates=replicates,
        confidence=confidence,
        seed=seed,
    )


def _difference(
    name: str, first: float, second: float, draw_R: NDArray[Any], tail: float
) -> Difference:
    draw_R = draw_R[np.isfinite(draw_R)]  # a draw may be of one class
    low, high = np.quantile(draw_R, (tail, 1 - tail)) if len(draw_R) else (math.nan, math.nan)
    verdict: Verdict = "tie"
    if low > 0 or high < 0:
        second_is_better = (low > 0) == HIGHER_IS_BETTER[name]
        verdict = "second is better" if second_is_better else "first is better"
    return Difference(
        first=first,
        second=second,
        difference=second - first,
        low=float(low),
        high=float(high),
        verdict=verdict,
    )


class _Side:
    """One model's losses by cluster, and its events in the order of their scores."""

    def __init__(
        self,
        place_B: NDArray[np.int64],
        clusters: int,
        positive_B: NDArray[np.float64],
        score_B: Array,
    ) -> None:
        p_B = np.clip(score_B.astype(np.float64), SCORE_FLOOR, 1 - SCORE_FLOOR)
        loss_B = -np.where(positive_B != 0, np.log(p_B), np.log1p(-p_B))
        self.loss_C = np.bincount(place_B, loss_B, clusters)
        order_B = np.argsort(score_B, kind="stable")
        sorted_B = score_B[order_B]
        self._first_G = np.flatnonzero(np.append(True, sorted_B[1:] != sorted_B[:-1]))
        self._place_B, self._positive_B = place_B[order_B], positive_B[order_B]

    def auc(self, weight_C: NDArray[np.float64]) -> float:
        """Return the AUC where each cluster's events are there so many times."""
        weight_B = weight_C[self._place_B]
        positive_G = np.add.reduceat(weight_B * self._positive_B, self._first_G)
        negative_G = np.add.reduceat(weight_B * (1 - self._positive_B), self._first_G)
        below_G = np.cumsum(negative_G) - negative_G
        pairs = positive_G.sum() * negative_G.sum()
        return float(positive_G @ (below_G + negative_G / 2) / pairs) if pairs else math.nan


class _UserSums:
    """One model's AUC of each user times the user's events, by cluster.

    A user whose events lie in several clusters counts in each by its part of them.
    """

    def __init__(
        self,
        user_B: NDArray[np.int64],
        place_B: NDArray[np.int64],
        clusters: int,
        label_B: Array,
        score_B: Array,
    ) -> None:
        aucs = user_aucs(user_B, label_B, score_B)
        auc_B = aucs.auc_U[np.searchsorted(aucs.user_U, user_B)]
        counted_B = ~np.isnan(auc_B)
        self._auc_C = np.bincount(place_B, np.where(counted_B, auc_B, 0), clusters)
        self._events_C = np.bincount(place_B, counted_B, clusters)

    def gauc(self, weight_C: NDArray[np.float64]) -> float:
        events = float(weight_C @ self._events_C)
        return float(weight_C @ self._auc_C) / events if events else math.nan
