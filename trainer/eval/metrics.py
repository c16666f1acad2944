"""AUC, log loss, normalised entropy, calibration: of events, exact, or of sums of a fixed size.

docs/evaluation.md has the formulas and what each figure is for. Array suffixes: B events, S bins of
scores.
"""

import datetime
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide._common.auc import auc_error_of_counts, auc_of_counts, counts_by_score

HOUR_MS = 3_600_000
DAY_HOURS = 24
# Log loss of a certain and wrong score would be infinite; float32 cannot tell 1 - 1e-7 from 1.
SCORE_FLOOR = 1e-7

_DAYS_OF_1985 = 5479  # days count from 1970 where events have the clock's time

Array = NDArray[Any]


def day_name(day: int) -> str:
    """Return the date of a day since 1970; days of small numbers have no other name."""
    if day < _DAYS_OF_1985:
        return f"day {day}"
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=day)).isoformat()


def auc(label_B: Array, score_B: Array) -> float:
    """Area under the ROC curve, exact; equal scores count a half.

    Args:
        label_B: 0 or 1.
        score_B: Any scale; only the order counts.

    Returns:
        Probability that a random positive scores above a random negative; nan where one class is
        missing.

    Raises:
        ValueError: Lengths differ, or a score is nan.
    """
    check_scores(label_B, score_B)
    return auc_of_counts(*counts_by_score(label_B, score_B))


def auc_error(label_B: Array, score_B: Array) -> float:
    """Standard error of `auc` by DeLong et al. 1988; nan with fewer than two events of a class.

    Raises:
        ValueError: As `auc`.
    """
    check_scores(label_B, score_B)
    return auc_error_of_counts(*counts_by_score(label_B, score_B))


def log_loss(label_B: Array, score_B: Array) -> float:
    """Mean negative log likelihood in nats, scores held `SCORE_FLOOR` away from 0 and 1.

    Args:
        label_B: 0 or 1.
        score_B: Probabilities.

    Returns:
        The mean; nan without events.

    Raises:
        ValueError: Lengths differ, or a score is nan or outside 0 to 1.
    """
    check_scores(label_B, score_B)
    if len(score_B) == 0:
        return math.nan
    if score_B.min() < 0 or score_B.max() > 1:
        raise ValueError(
            f"scores reach from {score_B.min()} to {score_B.max()}; give probabilities"
        )
    p_B = np.clip(score_B.astype(np.float64), SCORE_FLOOR, 1 - SCORE_FLOOR)
    return float(-np.mean(np.where(label_B != 0, np.log(p_B), np.log1p(-p_B))))


def entropy(label_mean: float) -> float:
    """Log loss, in nats, of one who scores every event as the mean label; nan for one class."""
    p = label_mean
    return -(p * math.log(p) + (1 - p) * math.log1p(-p)) if 0 < p < 1 else math.nan


def normalised_entropy(label_B: Array, score_B: Array) -> float:
    """Log loss over the entropy of the mean label: below 1 the scores say more than the mean does.

    He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", equation 1.
    Unlike log loss it can be compared between slices whose mean labels differ.

    Args:
        label_B: 0 or 1.
        score_B: Probabilities.

    Returns:
        The ratio; nan where one class is missing.

    Raises:
        ValueError: As `log_loss`.
    """
    loss = log_loss(label_B, score_B)
    return loss / entropy(float(np.mean(label_B != 0))) if len(label_B) else math.nan


def calibration(label_B: Array, score_B: Array) -> float:
    """Mean score over mean label: above 1 the model promises too much.

    Args:
        label_B: 0 or 1.
        score_B: Probabilities.

    Returns:
        The ratio; nan without a positive.

    Raises:
        ValueError: Lengths differ, or a score is nan.
    """
    check_scores(label_B, score_B)
    positives = float(np.sum(label_B != 0))
    return float(np.sum(score_B, dtype=np.float64)) / positives if positives else math.nan


def calibration_curve(
    label_B: Array, score_B: Array, *, bins: int = 20
) -> tuple[NDArray[np.int64], Array, Array]:
    """Mean score and mean label of bins that hold equally many events, ascending by score.

    Args:
        label_B: 0 or 1.
        score_B: Probabilities.
        bins: At most so many; fewer where there are fewer events.

    Returns:
        (events_S, mean score_S, mean label_S); empty without events.

    Raises:
        ValueError: As `auc`.
    """
    check_scores(label_B, score_B)
    order_B = np.argsort(score_B, kind="stable")
    parts = [part for part in np.array_split(order_B, bins) if len(part)]
    events_S = np.array([len(part) for part in parts], np.int64)
    score_S = np.array([np.mean(score_B[part], dtype=np.float64) for part in parts])
    label_S = np.array([np.mean(label_B[part] != 0) for part in parts])
    return events_S, score_S, label_S


def expected_calibration_error(label_B: Array, score_B: Array, *, bins: int = 20) -> float:
    """Mean |mean score - mean label| over bins of equally many events; nan without events.

    Naeini et al. 2015, "Obtaining Well Calibrated Probabilities Using Bayesian Binning", with bins
    by rank: with bins of equal width nearly all events of a low click rate would be in one. Chance
    alone gives about sqrt(label mean * bins / events), so it is never 0.

    Raises:
        ValueError: As `auc`.
    """
    events_S, score_S, label_S = calibration_curve(label_B, score_B, bins=bins)
    if not len(events_S):
        return math.nan
    return float(np.average(np.abs(score_S - label_S), weights=events_S))


def check_scores(label_B: Array, score_B: Array) -> None:
    """Refuse labels and scores that are not two equal vectors, or scores that are nan.

    Raises:
        ValueError: They are.
    """
    if label_B.shape != score_B.shape or label_B.ndim != 1:
        raise ValueError(
            f"label has shape {label_B.shape} and score {score_B.shape}; give two equal vectors"
        )
    if np.isnan(score_B).any():
        raise ValueError(f"{int(np.isnan(score_B).sum())} scores are nan; the model diverged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a stretch of events; nan where a figure does not exist.

    Attributes:
        events: Their number.
        auc: Area under the ROC curve.
        log_loss: In nats.
        calibration: Mean score over mean label.
        label_mean: Share of events with label 1; nan in checkpoints of builds that did not note it.
        auc_error: Standard error of the AUC (`auc_error`); nan there, too.
    """

    events: int
    auc: float
    log_loss: float
    calibration: float
    label_mean: float = math.nan
    auc_error: float = math.nan

    @property
    def auc_interval(self) -> float:
        """How far the AUC may lie from the one of infinitely many such events, 95 times of 100."""
        return _INTERVAL * self.auc_error

    @property
    def is_unstable(self) -> bool:
        """Whether the AUC is a matter of chance, as of few events, or few of one label."""
        if math.isnan(self.auc_error):  # needs two events of either label
            positives = self.label_mean * self.events
            return bool(positives < 1.5 or self.events - positives < 1.5)
        return self.auc_interval > _STABLE

    @property
    def normalised_entropy(self) -> float:
        """Log loss over the entropy of the mean label (`normalised_entropy`)."""
        return self.log_loss / entropy(self.label_mean)

    def as_json(self) -> dict[str, float]:
        """Return the figures that exist, by name."""
        named = asdict(self) | {"normalised_entropy": self.normalised_entropy}
        return {name: value for name, value in named.items() if not math.isnan(value)}


def summarise(label_B: Array, score_B: Array) -> Summary:
    """All figures of one stretch of events; errors as in `log_loss`."""
    loss = log_loss(label_B, score_B)
    counts = counts_by_score(label_B, score_B)
    return Summary(
        events=len(label_B),
        auc=auc_of_counts(*counts),
        auc_error=auc_error_of_counts(*counts),
        log_loss=loss,
        calibration=calibration(label_B, score_B),
        label_mean=float(np.mean(label_B != 0)) if len(label_B) else math.nan,
    )


# Scores are told apart by their log odds, in bins of equal width: a click rate of 0.01 has as many
# bins as one of 0.5.
_MAX_LOGIT = math.log(1 / SCORE_FLOOR - 1)
LIVE_BINS = 1 << 16

# Half of the interval in which 95 of 100 AUCs lie, in standard errors; and wider than this, an AUC
# is a matter of chance.
_INTERVAL = 1.96
_STABLE = 0.05


class Binned:
    """The figures of any number of events in memory of a fixed size. Used by one thread.

    All are exact but the AUC: scores in one bin of log odds count as equal.

    Args:
        bins: The number of bins of scores, 16 bytes each. 65,536 lie 0.0005 apart in log odds, 512
            lie 0.06.
    """

    def __init__(self, bins: int = LIVE_BINS) -> None:
        """Begin with no events."""
        self.counts_2S = np.zeros((2, bins), np.int64)
        self.score = self.loss = 0.0  # sums

    @property
    def events(self) -> int:
        """Events added."""
        return int(self.counts_2S.sum())

    def add(self, label_B: Array, score_B: Array) -> None:
        """Add events; scores are probabilities, which is not looked at."""
        p_B = np.clip(score_B.astype(np.float64), SCORE_FLOOR, 1 - SCORE_FLOOR)
        log_B, log_not_B = np.log(p_B), np.log1p(-p_B)
        bins = self.counts_2S.shape[1]
        place_B = (log_B - log_not_B + _MAX_LOGIT) * (bins / (2 * _MAX_LOGIT))
        bin_B = np.clip(place_B.astype(np.int64), 0, bins - 1)
        positive_B = label_B != 0
        np.add.at(self.counts_2S, (positive_B.astype(np.int64), bin_B), 1)
        self.score += float(np.sum(score_B, dtype=np.float64))
        self.loss -= float(np.sum(np.where(positive_B, log_B, log_not_B)))

    def merge(self, other: "Binned") -> None:
        """Add the events of another, which has as many bins."""
        self.counts_2S += other.counts_2S
        self.score += other.score
        self.loss += other.loss

    def auc(self) -> tuple[float, float]:
        """Return the AUC if the scores of a bin were equal, and by how much it may be wrong."""
        negatives_S, positives_S = self.counts_2S
        pairs = int(negatives_S.sum()) * int(positives_S.sum())
        if pairs == 0:
            return math.nan, math.nan
        halves = int((positives_S * negatives_S).sum()) / 2
        return auc_of_counts(positives_S, negatives_S), halves / pairs

    def summary(self) -> Summary:
        """Return all figures."""
        events, positives = self.events, int(self.counts_2S[1].sum())
        return Summary(
            events=events,
            auc=self.auc()[0],
            auc_error=auc_error_of_counts(self.counts_2S[1], self.counts_2S[0]),
            log_loss=self.loss / events if events else math.nan,
            calibration=self.score / positives if positives else math.nan,
            label_mean=positives / events if events else math.nan,
        )
