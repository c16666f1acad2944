"""Accepted rows, and how they are cut into batches: the step after `assemble.py`.

Array suffix: N rows held.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.data.bags import Bags
from embertide.trainer.data.base import MAX_GROUP, Batch
from embertide.trainer.errors import DataError


@dataclass(frozen=True, slots=True)
class Rows:
    """Accepted rows: the arrays of `Batch`, in its order, ids last if there are any; its lists.

    Of a schema with further labels or weights, the labels have columns: the label, those, weights.
    """

    arrays: tuple[NDArray[Any], ...]
    lists: Mapping[int, Bags]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.arrays[0])

    @property
    def events(self) -> NDArray[np.int64]:
        """Event index of each."""
        return self.arrays[0]

    @property
    def times_ms(self) -> NDArray[np.int64]:
        """Time of each in milliseconds."""
        return self.arrays[1]

    def cut(self, begin: int, end: int) -> "Rows":
        """Return rows `begin` to `end`."""
        return Rows(
            tuple(array[begin:end] for array in self.arrays),
            {f: bags.cut(begin, end) for f, bags in self.lists.items()},
        )

    def where(self, keep_N: NDArray[np.bool_]) -> "Rows":
        """Return the rows that are to be kept."""
        if keep_N.all():
            return self
        return Rows(
            tuple(array[keep_N] for array in self.arrays),
            {f: bags.where(keep_N) for f, bags in self.lists.items()},
        )

    def at(self, row_R: NDArray[np.int64]) -> "Rows":
        """Return these rows in this order."""
        return Rows(
            tuple(array[row_R] for array in self.arrays),
            {f: bags.at(row_R) for f, bags in self.lists.items()},
        )

    def at_times(self, ts_ms_N: NDArray[np.int64]) -> "Rows":
        """Return them with other times."""
        return Rows((self.arrays[0], ts_ms_N, *self.arrays[2:]), self.lists)

    def batch(self, next_offset: int) -> Batch:
        """Return all of them as a batch."""
        event_B, ts_ms_B, keys_BF, dense_BD, label_B, *ids = self.arrays
        more: dict[str, Any] = {}
        if label_B.ndim > 1:
            label_BL, label_B = label_B, np.ascontiguousarray(label_B[:, 0])
            more = {"weight_B": np.ascontiguousarray(label_BL[:, -1])}
            if label_BL.shape[1] > 2:
                more["more_labels_BL"] = label_BL[:, 1:-1]
        return Batch(
            first=int(event_B[0]),
            next_offset=next_offset,
            event_B=event_B,
            ts_ms_B=ts_ms_B,
            keys_BF=keys_BF,
            dense_BD=dense_BD,
            label_B=label_B,
            lists=self.lists,
            id_B=ids[0] if ids else None,
            **more,
        )


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        tuple(np.concatenate(a) for a in zip(*(p.arrays for p in parts), strict=True)),
        {f: Bags.concatenated([part.lists[f] for part in parts]) for f in parts[0].lists},
    )


class Cutter:
    """Cuts accepted rows into batches at the bounds that `EventSource` promises."""

    def __init__(self, path: str, batch_size: int) -> None:
        """Holds nothing yet; `path` is for messages."""
        self._path = path
        self._batch_size = batch_size
        self._parts: list[Rows] = []
        self._held = 0

    @property
    def held(self) -> int:
        """Rows of the batch that may not be complete yet."""
        return self._held

    def add(self, rows: Rows) -> Iterator[Batch]:
        """Takes the next rows and yields the batches that are complete with them."""
        if not len(rows):
            return
        self._parts.append(rows)
        self._held += len(rows)
        # A batch is known to be complete only once the row after it is there.
        if self._held <= self._batch_size:
            return
        held, begin = concatenate(self._parts), 0
        while (end := self._end(held.times_ms, begin)) < len(held):
            yield self._checked(held.cut(begin, end)).batch(int(held.events[end]))
            begin = end
        self._parts = [self._checked(held.cut(begin, len(held)))]
        self._held = len(held) - begin

    def finish(self, end: int) -> Iterator[Batch]:
        """Yields what is held as the last batch before event index `end`."""
        if self._held:
            batch = self._checked(concatenate(self._parts)).batch(end)
            self._parts, self._held = [], 0
            yield batch

    def _end(self, ts_ms_N: NDArray[np.int64], begin: int) -> int:
        last = begin + self._batch_size - 1
        if last >= len(ts_ms_N):
            return len(ts_ms_N)
        return last + int(np.searchsorted(ts_ms_N[last:], ts_ms_N[last], side="right"))

    def _checked(self, rows: Rows) -> Rows:
        ts_ms_N = rows.times_ms
        if len(rows) > MAX_GROUP:
            same_N = ts_ms_N[MAX_GROUP:] == ts_ms_N[:-MAX_GROUP]
            if same_N.any():
                row = int(same_N.argmax())
                raise DataError(
                    self._path,
                    f"more than {MAX_GROUP} events share ts {int(ts_ms_N[row])} ms, and such a "
                    "group may not be split; give ts a finer unit",
                    row=int(rows.events[row]),
                )
        return rows


def check_waits(quiet_s: float, patience_s: float) -> None:
    """Refuses times that a live input cannot wait.

    Raises:
        ValueError: They are below 0, or `quiet_s` is 0.
    """
    if quiet_s <= 0 or patience_s < 0:
        raise ValueError(f"quiet_s is {quiet_s} and patience_s {patience_s}; give seconds")


def check_bounds(batch_size: int, start: int) -> None:
    """Refuses, as `EventSource.batches` says, what no source can begin with."""
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size} is below 1; give a positive one")
    if start < 0:
        raise ValueError(f"start {start} is negative; give an event index")
