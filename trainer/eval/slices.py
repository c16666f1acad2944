"""Figures by the values of a column: in bounded memory for a stream, or exact for a file.

Shapes: B events, V values, S bins of scores.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import HOUR_OF_DAY
from embertide.trainer.data.base import Batch
from embertide.trainer.eval.metrics import DAY_HOURS, HOUR_MS, Array, Binned, Summary, summarise

MAX_TRACKED = 256
"""Values of a slice that a stream's figures tell apart; 8 KiB each."""

_BINS = 512

Keys = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SliceTable:
    """Figures of one slice.

    Attributes:
        values: Figures by value, those with the most events first.
        rest: The figures of all other values together; None: there are no others.
        rest_values: The number of those; None: not known, as not all were told apart.
    """

    values: dict[int, Summary]
    rest: Summary | None
    rest_values: int | None

    def named(self) -> dict[str, Summary]:
        """Return all figures by what they are called, the rest last."""
        rest = {} if self.rest is None else {"rest": self.rest}
        return {str(value): figures for value, figures in self.values.items()} | rest


def slice_column(name: str, features: Sequence[str], batch: Batch) -> Keys:
    """Return each event's value of a slice: a feature's key, or the hour of its time."""
    if name == HOUR_OF_DAY and name not in features:
        return batch.ts_ms_B // HOUR_MS % DAY_HOURS
    return batch.keys_BF[:, features.index(name)]


def slice_table(value_B: Keys, label_B: Array, score_B: Array, *, most: int) -> SliceTable:
    """Return the exact figures by value; errors as `summarise`."""
    order_B = np.argsort(value_B, kind="stable")
    value_V, first_V, events_V = np.unique(value_B[order_B], return_index=True, return_counts=True)
    largest_V = np.argsort(-events_V, kind="stable")
    values = {}
    for v in largest_V[:most].tolist():
        part = order_B[first_V[v] : first_V[v] + events_V[v]]
        values[int(value_V[v])] = summarise(label_B[part], score_B[part])
    rest = None
    if len(value_V) > most:
        rest_B = ~np.isin(value_B, value_V[largest_V[:most]])
        rest = summarise(label_B[rest_B], score_B[rest_B])
    return SliceTable(values=values, rest=rest, rest_values=max(0, len(value_V) - most))


class StreamSlice:
    """Figures of a stream by one column's values. Used by one thread.

    The first `MAX_TRACKED` values are told apart, all later ones are one. AUCs take scores as
    equal that are within 0.06 in log odds; all other figures are exact.
    """

    def __init__(self) -> None:
        """Begin with no events."""
        self._values: dict[int, Binned] = {}
        self._others: Binned | None = None

    def add(self, value_B: Keys, label_B: Array, score_B: Array) -> None:
        """Add events."""
        order_B = np.argsort(value_B, kind="stable")
        value_V, first_V = np.unique(value_B[order_B], return_index=True)
        for value, part in zip(value_V.tolist(), np.split(order_B, first_V[1:]), strict=True):
            self._of(value).add(label_B[part], score_B[part])

    def _of(self, value: int) -> Binned:
        found = self._values.get(value)
        if found is None and len(self._values) < MAX_TRACKED:
            found = self._values[value] = Binned(_BINS)
        if found is None:
            found = self._others = self._others or Binned(_BINS)
        return found

    def table(self, most: int) -> SliceTable:
        """Return the figures of the values with the most events, and of all others together."""
        by_events = sorted(self._values, key=lambda value: -self._values[value].events)
        shown, more = by_events[:most], by_events[most:]
        rest = None
        if more or self._others is not None:
            rest = Binned(_BINS)
            for each in (*(self._values[value] for value in more), self._others):
                if each is not None:
                    rest.merge(each)
        return SliceTable(
            values={value: self._values[value].summary() for value in shown},
            rest=None if rest is None else rest.summary(),
            rest_values=len(more) if self._others is None else None,
        )

    def state(self) -> dict[str, Array]:
        """Return copies of what `from_state` makes an equal one of; of the others, the last."""
        all_V = [*self._values.values(), *([] if self._others is None else [self._others])]
        return {
            "value": np.array(list(self._values), np.int64),
            "counts": np.array([each.counts_2S for each in all_V]).reshape(-1, 2, _BINS),
            "sums": np.array([(each.score, each.loss) for each in all_V]).reshape(-1, 2),
        }

    @classmethod
    def from_state(cls, arrays: dict[str, Any]) -> "StreamSlice":
        """Make one of what `state` returned."""
        made = cls()
        found = []
        for counts_2S, (score, loss) in zip(arrays["counts"], arrays["sums"], strict=True):
            each = Binned(_BINS)
            each.counts_2S, each.score, each.loss = counts_2S.copy(), float(score), float(loss)
            found.append(each)
        values = arrays["value"].tolist()
        made._values = dict(zip(values, found, strict=False))
        made._others = found[len(values)] if len(found) > len(values) else None
        return made
