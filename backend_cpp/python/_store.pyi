"""Bindings to the tiered embedding store.

Contracts stand in backend_cpp/include/embertide; this file gives the Python types. Every error of
the store is a StoreError whose `code` is the name of the C++ status code.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

HASH_NAME: str
HASH_SEED: int
FORMAT_VERSION: int

class StoreError(RuntimeError):
    """An operating error of the store; `code` is for example "CORRUPT"."""

    code: str

class RowLayout:
    """How a row's vector is cut: dim = chunks * chunk_dim values of one dtype."""

    def __init__(self, *, dtype: str = "fp32", chunks: int = 1, chunk_dim: int) -> None: ...
    @property
    def chunks(self) -> int: ...
    @property
    def chunk_dim(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...

class TableConfig:
    """What a table is; `id` and the rest stand in every file of it."""

    def __init__(
        self,
        *,
        name: str,
        id: int,
        layout: RowLayout,
        bucket_bits: int = 0,
        init_seed: int = 0,
        init_scale: float = 0.01,
        default_row: list[float] = ...,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def id(self) -> int: ...
    @property
    def layout(self) -> RowLayout: ...
    @property
    def bucket_bits(self) -> int: ...
    @property
    def init_seed(self) -> int: ...
    @property
    def init_scale(self) -> float: ...
    @property
    def default_row(self) -> list[float]: ...

class BucketFileInfo:
    """A bucket file as the manifest names it."""

    def __init__(
        self,
        *,
        path: str,
        table: str,
        bucket: int,
        version: int,
        rows: int,
        bytes: int,
        crc32c: int,
    ) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def table(self) -> str: ...
    @property
    def bucket(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def crc32c(self) -> int: ...

class Store:
    """The tables of one node or trainer rank. One writer at a time; reads pin a version."""

    def __init__(
        self,
        *,
        tables: list[TableConfig],
        profile: str = "serve",
        devices: int = 1,
        ddr_budget_bytes: int = ...,
        ssd_budget_bytes: int = 0,
        ssd_directory: str = "",
        window_versions: int = 8,
    ) -> None: ...
    def lookup(
        self,
        table: int,
        keys: NDArray[np.int64],
        *,
        pooling: str = "none",
        offsets: NDArray[np.uint32] = ...,
        version: int | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.uint8], int]: ...
    def stage_records(self, version: int, table: int, bucket: int, records: bytes) -> None: ...
    def commit(self, version: int) -> None: ...
    def ensure_rows(self, table: int, keys: NDArray[np.int64]) -> int: ...
    def apply_gradients(
        self,
        table: int,
        keys: NDArray[np.int64],
        gradients: NDArray[np.float32],
        *,
        learning_rate: float,
        epsilon: float = 1e-8,
        initial_accumulator: float = 0.0,
    ) -> int: ...
    def set_live(self, table: int, key: int, live: int) -> None: ...
    def take_changes(self, table: int, bucket: int) -> bytes: ...
    def export_bucket(self, table: int, bucket: int) -> bytes: ...
    def import_records(self, table: int, bucket: int, records: bytes) -> None: ...
    def adagrad_state(self, table: int, key: int) -> float: ...
    def maintain(self) -> None: ...
    def check_integrity(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

def hash_key(key: int, /) -> int: ...
def initial_value(seed: int, table_id: int, key: int, d: int, scale: float, /) -> float: ...
def crc32c(data: bytes, /) -> int: ...
def encode_payload(layout: RowLayout, live: int, values: NDArray[np.float32], /) -> bytes: ...
def encode_record(key: int, live: int, kind: int, payload: bytes) -> bytes: ...
def write_bucket_file(
    directory: str, table: TableConfig, bucket: int, version: int, records: bytes, /
) -> BucketFileInfo: ...
def read_bucket_file(directory: str, table: TableConfig, info: BucketFileInfo, /) -> bytes: ...
def check_manifest(json: str, /) -> str: ...
