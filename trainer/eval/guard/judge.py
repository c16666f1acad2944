"""Judging a candidate against the served version, by the same labelled events.

Both score the same events, so what differs between events cancels: the standard error is that of
the paired difference (DeLong, DeLong & Clarke-Pearson 1988). A candidate is withdrawn for a loss
that is both large enough to matter and too large for chance.

Array suffixes: B events, P of them with label 1, N with label 0.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.publish.promotion import Reason

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds on a candidate's losses."""

    auc_loss: float = 0.005
    calibration: float = 1.25  # mean score / mean label, or its inverse
    sigmas: float = 3.0  # standard errors beyond which a loss is no chance
    latency_ratio: float = 3.0  # of p99, against the served version
    latency_ms: float = 20.0  # ... and so much more

    def __post_init__(self) -> None:
        """Refuse what would withdraw everything."""
        for name, least in (("auc_loss", 0), ("calibration", 1), ("sigmas", 0)):
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """The answers of one version."""

    version: int
    score_B: NDArray[np.float32]
    latency_us: NDArray[np.int64]  # by request


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The decision about a candidate, and why."""

    reason: Reason | None  # why it is withdrawn; None: it is promoted
    figures: dict[str, float]

    @property
    def detail(self) -> str:
        """The figures as text."""
        return ", ".join(f"{name} {value:.5g}" for name, value in self.figures.items())


def _placements(label_B: Array, score_B: Array) -> tuple[Array, Array]:
    """Return for each positive the share of negatives below it, and the other way round."""
    positive_P, negative_N = np.sort(score_B[label_B != 0]), np.sort(score_B[label_B == 0])

    def below(sorted_: Array, at: Array) -> Array:
        # Equal scores count a half.
        left, right = (np.searchsorted(sorted_, at, side=side) for side in ("left", "right"))
        return np.asarray((left + right) / (2 * len(sorted_)))

    return below(negative_N, score_B[label_B != 0]), 1 - below(positive_P, score_B[label_B == 0])


def auc_difference(label_B: Array, one_B: Array, other_B: Array) -> tuple[float, float, float]:
    """Return (AUC of one, AUC of the other, standard error of their difference); nan for one class.

    Scores must be finite.
    """
    positives = int(np.count_nonzero(label_B))
    if min(positives, len(label_B) - positives) < 2:
        return math.nan, math.nan, math.nan
    one_P, one_N = _placements(label_B, one_B)
    other_P, other_N = _placements(label_B, other_B)
    variance = np.var(one_P - other_P, ddof=1) / len(one_P)
    variance += np.var(one_N - other_N, ddof=1) / len(one_N)
    return float(one_P.mean()), float(other_P.mean()), math.sqrt(variance)


def _miscalibration(label_B: Array, score_B: Array) -> float:
    """Return |log(mean score / mean label)|."""
    return abs(math.log(max(float(np.mean(score_B)), 1e-9) / float(np.mean(label_B))))


def judge(label_B: Array, candidate: Side, served: Side | None, limits: Limits) -> Verdict:
    """Judge a candidate; without a served version to compare with, by absolute limits alone."""
    share = float(np.mean(~np.isfinite(candidate.score_B)))
    figures: dict[str, float] = {"events": len(label_B), "not_finite": share}
    if share > 0:
        return Verdict(reason="not_finite", figures=figures)
    # The served version may be broken: anything finite is better.
    if served is not None and not np.isfinite(served.score_B).all():
        served = None
    reason: Reason | None = None
    if np.any(label_B):
        wrong = _miscalibration(label_B, candidate.score_B)
        error = math.sqrt((1 - np.mean(label_B)) / np.count_nonzero(label_B))
        before = _miscalibration(label_B, served.score_B) if served is not None else 0.0
        figures |= {"calibration": math.exp(wrong), "calibration_served": math.exp(before)}
        limit = math.log(limits.calibration)
        if wrong > limit and wrong > limits.sigmas * error and wrong > before + limit / 2:
            reason = "calibration"
    if served is None:
        return Verdict(reason=reason, figures=figures)
    auc, auc_served, error = auc_difference(label_B, candidate.score_B, served.score_B)
    figures |= {"auc": auc, "auc_served": auc_served, "error": error}
    loss = auc_served - auc
    if loss > limits.auc_loss and loss > limits.sigmas * error:
        reason = "auc"
    p99_ms, p99_served_ms = (
        float(np.percentile(side.latency_us, 99)) / 1000 for side in (candidate, served)
    )
    figures |= {"p99_ms": p99_ms, "p99_served_ms": p99_served_ms}
    slow = p99_ms > limits.latency_ratio * p99_served_ms
    if reason is None and slow and p99_ms > p99_served_ms + limits.latency_ms:
        reason = "latency"
    return Verdict(reason=reason, figures=figures)
