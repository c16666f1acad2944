"""Where an import takes rows from: NumPy, safetensors, HPS folders, torch state_dicts.

Every source gives its rows a slice at a time and keeps none. All but the state_dict are plain
regions of files: they are read, not mapped, since pages of a mapping count as memory of ours.

Shapes: N rows of a slice, D values of a row.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.data.keys import Keys
from embertide.trainer.embedding.records import Floats
from embertide.trainer.errors import ConfigurationError

Format = Literal["numpy", "safetensors", "hps", "state_dict"]
FORMATS: tuple[Format, ...] = ("numpy", "safetensors", "hps", "state_dict")
# No header of a real file comes near; a length beyond it is a file of another kind.
_MAX_HEADER_BYTES = 100 << 20


class ModelImportError(ConfigurationError):
    """A model cannot be imported.

    Attributes:
        source: File, folder, table or option at fault.
        reason: The cause and the remedy.
    """

    def __init__(self, source: object, reason: str) -> None:
        """Keep the facts."""
        super().__init__(str(source), reason)
        self.source = str(source)
        self.reason = reason

    def __str__(self) -> str:
        """Source and reason."""
        return f"{self.source}: {self.reason}"


class RowSource(Protocol):
    """Rows of one table, in an order that is the same each time they are read."""

    name: str
    rows: int
    dim: int
    row_bytes: int  # of key and vector as read

    def slices(self, rows: int) -> Iterator[tuple[Keys, Floats]]:
        """Yield (keys_N, values_ND) of at most `rows` rows each, from the first row to the last.

        Raises:
            ModelImportError: The file ends too soon.
        """
        ...

    def rows_of(self, key: int) -> list[int]:
        """Return the positions at which a key, as an unsigned number, stands."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """An array in a file: row-major, little-endian. bf16 is `<u2` with `bf16` set."""

    path: Path
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    bf16: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * int(np.prod(self.shape[1:]))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows `start` to before `stop`.

        Raises:
            ModelImportError: The file is shorter.
        """
        width = int(np.prod(self.shape[1:]))
        count = (stop - start) * width
        at = self.offset + start * self.row_bytes
        values = np.fromfile(self.path, self.dtype, count, offset=at)
        if len(values) < count:
            raise ModelImportError(self.path, f"ends within row {start + len(values) // width}")
        return values.reshape(stop - start, *self.shape[1:])


class RegionSource:
    """Keys in one region, vectors in another."""

    def __init__(self, keys: Region, vectors: Region) -> None:
        """Check that the two belong together.

        Raises:
            ModelImportError: A dtype or a shape is wrong.
        """
        if len(keys.shape) != 1:
            raise ModelImportError(keys.path, f"keys have shape {list(keys.shape)}; give one axis")
        if keys.dtype not in (np.dtype("<i8"), np.dtype("<u8")):
            raise ModelImportError(
                keys.path, f"keys are {keys.dtype}; they must be int64 or uint64: save them so"
            )
        if len(vectors.shape) != 2 or vectors.shape[1] == 0:
            raise ModelImportError(
                vectors.path, f"vectors have shape {list(vectors.shape)}; give rows x dim"
            )
        if vectors.dtype not in (np.dtype("<f4"), np.dtype("<f2")) and not vectors.bf16:
            raise ModelImportError(
                vectors.path,
                f"vectors are {vectors.dtype}; they must be float32 or float16: save them so",
            )
        if keys.shape[0] != vectors.shape[0]:
            raise ModelImportError(
                vectors.path,
                f"{vectors.shape[0]} vectors, but {keys.path} holds {keys.shape[0]} keys; "
                "give one vector a key",
            )
        self._keys, self._vectors = keys, vectors
        self.name = str(vectors.path)
        self.rows, self.dim = vectors.shape
        self.row_bytes = keys.row_bytes + vectors.row_bytes

    def _read_keys(self, start: int, rows: int) -> Keys:
        return self._keys.read(start, min(start + rows, self.rows)).view(np.uint64)

    def slices(self, rows: int) -> Iterator[tuple[Keys, Floats]]:
        """See `RowSource.slices`."""
        for start in range(0, self.rows, rows):
            values = self._vectors.read(start, min(start + rows, self.rows))
            if self._vectors.bf16:
                values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
            yield self._read_keys(start, rows), values.astype(np.float32, copy=False)

    def rows_of(self, key: int) -> list[int]:
        """See `RowSource.rows_of`."""
        rows = 1 << 20
        found: list[int] = []
        for start in range(0, self.rows, rows):
            found += (start + np.flatnonzero(self._read_keys(start, rows) == key)).tolist()
        return found


class StateDictSource:
    """One parameter of a torch state_dict: the key of a row is its index.

    torch maps the file; a fresh mapping for each slice lets go of the pages of the one before.
    """

    def __init__(self, path: Path, parameter: str) -> None:
        """Find the parameter, by its name or that of its module.

        Raises:
            ModelImportError: No such parameter, or it is no table.
        """
        found = _state_dict(path)
        self._parameter = parameter if parameter in found else f"{parameter}.weight"
        if self._parameter not in found:
            names = ", ".join(sorted(found)) or "no tensor at all"
            raise ModelImportError(path, f"has no parameter {parameter!r}; it holds {names}")
        tensor = found[self._parameter]
        shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if len(shape) != 2 or not shape[1]:
            raise ModelImportError(
                path, f"{self._parameter!r} has shape {shape}; a table's weight is rows x dim"
            )
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ModelImportError(
                path,
                f"{self._parameter!r} is {dtype}; it must be float32, float16 or bfloat16: "
                "convert it before saving",
            )
        self._path = path
        self.name = f"{path}, parameter {self._parameter}"
        self.rows, self.dim = shape
        self.row_bytes = self.dim * tensor.element_size()

    def slices(self, rows: int) -> Iterator[tuple[Keys, Floats]]:
        """See `RowSource.slices`."""
        for start in range(0, self.rows, rows):
            stop = min(start + rows, self.rows)
            tensor = _state_dict(self._path)[self._parameter]
            values = tensor[start:stop].detach().float().contiguous().numpy().copy()
            del tensor
            yield np.arange(start, stop, dtype=np.uint64), values

    def rows_of(self, key: int) -> list[int]:
        """See `RowSource.rows_of`."""
        return [key] if key < self.rows else []


def _state_dict(path: Path) -> dict[str, Any]:
    import torch  # here, for it takes 200 MB and the other sources need none of it

    _must_exist(path)
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise ModelImportError(
            path, f"is no state_dict ({error}); save one with torch.save(net.state_dict(), path)"
        ) from error
    found: dict[str, Any] = {}

    def collect(value: object, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, each in value.items():
                collect(each, f"{name}.{key}" if name else str(key))

    collect(loaded, "")
    return found


def _must_exist(path: Path) -> None:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is missing"
        raise ModelImportError(path, f"{what}; give an existing file")


def _npy(path: Path) -> Region:
    _must_exist(path)
    try:
        open_memmap: Any = np.lib.format.open_memmap  # not typed by numpy
        array = open_memmap(path, mode="r")  # for the header: no page is touched
    except (ValueError, EOFError) as error:
        raise ModelImportError(path, f"is no whole .npy file ({error}); save it again") from error
    if not array.flags.c_contiguous:
        raise ModelImportError(
            path, "is in Fortran's order; save numpy.ascontiguousarray of the array"
        )
    return Region(path, array.offset, array.dtype, array.shape)


def open_numpy(folder: Path, keys: str = "keys.npy", vectors: str = "vectors.npy") -> RegionSource:
    """Open two .npy files; the names are relative to `folder`.

    Raises:
        ModelImportError: A file is missing, or is not what it should be.
    """
    return RegionSource(_npy(folder / keys), _npy(folder / vectors))


def open_hps(folder: Path) -> RegionSource:
    """Open a table of HugeCTR's HPS: files `key` (int64) and `emb_vector` (float32).

    Raises:
        ModelImportError: A file is missing, or their sizes do not fit.
    """
    keys, vectors = folder / "key", folder / "emb_vector"
    _must_exist(keys)
    _must_exist(vectors)
    key_bytes, vector_bytes = keys.stat().st_size, vectors.stat().st_size
    if key_bytes % 8 or not key_bytes:
        raise ModelImportError(keys, f"{key_bytes} bytes; it must hold int64 keys, 8 bytes each")
    rows = key_bytes // 8
    if vector_bytes % (4 * rows) or not vector_bytes:
        raise ModelImportError(
            vectors,
            f"{vector_bytes} bytes are no whole number of float32 for each of the {rows} keys "
            "in 'key'; export the table again",
        )
    return RegionSource(
        Region(keys, 0, np.dtype("<i8"), (rows,)),
        Region(vectors, 0, np.dtype("<f4"), (rows, vector_bytes // (4 * rows))),
    )


_SAFETENSORS_DTYPES = {"I64": "<i8", "U64": "<u8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    _must_exist(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError:
        raise ModelImportError(
            path, "is no safetensors file: its header is no JSON; save it again"
        ) from None
    header.pop("__metadata__", None)
    end = 8 + length + max((each["data_offsets"][1] for each in header.values()), default=0)
    if path.stat().st_size != end:
        raise ModelImportError(
            path, f"{path.stat().st_size} bytes, its header says {end}; copy it again"
        )
    return header, 8 + length


def open_safetensors(path: Path, keys: str = "keys", vectors: str = "vectors") -> RegionSource:
    """Open two tensors of a safetensors file.

    Raises:
        ModelImportError: No such file or tensor, or it is not what it should be.
    """
    header, data = _safetensors_header(path)

    def region(name: str) -> Region:
        if name not in header:
            raise ModelImportError(path, f"has no tensor {name!r}; it holds {', '.join(header)}")
        entry = header[name]
        dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelImportError(
                path,
                f"tensor {name!r} is {entry['dtype']}; give I64 or U64 keys and F32, F16 or "
                "BF16 vectors",
            )
        offset = data + entry["data_offsets"][0]
        bf16 = entry["dtype"] == "BF16"
        return Region(path, offset, np.dtype(dtype), tuple(entry["shape"]), bf16)

    return RegionSource(region(keys), region(vectors))
