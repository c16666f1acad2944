"""Events from delimited text, with a header or without: CSV, TSV and the like.

Every field is read as text and parsed by `texts.py`, so that a value that does not parse costs its
row and not the file. Array suffixes: N rows of a block, S skipped lines.
"""

import csv
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from embertide._common.quoting import shown, terminal_text
from embertide.trainer.data import encoding, lines, texts
from embertide.trainer.data.arrow import split, text_column, text_kind
from embertide.trainer.data.assemble import Chunk, ChunkedSource, Ints
from embertide.trainer.data.base import DeadLetters, EventSchema
from embertide.trainer.data.lines import BLOCK_BYTES, MAX_LINE_BYTES
from embertide.trainer.data.opening import FAILURES, open_bytes, other_format
from embertide.trainer.data.texts import Kind
from embertide.trainer.errors import DataError

__all__ = ["BLOCK_BYTES", "MAX_LINE_BYTES", "CsvSource", "TextFormat", "TextReader"]

_SHOWN_BYTES = 80  # of a line that is skipped
_MAX_NAMED = 30  # columns in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat:
    """How lines become fields.

    Attributes:
        delimiter: One character; or several, and then quotes are nothing special.
        quoted: Whether double quotes may enclose a field, which may hold line ends then.
        names: Column names of a file without a header; empty: its first line has them.
        kinds: Says of columns of keys whether they are "int" or "string". One that is not named is
            "int" if the values in the first `BLOCK_BYTES`, but for a few, are integers. And of the
            time whether it is "float", a number, or "time", ISO 8601; by the same rule.
        encoding: As Python names it; empty: UTF-8, or UTF-16 where the file begins so.
        escaped: Whether a quote inside of quotes has a backslash before it; else it is doubled.
        skip: Lines before the header, or before the first event.
    """

    delimiter: str = ","
    quoted: bool = True
    names: tuple[str, ...] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    encoding: str = encoding.DEFAULT
    escaped: bool = False
    skip: int = 0

    def __post_init__(self) -> None:
        """Refuses what Arrow would refuse less clearly."""
        if not 1 <= len(self.delimiter) <= 8 or {*self.delimiter} & {*'"\r\n\\'}:
            raise ValueError(f"delimiter {self.delimiter!r} is not one character; give ',' or such")
        for name, count in Counter(self.names).items():
            if count > 1:
                raise ValueError(f"names has {name!r} {count} times; give each column its own")
        for name, kind in self.kinds.items():
            if kind not in ("int", "string", "float", "time"):
                raise ValueError(f"kind {kind!r} of {name!r} is unknown; use 'int' or 'string'")
        if self.skip < 0:
            raise ValueError(f"skip is {self.skip}; give 0 or more lines")
        encoding.check(self.encoding)

    @property
    def shape(self) -> lines.Shape:
        """The form of the file, for `lines.py`."""
        delimiter = self.delimiter.encode()
        return lines.Shape(
            delimiter=delimiter, quoted=self.quoted and len(delimiter) == 1, escaped=self.escaped
        )


WITH_HEADER = TextFormat()
"""CSV whose first line names the columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive lines.

    Attributes:
        event_N: Event index of each row.
        columns: Texts of the columns that were asked for, null where a field is empty.
        end: Event index after the last line.
        malformed: Event index and text of lines that are no rows.
    """

    event_N: Ints
    columns: Mapping[str, pa.Array]
    end: int
    malformed: Sequence[tuple[int, str]]


class TextReader:
    """One file of delimited text. Reads it from its beginning as often as it is asked to.

    Attributes:
        path: The file.
        text: How it is read.
        names: Names of its columns, in its order; one may come twice.
    """

    def __init__(self, path: str, text: TextFormat) -> None:
        """Read the names of the columns.

        Raises:
            DataError: The file is missing, empty or no text.
        """
        self.path = path
        self.text = text
        self._header = 0  # bytes of the line of names
        self.names = self._read_names()

    def blocks(self, columns: Collection[str]) -> Iterator[Block]:
        """Yield the lines of the file, a block at a time.

        Raises:
            DataError: The file cannot be read.
        """
        read = lines.blocks(self._pieces(), self.text.shape, len(self.names))
        at, header = 0, self._header
        for data in read:
            rows = data[header:]
            header = 0
            if rows:
                block = self._parsed(rows, columns, at)
                at = block.end
                yield block

    def _parsed(self, data: bytes, columns: Collection[str], at: int) -> Block:
        skipped: list[tuple[int, str]] = []

        def skip(row: Any) -> str:
            skipped.append((at + row.number - 1, row.text[:_SHOWN_BYTES]))
            return "skip"

        # Names of our own: those of the file may repeat, and may be anything.
        own = [f"c{place}" for place in range(len(self.names))]
        wanted = {name: own[self.names.index(name)] for name in columns}
        included = list(wanted.values()) or own[:1]
        table = pyarrow.csv.read_csv(
            pa.BufferReader(data),
            # One thread and one block: else Arrow does not tell which lines it skipped.
            read_options=pyarrow.csv.ReadOptions(
                use_threads=False, block_size=len(data) + 1, column_names=own
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=self.text.shape.parsed_delimiter.decode(),
                quote_char='"' if self.text.shape.quoted else False,
                ignore_empty_lines=False,
                invalid_row_handler=skip,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=included,
                column_types=dict.fromkeys(included, pa.binary()),
                null_values=[""],
                strings_can_be_null=True,
            ),
        ).combine_chunks()
        end = at + table.num_rows + len(skipped)
        event_N = np.arange(at, end, dtype=np.int64)
        if skipped:
            event_N = np.delete(event_N, [event - at for event, _ in skipped])
        return Block(
            event_N=event_N,
            columns={
                name: _one_array(table.column(place), pa.binary()) for name, place in wanted.items()
            },
            end=end,
            malformed=skipped,
        )

    def _pieces(self) -> Iterator[bytes]:
        """Yield the file as UTF-8, its line ends unified, after the lines to skip."""
        with open_bytes(self.path, inflate=True) as file:
            raw = iter(lambda: self._read(file), b"")
            read = lines.unified(encoding.as_utf8(raw, self.text.encoding))
            yield from lines.without_first(read, self.text.skip) if self.text.skip else read

    def _read(self, file: Any) -> bytes:
        try:
            return bytes(file.read(BLOCK_BYTES))
        except FAILURES as error:
            said = terminal_text(str(error))
            raise DataError(self.path, f"cannot be read ({said}); copy it again") from error

    def _read_names(self) -> list[str]:
        with open_bytes(self.path, inflate=True) as file:
            head = self._read(file)[: lines.MAX_LINE_BYTES]
        fault = other_format(head)
        if fault is not None:
            raise DataError(self.path, fault)
        pieces = self._pieces()
        try:
            record = lines.first_record(pieces, self.text.shape)
        except OSError as error:
            raise DataError(
                self.path, f"cannot be read as text in columns ({error}); check its format"
            ) from error
        finally:
            pieces.close()  # type: ignore[attr-defined]
        if self.text.names:
            if not head:
                raise DataError(self.path, "is empty; give a file that has events")
            return list(self.text.names)
        names = split_fields(record, self.text)
        if not any(name.strip() for name in names) or b"\0" in record:
            what = "is empty" if not head else "begins with a line that names no column"
            raise DataError(
                self.path, f"{what}; give a file whose first line names its columns, or names="
            )
        self._header = len(record) + 1
        return names


def split_fields(record: bytes, text: TextFormat) -> list[str]:
    """Return the fields of one record."""
    line = record.decode("utf-8", "backslashreplace")
    delimiter = text.shape.parsed_delimiter.decode()
    if not text.shape.quoted:
        return line.split(delimiter)
    csv.field_size_limit(max(csv.field_size_limit(), 4 * MAX_LINE_BYTES))
    return next(csv.reader([*line.splitlines(keepends=True)], delimiter=delimiter), [])


def _one_array(column: Any, kind: pa.DataType) -> pa.Array:
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return pa.concat_arrays(chunks) if chunks else pa.array([], kind)


class CsvSource(ChunkedSource):
    """An `EventSource` over one delimited text file; `start` reads past what lies before it."""

    def __init__(
        self,
        path: str,
        schema: EventSchema,
        text: TextFormat = WITH_HEADER,
        *,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        """Reads the first block and checks the columns.

        Args:
            path: Local path or fsspec URL; what is compressed is decompressed.
            schema: The columns to read.
            text: How to read it.
            dead_letters: Where rejected rows go; by default they are only counted.

        Raises:
            DataError: The file is missing or empty, or lacks a column or has it twice.
        """
        super().__init__(path, schema, dead_letters)
        self.text = text
        self._reader = TextReader(path, text)
        names = self._reader.names
        check_columns(path, schema.columns, names, header_hint(names))
        self._kinds = self._find_kinds()

    @property
    def key_kinds(self) -> dict[str, Kind]:
        """How each key column is read, for `TextFormat.kinds` of a file like this one."""
        times = () if self.schema.ts is None else (self.schema.ts,)
        columns = (*self.schema.key_columns, *self.schema.list_columns, *times)
        return {name: self._kinds[name] for name in columns}

    def total_events(self) -> int | None:
        """Unknown: only reading counts lines."""
        return None

    def chunks(self, start: int) -> Iterator[Chunk]:
        """See `ChunkedSource.chunks`."""
        for block in self._reader.blocks(self.schema.columns):
            skip = int(np.searchsorted(block.event_N, start))
            yield Chunk(
                event_N=block.event_N[skip:],
                columns={
                    name: text_column(array.slice(skip), self._kinds[name], self._separator(name))
                    for name, array in block.columns.items()
                },
                end=block.end,
                malformed=[each for each in block.malformed if each[0] >= start],
            )

    def _separator(self, name: str) -> str:
        lists = (*self.schema.list_columns, *self.schema.weight_columns)
        return self.schema.list_separator if name in lists else ""

    def _find_kinds(self) -> dict[str, Kind]:
        schema = self.schema
        ids = () if schema.id is None else (schema.id,)
        keys = {*schema.key_columns, *schema.list_columns, *ids}
        kinds: dict[str, Kind] = {name: text_kind(schema, name) for name in schema.columns}
        guessed: list[str] = []
        for name in keys:
            if name in schema.dense or name == schema.label or name == schema.ts:
                kinds[name] = "int"
            elif schema.kind_of(name):
                kinds[name] = schema.kind_of(name) or "string"
            elif name in self.text.kinds:
                kinds[name] = self.text.kinds[name]
            else:
                guessed.append(name)
        if schema.ts is not None and schema.ts not in keys:
            kinds[schema.ts] = self.text.kinds.get(schema.ts, "float")
            if schema.ts not in self.text.kinds:
                guessed.append(schema.ts)
        block = next(self._reader.blocks(guessed), None) if guessed else None
        for name in guessed:
            values = None if block is None else self._values(name, block.columns[name])
            if name == schema.ts:
                if values is not None and texts.are("time", values):
                    kinds[name] = "time"
            else:
                whole = values is not None and texts.are("int", values)
                kinds[name] = "int" if whole else "string"
        return kinds

    def _values(self, name: str, array: Any) -> Any:
        separator = self._separator(name)
        return split(array, separator).flatten() if separator else array


def text_columns(path: str, text: TextFormat) -> list[str]:
    """Names of a file's columns, by its header or else by the format.

    Raises:
        DataError: The file is missing, empty or no text.
    """
    return TextReader(path, text).names


def check_columns(path: str, wanted: Iterable[str], names: Sequence[str], hint: str = "") -> None:
    """Refuse a file that lacks a column, or has one that is read twice.

    Raises:
        DataError: It does.
    """
    for name in wanted:
        count = list(names).count(name)
        if count == 0:
            raise DataError(
                path,
                f"column {name!r} is missing; there are {listed(names)}: give a schema "
                f"that names one of them, or the file an empty column{hint}",
            )
        if count > 1:
            raise DataError(
                path, f"column {name!r} is there {count} times; rename all of them but one{hint}"
            )


def listed(names: Iterable[str]) -> str:
    """Return names for a message: one line of bounded length."""
    found = [name if name.isascii() and name.isprintable() else shown(name) for name in names]
    more = ", ..." if len(found) > _MAX_NAMED else ""
    return ", ".join(name[:80] for name in found[:_MAX_NAMED]) + more


def is_value(text: str) -> bool:
    """Whether a text is a number, as a name of a column hardly ever is."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def header_hint(columns: Iterable[str]) -> str:
    """Return what ends a message on columns that look like values; nothing if they do not."""
    if any(map(is_value, columns)):
        return "; if its first line is an event, give open_events names=, and a schema"
    return ""
