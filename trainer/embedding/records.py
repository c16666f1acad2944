"""Row records of docs/formats.md, encoded for many rows at once.

The store's library encodes a row at a time (`_store.encode_payload`); here numpy does the same to
whole arrays, for imports of many millions of rows. Tests hold both to equal bytes.

Shapes: N rows, D values of a row.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.data.keys import Keys

Floats = NDArray[np.float32]

# From here on a value rounds to infinity: halfway between the largest number and the next step.
_OVERFLOW = {"fp16": 65520.0, "bf16": float(np.uint32(0x7F7F8000).view(np.float32))}
_PAYLOAD = {"fp32": "<f4", "fp16": "<f2", "bf16": "<u2", "int8": "i1"}


def record_dtype(layout: _store.RowLayout) -> np.dtype[Any]:
    """Return the numpy dtype of a record whose chunks are all live."""
    scale = [("scale", "<f4")] if layout.dtype == "int8" else []
    return np.dtype(
        [
            ("key", "<u8"),
            ("live", "<u2"),
            ("kind", "u1"),
            ("zero", "u1"),
            *scale,
            ("payload", _PAYLOAD[layout.dtype], (layout.dim,)),
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
