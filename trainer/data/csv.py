"""Events from delimited text, with a header or without: CSV, TSV and the like.

Every field is read as text and parsed by us, so that a value that does not parse costs its row
and not the file. Bytes that are no UTF-8 are read as escapes. Array suffixes: N parsed rows of a
block, S skipped lines.
"""

import codecs
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from embertide.trainer.data.arrow import Kind, parses_as_int, parses_as_time, split, text_column
from embertide.trainer.data.assemble import Chunk, ChunkedSource, Column, Ints
from embertide.trainer.data.base import DeadLetters, EventSchema
from embertide.trainer.data.parquet import open_bytes
from embertide.trainer.errors import DataError

# Arrow parses a block at a time.
BLOCK_BYTES = 4 << 20
# A longer line is malformed. Escapes of bytes that are no UTF-8 make it four times as long, which a
# block holds.
MAX_LINE_BYTES = BLOCK_BYTES // 8
_SHOWN_BYTES = 80  # of such a line


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat:
    """How lines become fields.

    Attributes:
        delimiter: One character.
        quoted: Whether double quotes may enclose a field. No field may contain a line's end.
        names: Column names of a file without a header; empty: its first line has them.
        kinds: Says of columns of keys whether they are "int" or "string". One that is not named is
            "int" if the values in the first `BLOCK_BYTES`, but for a few, are integers. And of the
            time whether it is "float", a number, or "time", ISO 8601; by the same rule.
    """

    delimiter: str = ","
    quoted: bool = True
    names: tuple[str, ...] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses what Arrow would refuse less clearly."""
        if len(self.delimiter) != 1:
            raise ValueError(f"delimiter {self.delimiter!r} is not one character; give ',' or such")
        for name, count in Counter(self.names).items():
            if count > 1:
                raise ValueError(f"names has {name!r} {count} times; give each column its own")
        for name, kind in self.kinds.items():
            if kind not in ("int", "string", "float", "time"):
                raise ValueError(f"kind {kind!r} of {name!r} is unknown; use 'int' or 'string'")


WITH_HEADER = TextFormat()
"""CSV whose first line names the columns."""


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
            path: Local path or fsspec URL; .gz and the like are decompressed.
            schema: What to read.
            text: How to read it.
            dead_letters: Where rejected rows go; by default they are only counted.

        Raises:
            DataError: The file is missing or empty, or lacks a column.
        """
        super().__init__(path, schema, dead_letters)
        self._text = text
        found = text_columns(path, text)
        for name in schema.columns:
            if name not in found:
                raise DataError(
                    path,
                    f"column {name!r} is missing; there are {', '.join(found)}: give a schema "
                    f"that names one of them, or the file an empty column{header_hint(found)}",
                )
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
        lines = _Lines(0 if self._text.names else 1)
        with open_bytes(self.path, inflate=True) as file:
            for block in self._blocks(file, lines):
                event_N = lines.number(block.num_rows)
                skip = int(np.searchsorted(event_N, start))
                rows = block.slice(skip)
                yield Chunk(
                    event_N=event_N[skip:],
                    columns={name: self._column(name, rows.column(name)) for name in self._kinds},
                    end=lines.at,
                    malformed=lines.take_skipped(start),
                )
            lines.number(0, last=True)
            none = pa.array([], pa.binary())
            yield Chunk(
                event_N=np.empty(0, np.int64),
                columns={name: self._column(name, none) for name in self._kinds},
                end=lines.at,
                malformed=lines.take_skipped(start),
            )

    def _separator(self, name: str) -> str:
        lists = (*self.schema.list_columns, *self.schema.weight_columns)
        return self.schema.list_separator if name in lists else ""

    def _values(self, name: str, texts: Any) -> Any:
        separator = self._separator(name)
        return split(texts, separator).flatten() if separator else texts

    def _column(self, name: str, texts: Any) -> Column:
        return text_column(texts, self._kinds[name], self._separator(name))

    def _blocks(self, file: Any, lines: "_Lines") -> Iterator[Any]:
        try:
            reader = _reader(file, self._text, self.schema.columns, lines)
            while (block := next(reader, None)) is not None:
                yield block
        except (OSError, pa.ArrowException) as error:
            raise DataError(self.path, f"cannot be read as text in columns: {error}") from error

    def _find_kinds(self) -> dict[str, Kind]:
        schema = self.schema
        numbers = {*schema.dense, schema.label, schema.ts, *schema.target_columns}
        numbers |= {*schema.weight_columns}
        kinds: dict[str, Kind] = {name: "float" for name in schema.columns if name in numbers}
        if schema.text_label and schema.label is not None:
            kinds[schema.label] = "string"
        if schema.ts is not None and schema.ts in self._text.kinds:
            kinds[schema.ts] = self._text.kinds[schema.ts]
        guessed: list[str] = []
        ids = () if schema.id is None else (schema.id,)
        for name in dict.fromkeys((*schema.key_columns, *schema.list_columns, *ids)):
            if name in numbers:
                kinds[name] = "int"
            elif name in self._text.kinds:
                kinds[name] = self._text.kinds[name]
            else:
                guessed.append(name)
        ts = None if schema.ts in self._text.kinds else schema.ts
        if guessed or ts is not None:
            with open_bytes(self.path, inflate=True) as file:
                block = next(self._blocks(file, _Lines(0)), None)
            for name in guessed:
                whole = block is not None and parses_as_int(self._values(name, block.column(name)))
                kinds[name] = "int" if whole else "string"
            if ts is not None and block is not None and parses_as_time(block.column(ts)):
                kinds[ts] = "time"
        return kinds


def text_columns(path: str, text: TextFormat) -> list[str]:
    """Names of a file's columns, by its header or else by the format.

    Raises:
        DataError: The file is missing or empty.
    """
    with open_bytes(path, inflate=True) as file:
        try:
            return list(_reader(file, text, None, _Lines(0)).schema.names)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                path, f"cannot be read as text in columns ({error}); check its format"
            ) from error


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


class _Lines:
    """Gives parsed rows their event indices around the lines that Arrow skipped.

    Arrow reports a skipped line before it hands over the block that the line stands in.
    """

    def __init__(self, header_lines: int) -> None:
        self._before = header_lines + 1  # Arrow counts lines from 1.
        self._pending: list[tuple[int, str]] = []
        self._passed: list[tuple[int, str]] = []
        self.at = 0

    def skip(self, row: Any) -> str:
        self._pending.append((row.number - self._before, row.text[:_SHOWN_BYTES]))
        return "skip"

    def number(self, count: int, *, last: bool = False) -> Ints:
        """Event indices of the next `count` rows; at the `last` call all skipped lines pass."""
        end = self.at + count
        passed = 0
        for event, _ in self._pending:
            if event >= end and not last:
                break
            end, passed = end + 1, passed + 1
        event_N = np.arange(self.at, end, dtype=np.int64)
        if passed:
            skipped_S = np.array([event for event, _ in self._pending[:passed]])
            event_N = event_N[~np.isin(event_N, skipped_S)]
        self._passed += self._pending[:passed]
        del self._pending[:passed]
        self.at = end
        return event_N

    def take_skipped(self, start: int) -> list[tuple[int, str]]:
        """What was skipped since the last call, from event index `start` on."""
        passed, self._passed = self._passed, []
        return [(event, text) for event, text in passed if event >= start]


class _Shortener:
    """Replaces lines that are too long by short ones that are malformed, whatever the columns."""

    def __init__(self, delimiter: str, columns: int) -> None:
        """`columns`: of the file; 0: those of its first line."""
        self._delimiter = delimiter.encode()
        self._fields = columns + 1 if columns else 0
        self._line = b""  # the line that has not ended
        self._shown = b""  # of a line that is too long, and has not ended
        self._too_long = False

    def take(self, data: Any) -> bytes:
        """Take a buffer of the file, empty at its end; return the bytes of lines that have ended.

        Raises:
            OSError: The first line is too long.
        """
        lines = bytes(data).split(b"\n")
        if len(data) == 0:
            return self._ended(b"")
        if len(lines) == 1:
            self._go_on(lines[0])
            return b""
        done = [self._ended(lines[0])]
        done += [line if len(line) <= MAX_LINE_BYTES else self._short(line) for line in lines[1:-1]]
        self._go_on(lines[-1])
        return b"\n".join([*done, b""])

    def _go_on(self, data: bytes) -> None:
        if not self._too_long:
            self._line += data
            if len(self._line) > MAX_LINE_BYTES:
                self._too_long, self._shown, self._line = True, self._line[:_SHOWN_BYTES], b""

    def _ended(self, data: bytes) -> bytes:
        self._go_on(data)
        line = self._short(self._shown) if self._too_long else self._line
        if not self._fields:
            if self._too_long:
                raise OSError(f"its first line has more than {MAX_LINE_BYTES} bytes")
            self._fields = line.count(self._delimiter) + 2
        self._line, self._too_long = b"", False
        return line

    def _short(self, line: bytes) -> bytes:
        shown = line[:_SHOWN_BYTES].replace(b'"', b"'").replace(self._delimiter, b" ")
        return b"(too long) " + shown + self._delimiter * self._fields


def _as_utf8(file: Any, shortener: _Shortener) -> Any:
    """Escapes bytes that are no UTF-8: Arrow fails on a malformed line that has some."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    source = file if isinstance(file, pa.NativeFile) else pa.PythonFile(file, mode="r")
    # Called with nothing at the end of the file.
    return pa.TransformInputStream(
        source,
        lambda data: decoder.decode(shortener.take(data), final=len(data) == 0).encode(),
    )


def _reader(file: Any, text: TextFormat, columns: tuple[str, ...] | None, lines: _Lines) -> Any:
    wanted = columns or ()
    return pyarrow.csv.open_csv(
        _as_utf8(file, _Shortener(text.delimiter, len(text.names))),
        # One thread: with more, Arrow does not tell which lines it skipped.
        read_options=pyarrow.csv.ReadOptions(
            use_threads=False,
            block_size=BLOCK_BYTES,
            column_names=list(text.names) or None,
        ),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=text.delimiter,
            quote_char='"' if text.quoted else False,
            ignore_empty_lines=False,
            invalid_row_handler=lines.skip,
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            include_columns=list(wanted),
            column_types={name: pa.binary() for name in wanted},
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
