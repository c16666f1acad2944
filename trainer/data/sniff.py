"""The format of files, by their first bytes: Parquet, or text and how its fields are told apart.

`open_events` is told what is found here, so that `init` and `train` read a file alike.
"""

import codecs
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from embertide._common.quoting import shown
from embertide.trainer.data import encoding, lines
from embertide.trainer.data.csv import (
    BLOCK_BYTES,
    TextFormat,
    TextReader,
    is_value,
    listed,
    split_fields,
)
from embertide.trainer.data.opening import FAILURES, is_parquet, open_bytes, other_format
from embertide.trainer.data.texts import iso_ms
from embertide.trainer.errors import DataError

_HEAD_BYTES = 1 << 18
_RECORDS = 200  # that are looked at
# The first that tells as many fields in as many records is taken.
_DELIMITERS = (",", "\t", ";", "|", "::", "\x01", " ")
_MIN_SHARE = 0.8  # of records with as many fields as the header
# In a text of Western Europe, so many of the letters are not ASCII at most.
_MAX_ACCENTS = 0.3
_CP1252_SIGNS = {*"€‚„…‘’“”–—™ ¡£§©«­®°±²³´µ·¹º»¼½¾¿×÷"}  # noqa: RUF001  as people write them
_NAMES = "write the names of the columns there, or give --names a,b,c"


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Files of one format.

    Attributes:
        paths: Their paths or URLs, in the order of reading.
        format: "parquet" or "csv".
        text: For csv: how it is read.
        notes: Findings that one may not expect.
    """

    paths: tuple[str, ...]
    format: str
    text: TextFormat = field(default_factory=TextFormat)
    notes: tuple[str, ...] = ()

    @property
    def delimiter(self) -> str:
        """The text between the fields of csv."""
        return self.text.delimiter


def sniff(
    paths: Sequence[str],
    format: str | None = None,
    *,
    names: Sequence[str] = (),
    encoded: str = encoding.DEFAULT,
    delimiter: str = "",
) -> Files:
    """Find out what files hold; of text, how its bytes become fields.

    Args:
        paths: The files, one at least.
        format: "parquet" or "csv"; None: what each begins with tells.
        names: Column names of text without a header.
        encoded: The encoding of text, if that is known.
        delimiter: The text between its fields, if that is known.

    Raises:
        DataError: A file is missing or empty, is no table that we read, or is of another kind than
            the first, or its first line holds no names of columns.
        ConfigurationError: There is no such encoding.
    """
    encoded = encoding.check(encoded)
    kinds = ["parquet" if is_parquet(path) else "csv" for path in paths]
    if format == "parquet" and kinds[0] == "csv":
        raise DataError(paths[0], "is not a whole Parquet file; write or copy it again")
    for path, kind in zip(paths, kinds, strict=True):
        if kind != kinds[0]:
            said = {"parquet": "Parquet", "csv": "text"}
            raise DataError(
                path, f"is {said[kind]}, and {paths[0]} is {said[kinds[0]]}: give files of one kind"
            )
    if kinds[0] == "parquet":
        return Files(paths=tuple(paths), format="parquet")
    heads = [_head(path, encoded) for path in paths]
    text, first = _text_format(paths[0], heads[0], names, delimiter), ""
    for path, head in zip(paths[1:], heads[1:], strict=True):
        other = _text_format(path, head, names, delimiter)
        if (other.delimiter, other.skip) != (text.delimiter, text.skip):
            raise DataError(
                path,
                f"has {other.delimiter!r} between fields, and {paths[0]} has {text.delimiter!r}: "
                "give files of one kind",
            )
        text = replace(text, escaped=text.escaped or other.escaped)
    notes: tuple[str, ...] = ()
    if encoded == encoding.DEFAULT:
        encoded, first = _encoding(paths)
        notes = (first,) if first else ()
    text = replace(text, encoding=encoded)
    return Files(paths=tuple(paths), format="csv", text=text, notes=notes)


def _head(path: str, encoded: str) -> str:
    """Return the first lines of a file."""
    with open_bytes(path, inflate=True) as file:
        head = _read(path, file, _HEAD_BYTES)
        whole = len(head) < _HEAD_BYTES
    if not head.strip():
        raise DataError(path, "is empty; give a file whose first line names its columns")
    fault = other_format(head)
    if fault is not None:
        raise DataError(path, fault)
    pieces = lines.unified(encoding.as_utf8(iter([head]), encoded))
    text = b"".join(pieces)
    if b"\0" in text:
        raise DataError(path, "holds bytes of zero and is no text: give Parquet, or text in UTF-8")
    if not whole:
        text = text.rpartition(b"\n")[0] or text
    return text.decode("utf-8", "replace").removesuffix("\n")


def _read(path: str, file: Any, size: int) -> bytes:
    try:
        return bytes(file.read(size))
    except FAILURES as error:
        raise DataError(path, f"cannot be read ({shown(str(error))}); copy it again") from error


# --- delimiters, quotes, header -------------------------------------------------------------------


def _text_format(path: str, head: str, names: Sequence[str], delimiter: str) -> TextFormat:
    skip = 0
    rows = head.split("\n")
    if rows[0].lower().startswith("sep=") and len(rows[0].strip()) in (4, 5):
        delimiter, skip = delimiter or rows[0].strip()[4:] or "\t", 1
    while skip < len(rows) - 1 and not rows[skip].strip():
        skip += 1
    rows = rows[skip:]
    found = TextFormat(delimiter=delimiter or _delimiter(rows), names=tuple(names), skip=skip)
    if '\\"' in head:
        found = max((found, replace(found, escaped=True)), key=lambda text: _fit(rows, text)[0])
    if names:
        _, fields = _fit(rows, found)
        if fields != len(names):
            raise DataError(
                path,
                f"has {fields} fields between {found.delimiter!r}, and there are {len(names)} "
                f"names: its first line is {shown(rows[0], 60)}",
            )
        return found
    _check_header(path, rows, found)
    return found


def _delimiter(rows: Sequence[str]) -> str:
    best, share = ",", 0.0
    for each in _DELIMITERS:
        if each not in rows[0]:
            continue
        fit, fields = _fit(rows, TextFormat(delimiter=each))
        least = 1.0 if each == " " else _MIN_SHARE
        if fields > (2 if each == " " else 1) and fit >= least and fit > share:
            best, share = each, fit
    if not share:  # as no record has as many fields as the header: what it has most of
        named = [each for each in _DELIMITERS[:-1] if each in rows[0]]
        best = max(named, key=rows[0].count, default=",")
    return best


def _fit(rows: Sequence[str], text: TextFormat) -> tuple[float, int]:
    """Return which share of the records has as many fields as the first, and that number."""
    data = iter(["\n".join(rows).encode()])
    counts = []
    for record in lines.records(data, text.shape, _RECORDS):
        counts.append(len(split_fields(record, text)))
    rest = counts[1:] or counts
    return (rest.count(counts[0]) / len(rest), counts[0]) if counts else (0.0, 0)


def _check_header(path: str, rows: Sequence[str], text: TextFormat) -> None:
    record = next(lines.records(iter(["\n".join(rows).encode()]), text.shape, 1), b"")
    names = split_fields(record, text)
    if not any(name.strip() for name in names):
        raise DataError(path, "is empty; give a file whose first line names its columns")
    said = f"its first line, {shown(rows[0], 60)},"
    if all(is_value(name) for name in names if name) or any(map(_is_datum, names)):
        raise DataError(path, f"{said} holds values; {_NAMES}")
    fit, _ = _fit(rows, text)
    if fit < _MIN_SHARE / 2 and len(rows) > 1:
        counts = Counter(
            len(split_fields(each, text))
            for each in lines.records(iter(["\n".join(rows[1:]).encode()]), text.shape, _RECORDS)
        )
        most = counts.most_common(1)[0][0]
        raise DataError(
            path,
            f"{said} has {len(names)} names between {text.delimiter!r}, and most lines after it "
            f"have {most} fields; {_NAMES}, or give --delimiter",
        )


def _is_datum(name: str) -> bool:
    """Whether a name is none: a time, or a number of a fraction or of many digits."""
    text = name.strip()
    if iso_ms(text) is not None and len(text) > 8:
        return True
    return is_value(text) and ("." in text or len(text.lstrip("-")) > 4)


# --- encoding -------------------------------------------------------------------------------------


def _encoding(paths: Sequence[str]) -> tuple[str, str]:
    """Return the encoding of all files together, and what is to be said of it.

    Raises:
        DataError: Bytes are neither UTF-8 nor text of Western Europe.
    """
    bad: tuple[str, int, bytes] | None = None
    many = False  # characters of UTF-8 that are not ASCII
    for path in paths:
        fault, utf8 = _scan(path)
        bad, many = bad or (None if fault is None else (path, *fault)), many or utf8
    if bad is None or many:
        # Bytes that are wrong here and there cost nobody else the right letters.
        damaged = bad is not None and f"{bad[0]}: line {bad[1]} is not UTF-8: {_line(bad[2])}"
        return encoding.DEFAULT, f"{damaged}; such bytes are read as escapes" if damaged else ""
    path, row, line = bad
    if not _is_western(line):
        raise DataError(
            path,
            f"line {row} is not UTF-8, {_line(line)}: name its encoding with --encoding, such as "
            "cp1251, gbk or shift_jis",
        )
    return (
        "cp1252",
        f"{path}: line {row} is not UTF-8; read as cp1252, it is {shown(_cp1252(line), 60)}. "
        "Another one is given with --encoding",
    )


def _scan(path: str) -> tuple[tuple[int, bytes] | None, bool]:
    """Return the first line that is not UTF-8, and whether others have letters beyond ASCII."""
    many, line = False, 1
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_bytes(path, inflate=True) as file:
        head = True
        kept = b""
        while piece := _read(path, file, BLOCK_BYTES):
            if head and encoding.of_head(piece) not in ("utf-8", "utf-8-sig"):
                return None, True  # marked, or plain to see
            if head:
                piece = piece.removeprefix(codecs.BOM_UTF8)
            head = False
            if piece.isascii() and not decoder.getstate()[0]:
                line, kept = line + piece.count(b"\n"), piece.rpartition(b"\n")[2]
                continue
            try:
                decoder.decode(piece)
                many = True
            except UnicodeDecodeError as error:
                data = error.object
                begin = data.rfind(b"\n", 0, error.start) + 1
                before = kept if begin == 0 else b""
                many = many or _has_utf8(data[: error.start])
                bad = (before + data[begin:]).split(b"\n", 1)[0]
                return (line + data[: error.start].count(b"\n"), bad[:4096]), many
            line, kept = line + piece.count(b"\n"), piece.rpartition(b"\n")[2]
    return None, many


def _has_utf8(data: bytes) -> bool:
    return not data.isascii()


def _line(data: bytes) -> str:
    return shown(data.decode("ascii", "backslashreplace"), 60)


def _cp1252(data: bytes) -> str:
    return data.decode("cp1252", "replace")


def _is_western(line: bytes) -> bool:
    """Whether a line of bytes reads as text of Western Europe."""
    text = _cp1252(line)
    strange = [each for each in text if ord(each) > 127]
    letters = sum(each.isalpha() for each in text)
    good = all(each.isalpha() or each in _CP1252_SIGNS for each in strange)
    return good and len(strange) <= max(2, _MAX_ACCENTS * letters)


def names_of(files: Files) -> list[str]:
    """Return the names of the columns of text, which are the same in all files.

    Raises:
        DataError: A column is missing in a file, or is there twice.
    """
    first = TextReader(files.paths[0], files.text).names
    for path in files.paths[1:]:
        names = TextReader(path, files.text).names
        lacks = [name for name in first if name not in names]
        if lacks:
            raise DataError(
                path, f"has no column {listed(lacks)}, which {files.paths[0]} has: give both"
            )
    return first
