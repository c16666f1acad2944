"""Bytes of delimited text as blocks of whole records: one a line, whatever the file does.

Arrow parses a block at a time. Before it sees one, the line ends are one kind, a record whose
quotes hold line ends is whole, and a line that would swallow the ones after it (its quotes do not
close, or it is too long) stands alone, as a malformed one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 4 << 20
"""Bytes that are read at once, and parsed at once where lines are not longer."""

MAX_LINE_BYTES = BLOCK_BYTES // 8
"""A longer record is malformed."""

UNIT_SEPARATOR = "\x1f"
"""What Arrow is given in place of a delimiter of several bytes."""

_SHOWN_BYTES = 80  # of a line that is replaced
_LF, _QUOTE = 10, 34


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How lines become records.

    Attributes:
        delimiter: Between fields, in UTF-8; one byte or several.
        quoted: Whether double quotes may enclose a field.
        escaped: Whether a backslash before a quote makes it a part of the field.
    """

    delimiter: bytes
    quoted: bool
    escaped: bool

    @property
    def parsed_delimiter(self) -> bytes:
        """The one byte that stands between fields in the blocks."""
        return self.delimiter if len(self.delimiter) == 1 else UNIT_SEPARATOR.encode()


def unified(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield pieces of text whose lines end with a line feed each, whatever they ended with."""
    carriage = b""
    for raw in pieces:
        piece = carriage + raw
        carriage = b"\r" if piece.endswith(b"\r") else b""
        piece = piece[: len(piece) - len(carriage)]
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        yield piece
    if carriage:
        yield b"\n"


def without_first(pieces: Iterator[bytes], lines: int) -> Iterator[bytes]:
    """Yield what follows the first lines."""
    for piece in pieces:
        while lines and piece:
            _, end, piece = piece.partition(b"\n")
            lines -= len(end)
        yield piece


def records(pieces: Iterator[bytes], shape: Shape, most: int) -> Iterator[bytes]:
    """Yield the first records, each without its line end; for a look at what a file holds."""
    text = _translated(b"".join(pieces), shape)
    begin = end = 0
    inside = False
    while most and begin < len(text):
        at = text.find(b"\n", end)
        at = len(text) if at < 0 else at
        if shape.quoted:
            inside, _ = scan(text[end:at], shape.parsed_delimiter, inside=inside)
        if not inside or at == len(text):
            yield text[begin:at]
            begin, most = at + 1, most - 1
        end = at + 1


def first_record(pieces: Iterator[bytes], shape: Shape) -> bytes:
    """Return the first record, without its line end; empty if there is none.

    Raises:
        OSError: It is too long.
    """
    text = b""
    for piece in pieces:
        text += piece
        if b"\n" in text and (found := _first_closed(_translated(text, shape), shape)) is not None:
            return found
        if len(text) > MAX_LINE_BYTES:
            break
    lines = _translated(text, shape).splitlines()
    if lines and len(lines[0]) > MAX_LINE_BYTES:
        raise OSError(f"its first line has more than {MAX_LINE_BYTES} bytes")
    found = _first_closed(_translated(text + b"\n", shape), shape)
    return found if found is not None else lines[0] if lines else b""


def _first_closed(text: bytes, shape: Shape) -> bytes | None:
    inside, end = False, 0
    while (at := text.find(b"\n", end)) >= 0 and at <= MAX_LINE_BYTES:
        if shape.quoted:
            inside, _ = scan(text[end:at], shape.parsed_delimiter, inside=inside)
        if not inside:
            return text[:at]
        end = at + 1
    return None


def blocks(pieces: Iterator[bytes], shape: Shape, columns: int) -> Iterator[bytes]:
    """Yield blocks of whole records, each record ended by a line feed.

    Args:
        pieces: A file, in UTF-8, its line ends unified.
        shape: How its lines become records.
        columns: Fields of a record.
    """
    rest = b""
    for lines, last in _whole_lines(pieces):
        done, rest = _Block(rest + _translated(lines, shape), shape, columns).records(last=last)
        if done:
            yield done


def _whole_lines(pieces: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield whole lines, and whether they are the last.

    A line of which too much has come is passed on in its first bytes alone: nothing is held that
    has no bound.
    """
    rest, held = [b""], 0
    for piece in pieces:
        whole, end, last = piece.rpartition(b"\n")
        if end:
            yield b"".join([*rest, whole, end]), False
            rest, held = [last], len(last)
        elif held <= MAX_LINE_BYTES:
            rest.append(last)
            held += len(last)
    tail = b"".join(rest)
    yield tail + b"\n" if tail else b"", True


def _translated(lines: bytes, shape: Shape) -> bytes:
    if shape.escaped and b"\\" in lines:
        lines = re.sub(rb'\\([\\"])', lambda m: b'""' if m[1] == b'"' else b"\\", lines)
    if len(shape.delimiter) > 1:
        lines = lines.replace(shape.delimiter, shape.parsed_delimiter)
    return lines


def scan(text: bytes, delimiter: bytes, *, inside: bool) -> tuple[bool, int]:
    """Return whether a line ends inside of quotes, and its delimiters outside of them."""
    at = fields = 0
    while True:
        if not inside:
            if text[at : at + 1] == b'"':
                inside, at = True, at + 1
            else:
                found = text.find(delimiter, at)
                if found < 0:
                    return False, fields
                fields, at = fields + 1, found + 1
                continue
        found = text.find(b'"', at)
        while found >= 0 and text[found + 1 : found + 2] == b'"':
            found = text.find(b'"', found + 2)
        if found < 0:
            return True, fields
        inside = False
        found = text.find(delimiter, found + 1)
        if found < 0:
            return False, fields
        fields, at = fields + 1, found + 1


class _Block:
    """Some whole lines, and what is wrong with which of them."""

    def __init__(self, data: bytes, shape: Shape, columns: int) -> None:
        self._data = data
        self._delimiter = shape.parsed_delimiter
        self._quoted = shape.quoted and b'"' in data
        self._columns = columns

    def records(self, *, last: bool) -> tuple[bytes, bytes]:
        """Return whole records, and the lines of one that has not ended."""
        if not self._quoted and len(self._data) <= MAX_LINE_BYTES:
            return self._data, b""
        byte_N = np.frombuffer(self._data, np.uint8)
        end_L = np.flatnonzero(byte_N == _LF) + 1
        begin_L = np.append(0, end_L[:-1])
        odd = set(np.flatnonzero(end_L - begin_L > MAX_LINE_BYTES + 1).tolist())
        if self._quoted:
            odd |= set(self._odd_quotes(byte_N, end_L))
        if not odd:
            return self._data, b""
        return self._mended(sorted(odd), begin_L.tolist(), end_L.tolist(), last=last)

    def _odd_quotes(self, byte_N: NDArray[np.uint8], end_L: NDArray[np.int64]) -> list[int]:
        """Lines whose quotes do not close by themselves, or may not."""
        at_Q = np.flatnonzero(byte_N == _QUOTE)
        line_Q = np.searchsorted(end_L, at_Q, side="right")
        first_Q = np.searchsorted(line_Q, line_Q, side="left")
        opens_Q = (np.arange(len(at_Q)) - first_Q) % 2 == 0
        before_Q = np.where(at_Q > 0, byte_N[at_Q - 1], _LF)
        after_Q = byte_N[at_Q + 1]
        ends = (_LF, self._delimiter[0], _QUOTE)
        usual_Q = np.where(opens_Q, np.isin(before_Q, ends), np.isin(after_Q, ends))
        count_L = np.bincount(line_Q, minlength=len(end_L))
        odd_L = count_L % 2 == 1
        odd_L[line_Q[~usual_Q]] = True
        found: list[int] = np.flatnonzero(odd_L).tolist()
        return found

    def _mended(
        self, odd: list[int], begin_L: list[int], end_L: list[int], *, last: bool
    ) -> tuple[bytes, bytes]:
        done: list[bytes] = []
        copied = 0  # lines that are done
        for line in odd:
            if line < copied:  # a part of the record before
                continue
            done.append(self._data[begin_L[copied] : begin_L[line]])
            text = self._data[begin_L[line] : end_L[line] - 1]
            copied = line + 1
            if len(text) > MAX_LINE_BYTES:
                done.append(self._broken(b"(too long) ", text))
                continue
            inside, fields = (
                scan(text, self._delimiter, inside=False) if self._quoted else (False, 0)
            )
            if not inside:
                done.append(text + b"\n")
                continue
            until = self._closing_line(line, fields, begin_L, end_L)
            if until is None and not last:
                rest = self._data[begin_L[line] :]
                if len(rest) <= MAX_LINE_BYTES:
                    return b"".join(done), rest
            if until is None or until < 0:
                done.append(self._broken(b"(open quote) ", text))
            else:
                done.append(self._data[begin_L[line] : end_L[until]])
                copied = until + 1
        if copied < len(begin_L):
            done.append(self._data[begin_L[copied] :])
        return b"".join(done), b""

    def _closing_line(
        self, line: int, fields: int, begin_L: list[int], end_L: list[int]
    ) -> int | None:
        """Return the line where a record ends; -1: it is none; None: it does not end here."""
        inside = True
        for end in range(line + 1, len(begin_L)):
            if end_L[end] - begin_L[line] > MAX_LINE_BYTES:
                return -1
            text = self._data[begin_L[end] : end_L[end] - 1]
            inside, more = scan(text, self._delimiter, inside=True)
            fields += more
            if not inside:
                return end if fields + 1 == self._columns else -1
        return None

    def _broken(self, why: bytes, text: bytes) -> bytes:
        """Return a line of too many fields, whatever the columns."""
        shown = text[:_SHOWN_BYTES].replace(b'"', b"'").replace(self._delimiter, b" ")
        return why + shown + self._delimiter * (self._columns + 1) + b"\n"
