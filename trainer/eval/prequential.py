"""The prequential figures of a run, by hour, day and fifth of its stream.

Prequential: every batch is scored before it is trained on, so a day's figure tests the model on
events that it had not seen. A run that shows its progress asks for the figures of the current day
twice a second: `live`, which costs the same however many events there were, and whose AUC is not
exact; nor is that of a fifth. All other figures are. Array suffixes: B events.
"""

import copy
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.eval.fifths import Fifths
from embertide.trainer.eval.metrics import (
    DAY_HOURS,
    HOUR_MS,
    Array,
    Binned,
    Summary,
    check_scores,
    summarise,
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
    _fifths: Fifths = field(default_factory=Fifths, compare=False)
    _live: _Live = field(default_factory=_Live, compare=False)  # of what `_open` holds

    def frozen(self) -> "Prequential":
        """Return it as it is now, for who writes it down: scores are shared, not copied.

        The arrays of scores are never written to, so a day of them costs nothing here. Nothing may
        be added to what is returned.
        """
        found = copy.copy(self)
        found._hours, found._days = dict(self._hours), dict(self._days)
        found._open = {hour: list(parts) for hour, parts in self._open.items()}
        found._fifths = self._fifths.frozen()
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
        check_scores(label_B, score_B)
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
        self._fifths.add(label_u8_B, score_f32_B)
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
        fifths, counts = self._fifths.state()
        arrays |= {f"fifths.{name}": array for name, array in counts.items()}
        figures = {"hours": hours, "days": days, "open": list(self._open), "fifths": fifths}
        return figures, arrays

    @classmethod
    def from_state(cls, figures: dict[str, Any], arrays: dict[str, Array]) -> Self:
        """Make one of what `state` returned."""
        hours, days = (
            {at: Summary(**each) for at, each in figures[name]} for name in ("hours", "days")
        )
        open_ = {
            hour: [(arrays[f"label.{hour}"], arrays[f"score.{hour}"])] for hour in figures["open"]
        }
        counts = {
            name.removeprefix("fifths."): array
            for name, array in arrays.items()
            if name.startswith("fifths.")
        }
        return cls(hours, days, open_, Fifths.from_state(figures.get("fifths", {}), counts))

    def live_auc(self) -> tuple[float, float]:
        """AUC of the current day, and by how much the exact one may differ; nan without one.

        Pairs of scores in the same bin of `Binned` count as equal: half of their share is the
        bound.
        """
        return self._live.binned.auc()

    def live(self) -> Summary:
        """Figures of the current day: the AUC as `live_auc` has it, the others exact."""
        return self._live.binned.summary()

    def fifths(self) -> list[Summary]:
        """Figures of the fifths of all events added, oldest first (`Fifths.figures`).

        Of a run that goes on from a checkpoint of a build that did not note them, of the events
        since.
        """
        return self._fifths.figures()

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
