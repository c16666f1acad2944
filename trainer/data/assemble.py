"""The step that all readers share: columns to validated rows, which `rows.py` cuts into batches.

A reader subclasses `ChunkedSource` and yields `Chunk`s of decoded columns. Array suffixes: N rows
of a chunk, R rejected rows, U distinct values, F features, D dense columns, I items of lists.
"""

import abc
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from embertide.trainer.data.bags import Bags
from embertide.trainer.data.base import (
    MISSING_KEY,
    PADDING_KEY,
    Batch,
    DeadLetters,
    EventSchema,
    EventSource,
    FeatureColumn,
    Positive,
)
from embertide.trainer.data.order import AHEAD, LATE, NO_TS_MS, UNKNOWN_MS, Order
from embertide.trainer.data.rows import Cutter, Rows, check_bounds, concatenate
from embertide.trainer.errors import DataError

_FAULTS = {LATE: "ts goes backwards", AHEAD: "ts is far ahead of the events after it"}

HOUR_MS = 3_600_000
# Milliseconds go through float64 where ts has a fraction; past 2^53 they would not be exact.
MAX_TS_MS = 1 << 53

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One decoded column of a chunk; of lists, the items of all rows, one after the other.

    Attributes:
        values: Per row: integers, floats, or timestamps as datetime64[ms]. With `code_N`: the
            distinct strings, as bytes.
        code_N: For strings: place of each row's value in `values`.
        null_N: True where the value is missing; None if nowhere.
        bad_N: True where the text is not of the column's type; None if nowhere.
        raw: Gives the values as they were read, for the rows asked for; None if `values` has them.
        sizes_N: For lists: the number of items of each row; all else but `raw` is then by item.
    """

    values: NDArray[Any]
    code_N: NDArray[np.int32] | None = None
    null_N: Mask | None = None
    bad_N: Mask | None = None
    raw: Callable[[Ints], list[object]] | None = None
    sizes_N: Ints | None = None

    def shown(self, row_R: Ints) -> list[object]:
        """The values of R rows, for the dead letters."""
        if self.raw is not None:
            return self.raw(row_R)
        at = row_R if self.code_N is None else self.code_N[row_R]
        values: list[object] = self.values[at].tolist()
        if self.null_N is None:
            return values
        gone_R = self.null_N[row_R].tolist()
        return [None if gone else value for gone, value in zip(gone_R, values, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive events as they were read, before validation.

    Attributes:
        event_N: Their event indices, ascending.
        columns: Every column of the schema.
        end: Event index after this chunk, lines without a row counted.
        malformed: Event index and text of what was no row at all.
        begins: Name and first ts of the file that begins with this chunk, where files follow one
            another in time.
        came_ms: When all of them came, or each did, where the input says so.
    """

    event_N: Ints
    columns: Mapping[str, Column]
    end: int
    malformed: Sequence[tuple[int, str]] = ()
    begins: tuple[str, int] | None = None
    came_ms: int | Ints | None = None


def fold(keys_N: Ints, rows: int) -> Ints:
    """Return a number below `rows` for each key, by the top half of its product with an odd one."""
    mixed_N = keys_N.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed_N >> np.uint64(32)) % np.uint64(rows)).view(np.int64)


def hash_strings(values_U: NDArray[np.object_]) -> Ints:
    """Keys of U byte strings: xxh3_64 read as a signed integer."""
    hashes = (xxhash.xxh3_64_intdigest(value) for value in values_U)
    return np.fromiter(hashes, np.uint64, len(values_U)).view(np.int64)


def column_keys(column: Column) -> Ints:
    """Keys of a column of integers or strings, as "key" of `FeatureColumn` says."""
    if column.code_N is not None:
        return hash_strings(column.values)[column.code_N]
    if column.values.dtype.kind == "f":  # of a column that the net reads as an amount, too
        beyond_N = _beyond(column)
        keys_N: Ints = np.where(beyond_N, MISSING_KEY, column.values).astype(np.int64)
    else:
        keys_N = column.values.astype(np.int64)
    if column.null_N is not None:
        keys_N[column.null_N] = MISSING_KEY
    return keys_N


def _beyond(column: Column) -> Mask:
    """Which values no integer of 64 bits is; NaN, which is missing, among them."""
    beyond_N: Mask = ~(np.abs(column.values) < 2.0**63)
    return beyond_N


class _RowFilter:
    """Which rows of a chunk stand; a row is reported for its first fault only."""

    def __init__(self, event_N: Ints, dead: DeadLetters) -> None:
        self._event_N = event_N
        self._dead = dead
        self.keep_N = np.ones(len(event_N), np.bool_)

    def reject(self, fault_N: Mask | None, reason: str, column: Column) -> None:
        if fault_N is None or not fault_N.any():
            return
        row_R = np.flatnonzero(fault_N & self.keep_N)
        self.keep_N[row_R] = False
        self._dead.add(self._event_N[row_R].tolist(), reason, column.shown(row_R))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Rows that are good but for their time, of which nothing is decided yet."""

    rows: Rows
    came_ms_N: Ints
    shown: list[object]  # their ts, for the dead letters


class Assembler:
    """Turns chunks into accepted rows; remembers from chunk to chunk what their order needs."""

    def __init__(self, schema: EventSchema, dead_letters: DeadLetters, start: int = 0) -> None:
        """Starts a stream that has no accepted row yet, at the event index where a batch began."""
        self._schema = schema
        self._dead = dead_letters
        self._order = Order(schema.times, trusts_next=start > 0)
        self._waiting: _Waiting | None = None

    def may_close(self, cutter: Cutter) -> bool:
        """Whether a quiet time decides about rows that wait here or are held in `cutter`.

        Where a row far ahead of those before it waits, and none has come after it, nothing does:
        those that come after it decide it.
        """
        held = self._waiting
        if held is None:
            return cutter.held > 0
        return len(held.rows) > 1 or self._order.latest_ms == NO_TS_MS

    @property
    def latest_ms(self) -> int:
        """The latest accepted ts, those of the rows that wait included as `finish` decides."""
        order = copy.copy(self._order)
        if self._waiting is not None:
            order.decide(self._waiting.rows.times_ms, self._waiting.came_ms_N, last=True)
        return order.latest_ms

    def close(self, ts_ms: int) -> list[Rows]:
        """Says that the group of this ts is complete: from now on such an event is late.

        Returns:
            As `finish`.
        """
        rows = self.finish()
        self._order.close(ts_ms)
        return rows

    def go_on_after(self, ts_ms: int) -> None:
        """Says that whoever read before closed this ts: from now on such an event is late."""
        self._order.latest_ms = max(self._order.latest_ms, ts_ms + 1)

    def accept(self, chunk: Chunk) -> Rows:
        """Validates a chunk; rejected rows go to the dead letters.

        A row far ahead of those before it waits, and up to 62 after it, for the next chunk or
        `finish`.

        Raises:
            DataError: A file begins before the end of the one before it.
        """
        if chunk.begins is not None and chunk.begins[1] < self._order.latest_ms:
            raise DataError(
                chunk.begins[0],
                f"begins at ts {chunk.begins[1]} ms, but the file before it goes on to "
                f"{self._order.latest_ms} ms: files may not overlap in time; sort their rows into "
                "one",
            )
        rows, row_K = self._check(chunk)
        if self._schema.ts is None:
            return rows
        column = chunk.columns[self._schema.ts]
        came_ms = UNKNOWN_MS if chunk.came_ms is None else chunk.came_ms
        came_ms_N = np.broadcast_to(came_ms, len(chunk.event_N))[row_K].astype(np.int64)
        held = self._waiting
        if held is not None:
            rows = concatenate([held.rows, rows])
            came_ms_N = np.append(held.came_ms_N, came_ms_N)
        before = [] if held is None else held.shown

        def shown(row_R: Ints) -> list[object]:
            new_R = row_R[row_R >= len(before)] - len(before)
            return [*(before[r] for r in row_R if r < len(before)), *column.shown(row_K[new_R])]

        return self._decide(rows, came_ms_N, shown, last=False)

    def finish(self) -> list[Rows]:
        """Returns, if any waited, the rows that are accepted if no others come."""
        held = self._waiting
        if held is None:
            return []
        shown = held.shown
        return [
            self._decide(
                held.rows, held.came_ms_N, lambda row_R: [shown[r] for r in row_R], last=True
            )
        ]

    def _decide(
        self,
        rows: Rows,
        came_ms_N: Ints,
        shown: Callable[[Ints], list[object]],
        *,
        last: bool,
    ) -> Rows:
        decision = self._order.decide(rows.times_ms, came_ms_N, last=last)
        for fault, reason in _FAULTS.items():
            row_R = np.flatnonzero(decision.fault_N == fault)
            self._dead.add(rows.events[row_R].tolist(), reason, shown(row_R))
        end = len(decision.fault_N)
        left_R = np.arange(end, len(rows))
        self._waiting = None
        if len(left_R):
            self._waiting = _Waiting(rows.cut(end, len(rows)), came_ms_N[end:], shown(left_R))
        return rows.cut(0, end).at_times(decision.ts_ms_N).where(decision.fault_N == 0)

    def _check(self, chunk: Chunk) -> tuple[Rows, Ints]:
        """Returns the rows that are good but for their order in time, and where they stood."""
        schema, columns = self._schema, chunk.columns
        if chunk.malformed:
            event_R, text_R = zip(*chunk.malformed, strict=True)
            self._dead.add(event_R, "malformed line", text_R)
        row_filter = _RowFilter(chunk.event_N, self._dead)
        label_N = np.zeros(len(chunk.event_N), np.float32)
        if schema.label is not None:
            label_N = self._label(columns[schema.label], row_filter)
        if schema.target_columns:
            label_N = np.column_stack((label_N, *self._targets(columns, row_filter)))
        dense_ND = self._dense(chunk, row_filter)
        for name in schema.key_columns:
            column = columns[name]
            row_filter.reject(column.bad_N, f"key {name} is not an integer", column)
            if column.values.dtype.kind == "f":
                beyond_N = _beyond(column) & ~np.isnan(column.values)
                row_filter.reject(beyond_N, f"key {name} does not fit 64 bits", column)
        for feature in schema.features:
            if feature.is_list:
                _prove_lists(feature, columns, row_filter)
        ts_ms_N = self._time(chunk, row_filter)
        keys_NF = self._keys(columns, ts_ms_N, dense_ND)
        arrays: tuple[NDArray[Any], ...] = (chunk.event_N, ts_ms_N, keys_NF, dense_ND, label_N)
        if schema.id is not None:
            ids = columns[schema.id]
            row_filter.reject(ids.bad_N, f"id {schema.id} is not an integer", ids)
            arrays = (*arrays, column_keys(ids))
        if not row_filter.keep_N.all():
            arrays = tuple(array[row_filter.keep_N] for array in arrays)
        lists = {
            f: _bags(feature, columns, row_filter.keep_N)
            for f, feature in enumerate(schema.features)
            if feature.is_list
        }
        return Rows(arrays, lists), np.flatnonzero(row_filter.keep_N)

    def _label(self, column: Column, row_filter: _RowFilter) -> NDArray[np.float32]:
        row_filter.reject(column.null_N, "label is missing", column)
        if self._schema.positive:
            return _thresholded(Positive.of(self._schema.positive), column, row_filter)
        good_N = (column.values == 0) | (column.values == 1)
        row_filter.reject(
            ~good_N if column.bad_N is None else ~good_N | column.bad_N,
            "label is not 0 or 1",
            column,
        )
        with np.errstate(over="ignore", invalid="ignore"):
            return column.values.astype(np.float32)

    def _targets(
        self, columns: Mapping[str, Column], row_filter: _RowFilter
    ) -> Iterator[NDArray[np.float32]]:
        """Yield further labels, NaN where one is unknown, then weights, which are 1 without any."""
        for name in self._schema.more_labels:
            value_N = _floats(columns[name])
            null_N = columns[name].null_N
            good_N = (value_N == 0) | (value_N == 1)
            if null_N is not None:
                value_N[null_N] = np.nan
                good_N |= null_N
            row_filter.reject(columns[name].bad_N, f"label {name} is not 0 or 1", columns[name])
            row_filter.reject(~good_N, f"label {name} is not 0 or 1", columns[name])
            yield value_N
        if self._schema.weight is None:
            yield np.ones(len(row_filter.keep_N), np.float32)
            return
        column = columns[self._schema.weight]
        value_N = _floats(column)
        fault_N = ~(np.isfinite(value_N) & (value_N >= 0))
        for each_N in (column.null_N, column.bad_N):
            fault_N = fault_N if each_N is None else fault_N | each_N
        name = self._schema.weight
        row_filter.reject(fault_N, f"weight {name} is not a number of 0 or more", column)
        yield value_N

    def _dense(self, chunk: Chunk, row_filter: _RowFilter) -> NDArray[np.float32]:
        names = self._schema.dense
        dense_ND = np.empty((len(chunk.event_N), len(names)), np.float32)
        for d, name in enumerate(names):
            column = chunk.columns[name]
            value_N = column.values.astype(np.float64)
            if column.null_N is not None:
                value_N[column.null_N] = np.nan
            row_filter.reject(column.bad_N, f"dense {name} is not a number", column)
            with np.errstate(over="ignore", invalid="ignore"):
                dense_ND[:, d] = value_N
            row_filter.reject(np.isinf(dense_ND[:, d]), f"dense {name} is infinite", column)
        return dense_ND

    def _time(self, chunk: Chunk, row_filter: _RowFilter) -> Ints:
        if self._schema.ts is None:
            return chunk.event_N
        column = chunk.columns[self._schema.ts]
        row_filter.reject(column.null_N, "ts is missing", column)
        is_clock = column.values.dtype.kind == "M"
        kind = "a time of ISO 8601" if is_clock else "a number"
        row_filter.reject(column.bad_N, f"ts is not {kind}", column)
        unit_ms: float = 1
        if is_clock:
            value_N = column.values.astype(np.int64)
        else:
            unit_ms, value_N = self._schema.ts_unit_ms, column.values
        limit = min(round(MAX_TS_MS / unit_ms), (1 << 63) - 1)
        inside_N = (value_N >= -limit) & (value_N <= limit)
        row_filter.reject(~inside_N, "ts is out of range", column)
        value_N = np.where(inside_N & row_filter.keep_N, value_N, 0)
        if value_N.dtype.kind == "f":
            value_N, unit_ms = np.rint(value_N * unit_ms), 1
        whole_N: Ints = value_N.astype(np.int64)
        return whole_N * round(unit_ms) if unit_ms >= 1 else whole_N // round(1 / unit_ms)

    def _keys(
        self, columns: Mapping[str, Column], ts_ms_N: Ints, dense_ND: NDArray[np.float32]
    ) -> Ints:
        features = self._schema.features
        keys_NF = np.empty((len(ts_ms_N), len(features)), np.int64)
        for f, feature in enumerate(features):
            if feature.transform == "hour_of_day":
                keys_NF[:, f] = ts_ms_N // HOUR_MS % 24
                continue
            if feature.transform == "bin":
                value_N = dense_ND[:, self._schema.dense.index(feature.column)]
                keys_NF[:, f] = _binned(value_N, feature.edges)
                continue
            if feature.is_list:
                keys_NF[:, f] = PADDING_KEY
                continue
            keys_NF[:, f] = column_keys(columns[feature.column])
            if feature.rows:
                keys_NF[:, f] = fold(keys_NF[:, f], feature.rows)
        return keys_NF


def _binned(value_N: NDArray[np.float32], edges: tuple[float, ...]) -> Ints:
    bin_N = np.searchsorted(np.array(edges, np.float32), value_N, "right")
    return np.where(np.isnan(value_N), MISSING_KEY, bin_N)


def _thresholded(positive: Positive, column: Column, row_filter: _RowFilter) -> NDArray[np.float32]:
    """Labels of a column that holds something else than 0 and 1."""
    if column.code_N is not None:
        # The last entry stands for what is missing; so does the empty string.
        missing_U = np.array([value == b"" for value in column.values])
        row_filter.reject(missing_U[column.code_N], "label is missing", column)
        return positive.holds(column.values)[column.code_N].astype(np.float32)
    row_filter.reject(column.bad_N, "label is not a number", column)
    if column.values.dtype.kind == "f":
        row_filter.reject(np.isnan(column.values), "label is missing", column)
    return positive.holds(column.values).astype(np.float32)


def _prove_lists(
    feature: FeatureColumn, columns: Mapping[str, Column], row_filter: _RowFilter
) -> None:
    """Reject rows whose lists are no bags of finite weights."""
    name, keys = feature.column, columns[feature.column]
    sizes_N = _sizes(keys)
    row_filter.reject(_any(keys.bad_N, sizes_N), f"a key of list {name} is not an integer", keys)
    row_filter.reject(_any(keys.null_N, sizes_N), f"a key of list {name} is missing", keys)
    too_many = f"list {name} has more than {feature.max_keys} keys"
    row_filter.reject(sizes_N > feature.max_keys, too_many, keys)
    if not feature.weights:
        return
    name, weights = feature.weights, columns[feature.weights]
    sizes_of_weights_N = _sizes(weights)
    row_filter.reject(
        sizes_of_weights_N != sizes_N,
        f"weights {name} are not as many as the keys of {feature.column}",
        weights,
    )
    bad_I = ~np.isfinite(_floats(weights))
    for fault_I in (weights.bad_N, weights.null_N):
        if fault_I is not None:
            bad_I |= fault_I
    no_number = f"a weight of {name} is not a finite number"
    row_filter.reject(_any(bad_I, sizes_of_weights_N), no_number, weights)


def _bags(feature: FeatureColumn, columns: Mapping[str, Column], keep_N: Mask) -> Bags:
    """The bags of the rows that stand."""
    keys = columns[feature.column]
    sizes_N = _sizes(keys)
    keys_I = column_keys(keys)[np.repeat(keep_N, sizes_N)]
    if feature.rows:
        keys_I = fold(keys_I, feature.rows)
    if not feature.weights:
        return Bags.of(keys_I, sizes_N[keep_N])
    weights = columns[feature.weights]
    weights_I = _floats(weights)[np.repeat(keep_N, _sizes(weights))]
    return Bags.of(keys_I, sizes_N[keep_N], weights_I)


def _sizes(column: Column) -> Ints:
    assert column.sizes_N is not None, "a column of lists"
    return column.sizes_N


def _floats(column: Column) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        return column.values.astype(np.float32)


def _any(fault_I: Mask | None, sizes_N: Ints) -> Mask | None:
    """Whether any item of each row has the fault."""
    if fault_I is None:
        return None
    faults = np.append(0, np.cumsum(fault_I))
    end_N = np.cumsum(sizes_N)
    any_N: Mask = faults[end_N] > faults[end_N - sizes_N]
    return any_N


class ChunkedSource(EventSource):
    """An `EventSource` whose reader yields chunks.

    Attributes:
        path: Where the events are, for messages.
    """

    def __init__(self, path: str, schema: EventSchema, dead_letters: DeadLetters | None) -> None:
        """Keeps what every source has."""
        self.path = path
        self.schema = schema
        self.dead_letters = DeadLetters() if dead_letters is None else dead_letters

    @abc.abstractmethod
    def chunks(self, start: int) -> Iterator[Chunk]:
        """Yields what was read, in order; chunks before `start` may be left out or empty.

        Raises:
            DataError: The input cannot be read or is not what the schema says.
        """

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """See `EventSource.batches`."""
        check_bounds(batch_size, start)
        return self._batches(batch_size, start)

    def _batches(self, batch_size: int, start: int) -> Iterator[Batch]:
        total = self.total_events()
        end = 0 if total is None else total
        assembler = Assembler(self.schema, self.dead_letters, start)
        cutter = Cutter(self.path, batch_size)
        for chunk in self.chunks(start):
            end = chunk.end
            yield from cutter.add(assembler.accept(chunk))
        for rows in assembler.finish():
            yield from cutter.add(rows)
        if start > end:
            raise DataError(
                self.path,
                f"start {start} lies beyond its {end} events; was the "
                "input replaced by a shorter one?",
            )
        yield from cutter.finish(end)
