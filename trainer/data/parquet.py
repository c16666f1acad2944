"""Events from a Parquet file, row group by row group in bounded memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embertide._common.quoting import shown, terminal_text
from embertide.trainer.data import texts
from embertide.trainer.data.arrow import is_text, plain, schema_column, text_kind, type_fault
from embertide.trainer.data.assemble import Chunk, ChunkedSource
from embertide.trainer.data.base import DeadLetters, EventSchema
from embertide.trainer.data.csv import check_columns
from embertide.trainer.data.opening import FAILURES, open_bytes
from embertide.trainer.data.texts import Kind
from embertide.trainer.errors import DataError

# Large enough that per-chunk costs vanish, small enough that a chunk stays in the caches' reach.
CHUNK_ROWS = 131_072
# ... of rows with lists, which may hold a thousand keys each.
LIST_CHUNK_ROWS = 8_192


def parquet_columns(path: str) -> list[str]:
    """Names of a file's columns; one may come twice.

    Raises:
        DataError: The file is missing or is not a whole Parquet file.
    """
    with open_bytes(path) as file:
        return list(open_footer(path, file).schema_arrow.names)


class ParquetSource(ChunkedSource):
    """An `EventSource` over one Parquet file; `start` skips whole row groups unread."""

    def __init__(
        self,
        path: str,
        schema: EventSchema,
        *,
        kinds: Mapping[str, Kind] | None = None,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        """Reads the footer and checks the columns.

        Args:
            path: Local path or fsspec URL.
            schema: The columns to read.
            kinds: Kinds of text columns: as `TextFormat.kinds`.
            dead_letters: Where rejected rows go; by default they are only counted.

        Raises:
            DataError: The file is missing or broken, or a column is missing or of a wrong type.
        """
        super().__init__(path, schema, dead_letters)
        self.kinds = dict(kinds or {})
        with open_bytes(path) as file:
            footer = open_footer(path, file)
            self._total = int(footer.metadata.num_rows)
            names = list(footer.schema_arrow.names)
            check_columns(path, schema.columns, names)
            types = {name: footer.schema_arrow.field(name).type for name in schema.columns}
            for name, kind in types.items():
                fault = type_fault(schema, name, kind)
                if fault is not None:
                    raise DataError(path, fault)
            self._kinds: dict[str, Kind] = {
                name: (kinds or {}).get(name) or text_kind(schema, name)
                for name, kind in types.items()
                if is_text(kind)
            }
            self._check_texts(footer, kinds or {})

    def _check_texts(self, footer: Any, given: Mapping[str, Kind]) -> None:
        """Tell what a time of text is, and refuse texts where numbers are meant."""
        lists = (*self.schema.list_columns, *self.schema.weight_columns)
        asked = [name for name, kind in self._kinds.items() if kind != "string"]
        asked = [name for name in asked if name not in given and name not in lists]
        groups = range(footer.num_row_groups)
        parts = batches(self.path, footer, asked, groups, CHUNK_ROWS) if asked else ()
        for part in parts:
            for name in asked:
                array = plain(part.column(name)).cast(pa.large_binary())
                kind = self._kinds[name]
                if kind == "time":
                    self._kinds[name] = "float" if texts.are("float", array) else kind
                elif kind == "float" and array.null_count < len(array):
                    self._refuse_words(name, array)
            return

    def _refuse_words(self, name: str, array: pa.Array) -> None:
        fits, present = texts.counted("float", array)
        if fits or not present:
            return
        value = shown(array.drop_null()[0].as_py().decode("utf-8", "backslashreplace"))
        what = f"label column {name!r}" if name == self.schema.label else f"column {name!r}"
        remedy = "cast it to a number"
        if name == self.schema.label and not self.schema.positive:
            remedy = "say which values are positive: EventSchema(positive='== yes')"
        raise DataError(self.path, f"{what} is text such as {value}; {remedy}")

    def total_events(self) -> int:
        """Rows of the file, by its footer."""
        return self._total

    def chunks(self, start: int) -> Iterator[Chunk]:
        """See `ChunkedSource.chunks`."""
        with open_bytes(self.path) as file:
            footer = open_footer(self.path, file)
            at = 0
            for group in range(footer.num_row_groups):
                end = at + footer.metadata.row_group(group).num_rows
                if end > start:
                    yield from self._group(footer, group, at, start)
                at = end

    def _group(self, footer: Any, group: int, at: int, start: int) -> Iterator[Chunk]:
        columns = list(self.schema.columns)
        # One group at a time: asked for several at once, Arrow reads ahead over all of them.
        rows = LIST_CHUNK_ROWS if self.schema.list_columns else CHUNK_ROWS
        for part in batches(self.path, footer, columns, [group], rows):
            end = at + part.num_rows
            part = part.slice(min(max(start - at, 0), part.num_rows))
            yield Chunk(
                event_N=np.arange(end - part.num_rows, end, dtype=np.int64),
                columns={
                    name: schema_column(self.schema, name, part.column(name), self._kinds)
                    for name in columns
                },
                end=end,
            )
            at = end


def batches(
    path: str, footer: Any, columns: Sequence[str], groups: Sequence[int], rows: int
) -> Iterator[Any]:
    """Yield rows of groups, one group after the other, `rows` at a time.

    Raises:
        DataError: A group is damaged.
    """
    for group in groups:
        try:
            parts = footer.iter_batches(rows, row_groups=[group], columns=list(columns))
            while (part := next(parts, None)) is not None:
                yield part
        except (*FAILURES, ValueError, NotImplementedError) as error:
            said = terminal_text(str(error))
            raise DataError(
                path,
                f"row group {group} is damaged: {said}; write the file again, or leave the column "
                "out",
            ) from error


def open_footer(path: str, file: Any) -> Any:
    """Open a Parquet file for reading.

    Raises:
        DataError: It is not a whole one.
    """
    try:
        return pq.ParquetFile(file)
    except (*FAILURES, ValueError, NotImplementedError) as error:
        said = terminal_text(str(error))
        raise DataError(
            path, f"is not a whole Parquet file ({said}); write or copy it again"
        ) from error
