"""Traces of keys: one column of a Parquet or CSV file, or a file of bare 64-bit keys.

Array suffix: N keys in the order in which they were asked for.
"""

import contextlib
import itertools
import lzma
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from embertide.trainer.data.arrow import is_text, typed_column
from embertide.trainer.data.assemble import Ints, column_keys
from embertide.trainer.data.opening import open_bytes
from embertide.trainer.data.parquet import CHUNK_ROWS
from embertide.trainer.errors import DataError

_KEY_BYTES = 8
_Progress = Callable[[int], None]


def read_trace(
    path: str,
    *,
    column: str | None = None,
    accesses: int | None = None,
    progress: _Progress = lambda _: None,
) -> Ints:
    """Reads a trace into memory.

    Args:
        path: Local path or fsspec URL: .parquet or .pq, .csv (also .csv.gz and the like), .trace or
            .trace.xz with big-endian 64-bit keys and nothing else.
        column: The key column, of integers or text (hashed as the trainer hashes it); None for
            that of a file with one. A .trace has no columns.
        accesses: Read the first ones alone.
        progress: Is told how many were read.

    Raises:
        DataError: The file is missing, damaged or of a form that is not known, or has no such
            column.
    """
    name = path.lower()
    if name.endswith((".trace", ".trace.xz")):
        if column is not None:
            raise DataError(path, f"has no columns; leave out --column {column}")
        chunks = _bare_keys(path)
    elif name.endswith((".parquet", ".pq")):
        chunks = _parquet(path, column)
    elif name.removesuffix(".gz").removesuffix(".zst").endswith(".csv"):
        chunks = _csv(path, column)
    else:
        raise DataError(path, "is no .parquet, .csv, .trace or .trace.xz; convert it to one")
    parts: list[Ints] = []
    count = 0
    for keys_N in chunks:
        parts.append(keys_N if accesses is None else keys_N[: accesses - count])
        count += len(parts[-1])
        progress(count)
        if count == accesses:
            break
    if count == 0:
        raise DataError(path, "holds no key")
    return np.concatenate(parts)


def _bare_keys(path: str) -> Iterator[Ints]:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_bytes(path))
        if path.lower().endswith(".xz"):
            file = stack.enter_context(lzma.LZMAFile(file))
        try:
            while piece := file.read(_KEY_BYTES * CHUNK_ROWS):
                if len(piece) % _KEY_BYTES:
                    raise DataError(path, f"does not end with a whole key of {_KEY_BYTES} bytes")
                yield np.frombuffer(piece, ">i8").astype(np.int64)
        except (lzma.LZMAError, EOFError, OSError) as error:
            raise DataError(path, f"cannot be decompressed: {error}") from error


def _parquet(path: str, column: str | None) -> Iterator[Ints]:
    with open_bytes(path) as file:
        try:
            parquet = pq.ParquetFile(file)
            name = _chosen(path, column, parquet.schema_arrow)
            yield from _keys(parquet.iter_batches(CHUNK_ROWS, columns=[name]))
        except (OSError, pa.ArrowException) as error:
            raise DataError(path, f"cannot be read as Parquet: {error}") from error


def _csv(path: str, column: str | None) -> Iterator[Ints]:
    with open_bytes(path, inflate=True) as file:
        try:
            # Types are those of the first block; a later value of another type is an error.
            reader = pa.csv.open_csv(file)
            name = _chosen(path, column, reader.schema)
            yield from _keys(batch.select([name]) for batch in reader)
        except (OSError, pa.ArrowException) as error:
            raise DataError(path, f"cannot be read as CSV: {error}") from error


def _keys(batches: Iterator[Any]) -> Iterator[Ints]:
    return (column_keys(typed_column(batch.column(0))) for batch in batches)


def _chosen(path: str, column: str | None, schema: pa.Schema) -> str:
    kinds: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
    able = [name for name, kind in kinds.items() if pa.types.is_integer(kind) or is_text(kind)]
    if column is None:
        if len(able) != 1:
            raise DataError(
                path, f"has {len(able)} columns of keys; --column chooses one: {_list(able)}"
            )
        return able[0]
    if column not in kinds:
        raise DataError(path, f"has no column {column!r}; there are {_list(list(kinds))}")
    if column not in able:
        raise DataError(
            path, f"column {column!r} is {kinds[column]}; cast it to int64 or to a string"
        )
    return column


def _list(names: list[str]) -> str:
    most = 30
    return ", ".join(itertools.islice(names, most)) + (", ..." if len(names) > most else "")
