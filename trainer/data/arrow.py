"""Arrow arrays to `Column`s: typed ones as they are, texts by `texts.py`; neither ever fails.

Every reader uses it, so that a value means the same in Parquet, Arrow and delimited text. Array
suffix: N rows of a chunk.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embertide._common.quoting import shown
from embertide.trainer.data import texts
from embertide.trainer.data.assemble import Column, Ints
from embertide.trainer.data.base import EventSchema
from embertide.trainer.data.texts import Kind

_SHOWN_ITEMS = 20  # of a list that is rejected
_EXACT = 1 << 53  # whole numbers up to it are exact in float64


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that `plain` gives an array of this one."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if types.is_float16(kind):
        return pa.float32()
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.large_list(plain_type(kind.value_type))
    return kind


def plain(array: pa.Array) -> pa.Array:
    """Return an array of the same values without dictionaries, views and other wrappings."""
    types = pa.types
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if types.is_dictionary(kind):
        return plain(array.dictionary_decode())
    if types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(array))
    if types.is_fixed_size_list(kind):
        array = array.cast(pa.large_list(kind.value_type))
    if types.is_list(array.type) or types.is_large_list(array.type):
        sizes = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        ends = pa.array(np.append(0, np.cumsum(sizes, dtype=np.int64)), pa.int64())
        gone = array.is_null() if array.null_count else None
        return pa.LargeListArray.from_arrays(ends, plain(array.flatten()), mask=gone)
    wanted = plain_type(kind)
    return array if wanted == kind else array.cast(wanted)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this Arrow type is hashed when it is a key."""
    kind = plain_type(kind)
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(test(kind) for test in tests)


def is_time(kind: pa.DataType) -> bool:
    """Whether a column of this Arrow type is a time or a date."""
    kind = plain_type(kind)
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this Arrow type has lists that can be read."""
    return bool(pa.types.is_large_list(plain_type(kind)))


def is_whole(kind: pa.DataType) -> bool:
    """Whether a column of this Arrow type has integers."""
    kind = plain_type(kind)
    scaled = pa.types.is_decimal(kind) and kind.scale > 0
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or (pa.types.is_decimal(kind) and not scaled)
    )


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this Arrow type has numbers."""
    kind = plain_type(kind)
    return bool(is_whole(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def type_fault(schema: EventSchema, name: str, kind: pa.DataType) -> str | None:
    """Return why a column of this Arrow type will not do, and the remedy; None if it will do."""
    lists = is_list(kind)
    item = plain_type(kind).value_type if lists else kind
    whole, number, text = is_whole(item), is_number(item), is_text(item)
    said = shown(str(kind))[1:-1]
    if name in schema.list_columns:
        fits = (lists and (whole or text)) or is_text(kind)
        return None if fits else f"list {name!r} is {said}; cast it to list<int64> or list<string>"
    if name in schema.weight_columns:
        fits = (lists and number) or is_text(kind)
        return None if fits else f"weights {name!r} are {said}; cast them to list<float>"
    if lists:
        return f"column {name!r} is {said}; read it with transform 'keys', or cast it to one value"
    if pa.types.is_null(plain_type(kind)):
        return None if name in schema.key_columns or name in schema.dense else _no_value(name)
    if name == schema.id and not (whole or text):
        return f"key column {name!r} is {said}; cast it to int64 or to a string"
    if name in schema.key_columns and not (number or text):
        return f"key column {name!r} is {said}; cast it to int64 or to a string"
    if name in schema.dense and not (number or text):
        return f"dense column {name!r} is {said}; cast it to a number"
    if name in schema.target_columns and not (number or text):
        return f"column {name!r} is {said}; cast it to a number"
    if name == schema.label and schema.text_label and not text:
        return (
            f"label column {name!r} is {said}, but positive is {schema.positive!r}; name a number"
        )
    if name == schema.label and not (number or text):
        return (
            f"label column {name!r} is {said}; cast it to int8, 0 or 1, or say which values are "
            "positive: EventSchema(positive='== yes')"
        )
    if name == schema.ts and not (number or is_time(kind) or text):
        return f"ts column {name!r} is {said}; cast it to a number or to a timestamp"
    return None


def _no_value(name: str) -> str:
    return f"column {name!r} has no value in any row; name another"


def schema_column(
    schema: EventSchema, name: str, array: pa.Array, kinds: Mapping[str, Kind] | None = None
) -> Column:
    """A column of a type that `type_fault` accepts, as the schema reads it.

    Args:
        schema: The schema to read by.
        name: The column's.
        array: Its values.
        kinds: The kinds of text columns.
    """
    lists = (*schema.list_columns, *schema.weight_columns)
    if pa.types.is_null(array.type):
        array = array.cast(pa.int64())
    if is_text(array.type):
        kind = (kinds or {}).get(name) or text_kind(schema, name)
        separator = schema.list_separator if name in lists else ""
        if kind == "string" and not separator:
            return _strings(array)  # which may be a dictionary
        return text_column(plain(array), kind, separator)
    array = plain(array)
    if name in lists:
        return _lists(array, lambda items: _typed(schema, name, items))
    return _typed(schema, name, array)


def text_kind(schema: EventSchema, name: str) -> Kind:
    """Return the kind of a text column, where nothing but the schema names it."""
    said = schema.kind_of(name)
    numbers = {*schema.dense, *schema.target_columns, *schema.weight_columns}
    if name in schema.dense and name in schema.key_columns:
        return "int"
    if name in numbers or (name == schema.label and not schema.text_label):
        return "float"
    if name == schema.ts:
        return "time"
    return said or "string"


def _typed(schema: EventSchema, name: str, array: pa.Array) -> Column:
    keys = (*schema.key_columns, *schema.list_columns, *(() if schema.id is None else (schema.id,)))
    is_key = name in keys and name not in schema.dense
    if is_key and schema.kind_of(name) == "string" and not is_text(array.type):
        return _strings(array.cast(pa.string()))
    if is_text(array.type):
        return text_column(array, schema.kind_of(name) or "string")
    if is_key and pa.types.is_floating(array.type):
        return _whole(array)
    if is_key and pa.types.is_decimal(array.type):
        return text_column(array.cast(pa.string()), "int")
    return typed_column(array)


def _whole(array: pa.Array) -> Column:
    """Integers that came as floats, as a table with missing integers writes them."""
    float_N = _numpy(array).astype(np.float64)
    null_N = np.isnan(float_N)
    gone = _nulls(array)
    null_N = null_N if gone is None else null_N | gone
    safe_N = np.where(null_N | (np.abs(float_N) > _EXACT), 0.0, float_N)
    bad_N = ~null_N & ((safe_N != np.rint(safe_N)) | (np.abs(float_N) > _EXACT))
    return Column(
        values=safe_N.astype(np.int64),
        null_N=null_N if null_N.any() else None,
        bad_N=bad_N if bad_N.any() else None,
        raw=lambda row_R: float_N[row_R].tolist(),
    )


def typed_column(array: pa.Array) -> Column:
    """A column by its own type alone: numbers, times, strings, or lists of them."""
    if is_list(array.type):
        return _lists(plain(array), typed_column)
    if is_text(array.type):
        return _strings(array)
    array = plain(array)
    null_N = _nulls(array)
    if is_time(array.type):
        return Column(values=_milliseconds(array).view("M8[ms]"), null_N=null_N)
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    return Column(values=_numpy(array), null_N=null_N)


def _milliseconds(array: pa.Array) -> NDArray[np.int64]:
    """Milliseconds of times; those that 64 bits cannot hold are the last there are."""
    if pa.types.is_timestamp(array.type) and array.type.unit == "s":
        seconds_N = _numpy(array.view(pa.int64()))
        limit = (1 << 63) // 1000 - 1
        return np.clip(seconds_N, -limit, limit) * 1000
    ms_N: NDArray[np.int64] = _numpy(array.cast(pa.timestamp("ms"), safe=False).view(pa.int64()))
    return ms_N


def text_column(array: pa.Array, kind: Kind, separator: str = "") -> Column:
    """Parses N texts, null where missing; what does not parse is marked as bad.

    With a separator, each text is a list of values.
    """
    if separator:
        return _lists(split(array, separator), lambda items: text_column(items, kind))
    if kind == "string":
        return _strings(array)
    array = array.cast(pa.large_binary())
    values_N, null_N, bad_N = texts.parsed(array, kind)
    return Column(
        values=values_N.view("M8[ms]") if kind == "time" else values_N,
        null_N=null_N if null_N.any() else None,
        bad_N=bad_N if bad_N.any() else None,
        raw=lambda row_R: [_shown(array[row].as_py()) for row in row_R.tolist()],
    )


def split(array: pa.Array, separator: str) -> pa.Array:
    """Lists of the texts between separators; a missing text is a missing list, as an empty one."""
    empty = pc.equal(pc.binary_length(array), 0)
    # Not by a scalar: of a slice, Arrow 22 gives other bytes then.
    return pc.split_pattern(pc.if_else(empty, pa.nulls(len(array), array.type), array), separator)


def _lists(array: pa.Array, column_of: Callable[[pa.Array], Column]) -> Column:
    sizes = pc.fill_null(pc.list_value_length(array), 0)

    def raw(row_R: Ints) -> list[object]:
        rows = (array.slice(row, 1).flatten() for row in row_R.tolist())
        return [[_shown(item) for item in row[:_SHOWN_ITEMS].to_pylist()] for row in rows]

    items = array.flatten()  # a list that is missing has none
    column = column_of(items)
    null_N = _nulls(items)  # of strings, too
    if column.null_N is not None:
        null_N = column.null_N if null_N is None else null_N | column.null_N
    return dataclasses.replace(
        column,
        null_N=null_N,
        raw=raw,
        sizes_N=_numpy(sizes).astype(np.int64),
    )


def _nulls(array: pa.Array) -> NDArray[np.bool_] | None:
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def _strings(array: pa.Array) -> Column:
    if not pa.types.is_dictionary(array.type):
        array = plain(array).dictionary_encode()
    # A null is an entry of its own, so that the empty string's key needs no special case later.
    words = pc.fill_null(plain(array.dictionary).cast(pa.large_binary()), b"")
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
