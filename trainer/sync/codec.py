"""How rows and gradients travel between ranks: exact, in half the bytes, or in a quarter.

Rows and gradients have codecs of their own. What a value cannot be in fewer bits is cut off at the
largest that can. int8 has a scale of fp32 for each row; what it rounds off a gradient is added to
the next gradient of that key (error feedback: Seide et al. 2014, Karimireddy et al. 2019), kept by
the rank that sends it, for a bounded number of keys.

Shapes: U keys, D values of each.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embertide.trainer.config import Codec

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MOST = {"bf16": float(torch.finfo(torch.bfloat16).max), "fp16": 65504.0}
_LEVELS = 127.0

Floats = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Values of some keys of one table.

    Attributes:
        keys: The number of keys.
        width: Values of each.
        exact: The number of last keys that travel as they are: counters are logarithms that would
            lose their meaning.
    """

    keys: int
    width: int
    exact: int = 0


Blocks = Sequence[Block]
"""One behind the other."""


def wire_bytes(codec: Codec, blocks: Blocks) -> int:
    """Return the bytes that blocks take."""
    bytes_ = _DTYPES[codec].itemsize if codec in _DTYPES else 1
    scale = 4 if codec == "int8" else 0
    return sum(
        each.keys * ((each.width - each.exact) * bytes_ + scale + each.exact * 4) for each in blocks
    )


def encode(codec: Codec, values: Floats, blocks: Blocks) -> Tensor:
    """Return the bytes of some blocks' values, which are flat."""
    flat = torch.from_numpy(values)
    if codec != "int8" and not (codec != "fp32" and any(each.exact for each in blocks)):
        return _coded(codec, flat)
    parts: list[Tensor] = []
    at = 0
    for each in blocks:
        if not each.keys:
            continue
        values_UD = flat[at : at + each.keys * each.width].view(each.keys, each.width)
        at += each.keys * each.width
        coded = each.width - each.exact
        head_UD = values_UD[:, :coded]
        parts += _levels(head_UD) if codec == "int8" else [_coded(codec, head_UD)]
        if each.exact:
            parts.append(_coded("fp32", values_UD[:, coded:]))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def decode(codec: Codec, data: Tensor, blocks: Blocks) -> Floats:
    """Return the values of bytes; those of fp32 share memory with them."""
    if codec != "int8" and not (codec != "fp32" and any(each.exact for each in blocks)):
        return _values(codec, data)
    out = np.empty(sum(each.keys * each.width for each in blocks), np.float32)
    at = to = 0
    for each in blocks:
        coded = each.width - each.exact
        out_UD = out[to : to + each.keys * each.width].reshape(each.keys, each.width)
        to += each.keys * each.width
        sizes = [each.keys * coded * (_DTYPES[codec].itemsize if codec in _DTYPES else 1)]
        sizes += [4 * each.keys] if codec == "int8" else []
        sizes += [4 * each.keys * each.exact]
        pieces = data[at : at + sum(sizes)].split(sizes)
        at += sum(sizes)
        if codec == "int8":
            levels_UD = pieces[0].numpy().view(np.int8).reshape(each.keys, coded)
            np.multiply(levels_UD, _values("fp32", pieces[1])[:, None], out=out_UD[:, :coded])
        else:
            out_UD[:, :coded] = _values(codec, pieces[0]).reshape(each.keys, coded)
        if each.exact:
            out_UD[:, coded:] = _values("fp32", pieces[-1]).reshape(each.keys, each.exact)
    return out


def _coded(codec: Codec, values: Tensor) -> Tensor:
    if not values.numel():
        return torch.empty(0, dtype=torch.uint8)
    if codec != "fp32":
        values = values.clamp(-_MOST[codec], _MOST[codec]).to(_DTYPES[codec])
    return values.reshape(-1).view(torch.uint8)


def _values(codec: Codec, data: Tensor) -> Floats:
    dtype = _DTYPES[codec]
    if not len(data):
        return np.empty(0, np.float32)
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()  # pieces of a message may begin anywhere
    values: Floats = data.view(dtype).float().numpy()
    return values


def _levels(values_UD: Tensor) -> list[Tensor]:
    """Return levels and scales of rows. One that is no number has a scale that is none, either."""
    scale_U = values_UD.abs().amax(dim=1) / _LEVELS
    safe_U = torch.where(scale_U > 0, scale_U, torch.ones_like(scale_U))
    levels_UD = torch.nan_to_num(values_UD / safe_U[:, None]).round().clamp(-_LEVELS, _LEVELS)
    return [levels_UD.to(torch.int8).reshape(-1).view(torch.uint8), scale_U.view(torch.uint8)]


class Feedback:
    """The rounding errors of a rank's sent gradients, by table and key, to add to the next ones.

    One place a key, chosen by its hash; a key that comes to a place that is taken, takes it.

    Attributes:
        forgotten: Remainders that were lost so.
    """

    def __init__(self, places: int, widths: Sequence[int]) -> None:
        """Keep `places` keys, a power of two, of each table, whose gradients have these widths."""
        self.forgotten = 0
        self._mask = np.uint64(places - 1)
        self._keys = [np.zeros(places, np.int64) for _ in widths]
        self._taken = [np.zeros(places, np.bool_) for _ in widths]
        self._rest = [np.zeros((places, width), np.float32) for width in widths]

    def add(self, table: int, keys_U: NDArray[np.int64], gradients_UD: NDArray[np.float32]) -> None:
        """Add what is left of these keys to their gradients, in place."""
        place_U = self._places(keys_U)
        known_U = self._taken[table][place_U] & (self._keys[table][place_U] == keys_U)
        gradients_UD[known_U] += self._rest[table][place_U[known_U]]

    def keep(self, table: int, keys_U: NDArray[np.int64], rest_UD: NDArray[np.float32]) -> None:
        """Keep what encoding took off."""
        place_U = self._places(keys_U)
        other_U = self._taken[table][place_U] & (self._keys[table][place_U] != keys_U)
        self.forgotten += int(other_U.sum())
        self._keys[table][place_U] = keys_U
        self._rest[table][place_U] = np.where(np.isfinite(rest_UD), rest_UD, 0.0)
        self._taken[table][place_U] = True

    def _places(self, keys_U: NDArray[np.int64]) -> NDArray[np.int64]:
        mixed_U = keys_U.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return ((mixed_U >> np.uint64(32)) & self._mask).astype(np.int64)
