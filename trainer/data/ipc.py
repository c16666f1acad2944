"""The memory that an Arrow IPC stream would take, told by its headers before it is decoded.

A compressed buffer begins with its size decompressed, so a stream of some KiB can ask for any
number of GiB, and pyarrow has no bound of its own. So each message's header, a flatbuffer (Arrow's
format/Message.fbs), is read here first: its rows, and where its buffers lie in the body.

    Message      0 version, 1 type of header, 2 header, 3 bytes of the body, 4 custom metadata
    RecordBatch  0 rows, 1 nodes, 2 buffers (offset, bytes), 3 compression
    Dictionary   0 id, 1 a RecordBatch
"""

import struct
from collections.abc import Iterator

import pyarrow as pa

MAX_BYTES = 16 << 20
"""Bound on the decompressed buffers of a stream ..."""

MAX_RATIO = 16
"""... or so many times the bytes of the stream, if that is more."""

_BUFFER = struct.Struct("<qq")
_LONG = struct.Struct("<q")
_NOT_COMPRESSED = -1  # in place of the size, of a buffer that compression made no smaller
_V5 = 4  # of MetadataVersion; streams before it had compression in custom metadata
_RECORD_BATCH, _DICTIONARY = 3, 2  # types of header


class BoundError(ValueError):
    """A stream asks for more than it may; the text says of what, and how much may be."""


class _Table:
    """A table of a flatbuffer; what leads out of it raises struct.error."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        self._fields = at - _int("<i", data, at)

    @classmethod
    def root(cls, data: memoryview) -> "_Table":
        return cls(data, _int("<I", data, 0))

    def _place(self, field: int) -> int:
        """Return where a field lies; 0: it is left out."""
        entry = 4 + 2 * field
        if entry >= _int("<H", self._data, self._fields):
            return 0
        offset = _int("<H", self._data, self._fields + entry)
        return self._at + offset if offset else 0

    def has(self, field: int) -> bool:
        return self._place(field) != 0

    def number(self, field: int, form: str) -> int:
        at = self._place(field)
        return _int(form, self._data, at) if at else 0

    def table(self, field: int) -> "_Table":
        at = self._place(field)
        return _Table(self._data, at + _int("<I", self._data, at))

    def pairs(self, field: int) -> Iterator[tuple[int, int]]:
        """Yield a vector of structs of two longs."""
        at = self._place(field)
        if not at:
            return
        at += _int("<I", self._data, at)
        for i in range(_int("<I", self._data, at)):
            yield _BUFFER.unpack_from(self._data, _inside(at + 4 + i * _BUFFER.size))


def _inside(at: int) -> int:
    if at < 0:  # Python would count from the end
        raise struct.error("an offset leads before the beginning")
    return at


def _int(form: str, data: memoryview, at: int) -> int:
    return int(struct.unpack_from(form, data, _inside(at))[0])


def prove_bounds(data: bytes, max_rows: int) -> None:
    """Refuse a stream that has more rows, or buffers that decompress to more, than may be.

    Raises:
        BoundError: It has.
        struct.error: A header is broken.
        pa.ArrowException: It is no stream.
    """
    rows = size = 0
    most = max(MAX_BYTES, MAX_RATIO * len(data))
    for message in _messages(data):
        table = _Table.root(memoryview(message.metadata))
        kind = table.number(1, "<B")
        if kind not in (_RECORD_BATCH, _DICTIONARY):
            continue
        if table.number(0, "<h") < _V5 and table.has(4):
            raise BoundError("its record batches are of a format before Arrow 1.0")
        batch = table.table(2)
        if kind == _DICTIONARY:
            batch = batch.table(1)
        else:
            rows += batch.number(0, "<q")
            if rows > max_rows:
                raise BoundError(f"it holds {rows} events; {max_rows} at most")
        if batch.has(3):
            size += sum(_decompressed(memoryview(message.body), *each) for each in batch.pairs(2))
            if size > most:
                raise BoundError(
                    f"its buffers have {size} bytes decompressed; {most} at most: send fewer "
                    "events in a message"
                )


def _decompressed(body: memoryview, at: int, size: int) -> int:
    """Return the bytes of a buffer of a compressed batch once it is read."""
    if size < _LONG.size:
        return 0
    (found,) = _LONG.unpack_from(body, _inside(at))
    if found < _NOT_COMPRESSED:
        raise BoundError(f"a buffer has {found} bytes")
    return size if found == _NOT_COMPRESSED else int(found)


def _messages(data: bytes) -> Iterator[pa.Message]:
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(data))
    while True:
        try:
            yield reader.read_next_message()
        except StopIteration:
            return
