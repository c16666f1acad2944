"""Arrow arrays to `Column`s: typed ones as they are, text parsed without ever failing.

`parquet.py` uses the first, `csv.py` the second. Array suffix: N rows of a chunk.
"""

import dataclasses
import datetime
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embertide.trainer.data.assemble import Column, Ints
from embertide.trainer.data.base import EventSchema

Kind = Literal["int", "float", "string", "time"]

_PATTERNS = {
    "int": r"^ *-?[0-9]{1,19} *$",
    "float": r"^ *[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})? *$",
}
# ISO 8601: a date, or a date and a time of day, with a zone or without.
ISO_TIME = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?"
    r"(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?$"
)
_UTC = datetime.UTC
_INT64 = range(-(1 << 63), 1 << 63)
_SHOWN_ITEMS = 20  # of a list that is rejected


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this Arrow type is hashed when it is a key."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(test(kind) for test in tests)


def type_fault(schema: EventSchema, name: str, kind: pa.DataType) -> str | None:
    """What is wrong with a column of this Arrow type, and the remedy; None if it will do."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    item = kind.value_type if is_list else kind
    whole = pa.types.is_integer(item) or pa.types.is_boolean(item)
    number = whole or pa.types.is_floating(item)
    if name in schema.list_columns:
        fits = (is_list and whole) or is_text(item)
        return None if fits else f"list {name!r} is {kind}; cast it to list<int64> or list<string>"
    if name in schema.weight_columns:
        fits = is_list and number
        return None if fits else f"weights {name!r} are {kind}; cast them to list<float>"
    if is_list:
        return f"column {name!r} is {kind}; read it with transform 'keys', or cast it to one value"
    if name == schema.id and not (whole or is_text(kind)):
        return f"key column {name!r} is {kind}; cast it to int64 or to a string"
    if name in schema.key_columns and not (number or is_text(kind)):
        return f"key column {name!r} is {kind}; cast it to int64 or to a string"
    if name in schema.dense and not number:
        return f"dense column {name!r} is {kind}; cast it to a number"
    if name in schema.target_columns and not number:
        return f"column {name!r} is {kind}; cast it to a number"
    if name == schema.label and schema.text_label and not is_text(kind):
        return (
            f"label column {name!r} is {kind}, but positive is {schema.positive!r}; name a number"
        )
    if name == schema.label and not (number or schema.text_label):
        return (
            f"label column {name!r} is {kind}; cast it to int8, 0 or 1, or say which values are "
            "positive: EventSchema(positive='== yes')"
        )
    if name == schema.ts and not (number or is_time(kind) or is_text(kind)):
        return f"ts column {name!r} is {kind}; cast it to a number or to a timestamp"
    return None


def is_time(kind: pa.DataType) -> bool:
    """Whether a column of this Arrow type is a time or a date."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def schema_column(schema: EventSchema, name: str, array: pa.Array) -> Column:
    """A column of a type that `type_fault` accepts, as the schema reads it."""
    lists = (*schema.list_columns, *schema.weight_columns)
    if name in lists and is_text(array.type):
        return _lists(split(_plain(array), schema.list_separator), typed_column)
    if name == schema.ts and is_text(array.type):
        return text_column(_plain(array).cast(pa.binary()), "time")
    if pa.types.is_floating(array.type) and name in schema.key_columns and name not in schema.dense:
        return _whole(array)
    return typed_column(array)


def _plain(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _whole(array: pa.Array) -> Column:
    """Integers that came as floats, as a table with missing integers writes them."""
    float_N = _numpy(array).astype(np.float64)
    null_N = np.isnan(float_N)
    gone = _nulls(array)
    null_N = null_N if gone is None else null_N | gone
    safe_N = np.where(null_N | (np.abs(float_N) > 1 << 53), 0.0, float_N)
    bad_N = ~null_N & ((safe_N != np.rint(safe_N)) | (np.abs(float_N) > 1 << 53))
    return Column(
        values=safe_N.astype(np.int64),
        null_N=null_N if null_N.any() else None,
        bad_N=bad_N if bad_N.any() else None,
        raw=lambda row_R: float_N[row_R].tolist(),
    )


def typed_column(array: pa.Array) -> Column:
    """A column of a type that `type_fault` accepts."""
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _lists(array, typed_column)
    if is_text(array.type):
        return _strings(array)
    null_N = _nulls(array)
    if is_time(array.type):
        array = array.cast(pa.timestamp("ms"), safe=False)
        return Column(values=_numpy(array.view(pa.int64())).view("M8[ms]"), null_N=null_N)
    return Column(values=_numpy(array), null_N=null_N)


def text_column(array: pa.Array, kind: Kind, separator: str = "") -> Column:
    """Parses N texts (binary, null where missing); what does not parse is marked as bad.

    With a separator, each text is a list of values.
    """
    if separator:
        return _lists(split(array, separator), lambda items: text_column(items, kind))
    if kind == "string":
        return _strings(array)
    if kind == "time":
        return _times(array)
    null_N = _nulls(array)
    fits = pc.fill_null(pc.match_substring_regex(array, _PATTERNS[kind]), False)
    # Only ASCII is left by now, so the bytes need no check before they are called a string.
    texts = pc.if_else(fits, array, pa.scalar(b"0", array.type)).view(pa.string())
    texts = pc.ascii_trim(texts, " ")
    fits_N = fits.to_numpy(zero_copy_only=False)
    values_N: NDArray[Any]
    if kind == "float":
        values_N = _numpy(texts.cast(pa.float64()))
    else:
        values_N, fits_N = _integers(texts, fits_N)
    bad_N = ~fits_N if null_N is None else ~fits_N & ~null_N
    return Column(
        values=values_N,
        null_N=null_N,
        bad_N=bad_N if bad_N.any() else None,
        raw=lambda row_R: [_shown(array[row].as_py()) for row in row_R.tolist()],
    )


def _times(array: pa.Array) -> Column:
    """Milliseconds of texts of ISO 8601; those without a zone are UTC."""
    fits = pc.fill_null(pc.match_substring_regex(array, ISO_TIME), False)
    texts = pc.if_else(fits, array, pa.scalar(b"1970-01-01", array.type)).view(pa.string())
    bad_N = ~fits.to_numpy(zero_copy_only=False)
    try:
        times = texts.cast(pa.timestamp("ns"))
        ms_N = _numpy(times.view(pa.int64())) // 1_000_000
    except pa.ArrowInvalid:  # zones, or a day that does not exist: Arrow does not say which
        found = [iso_ms(text) for text in texts.to_pylist()]
        ms_N = np.array([0 if ms is None else ms for ms in found], np.int64)
        bad_N |= np.array([ms is None for ms in found], np.bool_)
    null_N = _nulls(array)
    if null_N is not None:
        bad_N &= ~null_N
    return Column(
        values=ms_N.view("M8[ms]"),
        null_N=null_N,
        bad_N=bad_N if bad_N.any() else None,
        raw=lambda row_R: [_shown(array[row].as_py()) for row in row_R.tolist()],
    )


def iso_ms(text: str) -> int | None:
    """Milliseconds of a time of ISO 8601, of UTC where it names no zone; None: it is no time."""
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    when = when.replace(tzinfo=_UTC) if when.tzinfo is None else when
    return int(
        (when - datetime.datetime(1970, 1, 1, tzinfo=_UTC)) // datetime.timedelta(0, 0, 1000)
    )


_FAULTY = 0.02
_FEW = 4  # texts, of which one may be faulty


def most_match(array: pa.Array, pattern: str) -> bool:
    """Whether the texts that are there, but for a few, match: it is a column of such.

    The few are mistakes. Were half enough, a column of hexadecimal ids could be one of integers, as
    many of them are digits alone.
    """
    present = array.drop_null()
    if not len(present):
        return False
    faulty = len(present) - (pc.sum(pc.match_substring_regex(present, pattern)).as_py() or 0)
    return faulty <= max(_FAULTY * len(present), int(len(present) >= _FEW))


def parses_as_time(array: pa.Array) -> bool:
    """Whether the texts that are there, but for a few, are times of ISO 8601."""
    return most_match(array, ISO_TIME)


def split(array: pa.Array, separator: str) -> pa.Array:
    """Lists of the texts between separators; a missing text is a missing list."""
    return pc.split_pattern(array, separator)


def parses_as_int(array: pa.Array) -> bool:
    """Whether the texts that are there, but for a few, are integers."""
    return most_match(array, _PATTERNS["int"])


def _integers(texts: pa.Array, fits_N: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.bool_]]:
    try:
        return _numpy(texts.cast(pa.int64())), fits_N
    except pa.ArrowInvalid:
        # Some 19 digits exceed 64 bits, and Arrow does not say which.
        numbers = [int(text) for text in texts.to_pylist()]
    inside_N = np.array([number in _INT64 for number in numbers])
    kept = [number if number in _INT64 else 0 for number in numbers]
    return np.array(kept, np.int64), fits_N & inside_N


def _lists(array: pa.Array, column_of: Callable[[pa.Array], Column]) -> Column:
    sizes = pc.fill_null(pc.list_value_length(array), 0)

    def raw(row_R: Ints) -> list[object]:
        rows = (array.slice(row, 1).flatten() for row in row_R.tolist())
        return [[_shown(item) for item in row[:_SHOWN_ITEMS].to_pylist()] for row in rows]

    items = array.flatten()  # a list that is missing has none
    return dataclasses.replace(
        column_of(items),
        null_N=_nulls(items),  # of strings, too
        raw=raw,
        sizes_N=_numpy(sizes).astype(np.int64),
    )


def _nulls(array: pa.Array) -> NDArray[np.bool_] | None:
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def _strings(array: pa.Array) -> Column:
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    # A null is an entry of its own, so that the empty string's key needs no special case later.
    words = pc.fill_null(array.dictionary.cast(pa.large_binary()), b"")
    code_N = pc.fill_null(array.indices.cast(pa.int32()), len(words)).to_numpy()
    values = np.empty(len(words) + 1, np.object_)
    values[:-1] = words.to_pylist()
    values[-1] = b""
    return Column(values=values, code_N=code_N)


def _numpy(array: pa.Array) -> NDArray[Any]:
    if array.null_count:
        zero = False if pa.types.is_boolean(array.type) else 0
        array = pc.fill_null(array, zero)
    values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values


def _shown(value: object) -> object:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
