"""Contents of messages and entries, turned to columns: JSON, Avro and Arrow.

A payload holds one event or some, and is good or bad by itself: what is read of it depends on
nothing that came before. Of JSON and Avro each value is converted alone, so that a column may have
integers in one message and strings in the next. Array suffixes: N rows, I items of lists.
"""

import abc
import contextlib
import dataclasses
import datetime
import functools
import io
import json
import logging
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embertide._common.quoting import shown, terminal_text
from embertide.trainer.data.arrow import schema_column, type_fault
from embertide.trainer.data.assemble import MAX_TS_MS, Column, hash_strings
from embertide.trainer.data.base import MAX_GROUP, EventSchema, known_schema
from embertide.trainer.data.ipc import MAX_BYTES, MAX_RATIO, BoundError, prove_bounds
from embertide.trainer.data.texts import INT, ISO_TIME, iso_ms
from embertide.trainer.errors import ConfigurationError

JSON, AVRO, CONFLUENT_AVRO, ARROW = "json", "avro", "confluent-avro", "arrow"
FORMATS = (JSON, AVRO, CONFLUENT_AVRO, ARROW)

_CONFLUENT_HEADER = 5  # a zero and the id of a schema, 4 bytes
_KEYS = range(-(1 << 63), 1 << 64)  # a key is 64 bits, whatever their sign
_EXACT = 1 << 53  # whole numbers up to it are exact in float64
_UTC = datetime.UTC
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=_UTC)
_MS = datetime.timedelta(milliseconds=1)
_SHOWN_ITEMS = 20
_SHOWN_LETTERS = 60  # of a value
_MAX_LETTERS = 160  # of what a library says
_MAX_NESTED = "it is nested too deeply"

log = logging.getLogger(__name__)

T = TypeVar("T", bound="Sequence[Any] | ArrowRows")
Row = tuple[Any, ...]


class PayloadError(ValueError):
    """A payload that is not what the schema says; the text says what is wrong with it."""


def recognise(
    columns: Iterable[Callable[[], Sequence[str]]],
) -> tuple[EventSchema | None, str]:
    """Return the schema of the first message whose columns are known.

    Args:
        columns: One callable per message: returns the names of its columns, or raises PayloadError.

    Returns:
        The schema; None, and for an error the columns of the last message, if none is known.
    """
    names: Sequence[str] = ()
    for of_message in columns:
        try:
            names = of_message()
        except PayloadError:
            continue
        schema = known_schema(names)
        if schema is not None:
            return schema, ""
    return None, f": columns {', '.join(names)}" if names else ""


class Payloads(abc.ABC, Generic[T]):
    """A format of payloads. Used by one thread.

    Attributes:
        absent: Values that records leave out, by column; they count as null.
    """

    def __init__(self) -> None:
        """Count nothing yet."""
        self.absent: Counter[str] = Counter()

    def names(self, data: bytes) -> list[str]:
        """Columns of a payload.

        Raises:
            PayloadError: It does not decode.
        """
        with _barrier():
            return self._names(data)

    def rows(self, data: bytes, schema: EventSchema) -> T:
        """Events of a payload, 1 to `MAX_GROUP`.

        Whatever its bytes lead to, here or in a library, is a fault of this payload alone.

        Raises:
            PayloadError: It does not decode, or a column is not what the schema says.
        """
        with _barrier():
            return self._rows(data, schema)

    @abc.abstractmethod
    def _names(self, data: bytes) -> list[str]:
        """See `names`."""

    @abc.abstractmethod
    def _rows(self, data: bytes, schema: EventSchema) -> T:
        """See `rows`."""

    @abc.abstractmethod
    def columns(
        self, rows_of: Sequence[T], schema: EventSchema
    ) -> Iterator[tuple[int, Mapping[str, Column]]]:
        """Columns of the rows of payloads, in their order: of how many payloads, and the columns.

        How payloads are put together makes no difference to a row.
        """

    def check(self, schema: EventSchema) -> None:
        """Refuse a schema that payloads of this format cannot fill.

        Raises:
            ConfigurationError: It is one.
        """


def payloads_of(format: str, avro_schema: str = "") -> Payloads[Any]:
    """Return what reads a format.

    Args:
        format: One of `FORMATS`. "confluent-avro" has a zero and the id of a schema in front, as
            Confluent's serializers write it; the id is not looked up.
        avro_schema: Path of the schema (.avsc) that Avro was written with.

    Raises:
        ConfigurationError: There is no such format, or the schema is missing or broken.
    """
    if format not in FORMATS:
        raise ConfigurationError(f"format {format!r} does not exist; use {', '.join(FORMATS)}")
    is_avro = format in (AVRO, CONFLUENT_AVRO)
    if is_avro != bool(avro_schema):
        raise ConfigurationError(
            f"format {format!r} and avro_schema {avro_schema!r}: give the schema's file (.avsc) "
            "with Avro, and with nothing else"
        )
    if format == JSON:
        return JsonPayloads()
    if format == ARROW:
        return ArrowPayloads()
    return AvroPayloads(Path(avro_schema), header=_CONFLUENT_HEADER * (format == CONFLUENT_AVRO))


@contextlib.contextmanager
def _barrier() -> Iterator[None]:
    """Have whatever goes wrong with a payload be a PayloadError."""
    try:
        yield
    except PayloadError:
        raise
    except RecursionError:
        raise PayloadError(_MAX_NESTED) from None
    except MemoryError:
        raise PayloadError("it asks for more memory than there is") from None
    except Exception as error:
        raise PayloadError(f"it cannot be read: {type(error).__name__}: {_said(error)}") from error


def _said(error: Exception) -> str:
    """Return what a library says of a payload, some of which may be the payload's."""
    return terminal_text(str(error)[:_MAX_LETTERS])


class ArrowRows:
    """Rows of a stream, and the columns that they are; slices are rows again."""

    def __init__(self, table: pa.Table, schema: EventSchema) -> None:
        """Turn every column of the schema."""
        self._table = table
        self._schema = schema
        self.columns: Mapping[str, Column] = {
            name: schema_column(schema, name, table.column(name).combine_chunks())
            for name in schema.columns
        }

    def __len__(self) -> int:
        """Return how many."""
        return len(self._table)

    def __getitem__(self, cut: slice) -> "ArrowRows":
        """Return some."""
        return self if cut == slice(0, None) else ArrowRows(self._table[cut], self._schema)


class ArrowPayloads(Payloads[ArrowRows]):
    """Arrow's IPC streams of record batches; every buffer is proved, for they come from outside."""

    def _names(self, data: bytes) -> list[str]:
        return list(self._table(data).column_names)

    def _rows(self, data: bytes, schema: EventSchema) -> ArrowRows:
        table = self._table(data)
        _prove_count(len(table))
        names = Counter(table.column_names)
        for name in schema.columns:
            if names[name] != 1:
                what = "is missing" if name not in names else f"is there {names[name]} times"
                raise PayloadError(f"column {name!r} {what}")
            fault = type_fault(schema, name, table.schema.field(name).type)
            if fault is not None:
                raise PayloadError(fault)
        _prove_texts([table.column(name) for name in schema.columns], len(data))
        return ArrowRows(table, schema)

    def columns(
        self, rows_of: Sequence[ArrowRows], schema: EventSchema
    ) -> Iterator[tuple[int, Mapping[str, Column]]]:
        """See `Payloads.columns`; types may differ from payload to payload."""
        for rows in rows_of:
            yield 1, rows.columns

    def _table(self, data: bytes) -> pa.Table:
        try:
            prove_bounds(data, MAX_GROUP)
            table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
            table.validate(full=True)
        except BoundError as error:
            raise PayloadError(str(error)) from error
        except (pa.ArrowException, struct.error, OSError, ValueError) as error:
            raise PayloadError(f"it is no stream of Arrow: {_said(error)}") from error
        return table


def _prove_texts(columns: Sequence[pa.ChunkedArray], size: int) -> None:
    """Refuse dictionaries of texts that many rows repeat: written out, they would be too large.

    Raises:
        PayloadError: One is.
    """
    most, found = max(MAX_BYTES, MAX_RATIO * size), 0
    for array in (chunk for column in columns for chunk in column.chunks):
        if pa.types.is_dictionary(array.type) and len(array.dictionary):
            longest = pc.max(pc.binary_length(array.dictionary.cast(pa.large_binary()))).as_py()
            found += (longest or 0) * len(array)
        if found > most:
            raise PayloadError(
                f"its texts may have {found} bytes written out; {most} at most: send fewer events "
                "in a message"
            )


class _RecordPayloads(Payloads[list[Row]]):
    """Formats whose events are records: a subclass says how they are read."""

    def __init__(self) -> None:
        super().__init__()
        self._schema: EventSchema | None = None
        self._uses: list[_Use] = []
        # Key columns whose kind nobody says: those with keys of text, with nulls, with both.
        self._with_texts: set[str] = set()
        self._with_nulls: set[str] = set()
        self._told: set[str] = set()

    @abc.abstractmethod
    def records(self, data: bytes) -> list[dict[str, Any]]:
        """Records of a payload.

        Raises:
            PayloadError: It does not decode.
        """

    def check(self, schema: EventSchema) -> None:
        """See `Payloads.check`."""
        if not schema.one_use_each:
            raise ConfigurationError(
                "records of JSON and Avro are read with one use a column, and the schema has a "
                "column with two; give each use a column of its own"
            )

    def _names(self, data: bytes) -> list[str]:
        return list(dict.fromkeys(name for record in self.records(data) for name in record))

    def _rows(self, data: bytes, schema: EventSchema) -> list[Row]:
        self._read_as(schema)
        records = self.records(data)
        _prove_count(len(records))
        return [self._row(record) for record in records]

    def _row(self, record: dict[str, Any]) -> Row:
        row = []
        for use in self._uses:
            if use.name not in record:
                self.absent[use.name] += 1
            value = record.get(use.name)
            if use.untold:
                self._look(use.name, value)
            try:
                row.append(None if value is None else use.value(value))
            except (ValueError, OverflowError) as error:
                raise PayloadError(f"column {use.name!r} {error}") from error
        return tuple(row)

    def _look(self, name: str, value: Any) -> None:
        """Say once that a column of no kind has texts and nulls: their key is not that of files."""
        if value is None:
            self._with_nulls.add(name)
        elif isinstance(value, str | bytes):
            self._with_texts.add(name)
        if name in self._with_nulls & self._with_texts - self._told:
            self._told.add(name)
            log.warning(
                "column %s: some keys are text and some are null; a null has the key of integers, "
                "-1, as nothing says that the column is one of text: give its FeatureColumn "
                "kind='string', so that it has the key of files and of clients",
                shown(name),
            )

    def columns(
        self, rows_of: Sequence[list[Row]], schema: EventSchema
    ) -> Iterator[tuple[int, Mapping[str, Column]]]:
        """See `Payloads.columns`."""
        self._read_as(schema)
        rows = [row for rows in rows_of for row in rows]
        if rows:
            used = zip(self._uses, zip(*rows, strict=True), strict=True)
            yield len(rows_of), {use.name: use.column(values) for use, values in used}

    def _read_as(self, schema: EventSchema) -> None:
        if schema is not self._schema:
            self._schema, self._uses = schema, list(_uses(schema, self.text_fields()))

    def text_fields(self) -> frozenset[str]:
        """Columns that the format itself says are text: what is missing is an empty one."""
        return frozenset()


class JsonPayloads(_RecordPayloads):
    """JSON: an object an event, or an array of them."""

    def records(self, data: bytes) -> list[dict[str, Any]]:
        """See `_RecordPayloads.records`."""
        try:
            found = json.loads(data)
        except RecursionError:
            raise PayloadError(_MAX_NESTED) from None
        except ValueError as error:  # of UTF-8 and of numbers too
            raise PayloadError(f"it is no JSON: {_said(error)}") from error
        found = found if isinstance(found, list) else [found]
        for each in found:
            if not isinstance(each, dict):
                raise PayloadError(f"it holds {_kind(each)} where an event, an object, should be")
        return found


class AvroPayloads(_RecordPayloads):
    """Avro's binary encoding: records, one after the other, without a file's header."""

    def __init__(self, path: Path, *, header: int = 0) -> None:
        """Read the schema.

        Args:
            path: File of the schema, .avsc.
            header: Bytes before each payload: 0, or the 5 of Confluent's format.

        Raises:
            ConfigurationError: It is missing, or is no schema of a record.
        """
        from fastavro.schema import load_schema

        super().__init__()
        self._header = header
        try:
            self._avro: Any = load_schema(str(path))
        except Exception as error:  # fastavro names no base of its errors
            raise ConfigurationError(
                f"{path} is no Avro schema: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(self._avro, dict) or self._avro.get("type") != "record":
            raise ConfigurationError(f"{path} is no Avro schema of a record; events are records")

    def text_fields(self) -> frozenset[str]:
        """See `_RecordPayloads.text_fields`."""
        fields = self._avro["fields"]
        return frozenset(each["name"] for each in fields if _is_text_field(each["type"]))

    def records(self, data: bytes) -> list[dict[str, Any]]:
        """See `_RecordPayloads.records`."""
        from fastavro import schemaless_reader

        if self._header and (len(data) < self._header or data[0] != 0):
            raise PayloadError(
                "it has no header of Confluent's format, a zero and the id of a schema; use format "
                "'avro' for Avro without one"
            )
        file = io.BytesIO(data)
        found: list[Any] = []
        file.seek(self._header)
        try:
            while file.tell() < len(data) or not found:
                before = file.tell()
                found.append(schemaless_reader(file, self._avro, None))
                if file.tell() == before:  # a record of no bytes would never end
                    break
        except RecursionError:
            raise PayloadError(_MAX_NESTED) from None
        except Exception as error:  # fastavro raises what its bytes lead to
            what = f"{type(error).__name__}: {_said(error)}"
            raise PayloadError(f"it is no Avro of the schema that was given: {what}") from error
        return found


def _is_text_field(kind: Any) -> bool:
    """Whether an Avro type is text, or text or null."""
    kinds = [each for each in (kind if isinstance(kind, list) else [kind]) if each != "null"]
    names = [each.get("type") if isinstance(each, dict) else each for each in kinds]
    return bool(names) and all(name in ("string", "bytes", "enum") for name in names)


def _prove_count(rows: int) -> None:
    if not 0 < rows <= MAX_GROUP:
        raise PayloadError(f"it holds {rows} events; one or more, {MAX_GROUP} at most")


# --- one value ------------------------------------------------------------------------------------


def _kind(value: object) -> str:
    return f"{type(value).__name__} {shown(value, _SHOWN_LETTERS)}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
    """How a column is used: what reads a value of it, raising ValueError, and makes it of values.

    The values given to `column` are those that were read, None where there was none. `untold`:
    they are keys, and neither the schema nor the format says of which kind.
    """

    name: str
    value: Callable[[Any], Any]
    column: Callable[[Sequence[Any]], Column]
    untold: bool = False


def _uses(schema: EventSchema, texts: Collection[str]) -> Iterator[_Use]:
    """Yield the use of every column, in the schema's order; `texts` are those of text."""
    unit_ms, separator = schema.ts_unit_ms, schema.list_separator
    for name in schema.columns:
        kind = schema.kind_of(name) or ("string" if name in texts else "")
        key = _KEY_OF[kind]
        if name == schema.ts:
            yield _Use(name, lambda value: _time_ms(value, unit_ms), _times)
        elif name in schema.list_columns:
            yield _Use(name, functools.partial(_items, separator=separator, item=key), _key_lists)
        elif name in schema.weight_columns:
            yield _Use(name, lambda value: _items(value, separator, _number), _number_lists)
        elif name in schema.key_columns or name == schema.id:
            untold = not kind and name != schema.id
            yield _Use(name, key, _text_keys if kind == "string" else _keys, untold)
        elif name == schema.label and schema.text_label:
            yield _Use(name, _text, _words)
        else:
            yield _Use(name, _number, _numbers)


def _key(value: Any) -> int | bytes:
    """A key: an integer as it is, text as the bytes that are hashed."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        value = int(value)
    if not isinstance(value, int):  # a bool is one
        raise ValueError(f"is {_kind(value)}; a key is an integer or a string")
    if value not in _KEYS:
        raise ValueError(f"is {_kind(value)}, which is no 64-bit integer; write it as a string")
    return int(value) if value < 1 << 63 else int(value) - (1 << 64)


def _text_key(value: Any) -> bytes:
    """A key of a column of text: numbers as they are written."""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    key = _key(value)
    return key if isinstance(key, bytes) else str(value).encode()


def _whole_key(value: Any) -> int:
    """A key of a column of integers, which text may hold."""
    if not isinstance(value, str | bytes):
        key = _key(value)
        assert isinstance(key, int), "as it is no text"
        return key
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    if not re.match(INT, text):
        raise ValueError(f"is {_kind(value)}; a key of this column is an integer")
    return int(_key(int(text.partition(".")[0])))


_KEY_OF: Mapping[str, Callable[[Any], int | bytes]] = {
    "": _key,
    "int": _whole_key,
    "string": _text_key,
}
"""Readers of keys, by the schema's kind."""


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"is {_kind(value)}; give a number")
    return float(value)


def _text(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    raise ValueError(f"is {_kind(value)}; the label is compared as text")


def _items(value: Any, separator: str, item: Callable[[Any], Any]) -> list[Any]:
    if isinstance(value, str):
        value = value.split(separator) if value else []
    if not isinstance(value, list | tuple):
        raise ValueError(f"is {_kind(value)}; give a list")
    return [None if each is None else item(each) for each in value]


def _time_ms(value: Any, unit_ms: float) -> int:
    """Milliseconds of a number in the schema's unit, a text of ISO 8601, or Avro's date or time."""
    if isinstance(value, str):
        ms = iso_ms(value) if re.match(ISO_TIME, value) else None
        if ms is None:
            raise ValueError(f"is {_kind(value)}, which is no time of ISO 8601")
    elif isinstance(value, datetime.datetime):
        value = value.replace(tzinfo=_UTC) if value.tzinfo is None else value
        ms = (value - _EPOCH) // _MS
    elif isinstance(value, datetime.date):
        ms = (value - _EPOCH.date()) // _MS
    elif isinstance(value, int):
        ms = value * round(unit_ms) if unit_ms >= 1 else value // round(1 / unit_ms)
    elif isinstance(value, float) and math.isfinite(value):
        ms = round(value * unit_ms)
    else:
        raise ValueError(f"is {_kind(value)}; give a number, or a time of ISO 8601")
    if abs(ms) > MAX_TS_MS:
        raise ValueError(f"is {_kind(value)}, which is out of range; see ts_unit_ms")
    return ms


# --- columns of values ----------------------------------------------------------------------------


def _times(values: Sequence[Any]) -> Column:
    ms_N = np.array([0 if each is None else each for each in values], np.int64)
    return Column(values=ms_N.view("M8[ms]"), null_N=_nulls(values))


def _words(values: Sequence[Any]) -> Column:
    # Its last entry stands for what is missing.
    words = np.array([*(each or b"" for each in values), b""], np.object_)
    return Column(values=words, code_N=np.arange(len(values), dtype=np.int32))


def _key_lists(values: Sequence[Any]) -> Column:
    return _lists(values, _keys)


def _number_lists(values: Sequence[Any]) -> Column:
    return _lists(values, _numbers)


def _keys(values: Sequence[Any]) -> Column:
    """Keys: integers, and those that texts are hashed to. One that is null is that of integers."""
    words = [each for each in values if isinstance(each, bytes)]
    hashes = iter(hash_strings(np.array(words, np.object_)).tolist() if words else ())
    keys = [next(hashes) if isinstance(each, bytes) else each or 0 for each in values]
    return Column(values=np.array(keys, np.int64), null_N=_nulls(values))


def _text_keys(values: Sequence[Any]) -> Column:
    """Keys of a column of text, in which one that is null is that of the empty text."""
    return _keys([b"" if each is None else each for each in values])


def _numbers(values: Sequence[Any]) -> Column:
    numbers = [math.nan if each is None else each for each in values]
    return Column(values=np.array(numbers, np.float64), null_N=_nulls(values))


def _lists(values: Sequence[Any], column_of: Callable[[Sequence[Any]], Column]) -> Column:
    sizes = [0 if each is None else len(each) for each in values]
    items = [item for each in values if each is not None for item in each]
    return dataclasses.replace(
        column_of(items),
        sizes_N=np.array(sizes, np.int64),
        raw=lambda row_R: [(values[row] or [])[:_SHOWN_ITEMS] for row in row_R.tolist()],
    )


def _nulls(values: Sequence[Any]) -> Any:
    null_N = np.fromiter((each is None for each in values), np.bool_, len(values))
    return null_N if null_N.any() else None
