"""Events from a Parquet file, row group by row group in bounded memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embertide.trainer.data.arrow import schema_column, type_fault
from embertide.trainer.data.assemble import Chunk, ChunkedSource
from embertide.trainer.data.base import DeadLetters, EventSchema
from embertide.trainer.data.urls import file_systems
from embertide.trainer.errors import DataError

# Large enough that per-chunk costs vanish, small enough that a chunk stays in the caches' reach.
CHUNK_ROWS = 131_072
# ... of rows with lists, which may hold a thousand keys each.
LIST_CHUNK_ROWS = 8_192


@contextmanager
def open_bytes(path: str, *, inflate: bool = False) -> Iterator[Any]:
    """Opens a local path, or any URL that fsspec knows, for reading.

    Args:
        path: The file.
        inflate: Decompress by the suffix (.gz, .zst and so on).

    Raises:
        DataError: There is no such file, or it cannot be read.
    """
    try:
        if "://" in path:
            system, name = file_systems().url_to_fs(path)
            if not system.exists(name):
                raise FileNotFoundError(path)
            opened = system.open(name, "rb", compression="infer" if inflate else None)
        elif not Path(path).is_file():
            raise FileNotFoundError(path)
        else:
            opened = pa.input_stream(path, compression="detect") if inflate else pa.OSFile(path)
    except FileNotFoundError as error:
        raise DataError(path, "there is no such file; check the path") from error
    except (OSError, ValueError, ImportError) as error:
        raise DataError(path, f"cannot be opened: {error}") from error
    with opened:
        yield opened


def parquet_columns(path: str) -> dict[str, str]:
    """Names and types of a file's columns.

    Raises:
        DataError: The file is missing or is not a whole Parquet file.
    """
    with open_bytes(path) as file:
        schema = _footer(path, file).schema_arrow
        return {field.name: str(field.type) for field in schema}


class ParquetSource(ChunkedSource):
    """An `EventSource` over one Parquet file; `start` skips whole row groups unread."""

    def __init__(
        self, path: str, schema: EventSchema, *, dead_letters: DeadLetters | None = None
    ) -> None:
        """Reads the footer and checks the columns.

        Args:
            path: Local path or fsspec URL.
            schema: What to read.
            dead_letters: Where rejected rows go; by default they are only counted.

        Raises:
            DataError: The file is missing or broken, or a column is missing or of a wrong type.
        """
        super().__init__(path, schema, dead_letters)
        with open_bytes(path) as file:
            footer = _footer(path, file)
            self._total = int(footer.metadata.num_rows)
            found = {field.name: field.type for field in footer.schema_arrow}
        for name in schema.columns:
            if name not in found:
                raise DataError(
                    path,
                    f"column {name!r} is missing; there are {', '.join(found)}: give a schema "
                    "that names one of them, or the file an empty column",
                )
            fault = type_fault(schema, name, found[name])
            if fault is not None:
                raise DataError(path, fault)

    def total_events(self) -> int:
        """Rows of the file, by its footer."""
        return self._total

    def chunks(self, start: int) -> Iterator[Chunk]:
        """See `ChunkedSource.chunks`."""
        with open_bytes(self.path) as file:
            footer = _footer(self.path, file)
            at = 0
            for group in range(footer.num_row_groups):
                end = at + footer.metadata.row_group(group).num_rows
                if end > start:
                    yield from self._group(footer, group, at, start)
                at = end

    def _group(self, footer: Any, group: int, at: int, start: int) -> Iterator[Chunk]:
        columns = list(self.schema.columns)
        # One group at a time: asked for several at once, Arrow reads ahead over all of them.
        chunk_rows = LIST_CHUNK_ROWS if self.schema.list_columns else CHUNK_ROWS
        parts = footer.iter_batches(chunk_rows, row_groups=[group], columns=columns)
        while True:
            try:
                part = next(parts, None)
            except (OSError, pa.ArrowException) as error:
                raise DataError(self.path, f"row group {group} is damaged: {error}") from error
            if part is None:
                return
            end = at + part.num_rows
            part = part.slice(min(max(start - at, 0), part.num_rows))
            yield Chunk(
                event_N=np.arange(end - part.num_rows, end, dtype=np.int64),
                columns={
                    name: schema_column(self.schema, name, part.column(name)) for name in columns
                },
                end=end,
            )
            at = end


def _footer(path: str, file: Any) -> Any:
    try:
        return pq.ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            path, f"is not a whole Parquet file ({error}); write or copy it again"
        ) from error
