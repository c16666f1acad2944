"""Contents of the columns of files, read within bounds: types, values, missing ones, times.

The first rows are read whole, and of all others what is asked for alone: one column, whose order
and gaps tell whether it is a clock. Everything goes through the readers that training uses. Array
suffixes: N rows of a piece.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embertide._common.quoting import shown, terminal_text
from embertide.trainer.data import clock, texts
from embertide.trainer.data.arrow import is_list, is_number, is_text, is_time, is_whole, plain
from embertide.trainer.data.clock import TimeFacts
from embertide.trainer.data.column_names import tells_number
from embertide.trainer.data.csv import TextReader
from embertide.trainer.data.opening import open_bytes
from embertide.trainer.data.parquet import CHUNK_ROWS, batches, open_footer
from embertide.trainer.data.sniff import Files, names_of, sniff
from embertide.trainer.data.texts import Kind
from embertide.trainer.errors import DataError

__all__ = ["Files", "Sample", "count_rows", "facts", "read_rows", "read_sample", "sniff"]

SAMPLE_ROWS = 500_000
"""Rows that are read whole: their values tell a column's kind, and most of its size."""

LIST_SEPARATORS = ("|", ";")
"""Texts that may separate the items of a list."""

ColumnKind = Literal["int", "float", "bool", "text", "time", "list", "numbers", "other"]

_EXAMPLES = 4
# Bins of an amount: as many as leave each so many values, within bounds.
_BIN_VALUES, _MIN_BINS, _MAX_BINS = 1250, 16, 64
_SHOWN_CHARACTERS = 16
# A column of lists has more than one item in this share of its texts ...
_WITH_SEPARATOR = 0.1
# ... and there are so many times fewer items than texts, or few.
_FEWER_ITEMS = 4
_FEW_ITEMS = 200
# A column ascends where this share of the steps from row to row goes forward.
_ASCENDING = 0.99
# Kinds that texts of a Parquet file are taken for; integers as text are meant as text.
_MEANT: tuple[Kind, ...] = ("float", "time")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFacts:
    """Contents of a column, by the rows that were read whole.

    Attributes:
        name: The column's.
        kind: The kind of its values; "list" of keys, "numbers": a list of floats.
        rows: That were read.
        missing: Rows among them without a value.
        distinct: Different values; of lists, different items.
        expected: Different values of the whole input, as far as the sample lets one reckon:
            distinct values grow by a power of the rows (Heaps' law).
        least: Smallest number; nan where values are no numbers.
        most: Largest number.
        middle: The median of the numbers.
        edges: Where bins of about equally many of the numbers end, 16 to 64 bins.
        whole: Whether all numbers are integers, also where they came as floats.
        ascends: Whether hardly a value is smaller than the one before it.
        length: Characters of a text, or items of a list, in the mean.
        separator: Between the items of a list that is text.
        counts: The most frequent values with their rows, as text; 12 at most.
        nested: Whether the input itself has lists.
        text: For a column of texts: what they were taken for; empty: the input has types.
        type: The input's type, for messages.
        unit: For numbers most of which are times since 1970: their unit's name.
        unit_ms: ... and its milliseconds.
        hint: How values would have to be written to be read as what they seem to be.
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
    text: Kind | Literal[""] = ""
    type: str = ""
    unit: str = ""
    unit_ms: float = 1.0
    hint: str = ""

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
        """Some values, shortened, as a terminal shows them."""
        found = [text.strip()[:_SHOWN_CHARACTERS] for text, _ in self.counts[:_EXAMPLES]]
        more = ", ..." if self.distinct > len(found) else ""
        return terminal_text(", ".join(found) + more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The first rows of an input.

    Attributes:
        table: Columns by the type that their values have.
        read_as: The kinds that columns of texts were taken for, by column.
        types: The types that the input has, for messages.
        hints: See `ColumnFacts.hint`.
    """

    table: pa.Table
    read_as: Mapping[str, Kind] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)


class InputColumn(NamedTuple):
    """A column of an input: its name, its type in words, and whether it can be read."""

    name: str
    type: str
    readable: bool


def input_columns(files: Files) -> list[InputColumn]:
    """Return the columns of all files, one as often as it is there.

    Raises:
        DataError: A file is missing or broken, or lacks a column of the first, or has it of another
            kind.
    """
    if files.format == "csv":
        return [InputColumn(name, "text", True) for name in names_of(files)]
    first: list[tuple[str, str]] = []
    types: list[str] = []
    for path in files.paths:
        with open_bytes(path) as file:
            schema = open_footer(path, file).schema_arrow
        found = [(each.name, _kind(each.type)) for each in schema]
        for name, kind in first:
            if (name, kind) not in found and kind != "other":
                there = dict(found).get(name)
                what = f"is {there}" if there else "is missing"
                raise DataError(
                    path,
                    f"column {shown(name)} {what}, and in {files.paths[0]} it is {kind}: give it "
                    "one type",
                )
        if not first:
            first, types = list(found), [str(each.type) for each in schema]
    return [
        InputColumn(name, said, kind != "other")
        for (name, kind), said in zip(first, types, strict=True)
    ]


def read_sample(
    files: Files, rows: int = SAMPLE_ROWS, columns: Collection[str] | None = None
) -> Sample:
    """Read the first rows of all files together, text as the type that its values have.

    Args:
        files: Their format is what `sniff` found.
        rows: At most.
        columns: Those to read; None: all.

    Raises:
        DataError: A file is missing or broken, or has no row.
    """
    table = read_rows(files, rows, columns)
    typed, read_as, hints = {}, {}, {}
    for name in table.column_names:
        array = plain(_one(table.column(name)))
        if is_text(array.type):
            array, read_as[name] = _typed(array, table.schema.field(name).type, name)
            if read_as[name] == "string" and (hint := _hint(array)):
                hints[name] = hint
        typed[name] = array
    types = {
        name: str(kind) for name, kind in zip(table.column_names, table.schema.types, strict=True)
    }
    return Sample(table=pa.table(typed), read_as=read_as, types=types, hints=hints)


def read_rows(files: Files, rows: int, columns: Collection[str] | None = None) -> pa.Table:
    """Read the first rows of all files together, as they are; of text, texts.

    Raises:
        DataError: A file is missing or broken, or has no row.
    """
    if columns is None:
        columns = [each.name for each in input_columns(files) if each.readable]
    wanted = list(dict.fromkeys(columns))
    parts: list[Any] = []
    left = rows
    for part in _pieces(files, wanted):
        part = part.slice(0, left)
        parts.append(part)
        left -= len(part)
        if left <= 0:
            break
    if left == rows:
        raise DataError(files.paths[0], "has no row; give a file that has some")
    try:
        return pa.concat_tables(parts, promote_options="permissive")
    except (pa.ArrowException, ValueError) as error:
        raise DataError(
            files.paths[-1], f"has columns of other types ({shown(str(error))}); cast them alike"
        ) from error


def facts(sample: "Sample | pa.Table", total: int) -> list[ColumnFacts]:
    """Return what each column of a sample holds; `total` rows are in the whole input."""
    sample = sample if isinstance(sample, Sample) else Sample(table=sample)
    with np.errstate(over="ignore", invalid="ignore"):  # values may be as large as they like
        return [_facts(sample, name, total) for name in sample.table.column_names]


def count_rows(files: Files) -> int:
    """Count the rows of all files.

    Raises:
        DataError: One is missing or broken.
    """
    rows = 0
    for path in files.paths:
        if files.format == "parquet":
            with open_bytes(path) as file:
                rows += int(open_footer(path, file).metadata.num_rows)
        else:
            rows += sum(block.end - at for block, at in _blocks(path, files, ()))
    return rows


def _blocks(path: str, files: Files, columns: Collection[str]) -> Iterator[tuple[Any, int]]:
    at = 0
    for block in TextReader(path, files.text).blocks(columns):
        yield block, at
        at = block.end


def survey_time(
    files: Files, column: str, *, unit_ms: float = 1000.0, kind: Kind | None = None
) -> TimeFacts:
    """Read one column of all rows, to tell whether it is a clock.

    Args:
        files: The files to read.
        column: The clock.
        unit_ms: Milliseconds in one of its numbers.
        kind: Kind of the texts; None: that of most of the first ones.

    Raises:
        DataError: A file is missing or broken.
    """
    is_number = True
    first = next(_pieces(files, [column]), None)
    if first is not None:
        array = plain(_one(first.column(0)))
        if is_text(array.type) and kind is None:
            kind = "time" if texts.are("time", array.cast(pa.large_binary())) else "float"
        is_number = kind != "time" if is_text(array.type) else not is_time(array.type)

    def read() -> Iterator[NDArray[np.float64]]:
        return (time_values(part.column(0), kind) for part in _pieces(files, [column]))

    return clock.survey(read, unit_ms if is_number else 1.0, is_number=is_number)


def time_values(array: Any, kind: Kind | None = None) -> NDArray[np.float64]:
    """Values of a clock as floats: of times milliseconds; nan where there is none.

    Args:
        array: Times, numbers or texts.
        kind: Kind of the texts.
    """
    array = plain(_one(array))
    if is_text(array.type):
        value_N, null_N, bad_N = texts.parsed(array.cast(pa.large_binary()), kind or "time")
        return np.where(null_N | bad_N, np.nan, value_N.astype(np.float64))
    if is_time(array.type):
        array = array.cast(pa.timestamp("ms"), safe=False).view(pa.int64())
    values: Any = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values.astype(np.float64)  # type: ignore[no-any-return]


def _one(column: Any) -> Any:
    if not isinstance(column, pa.ChunkedArray):
        return column
    chunks = column.combine_chunks()
    return chunks.chunk(0) if isinstance(chunks, pa.ChunkedArray) else chunks


def _pieces(files: Files, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield pieces of all files; of text, texts."""
    for path in files.paths:
        if files.format == "csv":
            for block, _ in _blocks(path, files, columns):
                yield pa.table(dict(block.columns))
            continue
        with open_bytes(path) as file:
            footer = open_footer(path, file)
            groups = range(footer.num_row_groups)
            for part in batches(path, footer, columns, groups, CHUNK_ROWS):
                yield pa.Table.from_batches([part])


# --- types ----------------------------------------------------------------------------------------


def _typed(array: Any, meant: pa.DataType, name: str) -> tuple[Any, Kind]:
    """Return texts as what most of them are, and that; `meant`: the type that the input has."""
    as_binary = array.cast(pa.large_binary())
    kind = texts.kind_of(as_binary)
    # In delimited text everything is text, whatever it means; a Parquet file could have said so.
    if not pa.types.is_binary(meant) and kind not in _MEANT and not tells_number(name):
        kind = "string"
    if kind == "string":
        return array, kind
    value_N, null_N, bad_N = texts.parsed(as_binary, kind)
    found = pa.array(value_N, mask=null_N | bad_N)
    return (found.cast(pa.timestamp("ms")) if kind == "time" else found), kind


def _hint(array: Any) -> str:
    present = array.drop_null().cast(pa.large_binary())
    for pattern, hint in (
        (texts.OTHER_DATE, "dates that are not ISO 8601: write 2024-01-31"),
        (texts.DECIMAL_COMMA, "numbers with a decimal comma: write 3.14"),
    ):
        matches = pc.sum(pc.match_substring_regex(present, pattern)).as_py() or 0
        if matches and 10 * matches >= 9 * len(present):
            return hint
    return ""


def _facts(sample: Sample, name: str, total: int) -> ColumnFacts:
    array = plain(_one(sample.table.column(name)))
    kind = _kind(array.type)
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    rows, missing = len(array), array.null_count
    if pa.types.is_floating(array.type):
        missing = int(pc.sum(pc.is_nan(array)).as_py() or 0) + missing
    said: dict[str, Any] = {"name": name, "kind": kind, "rows": rows, "missing": missing}
    said |= {
        "text": sample.read_as.get(name, ""),
        "type": sample.types.get(name, str(array.type)),
        "hint": sample.hints.get(name, ""),
    }
    if kind in ("list", "numbers"):
        items = array.flatten()
        said |= _distinct(items, total, rows)
        return ColumnFacts(**said, length=len(items) / max(1, rows), nested=True)
    if kind == "other":
        return ColumnFacts(**said, distinct=0, expected=0)
    said |= _distinct(array, total, rows)
    if kind == "text":
        said["length"] = float(pc.mean(pc.binary_length(array)).as_py() or 0)
        said |= _as_list(array, said["distinct"], total)
        return ColumnFacts(**said)
    value_N = time_values(array)
    value_N = value_N[np.isfinite(value_N)]
    if len(value_N):
        steps = max(1, len(value_N) - 1)
        said |= {
            "least": float(value_N.min()),
            "most": float(value_N.max()),
            "middle": float(np.median(value_N)),
            "edges": _edges(value_N),
            "whole": bool((value_N == np.rint(value_N)).all()),
            "ascends": int((np.diff(value_N) < 0).sum()) <= (1 - _ASCENDING) * steps,
        }
        unit = clock.epoch_unit(value_N) if kind in ("int", "float") else None
        if unit is not None:
            said |= {"unit": unit[0], "unit_ms": unit[1]}
    return ColumnFacts(**said)


def _edges(value_N: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the ends of bins of about equally many values."""
    bins = min(max(len(value_N) // _BIN_VALUES, _MIN_BINS), _MAX_BINS)
    inner = np.quantile(value_N, np.arange(1, bins) / bins, method="higher")
    with np.errstate(over="ignore"):
        low = np.float32(value_N.min())
        found = {float(f"{value:.6g}") for value in inner.tolist()}
        kept = [value for value in found if np.float32(value) > low]
        return tuple(sorted(value for value in kept if np.isfinite(np.float32(value))))


def _kind(type: pa.DataType) -> ColumnKind:
    if pa.types.is_boolean(type):
        return "bool"
    if is_whole(type):
        return "int"
    if is_number(type):
        return "float"
    if is_time(type):
        return "time"
    if is_text(type):
        return "text"
    if is_list(type):
        item = type.value_type
        if is_whole(item) or is_text(item):
            return "list"
        return "numbers" if is_number(item) else "other"
    return "other"


def _distinct(array: Any, total: int, rows: int) -> dict[str, Any]:
    if pa.types.is_null(array.type):
        return {"distinct": 0, "expected": 0}
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    present = array.drop_null()
    counted = present.value_counts()
    distinct = len(counted)
    half = len(pc.unique(array.slice(0, max(1, len(array) // 2)).drop_null()))
    growth = min(1.0, max(0.0, math.log2(max(1, distinct) / max(1, half))))
    expected = round(distinct * max(1.0, total / max(1, rows)) ** growth)
    best = pc.sort_indices(counted.field("counts"), sort_keys=[("", "descending")])[:12]
    values, counts = counted.field("values").take(best), counted.field("counts").take(best)
    if is_time(values.type):  # Python has no years beyond 9999
        values = values.cast(pa.string())
    top = zip(values.to_pylist(), counts.to_pylist(), strict=True)
    found = tuple((_shown(value), int(count)) for value, count in top)
    return {"distinct": distinct, "expected": max(distinct, expected), "counts": found}


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
        said["whole"] = texts.are("int", items.cast(pa.large_binary()))
        if said["distinct"] * _FEWER_ITEMS <= distinct or said["distinct"] <= _FEW_ITEMS:
            return {**said, "kind": "list", "separator": separator}
    return {}
