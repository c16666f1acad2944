"""Payloads that no reader of live events may break on: none of them is an event."""

import functools

import pyarrow as pa


def nested(depth: int, inside: str = "") -> str:
    """A list in lists, as JSON."""
    return "[" * depth + inside + "]" * depth


def stream(batch: pa.RecordBatch, compression: str | None = None) -> bytes:
    """Arrow's IPC stream of a batch."""
    out = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(out, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    data: bytes = out.getvalue().to_pybytes()
    return data


@functools.cache
def bomb(size: int, compression: str) -> bytes:
    """Some KiB of Arrow that are `size` bytes once they are read: zeros, compressed."""
    zeros = pa.array([b"\0" * size], pa.large_binary())
    return stream(pa.RecordBatch.from_arrays([zeros], names=["zeros"]), compression)


JSON: tuple[bytes, ...] = (
    *(b"", b"\xff\xfe", b"null", b"7", b"[]", b"[1]", b"{", b'{"ts": NaN, "item": 1, "y": 0}'),
    *(b"[" * 100_000, nested(985).encode(), nested(400, '{"a": 1}').encode()),
    f'{{"ts": 3, "item": {nested(985)}, "y": 0}}'.encode(),
    f'{{"ts": {nested(985)}, "item": 1, "y": 0}}'.encode(),
    f'{{"ts": {"9" * 5000}, "item": 1, "y": 0}}'.encode(),
    f'{{"ts": 3, "item": {"9" * 4000}, "y": 0}}'.encode(),
    b'{"ts": 3, "item": 1e400, "y": 0}',
    b'{"ts": "9999-12-31T23:59:59-23:59", "item": {}, "y": 0}',
)
"""Faults of a whole message: each is one dead letter."""

ARROW: tuple[bytes, ...] = (
    *(b"", b"\xff\xff\xff\xff\x00", bomb(300 << 20, "zstd"), bomb(100 << 20, "lz4")),
    stream(pa.RecordBatch.from_arrays([pa.nulls(1 << 30)], names=["ts"])),
    stream(pa.RecordBatch.from_arrays([pa.array([1])] * 2, names=["ts", "ts"])),
)
