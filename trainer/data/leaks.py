"""Columns that tell the label, are known only after it, or are of no use; pure, over a sample.

A column is judged by the order in which it puts events that it was not fitted to: rows are cut
into blocks in order of time, or by a hash of their place where there is no clock, and what a value
tells is counted over the blocks before its own. A key that is new in each row tells nothing then,
whatever its rows' labels are. Array suffixes: N rows of the sample, M items of all their lists, C
codes, D columns of numbers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from scipy import stats

from embertide._common.auc import auc_of_counts, counts_by_score
from embertide._common.quoting import shown
from embertide.trainer.data.base import MISSING_KEY
from embertide.trainer.data.csv import listed
from embertide.trainer.data.keys import hash_keys

NoteKind = Literal["tells the label", "after the label", "together", "nearly unique", "equal"]
REMEDIES: dict[NoteKind, str] = {
    "tells the label": "leave it out, unless it is known when a score is asked for",
    "after the label": "leave it out: who asks for a score does not know it yet",
    "together": "leave them out, unless they are known when a score is asked for",
    "nearly unique": "leave it out: it costs a row an event, and tells nothing of the next one",
    "equal": "leave one of them out: it costs rows and tells nothing more",
}
"""The remedy for a column, to follow the evidence."""

LEAKS: tuple[NoteKind, ...] = ("tells the label", "after the label")
"""Kinds of columns that a run is better without."""

MAX_ROWS = 16_384
"""Rows of either label that a sample has at most: more change no verdict, and cost time."""

AUC = 0.98
"""The AUC from which on a column tells the label."""

UNIQUE = 0.95
"""The share of rows with a value of their own from which on a key is nearly unique."""

_EMPTY_KEY = int(np.uint64(xxhash.xxh3_64_intdigest(b"")).view(np.int64))
_MIN_ROWS = 100
_BLOCKS = 8
# Few events may have an AUC of 0.98 by chance. So it lies so many standard errors above this one,
# too, which needs ten positives and as many negatives, or more.
_NO_LEAK, _ERRORS = 0.95, 1.5
_PRIOR_ROWS = 1.0  # of either label that a code begins with, counted and expected
_BINS = 64
_SLIPS = 0.001  # of the rows of a label that do not count against a rule
_CHANCE = 1e-9  # of a rule that holds by chance
# At least this share of the positives has a value that no negative has; other such rules need more,
# as rows without a value may well be rows of which little is expected.
_FEW, _MOST = 0.1, 0.5
_TOGETHER = 4  # columns that tell the label together, at most
_MAX_NUMBERS = 64
_CLIP = 8.0
_TEN_YEARS_MS = 10 * 365 * 86_400_000.0

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledColumn:
    """A column's values in a sample; they are of one kind.

    Attributes:
        name: The column's.
        keys_N: Keys, as readers make them; `MISSING_KEY` or that of the empty string: no value.
        value_N: Numbers; NaN: no value.
        items_M: Keys of the lists of all rows, one list after the other.
        sizes_N: Keys of each row's list.
        unit_ms: Milliseconds in a unit of it if it is a time; 0: it cannot be one.
    """

    name: str
    keys_N: Ints | None = None
    value_N: Floats | None = None
    items_M: Ints | None = None
    sizes_N: Ints | None = None
    unit_ms: float = 0.0

    @property
    def present_N(self) -> Bools:
        """Which rows have a value."""
        if self.keys_N is not None:
            present_N: Bools = (self.keys_N != MISSING_KEY) & (self.keys_N != _EMPTY_KEY)
            return present_N
        if self.value_N is not None:
            return ~np.isnan(self.value_N)
        assert self.sizes_N is not None
        return self.sizes_N > 0

    @property
    def number_N(self) -> Floats:
        """Its values as numbers, of lists their sizes; NaN where there is none."""
        found = self.sizes_N if self.keys_N is None else self.keys_N
        if self.value_N is not None:
            return self.value_N
        assert found is not None
        return np.where(self.present_N, found.astype(np.float64), np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnNote:
    """A remark on a column.

    Attributes:
        kind: The kind of the remark.
        columns: The column, then those that it is equal to or tells the label with.
        text: The evidence, in a sentence without its end.
        auc: By which it tells the label; None: it does not.
    """

    kind: NoteKind
    columns: tuple[str, ...]
    text: str
    auc: float | None = None

    @property
    def is_leak(self) -> bool:
        """Whether a run is better without the column."""
        return self.kind in LEAKS


def kept_rows(label_N: NDArray[Any], event_N: Ints, most: int = MAX_ROWS) -> Ints:
    """Return the rows of a sample, ascending: of either label at most so many, by a hash."""
    hash_N = hash_keys(event_N.astype(np.uint64))
    kept = []
    for label in (0, 1):
        of_label = np.flatnonzero(label_N == label)
        kept.append(of_label[np.argsort(hash_N[of_label], kind="stable")[:most]])
    return np.sort(np.concatenate(kept))


def examine(
    columns: Sequence[SampledColumn], label_N: NDArray[Any], ts_ms_N: NDArray[Any] | None = None
) -> list[ColumnNote]:
    """Return what is to be said of columns, leaks first.

    Args:
        columns: Columns of one sample (`kept_rows`), in any order of its rows.
        label_N: 0 or 1.
        ts_ms_N: Times of the events; None: there is no clock.
    """
    rows = len(label_N)
    if rows < _MIN_ROWS:
        return []
    row_N = np.arange(rows)
    order_N = np.argsort(
        hash_keys(row_N.astype(np.uint64)) if ts_ms_N is None else ts_ms_N, kind="stable"
    )
    place_N = np.empty(rows, np.int64)
    place_N[order_N] = row_N
    judge = _Judge(label_N != 0, place_N * _BLOCKS // rows)
    notes = [note for each in columns if (note := judge.note(each, ts_ms_N)) is not None]
    leaks = {note.columns[0] for note in notes}
    numbers = [each for each in columns if each.value_N is not None and each.name not in leaks]
    notes.sort(key=lambda note: LEAKS.index(note.kind))
    return [*notes, *judge.together(numbers), *equal_columns(columns)]


def unique_note(column: str, distinct: int, rows: int) -> ColumnNote | None:
    """Return what is to be said of keys of which so many rows have so many different ones."""
    if rows < _MIN_ROWS or distinct < UNIQUE * rows:
        return None
    text = f"{shown(column)} is nearly unique: {distinct:,} keys in {rows:,} events"
    return ColumnNote(kind="nearly unique", columns=(column,), text=text)


class _Judge:
    """Labels and blocks of a sample, against which its columns are held."""

    def __init__(self, label_N: Bools, block_N: Ints) -> None:
        self._label_N, self._block_N = label_N, block_N
        self._tested_N = block_N > 0
        self._blocks = [np.flatnonzero(block_N == block) for block in range(_BLOCKS)]
        self._tested = label_N[self._tested_N]

    def note(self, column: SampledColumn, ts_ms_N: NDArray[Any] | None) -> ColumnNote | None:
        """Return whether a column tells the label, and how."""
        name = shown(column.name)
        said = self._by_presence(column.present_N) or self._by_time(column, ts_ms_N)
        if said is not None:
            text = f"{name} is known only after the label: {said[0]}"
            return ColumnNote(
                kind="after the label", columns=(column.name,), text=text, auc=said[1]
            )
        best = max(self._aucs(column))
        if not self._tells(best):
            return None
        text = (
            f"{name} alone tells the label: AUC {best:.4f} over {int(self._tested.sum()):,} "
            f"positives and {int((~self._tested).sum()):,} negatives of a sample"
        )
        return ColumnNote(kind="tells the label", columns=(column.name,), text=text, auc=best)

    def _auc(self, score_N: Floats, tested_N: Bools | None = None) -> float:
        """Return the AUC over rows of later blocks than the first; 0 if one label is missing."""
        tested_N = self._tested_N if tested_N is None else tested_N
        found = auc_of_counts(*counts_by_score(self._label_N[tested_N], score_N[tested_N]))
        return 0.0 if math.isnan(found) else found

    def _tells(self, auc: float, tested_N: Bools | None = None) -> bool:
        label_N = self._tested if tested_N is None else self._label_N[tested_N]
        positives = int(label_N.sum())
        negatives = len(label_N) - positives
        if not positives or not negatives:
            return False
        # The standard error of an AUC (Hanley & McNeil 1982), were there no leak.
        a = _NO_LEAK
        q1, q2 = a / (2 - a) - a * a, 2 * a * a / (1 + a) - a * a
        spread = a * (1 - a) + (positives - 1) * q1 + (negatives - 1) * q2
        error = float(np.sqrt(spread / (positives * negatives)))
        return auc >= max(AUC, _NO_LEAK + _ERRORS * error)

    # --- one column -------------------------------------------------------------------------------

    def _by_presence(self, present_N: Bools) -> tuple[str, float] | None:
        label_N = self._label_N
        for said, with_N, of_N, least in (
            ("only positives have a value", present_N, label_N, _FEW),
            ("only negatives lack one", ~present_N, ~label_N, _MOST),
            ("only negatives have a value", present_N, ~label_N, _MOST),
            ("only positives lack one", ~present_N, label_N, _MOST),
        ):
            of, others = int(of_N.sum()), int((~of_N).sum())
            found, wrong = int((with_N & of_N).sum()), int((with_N & ~of_N).sum())
            if not of or not others or found < least * of or wrong > _SLIPS * others:
                continue
            chance = float(stats.binom.cdf(wrong, found + wrong, others / (of + others)))
            if chance <= _CHANCE:
                auc = (1 + found / of - wrong / others) / 2
                return f"{said}, {found:,} of {of:,} in a sample", auc
        return None

    def _by_time(
        self, column: SampledColumn, ts_ms_N: NDArray[Any] | None
    ) -> tuple[str, float] | None:
        if ts_ms_N is None or column.unit_ms == 0 or column.sizes_N is not None:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            after_N = column.number_N * column.unit_ms - ts_ms_N
        present_N = np.isfinite(after_N)
        if not present_N.any() or np.median(np.abs(after_N[present_N])) > _TEN_YEARS_MS:
            return None
        auc = self._auc(np.where(present_N, after_N, -np.inf))
        if not self._tells(auc):
            return None
        return f"how long after the event it lies has AUC {auc:.4f}", auc

    def _aucs(self, column: SampledColumn) -> Iterator[float]:
        """Yield the AUC of each way to order rows by a column."""
        number_N = column.number_N
        raw = self._auc(np.where(np.isnan(number_N), -np.inf, number_N))
        yield raw
        yield 1 - raw
        if column.items_M is not None and column.sizes_N is not None:
            code_M = np.unique(column.items_M, return_inverse=True)[1].reshape(-1)
            lift_M = self._lifts(code_M, np.repeat(np.arange(len(number_N)), column.sizes_N))
            for sign in (1.0, -1.0):
                yield self._auc(sign * _most_of_each(sign * lift_M, column.sizes_N))
            return
        code_N = _codes(column.keys_N) if column.keys_N is not None else _bins(number_N)
        yield self._auc(self._lifts(code_N, np.arange(len(number_N))))

    def _lifts(self, code_M: Ints, row_M: Ints) -> Floats:
        """Return by how much the odds of a code lie above those of all, as of the blocks before.

        In logarithms of what was counted over what the mean label lets one expect; 0 for a code
        that was not there yet, and for all while there was one label alone. A mean label that
        moves with time thus tells nothing.
        """
        codes = int(code_M.max()) + 1 if len(code_M) else 0
        counts_2C = np.zeros((2, codes))
        both_2 = np.zeros(2)
        lift_M = np.zeros(len(code_M))
        block_M, label_M = self._block_N[row_M], self._label_N[row_M]
        order_M = np.argsort(block_M, kind="stable")
        ends = np.searchsorted(block_M[order_M], np.arange(_BLOCKS + 1))
        for block, rows in enumerate(self._blocks):
            at_M = order_M[ends[block] : ends[block + 1]]
            share_2 = both_2 / max(1.0, both_2.sum())
            expected_2C = counts_2C.sum(axis=0) * share_2[:, None]
            log_2C = np.log((counts_2C + _PRIOR_ROWS) / (expected_2C + _PRIOR_ROWS))
            lift_M[at_M] = (log_2C[1] - log_2C[0])[code_M[at_M]]
            for label in (0, 1):
                of_label = code_M[at_M][label_M[at_M] == label]
                counts_2C[label] += np.bincount(of_label, minlength=codes)
                both_2[label] += int((self._label_N[rows] == label).sum())
        return lift_M

    # --- several columns --------------------------------------------------------------------------

    def together(self, numbers: Sequence[SampledColumn]) -> list[ColumnNote]:
        """Return the few columns of numbers of which a weighted sum tells the label, if any do."""
        if len(numbers) < 2:
            return []
        numbers = numbers[:_MAX_NUMBERS]
        later_N = self._block_N >= _BLOCKS // 2
        raw_ND = np.column_stack([each.number_N for each in numbers])
        with np.errstate(over="ignore"):
            log_ND = np.sign(raw_ND) * np.log1p(np.abs(raw_ND))
        for view_ND in (raw_ND, log_ND):
            scaled_ND = _scaled(view_ND)
            weight_D = self._weights(scaled_ND, ~later_N)
            if not self._tells(self._auc(scaled_ND @ weight_D, later_N), later_N):
                continue
            best_D = np.argsort(-np.abs(weight_D), kind="stable")
            for count in range(2, min(_TOGETHER, len(numbers)) + 1):
                few_ND = scaled_ND[:, best_D[:count]]
                auc = self._auc(few_ND @ self._weights(few_ND, ~later_N), later_N)
                if self._tells(auc, later_N):
                    names = tuple(numbers[d].name for d in sorted(best_D[:count].tolist()))
                    text = f"{listed(names)} together tell the label: a weighted sum has AUC "
                    return [
                        ColumnNote(kind="together", columns=names, text=f"{text}{auc:.4f}", auc=auc)
                    ]
        return []

    def _weights(self, scaled_ND: Floats, fitted_N: Bools) -> Floats:
        """Return the weights of Fisher's linear discriminant over some rows."""
        of_N, label_N = scaled_ND[fitted_N], self._label_N[fitted_N]
        if label_N.all() or not label_N.any():
            return np.zeros(scaled_ND.shape[1])
        means = [of_N[label_N == label].mean(axis=0) for label in (0, 1)]
        centred_N = of_N - np.where(label_N[:, None], means[1], means[0])
        cover = centred_N.T @ centred_N / len(of_N) + 1e-6 * np.eye(of_N.shape[1])
        return np.asarray(np.linalg.solve(cover, means[1] - means[0]))


def equal_columns(columns: Sequence[SampledColumn]) -> list[ColumnNote]:
    """Return a note for each column that is the same as an earlier one, or another name of it."""
    notes: list[ColumnNote] = []
    exact: dict[tuple[str, bytes], str] = {}
    renamed: dict[bytes, str] = {}
    for column in columns:
        present_N = column.present_N
        rows = len(present_N)
        kind: str
        values: NDArray[Any]
        if column.items_M is not None and column.sizes_N is not None:
            kind, values = "list", np.concatenate((column.sizes_N, column.items_M))
        elif column.keys_N is not None:
            kind, values = "key", column.keys_N
        else:
            kind, values = "number", column.number_N
        if not _varies(values[:rows]):
            continue
        digest = xxhash.xxh3_128_digest(np.ascontiguousarray(values).tobytes())
        earlier = exact.get((kind, digest))
        said = "is equal to"
        if earlier is None and kind == "key":
            code_N = _codes(column.keys_N)
            if 2 * (int(code_N.max()) + 1) <= rows:  # else a new value each row is one to one
                digest_codes = xxhash.xxh3_128_digest(code_N.tobytes())
                earlier = renamed.setdefault(digest_codes, column.name)
                said = "is another name of"
        exact.setdefault((kind, digest), column.name)
        if earlier is not None and earlier != column.name:
            text = f"{shown(column.name)} {said} {shown(earlier)} in {rows:,} rows of a sample"
            notes.append(ColumnNote(kind="equal", columns=(column.name, earlier), text=text))
    return notes


def _varies(values_N: NDArray[Any]) -> bool:
    """Whether enough rows differ from the most frequent value for equality to tell anything."""
    _, counts = np.unique(values_N, return_counts=True)
    return len(values_N) - int(counts.max(initial=0)) >= 10


def _codes(keys_N: Ints | None) -> Ints:
    """Return small numbers for keys, in the order in which they first come."""
    assert keys_N is not None
    _, first, code_N = np.unique(keys_N, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return np.asarray(rank[code_N.reshape(-1)])


def _bins(number_N: Floats) -> Ints:
    """Return the bin of each number, whose ends no label decides; the first has those missing."""
    there_N = ~np.isnan(number_N)
    found = np.unique(number_N[there_N])
    if len(found) > _BINS:
        inner = np.arange(1, _BINS) / _BINS
        found = np.unique(np.quantile(number_N[there_N], inner, method="lower"))
    code_N = np.searchsorted(found, number_N, side="left") + 1
    return np.where(there_N, code_N, 0)


def _most_of_each(value_M: Floats, sizes_N: Ints) -> Floats:
    """Return the largest value of each list; 0 for an empty one."""
    most_N = np.zeros(len(sizes_N))
    some_N = sizes_N > 0
    if some_N.any():
        begins = (np.cumsum(sizes_N) - sizes_N)[some_N]
        most_N[some_N] = np.maximum.reduceat(value_M, begins)
    return most_N


def _scaled(value_ND: Floats) -> Floats:
    """Return columns about 0 of about equal spread, without missing values and far outliers."""
    with np.errstate(invalid="ignore", over="ignore"):
        value_ND = np.where(np.isfinite(value_ND), value_ND, np.nan)
        some_D = ~np.isnan(value_ND).all(axis=0)
        value_ND = np.where(some_D, value_ND, 0.0)
        low_D, middle_D, high_D = np.nanquantile(value_ND, (0.25, 0.5, 0.75), axis=0)
        spread_D = high_D - low_D
        deviation_D = np.nanstd(value_ND, axis=0)
        spread_D = np.where(spread_D > 0, spread_D, np.where(deviation_D > 0, deviation_D, 1.0))
        scaled_ND = (value_ND - middle_D) / spread_D
    return np.asarray(np.clip(np.nan_to_num(scaled_ND), -_CLIP, _CLIP))
