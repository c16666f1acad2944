"""The day before: what each node and each table wanted at this time of the day.

A day is kept in slots. The forecast is the seasonal naive one: the coming hour will differ from now
as the same hour of the day before did. Nodes and tables are kept apart, N + T numbers a slot, and
their changes are multiplied: the mix of tables at a node is taken to move with its table's total.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SLOTS = 96
DAY_MS = 24 * 3600 * 1000
_SMOOTHED = 0.5  # of a slot's value, what the newest window gives
_RATE_MIN = 1e-9

Floats = NDArray[np.float64]


@dataclasses.dataclass(slots=True)
class _Slot:
    """Rates of a slot of the day, as seen last.

    Attributes:
        day: Number of the day that it was seen on.
        totals: Keys a second by name: of nodes and of tables.
    """

    day: int
    totals: dict[str, float]


class Seasons:
    """Rates of the last day by slot. Bounded: 96 slots of a number a node and a table."""

    def __init__(self, day_ms: int = DAY_MS) -> None:
        """Begin without a day; `day_ms` is its length, shorter where a day is replayed faster."""
        self._day_ms = day_ms
        self._slots: dict[int, _Slot] = {}
        self._before: dict[int, _Slot] = {}

    def _at(self, at_ms: int) -> tuple[int, int]:
        """Return the day and the slot of a time."""
        day, of_day = divmod(at_ms, self._day_ms)
        return day, of_day * SLOTS // self._day_ms

    def take(self, at_ms: int, totals: dict[str, float]) -> None:
        """Add what is wanted now, by name of node or table."""
        day, slot = self._at(at_ms)
        known = self._slots.get(slot)
        if known is None or known.day != day:
            if known is not None:
                self._before[slot] = known
            self._slots[slot] = _Slot(day, dict(totals))
            return
        for name, rate in totals.items():
            before = known.totals.get(name, rate)
            known.totals[name] = before + _SMOOTHED * (rate - before)

    def _day_before(self, at_ms: int) -> _Slot | None:
        """Return the slot of a day before a time; None: it was not seen."""
        day, slot = self._at(at_ms)
        for each in (self._slots.get(slot), self._before.get(slot)):
            if each is not None and each.day == day - 1:
                return each
        return None

    def error(self, at_ms: int, totals: dict[str, float]) -> float:
        """Return the total variation distance between today's mix and that of the day before."""
        before = self._day_before(at_ms)
        if before is None:
            return 0.0
        names = sorted(totals.keys() | before.totals.keys())
        now, then = (
            np.array([of.get(name, 0.0) for name in names]) for of in (totals, before.totals)
        )
        if not now.sum() or not then.sum():
            return 0.0
        return float(np.abs(now / now.sum() - then / then.sum()).sum() / 2)

    def growth(self, at_ms: int, horizon_ms: int, names: Sequence[str]) -> Floats:
        """Return the factor by which each name's rate over the horizon differs from now.

        1 where the day before does not say.
        """
        now = self._day_before(at_ms)
        step_ms = max(1, self._day_ms // SLOTS)
        later = [
            each
            for ahead_ms in range(step_ms, horizon_ms + 1, step_ms)
            if (each := self._day_before(at_ms + ahead_ms)) is not None
        ]
        factors = np.ones(len(names))
        if now is None or not later:
            return factors
        for at, name in enumerate(names):
            today = now.totals.get(name, 0.0)
            ahead = float(np.mean([each.totals.get(name, 0.0) for each in later]))
            if today > _RATE_MIN and ahead > _RATE_MIN:
                factors[at] = ahead / today
        return factors
