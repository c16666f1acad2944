"""What the columns of files hold, read within bounds: types, values, missing ones, times.

`survey` reads the first rows whole, and of all others what it is asked for alone: one column, whose
order and gaps tell whether it is a clock. Array suffixes: N rows of a piece.
"""

import csv
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from embertide.trainer.data.arrow import ISO_TIME, is_text, is_time, most_match
from embertide.trainer.data.csv import is_value
from embertide.trainer.data.parquet import open_bytes
from embertide.trainer.errors import DataError

SAMPLE_ROWS = 500_000
"""Rows that are read whole: their values tell a column's kind, and most of its size."""

LIST_SEPARATORS = ("|", ";")
"""What may stand between the items of a list in text."""

ColumnKind = Literal["int", "float", "bool", "text", "time", "list", "numbers", "other"]

_BLOCK_BYTES = 4 << 20
_HEAD_BYTES = 1 << 16
_PIECE_ROWS = 65_536
_DELIMITERS = ",\t;|"
_EXAMPLES = 4
# Bins of an amount: as many as leave each so many values, within bounds.
_BIN_VALUES, _LEAST_BINS, _MOST_BINS = 1250, 16, 64
_SHOWN_CHARACTERS = 16
# Of the texts of a list, so many have more than one item ...
_WITH_SEPARATOR = 0.1
# ... and there are so many times fewer items than texts, or few.
_FEWER_ITEMS = 4
_FEW_ITEMS = 200
_INT = r"^ *-?[0-9]{1,18} *$"
_FLOAT = r"^ *[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})? *$"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFacts:
    """What a column holds, by the rows that were read whole.

    Attributes:
        name: The column's.
        kind: What its values are; "list" of keys, "numbers": a list of floats.
        rows: That were read.
        missing: Of them, without a value.
        distinct: Different values; of lists, different items.
        expected: Different values of the whole input, as far as the sample lets one reckon:
            distinct values grow by a power of the rows (Heaps' law).
        least: Smallest number; nan where values are no numbers.
        most: Largest number.
        middle: The median of the numbers.
        edges: Where bins of about equally many of the numbers end, 16 to 64 bins.
        whole: Whether all numbers are integers, also where they came as floats.
        ascends: Whether no value is smaller than the one before it.
        length: Characters of a text, or items of a list, in the mean.
        separator: Between the items of a list that is text.
        counts: The most frequent values with their rows, as text; 12 at most.
        nested: Whether the input itself has lists.
    """

    name: str
    kind: ColumnKind
    rows: int
    missing: int
    distinct: int
    expected: int
    least: float = math.nan
    most: float = math.nan
    middle: float = math.nan
    edges: tuple[float, ...] = ()
    whole: bool = False
    ascends: bool = False
    length: float = 0.0
    separator: str = ""
    counts: tuple[tuple[str, int], ...] = ()
    nested: bool = False

    @property
    def present(self) -> int:
        """Rows with a value."""
        return self.rows - self.missing

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers."""
        return self.kind in ("int", "float", "bool")

    @property
    def examples(self) -> str:
        """Some values, shortened."""
        shown = [text.strip()[:_SHOWN_CHARACTERS] for text, _ in self.counts[:_EXAMPLES]]
        return ", ".join(shown) + (", ..." if self.distinct > len(shown) else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFacts:
    """What a clock says of all rows, in the units of its column; of a timestamp milliseconds.

    Attributes:
        rows: Of the input.
        first: Smallest value.
        last: Largest value.
        backwards: Rows whose value is smaller than one before them.
        gap: Longest step forward.
        group: Most rows in a row of one value.
        is_number: Whether the column has numbers, whose unit it does not tell.
    """

    rows: int
    first: float
    last: float
    backwards: int
    gap: float
    group: int
    is_number: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Files of one format.

    Attributes:
        paths: Their paths or URLs, in the order of reading.
        format: "parquet" or "csv".
        delimiter: Of csv.
    """

    paths: tuple[str, ...]
    format: str
    delimiter: str = ","


def sniff(paths: Sequence[str], format: str) -> Files:
    """Find out how the fields of text are told apart.

    Raises:
        DataError: A file is missing or empty, or its first line holds no names of columns.
    """
    if format == "parquet":
        return Files(paths=tuple(paths), format=format)
    with open_bytes(paths[0], inflate=True) as file:
        try:
            head = bytes(file.read(_HEAD_BYTES)).split(b"\n")[0].decode("utf-8", "replace")
        except OSError as error:
            raise DataError(paths[0], f"cannot be read: {error}") from error
    delimiter = max(_DELIMITERS, key=head.count)
    delimiter = delimiter if delimiter in head else ","
    names = next(csv.reader([head], delimiter=delimiter), [])
    if not names or not any(name.strip() for name in names):
        raise DataError(paths[0], "is empty; give a file whose first line names its columns")
    if all(is_value(name) for name in names if name):
        raise DataError(
            paths[0],
            f"its first line, {head[:60]!r}, holds values; write the names of the columns there",
        )
    return Files(paths=tuple(paths), format="csv", delimiter=delimiter)


def read_sample(files: Files, rows: int = SAMPLE_ROWS) -> pa.Table:
    """Read the first rows of all files together, text as the type that its values have.

    Raises:
        DataError: A file is missing or broken, or has no row.
    """
    parts: list[pa.RecordBatch] = []
    left = rows
    for part in _pieces(files, None):
        parts.append(part.slice(0, left))
        left -= len(parts[-1])
        if left <= 0:
            break
    if left == rows:
        raise DataError(files.paths[0], "has no row; give a file that has some")
    table = pa.Table.from_batches(parts)
    kinds = _KINDS if files.format == "csv" else _TIME_KINDS  # Parquet's other types are meant
    typed = {}
    for name in table.column_names:
        array = table.column(name).combine_chunks()
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        typed[name] = _typed(array, kinds) if is_text(array.type) else array
    return pa.table(typed)


def facts(table: pa.Table, total: int) -> list[ColumnFacts]:
    """Return what each column of a sample holds; `total` rows are in the whole input."""
    return [_facts(name, table.column(name), total) for name in table.column_names]


def count_rows(files: Files) -> int:
    """Count the rows of all files.

    Raises:
        DataError: One is missing or broken.
    """
    if files.format == "parquet":
        rows = 0
        for path in files.paths:
            with open_bytes(path) as file:
                rows += int(_footer(path, file).metadata.num_rows)
        return rows
    lines = sum(_count_lines(path) for path in files.paths)
    return max(0, lines - len(files.paths))  # each begins with the names of its columns


def _count_lines(path: str) -> int:
    lines, last = 0, b"\n"
    with open_bytes(path, inflate=True) as file:
        try:
            while piece := bytes(file.read(_BLOCK_BYTES)):
                lines, last = lines + piece.count(b"\n"), piece[-1:]
        except OSError as error:
            raise DataError(path, f"cannot be read: {error}") from error
    return lines + (last != b"\n")


def survey_time(files: Files, column: str) -> TimeFacts:
    """Read one column of all rows, to tell whether it is a clock.

    Raises:
        DataError: A file is missing or broken.
    """
    rows = backwards = group = run = 0
    first, last, gap, latest = math.inf, -math.inf, 0.0, -math.inf
    is_number = True
    for part in _pieces(files, (column,)):
        rows += len(part)
        is_number = _is_numbers(part.column(0))
        value_N = time_values(part.column(0))
        value_N = value_N[~np.isnan(value_N)]
        if not len(value_N):
            continue
        first, last = min(first, float(value_N.min())), max(last, float(value_N.max()))
        high_N = np.maximum.accumulate(np.append(latest, value_N))
        backwards += int((value_N < high_N[:-1]).sum())
        steps_N = np.diff(high_N)
        if math.isfinite(steps_N.max()):
            gap = max(gap, float(steps_N.max()))
        elif len(steps_N) > 1:
            gap = max(gap, float(steps_N[1:].max()))
        edges = np.flatnonzero(np.append(True, np.diff(value_N) != 0))
        sizes = np.diff(np.append(edges, len(value_N)))
        sizes[0] += run if value_N[0] == latest else 0
        group, run = max(group, int(sizes.max())), int(sizes[-1])
        latest = float(high_N[-1])
    return TimeFacts(
        rows=rows,
        first=first,
        last=last,
        backwards=backwards,
        gap=gap,
        group=group,
        is_number=is_number,
    )


def _is_numbers(array: Any) -> bool:
    """Whether a clock's values are numbers, or text that holds some."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = _typed(array).type if is_text(array.type) else array.type
    return not is_time(kind) and not is_text(kind)


def time_values(array: Any) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Values of a clock as floats: of a timestamp or text milliseconds; nan where there is none."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text(array.type):
        array = _typed(array)
        if is_text(array.type):
            return np.full(len(array), np.nan)
    if is_time(array.type):
        array = array.cast(pa.timestamp("ms"), safe=False).view(pa.int64())
    values: Any = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values.astype(np.float64)  # type: ignore[no-any-return]


def _footer(path: str, file: Any) -> Any:
    try:
        return pq.ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(path, f"is not a whole Parquet file: {error}") from error


def _pieces(files: Files, columns: tuple[str, ...] | None) -> Iterator[pa.RecordBatch]:
    """Yield pieces of all files; of text, texts. `columns` None: all; empty: of csv, one."""
    for path in files.paths:
        with open_bytes(path, inflate=files.format == "csv") as file:
            try:
                if files.format == "parquet":
                    names = None if columns is None else list(columns)
                    yield from _footer(path, file).iter_batches(_PIECE_ROWS, columns=names)
                else:
                    yield from _text(file, files.delimiter, columns)
            except (OSError, pa.ArrowException) as error:
                raise DataError(path, f"cannot be read: {error}") from error


def _text(file: Any, delimiter: str, columns: tuple[str, ...] | None) -> Iterator[pa.RecordBatch]:
    """Yield pieces of text, each parsed whole.

    Not by Arrow's reader of streams: its threads call Python, which ends the process if one of them
    comes as the interpreter goes.
    """
    head = bytes(file.read(_HEAD_BYTES))
    line, _, head = head.partition(b"\n")
    names = next(csv.reader([_decoded(line)], delimiter=delimiter))
    wanted = names if columns is None else list(columns) or names[:1]
    chunks = itertools.chain([head], iter(lambda: bytes(file.read(_BLOCK_BYTES)), b""))
    for lines in _whole_lines(chunks):
        table = pyarrow.csv.read_csv(
            pa.BufferReader(lines),
            read_options=pyarrow.csv.ReadOptions(column_names=names, use_threads=False),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=delimiter, invalid_row_handler=lambda _: "skip"
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=wanted,
                column_types=dict.fromkeys(wanted, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
                check_utf8=False,
            ),
        )
        yield from table.to_batches()


def _decoded(line: bytes) -> str:
    return line.decode("utf-8", "replace").strip("\r").strip("\ufeff")


def _whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        whole, end, last = chunk.rpartition(b"\n")
        if end and (lines := rest + whole).strip():
            yield lines + end
        rest = last if end else rest + last
    if rest.strip():
        yield rest


_TIME_KINDS = ((ISO_TIME, None),)
_KINDS = ((_INT, pa.int64()), (_FLOAT, pa.float64()), *_TIME_KINDS)


def _typed(array: Any, kinds: Sequence[tuple[str, Any]] = _KINDS) -> Any:
    """Texts as integers, floats or times, if all but a few of them are."""
    for pattern, kind in kinds:
        if not most_match(array, pattern):
            continue
        good = pc.fill_null(pc.match_substring_regex(array, pattern), False)
        texts = pc.if_else(good, array, pa.scalar(None, array.type))
        try:
            if kind is not None:
                return pc.ascii_trim(texts, " ").cast(kind)
            return _times(texts)
        except pa.ArrowInvalid:
            continue
    return array


def _times(texts: Any) -> Any:
    try:
        return texts.cast(pa.timestamp("ns")).cast(pa.timestamp("ms"), safe=False)
    except pa.ArrowInvalid:
        return texts.cast(pa.timestamp("ns", "UTC")).cast(pa.timestamp("ms"), safe=False)


def _facts(name: str, column: Any, total: int) -> ColumnFacts:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # as it was too large for one
        array = array.chunk(0)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = _kind(array.type)
    rows, missing = len(array), array.null_count
    if kind == "float":
        missing = int(pc.sum(pc.is_nan(array)).as_py() or 0) + missing
    if kind in ("list", "numbers"):
        items = array.flatten()
        return ColumnFacts(
            name=name,
            kind=kind,
            rows=rows,
            missing=missing,
            **_distinct(items, total, rows),
            length=len(items) / max(1, rows),
            nested=True,
        )
    if kind == "other":
        return ColumnFacts(name=name, kind=kind, rows=rows, missing=missing, distinct=0, expected=0)
    said: dict[str, Any] = {"name": name, "kind": kind, "rows": rows, "missing": missing}
    said |= _distinct(array, total, rows)
    if kind == "text":
        said["length"] = float(pc.mean(pc.binary_length(array)).as_py() or 0)
        said |= _as_list(array, said["distinct"], total)
        return ColumnFacts(**said)
    value_N = time_values(array)
    value_N = value_N[np.isfinite(value_N)]
    if len(value_N):
        said |= {
            "least": float(value_N.min()),
            "most": float(value_N.max()),
            "middle": float(np.median(value_N)),
            "edges": _edges(value_N),
            "whole": bool((value_N == np.rint(value_N)).all()),
            "ascends": bool((np.diff(value_N) >= 0).all()),
        }
    return ColumnFacts(**said)


def _edges(value_N: "np.ndarray[Any, np.dtype[np.float64]]") -> tuple[float, ...]:
    """Return the ends of bins of about equally many values."""
    bins = min(max(len(value_N) // _BIN_VALUES, _LEAST_BINS), _MOST_BINS)
    inner = np.quantile(value_N, np.arange(1, bins) / bins, method="higher")
    low = np.float32(value_N.min())
    found = {float(f"{value:.6g}") for value in inner.tolist()}
    return tuple(sorted(value for value in found if np.float32(value) > low))


def _kind(type: pa.DataType) -> ColumnKind:
    if pa.types.is_boolean(type):
        return "bool"
    if pa.types.is_integer(type):
        return "int"
    if pa.types.is_floating(type) or pa.types.is_decimal(type):
        return "float"
    if is_time(type):
        return "time"
    if is_text(type):
        return "text"
    if pa.types.is_list(type) or pa.types.is_large_list(type):
        return "numbers" if pa.types.is_floating(type.value_type) else "list"
    return "other"


def _distinct(array: Any, total: int, rows: int) -> dict[str, Any]:
    present = array.drop_null()
    counted = present.value_counts()
    distinct = len(counted)
    half = len(pc.unique(array.slice(0, max(1, len(array) // 2)).drop_null()))
    growth = min(1.0, max(0.0, math.log2(max(1, distinct) / max(1, half))))
    expected = round(distinct * max(1.0, total / max(1, rows)) ** growth)
    best = pc.sort_indices(counted.field("counts"), sort_keys=[("", "descending")])[:12]
    top = counted.take(best).to_pylist()
    shown = tuple((_shown(each["values"]), int(each["counts"])) for each in top)
    return {"distinct": distinct, "expected": max(distinct, expected), "counts": shown}


def _shown(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _as_list(array: Any, distinct: int, total: int) -> dict[str, Any]:
    """Say that texts are lists, if their parts come again and again where the texts do not."""
    present = array.drop_null()
    for separator in LIST_SEPARATORS:
        found = pc.sum(pc.match_substring(present, separator)).as_py() or 0
        if found < _WITH_SEPARATOR * len(present):
            continue
        items = pc.split_pattern(present, separator).flatten()
        said = _distinct(items, total, len(present))
        if said["distinct"] * _FEWER_ITEMS <= distinct or said["distinct"] <= _FEW_ITEMS:
            return {**said, "kind": "list", "separator": separator}
    return {}
