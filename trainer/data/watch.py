"""A source whose first events are looked at on their way: which columns are leaks, or of no use.

A sample of bounded size is kept, of either label, by a hash of the events' places; of keys that may
be unique, a share by their hash, so that a key that comes again is counted however far apart its
events lie. Suffixes as in base.py.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.data.bags import Bags
from embertide.trainer.data.base import MISSING_KEY, Batch, DerivedSource, EventSource
from embertide.trainer.data.keys import hash_keys
from embertide.trainer.data.leaks import (
    MAX_ROWS,
    ColumnNote,
    SampledColumn,
    examine,
    kept_rows,
    unique_note,
)

LOOKS = (10_000, 100_000, 500_000)
"""After so many events the sample is examined, and at the end of an input that has fewer."""

_MAX_CELLS = 4_000_000  # keys and numbers that a sample holds
_MAX_KEYS = 4096  # of a feature, that are counted
_NOT_UNIQUE = 0.9  # of fewer different keys a row, a feature will not be unique later
_MIN_UNIQUE = 1000  # events before that is decided


class WatchedSource(DerivedSource):
    """The events of `source`, unchanged; `say` hears once of each thing that is found.

    It is called by the thread that reads. An error while looking would be one of ours: it ends the
    run as any other.

    Attributes:
        notes: The findings.
    """

    def __init__(self, source: EventSource, say: Callable[[ColumnNote], None]) -> None:
        """Watch a source, from wherever it is read first."""
        super().__init__(source)
        self.notes: list[ColumnNote] = []
        self._say = say
        self._began = False

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Yield batches as the source does."""
        source = self._source.batches(batch_size=batch_size, start=start)
        if self._began or self._source.joined:  # then labels are not there yet
            yield from source
            return
        self._began = True
        looks, events = list(LOOKS), 0
        sample, keys = _Sample(self), _Keys(self)
        for batch in source:
            if looks:
                events += len(batch)
                sample.add(batch)
                keys.add(batch)
                if events >= looks[0]:
                    looks = [look for look in looks if look > events]
                    self._look(sample, keys if not looks else None)
            yield batch
        if looks:
            self._look(sample, keys)

    def _look(self, sample: "_Sample", keys: "_Keys | None") -> None:
        found = sample.notes() + (keys.notes() if keys is not None else [])
        before = {(note.kind, note.columns) for note in self.notes}
        leaks = {note.columns[0] for note in self.notes if note.is_leak}
        for note in found:
            again = note.is_leak and note.columns[0] in leaks
            if (note.kind, note.columns) not in before and not again:
                self.notes.append(note)
                self._say(note)


class _Sample:
    """Rows of the first events, of either label at most `MAX_ROWS`."""

    def __init__(self, source: EventSource) -> None:
        self._schema = source.schema
        self._parts: list[Batch] = []
        self._rows = [0, 0]  # by label
        self._cells = 0
        self._share = [1.0, 1.0]  # of the rows of each label that are kept, by their hash

    def add(self, batch: Batch) -> None:
        """Keep some rows of a batch."""
        self._keep(batch)
        while max(self._rows) > 2 * MAX_ROWS or self._cells > _MAX_CELLS:
            self._share[int(np.argmax(self._rows))] /= 2
            parts, self._parts, self._rows, self._cells = self._parts, [], [0, 0], 0
            for part in parts:
                self._keep(part)

    def _keep(self, batch: Batch) -> None:
        label_B = (batch.label_B != 0).astype(np.int64)
        top_B = hash_keys(batch.event_B.astype(np.uint64)) >> np.uint64(11)
        kept = np.flatnonzero(top_B < (np.asarray(self._share)[label_B] * 2.0**53))
        if not len(kept):
            return
        part = dataclasses.replace(
            batch,
            event_B=batch.event_B[kept],
            ts_ms_B=batch.ts_ms_B[kept],
            keys_BF=batch.keys_BF[kept],
            dense_BD=batch.dense_BD[kept],
            label_B=batch.label_B[kept],
            weight_B=None,
            more_labels_BL=None,
            lists={f: bags.at(kept) for f, bags in batch.lists.items()},
            id_B=None,
            origin=None,
        )
        self._parts.append(part)
        self._cells += _cells(part)
        for label in (0, 1):
            self._rows[label] += int((label_B[kept] == label).sum())

    def notes(self) -> list[ColumnNote]:
        """Return what is to be said of the columns by now."""
        if not self._parts:
            return []
        event_N = np.concatenate([part.event_B for part in self._parts])
        label_N = np.concatenate([part.label_B for part in self._parts])
        kept = kept_rows(label_N, event_N)
        schema = self._schema
        ts_ms_N = np.concatenate([part.ts_ms_B for part in self._parts])[kept]
        return examine(self._columns(kept), label_N[kept], ts_ms_N if schema.has_clock else None)

    def _columns(self, kept: NDArray[np.int64]) -> Sequence[SampledColumn]:
        schema, parts = self._schema, self._parts
        columns = {}
        for d, name in enumerate(schema.dense):
            value_N = np.concatenate([part.dense_BD[:, d] for part in parts])[kept]
            columns[name] = SampledColumn(
                name=name, value_N=value_N.astype(np.float64), unit_ms=schema.ts_unit_ms
            )
        for f, feature in enumerate(schema.features):
            name = feature.column
            if name in columns or feature.transform in ("hour_of_day", "bin"):
                continue
            if feature.is_list:
                bags = Bags.concatenated([part.lists[f] for part in parts]).at(kept)
                columns[name] = SampledColumn(name=name, items_M=bags.keys_N, sizes_N=bags.sizes_B)
            else:
                keys_N = np.concatenate([part.keys_BF[:, f] for part in parts])[kept]
                columns[name] = SampledColumn(
                    name=name, keys_N=keys_N, unit_ms=0.0 if feature.rows else schema.ts_unit_ms
                )
        return list(columns.values())


def _cells(batch: Batch) -> int:
    lists = sum(len(bags.keys_N) for bags in batch.lists.values())
    return int(batch.keys_BF.size + batch.dense_BD.size + lists)


class _Keys:
    """Counts different keys of the features that may have one of its own in each row."""

    def __init__(self, source: EventSource) -> None:
        self._counted = [
            _Counted(name=each.column, f=f)
            for f, each in enumerate(source.schema.features)
            if each.transform == "key" and not each.rows and each.column not in source.schema.dense
        ]

    def add(self, batch: Batch) -> None:
        """Count the keys of a batch."""
        for each in self._counted:
            each.add(batch.keys_BF[:, each.f])
        self._counted = [each for each in self._counted if each.may_be_unique]

    def notes(self) -> list[ColumnNote]:
        """Return what is to be said of the keys by now."""
        found = [
            unique_note(each.name, round(each.rows * each.share), each.rows)
            for each in self._counted
        ]
        return [note for note in found if note is not None]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Counted:
    """The keys of a feature whose hash ends in `bits` zeros, with their rows."""

    name: str
    f: int
    rows: int = 0  # with a key
    bits: int = 0
    counted: int = 0  # of the rows
    counts: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def share(self) -> float:
        """Different keys a row."""
        return len(self.counts) / self.counted if self.counted else 0.0

    @property
    def may_be_unique(self) -> bool:
        return self.rows < _MIN_UNIQUE or self.share >= _NOT_UNIQUE

    def add(self, keys_B: NDArray[np.int64]) -> None:
        keys_B = keys_B[keys_B != MISSING_KEY]
        self.rows += len(keys_B)
        counted = keys_B[self._is_counted(keys_B)].tolist()
        self.counted += len(counted)
        for key in counted:
            self.counts[key] = self.counts.get(key, 0) + 1
        while len(self.counts) > _MAX_KEYS:
            self.bits += 1
            keys_K = np.fromiter(self.counts, np.int64, len(self.counts))
            stay = keys_K[self._is_counted(keys_K)].tolist()
            self.counts = {key: self.counts[key] for key in stay}
            self.counted = sum(self.counts.values())

    def _is_counted(self, keys_B: NDArray[np.int64]) -> NDArray[np.bool_]:
        mask = np.uint64((1 << self.bits) - 1)
        return np.asarray((hash_keys(keys_B.view(np.uint64)) & mask) == 0)
