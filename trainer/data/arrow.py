"""Arrow arrays to `Column`s: typed ones as they are, text parsed without ever failing.

`parquet.py` uses the first, `csv.py` and `criteo.py` the second. Array suffix: N rows of a chunk.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embertide.trainer.data.assemble import Column, Ints
from embertide.trainer.data.base import EventSchema

Kind = Literal["int", "float", "string"]

_PATTERNS = {
    "int": r"^-?[0-9]{1,19}$",
    "float": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?$",
}
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
        fits = is_list and (whole or is_text(item))
        return None if fits else f"list {name!r} is {kind}; cast it to list<int64> or list<string>"
    if name in schema.weight_columns:
        fits = is_list and number
        return None if fits else f"weights {name!r} are {kind}; cast them to list<float>"
    if is_list:
        return f"column {name!r} is {kind}; read it with transform 'keys', or cast it to one value"
    if name in (*schema.key_columns, schema.id) and not (whole or is_text(kind)):
        return f"key column {name!r} is {kind}; cast it to int64 or to a string"
    if name in schema.dense and not number:
        return f"dense column {name!r} is {kind}; cast it to a number"
    if name in schema.target_columns and not number:
        return f"column {name!r} is {kind}; cast it to a number"
    if name == schema.label and not number:
        return f"label column {name!r} is {kind}; cast it to int8, 0 or 1"
    if name == schema.ts and not (number or pa.types.is_timestamp(kind)):
        return f"ts column {name!r} is {kind}; cast it to a number or to a timestamp"
    return None


def typed_column(array: pa.Array) -> Column:
    """A column of a type that `type_fault` accepts."""
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _lists(array, typed_column)
    if is_text(array.type):
        return _strings(array)
    null_N = _nulls(array)
    if pa.types.is_timestamp(array.type):
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
    null_N = _nulls(array)
    fits = pc.fill_null(pc.match_substring_regex(array, _PATTERNS[kind]), False)
    # Only ASCII is left by now, so the bytes need no check before they are called a string.
    texts = pc.if_else(fits, array, pa.scalar(b"0", array.type)).view(pa.string())
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


def split(array: pa.Array, separator: str) -> pa.Array:
    """Lists of the texts between separators; a missing text is a missing list."""
    return pc.split_pattern(array, separator)


def parses_as_int(array: pa.Array) -> bool:
    """Whether at least half of the texts that are there read as integers."""
    present = array.drop_null()
    fits = pc.sum(pc.match_substring_regex(present, _PATTERNS["int"])).as_py() or 0
    return len(present) > 0 and 2 * fits >= len(present)


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
