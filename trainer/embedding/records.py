"""Row records of docs/formats.md, encoded for many rows at once.

The store's library encodes a row at a time (`_store.encode_payload`); here numpy does the same to
whole arrays, for imports of many millions of rows, but for int4, which it leaves to the library.
Tests hold both to equal bytes.

Shapes: N rows, D values of a row, C chunks of it, b bytes of a chunk.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.data.keys import Keys

Floats = NDArray[np.float32]

# From here on a value rounds to infinity: halfway between the largest number and the next step.
_OVERFLOW = {"fp16": 65520.0, "bf16": float(np.uint32(0x7F7F8000).view(np.float32))}
_OVERFLOW["int4"] = 2e38  # steps of a fitted scale reach beyond the largest value
_HEAD_BYTES = 12  # of a record: key, live mask, kind, zero
_PAYLOAD = {"fp32": "<f4", "fp16": "<f2", "bf16": "<u2", "int8": "i1", "int4": "u1"}


def record_dtype(layout: _store.RowLayout) -> np.dtype[Any]:
    """Return the numpy dtype of a record whose chunks are all live."""
    scale = [("scale", "<f4")] if layout.dtype in ("int8", "int4") else []
    elements = layout.dim // 2 if layout.dtype == "int4" else layout.dim
    return np.dtype(
        [
            ("key", "<u8"),
            ("live", "<u2"),
            ("kind", "u1"),
            ("zero", "u1"),
            *scale,
            ("payload", _PAYLOAD[layout.dtype], (elements,)),
        ]
    )


def unstorable(layout: _store.RowLayout, values_ND: Floats) -> tuple[int, int] | None:
    """Return (row, dimension) of the first value that is not finite or overflows the dtype."""
    limit = _OVERFLOW.get(layout.dtype, np.inf)
    fits_ND = np.abs(values_ND) < limit  # false for a NaN
    if fits_ND.all():
        return None
    row, dimension = np.unravel_index(int(np.argmin(fits_ND)), fits_ND.shape)
    return int(row), int(dimension)


def _bf16(values_ND: Floats) -> NDArray[np.uint16]:
    bits_ND = values_ND.view(np.uint32)
    odd_ND = (bits_ND >> np.uint32(16)) & np.uint32(1)
    odd_ND += np.uint32(0x7FFF)
    odd_ND += bits_ND
    return (odd_ND >> np.uint32(16)).astype(np.uint16)


def _int8(values_ND: Floats, scale_N: Floats) -> NDArray[np.int8]:
    quotient_ND = np.zeros_like(values_ND)
    scale_N1 = scale_N[:, np.newaxis]
    np.divide(values_ND, scale_N1, out=quotient_ND, where=scale_N1 != 0)
    np.rint(quotient_ND, out=quotient_ND)
    return np.clip(quotient_ND, -127, 127, out=quotient_ND).astype(np.int8)


def encode_rows(layout: _store.RowLayout, keys_N: Keys, values_ND: Floats) -> NDArray[Any]:
    """Return records with all chunks live, in the order given.

    Requires: `unstorable` finds nothing in `values_ND`, which is contiguous.
    """
    if layout.dtype == "int4":
        whole = _store.RowLayout(chunks=layout.chunks, chunk_dim=layout.chunk_dim)
        records = encode_rows(whole, keys_N, values_ND)
        encoded = bytearray(_store.convert_records(whole, layout, records.tobytes()))
        return np.frombuffer(encoded, record_dtype(layout))
    records = np.zeros(len(keys_N), record_dtype(layout))
    records["key"] = keys_N
    records["live"] = (1 << layout.chunks) - 1
    if layout.dtype == "bf16":
        records["payload"] = _bf16(values_ND)
    elif layout.dtype == "int8":
        records["scale"] = np.abs(values_ND).max(axis=1, initial=0) / np.float32(127)
        records["payload"] = _int8(values_ND, records["scale"])
    else:
        records["payload"] = values_ND  # numpy rounds to nearest even, as the store does
    return records


def chunks_of(
    layout: _store.RowLayout, records: bytes
) -> tuple[NDArray[np.uint64], NDArray[np.uint16], NDArray[np.uint8]]:
    """Return keys, live masks, and the encoded chunks of records of rows; zeros of dead chunks.

    Requires: the rows are not of int8 or int4, whose chunks have a scale in common.
    """
    full = record_dtype(layout)
    bits_C = np.uint16(1) << np.arange(layout.chunks, dtype=np.uint16)
    size = _chunk_bytes(layout)
    data = np.frombuffer(records, np.uint8)
    if len(data) % full.itemsize == 0:
        rows = np.frombuffer(records, full)
        if (rows["live"] == bits_C.sum()).all():
            payload = data.reshape(len(rows), full.itemsize)[:, _HEAD_BYTES:]
            return rows["key"], rows["live"], payload.reshape(-1, layout.chunks, size)
    at_N = np.array(_begins(records, layout.chunks, size), np.int64)
    head_Nb = data[at_N[:, np.newaxis] + np.arange(_HEAD_BYTES)]
    key_N = np.ascontiguousarray(head_Nb[:, :8]).view(np.uint64).reshape(-1)
    live_N = np.ascontiguousarray(head_Nb[:, 8:10]).view(np.uint16).reshape(-1)
    payload_NCb = np.zeros((len(at_N), layout.chunks, size), np.uint8)
    next_N = at_N + _HEAD_BYTES
    for c, bit in enumerate(bits_C):
        of_N = np.flatnonzero(live_N & bit)
        payload_NCb[of_N, c] = data[next_N[of_N, np.newaxis] + np.arange(size)]
        next_N[of_N] += size
    return key_N, live_N, payload_NCb


def records_of(
    layout: _store.RowLayout,
    key_N: NDArray[np.uint64],
    live_N: NDArray[np.uint16],
    payload_NCb: NDArray[np.uint8],
) -> bytes:
    """Return the records of rows, whose encoded chunks are as `chunks_of` gives them.

    Requires: as of `chunks_of`; each row has a live chunk.
    """
    size = _chunk_bytes(layout)
    live_NC = (live_N[:, np.newaxis] >> np.arange(layout.chunks, dtype=np.uint16) & 1).astype(bool)
    end_N = np.cumsum(_HEAD_BYTES + size * live_NC.sum(axis=1))
    at_N = end_N - (_HEAD_BYTES + size * live_NC.sum(axis=1))
    data = np.zeros(end_N[-1] if len(end_N) else 0, np.uint8)
    head_Nb = np.zeros((len(key_N), _HEAD_BYTES), np.uint8)
    head_Nb[:, :8] = np.ascontiguousarray(key_N).view(np.uint8).reshape(-1, 8)
    head_Nb[:, 8:10] = np.ascontiguousarray(live_N).view(np.uint8).reshape(-1, 2)
    data[at_N[:, np.newaxis] + np.arange(_HEAD_BYTES)] = head_Nb
    next_N = at_N + _HEAD_BYTES
    for c in range(layout.chunks):
        of_N = np.flatnonzero(live_NC[:, c])
        data[next_N[of_N, np.newaxis] + np.arange(size)] = payload_NCb[of_N, c]
        next_N[of_N] += size
    return data.tobytes()


def _chunk_bytes(layout: _store.RowLayout) -> int:
    return layout.chunk_dim * np.dtype(_PAYLOAD[layout.dtype]).itemsize


def _begins(records: bytes, chunks: int, size: int) -> list[int]:
    """Return where each record begins."""
    mask = (1 << chunks) - 1
    begins: list[int] = []
    at = 0
    while at < len(records):
        begins.append(at)
        live = int.from_bytes(records[at + 8 : at + 10], "little") & mask
        at += _HEAD_BYTES + size * live.bit_count()
    return begins
