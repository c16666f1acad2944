"""AUC, log loss, normalised entropy, calibration, exact; their prequential accumulation by day.

A run that shows how it goes asks for the figures of the current day twice a second: `live`, which
costs the same however many events there were, and whose AUC is not exact. All other figures are.
docs/evaluation.md has the formulas and what each figure is for.

Prequential: every batch is scored before it is trained on, so a day's figure tests the model on
events that it had not seen. Array suffixes: B events, G groups of equal score.
"""

import copy
import datetime
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

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
    _check(label_B, score_B)
    order_B = np.argsort(score_B, kind="stable")
    sorted_B = score_B[order_B]
    first_G = np.flatnonzero(np.append(True, sorted_B[1:] != sorted_B[:-1])[: len(sorted_B)])
    # In integers, so that no rounding creeps in however many events there are.
    positive_B = (label_B[order_B] != 0).astype(np.int64)
    positive_G = np.add.reduceat(positive_B, first_G) if len(first_G) else positive_B
    negative_G = np.diff(np.append(first_G, len(sorted_B))) - positive_G
    below_G = np.cumsum(negative_G) - negative_G
    pairs = int(positive_G.sum()) * int(negative_G.sum())
    if pairs == 0:
        return math.nan
    return int((positive_G * (2 * below_G + negative_G)).sum()) / (2 * pairs)


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
    _check(label_B, score_B)
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
    _check(label_B, score_B)
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
    _check(label_B, score_B)
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


def _check(label_B: Array, score_B: Array) -> None:
    if label_B.shape != score_B.shape or label_B.ndim != 1:
        raise ValueError(
            f"label has shape {label_B.shape} and score {score_B.shape}; give two equal vectors"
        )
    if np.isnan(score_B).any():
        raise ValueError(f"{int(np.isnan(score_B).sum())} scores are nan; the model diverged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a stretch of events came to; nan where a figure does not exist.

    Attributes:
        events: Their number.
        auc: Area under the ROC curve.
        log_loss: In nats.
        calibration: Mean score over mean label.
        label_mean: Share of events with label 1; nan in checkpoints of builds that did not note it.
    """

    events: int
    auc: float
    log_loss: float
    calibration: float
    label_mean: float = math.nan

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
    return Summary(
        events=len(label_B),
        auc=auc(label_B, score_B),
        log_loss=log_loss(label_B, score_B),
        calibration=calibration(label_B, score_B),
        label_mean=float(np.mean(label_B != 0)) if len(label_B) else math.nan,
    )


# Scores are told apart by their log odds, in bins of equal width: a click rate of 0.01 has as many
# bins as one of 0.5.
_MAX_LOGIT = math.log(1 / SCORE_FLOOR - 1)
LIVE_BINS = 1 << 16


class Binned:
    """The figures of any number of events in memory of a fixed size. Used by one thread.

    All are exact but the AUC: scores in one bin of log odds count as equal.

    Args:
        bins: Of the scores, 16 bytes each. 65,536 lie 0.0005 apart in log odds, 512 lie 0.06.
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
        negative_S, positive_S = self.counts_2S.astype(np.float64)
        pairs = negative_S.sum() * positive_S.sum()
        if pairs == 0:
            return math.nan, math.nan
        below_S = np.cumsum(negative_S) - negative_S
        halves = float(positive_S @ negative_S) / 2
        return (float(positive_S @ below_S) + halves) / pairs, halves / pairs

    def summary(self) -> Summary:
        """Return all figures."""
        events, positives = self.events, int(self.counts_2S[1].sum())
        return Summary(
            events=events,
            auc=self.auc()[0],
            log_loss=self.loss / events if events else math.nan,
            calibration=self.score / positives if positives else math.nan,
            label_mean=positives / events if events else math.nan,
        )


@dataclass(slots=True)
class _Live:
    """Events of one day."""

    day: int | None = None
    binned: Binned = field(default_factory=Binned)

    def add(self, day: int, label_B: Array, score_B: Array) -> None:
        if day != self.day:
            self.day, self.binned = day, Binned()
        self.binned.add(label_B, score_B)


@dataclass(slots=True)
class Prequential:
    """Accumulates scores made before training; part of a checkpoint, hence `state`.

    Hours and days count from ts 0. Scores are held for the current day alone, at 5 bytes an
    event; the first event of a later day folds the days before into their figures.
    """

    _hours: dict[int, Summary] = field(default_factory=dict)
    _days: dict[int, Summary] = field(default_factory=dict)
    _open: dict[int, list[tuple[Array, Array]]] = field(default_factory=dict)
    _live: _Live = field(default_factory=_Live, compare=False)  # of what `_open` holds

    def frozen(self) -> "Prequential":
        """Return it as it is now, for who writes it down: scores are shared, not copied.

        The arrays of scores are never written to, so a day of them costs nothing here. Nothing may
        be added to what is returned.
        """
        found = copy.copy(self)
        found._hours, found._days = dict(self._hours), dict(self._days)
        found._open = {hour: list(parts) for hour, parts in self._open.items()}
        return found

    def __post_init__(self) -> None:
        """Count what is held already."""
        for hour, parts in self._open.items():
            for label_B, score_B in parts:
                self._live.add(hour // DAY_HOURS, label_B, score_B)

    def add(self, ts_ms_B: NDArray[np.int64], label_B: Array, score_B: Array) -> None:
        """Adds a batch that was scored before it was trained on.

        Args:
            ts_ms_B: Times in milliseconds, ascending.
            label_B: 0 or 1.
            score_B: Probabilities; kept as float32.

        Raises:
            ValueError: Shapes differ, a score is no probability, ts descends within the batch, or
                an event belongs to a day before that of the batches added.
        """
        _check(label_B, score_B)
        if ts_ms_B.shape != label_B.shape:
            raise ValueError(f"ts_ms has shape {ts_ms_B.shape}, label {label_B.shape}; give equal")
        if len(ts_ms_B) == 0:
            return
        if score_B.min() < 0 or score_B.max() > 1:
            raise ValueError(f"scores reach from {score_B.min()} to {score_B.max()}; not in [0, 1]")
        if (np.diff(ts_ms_B) < 0).any():
            raise ValueError("ts_ms descends; add events in the order of the stream")
        hour_B = ts_ms_B // HOUR_MS
        first_day = int(hour_B[0]) // DAY_HOURS
        latest = max([*self._days, *(hour // DAY_HOURS for hour in self._open)], default=first_day)
        if first_day < latest:
            raise ValueError(f"an event of day {first_day} comes after day {latest}; add in order")
        # Copies: a batch may be a view that keeps a whole chunk of input in memory.
        label_u8_B, score_f32_B = label_B.astype(np.uint8), score_B.astype(np.float32)
        for hour in np.unique(hour_B).tolist():
            begin, end = np.searchsorted(hour_B, [hour, hour + 1])
            self._fold_before(hour // DAY_HOURS)
            part = (label_u8_B[begin:end], score_f32_B[begin:end])
            self._open.setdefault(hour, []).append(part)
            self._live.add(hour // DAY_HOURS, *part)

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return what `from_state` makes an equal one of: figures, for JSON, and arrays by name."""
        hours, days = (
            [[at, asdict(figures)] for at, figures in each.items()]
            for each in (self._hours, self._days)
        )
        arrays: dict[str, Array] = {}
        for hour, parts in self._open.items():
            arrays[f"label.{hour}"], arrays[f"score.{hour}"] = _join(parts)
        return {"hours": hours, "days": days, "open": list(self._open)}, arrays

    @classmethod
    def from_state(cls, figures: dict[str, Any], arrays: dict[str, Array]) -> Self:
        """Make one of what `state` returned."""
        hours, days = (
            {at: Summary(**each) for at, each in figures[name]} for name in ("hours", "days")
        )
        open_ = {
            hour: [(arrays[f"label.{hour}"], arrays[f"score.{hour}"])] for hour in figures["open"]
        }
        return cls(hours, days, open_)

    def live_auc(self) -> tuple[float, float]:
        """AUC of the current day, and by how much the exact one may differ; nan without one.

        Pairs of scores in the same bin of `Binned` count as equal: half of their share is the
        bound.
        """
        return self._live.binned.auc()

    def live(self) -> Summary:
        """Figures of the current day: the AUC as `live_auc` has it, the others exact."""
        return self._live.binned.summary()

    def hourly(self) -> dict[int, float]:
        """AUC by hour, for hours that had events."""
        return {hour: figures.auc for hour, figures in self._all_hours().items()}

    def daily(self) -> dict[int, float]:
        """AUC by day, for days that had events; the current day as far as it went."""
        return {day: figures.auc for day, figures in self.daily_summaries().items()}

    def daily_summaries(self) -> dict[int, Summary]:
        """Every figure by day."""
        days = dict(self._days)
        for day in sorted({hour // DAY_HOURS for hour in self._open}):
            days[day] = summarise(*self._joined(day))
        return days

    def mean_daily(self, first: int, last: int) -> float:
        """Mean of the daily AUC from day `first` to day `last`, both counted.

        Days without an AUC (no events, or of one class) are left out; nan if that leaves none.
        """
        daily = self.daily()
        found = [
            daily[day] for day in range(first, last + 1) if not math.isnan(daily.get(day, math.nan))
        ]
        return sum(found) / len(found) if found else math.nan

    def _all_hours(self) -> dict[int, Summary]:
        current = {hour: summarise(*_join(parts)) for hour, parts in self._open.items()}
        return {**self._hours, **current}

    def _fold_before(self, day: int) -> None:
        complete = sorted({h // DAY_HOURS for h in self._open if h // DAY_HOURS < day})
        for done in complete:
            self._days[done] = summarise(*self._joined(done))
            for hour in [h for h in self._open if h // DAY_HOURS == done]:
                self._hours[hour] = summarise(*_join(self._open.pop(hour)))

    def _joined(self, day: int) -> tuple[Array, Array]:
        hours = [hour for hour in self._open if hour // DAY_HOURS == day]
        return _join([part for hour in hours for part in self._open[hour]])


def _join(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    label_B = np.concatenate([label for label, _ in parts])
    return label_B, np.concatenate([score for _, score in parts])
