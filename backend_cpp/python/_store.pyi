"""Bindings to the tiered embedding store.

Contracts stand in backend_cpp/include/embertide; this file gives the Python types. Every error of
the store is a StoreError whose `code` is the name of the C++ status code.
"""

import builtins
from collections.abc import Mapping, Sequence
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
        counter_chunks: int = 0,
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
    @property
    def counter_chunks(self) -> int: ...

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

class TableBudget:
    """Room of all devices that one table has to itself."""

    def __init__(self, *, ddr_bytes: int, ssd_bytes: int = 0, ddr_policy: str = ...) -> None: ...
    @property
    def ddr_bytes(self) -> int: ...
    @property
    def ssd_bytes(self) -> int: ...
    @property
    def ddr_policy(self) -> str: ...

# (table, keys_N, offsets or None where each key is a bag of its own, pooling ("sum" or "mean", no
# matter without offsets), out_BD that is written to and may be columns of a larger array). A sixth
# member: what each key's row is multiplied by (weights_N); None: 1.
BagLookup = (
    tuple[int, NDArray[np.int64], NDArray[np.uint32] | None, str, NDArray[np.float32]]
    | tuple[
        int,
        NDArray[np.int64],
        NDArray[np.uint32] | None,
        str,
        NDArray[np.float32],
        NDArray[np.float32] | None,
    ]
)
# (table, keys_N, offsets or None where each key is a bag of its own, gradients_BD). A fifth
# member, without offsets: how many occurrences each key stands for (counts_N, none 0); None: one.
BagGradients = (
    tuple[int, NDArray[np.int64], NDArray[np.uint32] | None, NDArray[np.float32]]
    | tuple[
        int,
        NDArray[np.int64],
        NDArray[np.uint32] | None,
        NDArray[np.float32],
        NDArray[np.uint32] | None,
    ]
)
# Of rows in key order: accumulators_N, steps since each was last updated, utilities_NC at that
# step, one a chunk, and what some optimizers keep: each row's own steps, elements_NE (E: dim or 0).
BucketState = tuple[
    NDArray[np.float32],
    NDArray[np.uint32],
    NDArray[np.float32],
    NDArray[np.uint32],
    NDArray[np.float32],
]

class RowPlaces:
    """Where a lookup found the rows of its keys, for `apply_gradients`. No value depends on it."""

    def __len__(self) -> int: ...
    def found(self) -> NDArray[np.bool_]:
        """Return which keys have a row in memory."""

class PruneOutcome:
    """What a pass of pruning did; `bytes` are those of the rows that are left."""

    @property
    def price(self) -> float: ...
    @property
    def rows(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def rows_pruned(self) -> int: ...
    @property
    def rows_expired(self) -> int: ...
    @property
    def chunks_pruned(self) -> int: ...
    @property
    def chunks_regrown(self) -> int: ...
    @property
    def rows_unchanged(self) -> int: ...

def squares_of_keys(
    layout: RowLayout, keys: NDArray[np.int64], gradients: NDArray[np.float32]
) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Return each key's number, and the squares of what each one's gradients add up to, by chunk.

    Keys are numbered as they first come.
    """

def distinct_keys(
    keys: Sequence[tuple[int, NDArray[np.int64]]],
) -> list[tuple[int, NDArray[np.int64]]]:
    """Return (table, keys_N) with each of the keys once; those without any are left out."""

def vector_level() -> str:
    """Return the vectors that rows are added by: avx512, avx2 or plain (EMBERTIDE_VECTORS)."""

class Store:
    """What both faces of a store can do. One writer at a time; reads pin a version."""

    def lookup(
        self,
        table: int,
        keys: NDArray[np.int64],
        *,
        pooling: str = "none",
        offsets: NDArray[np.uint32] = ...,
        version: int | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.uint8], int]: ...
    def lookup_bags(
        self, bags: Sequence[BagLookup], *, threads: int = 1, places: bool = False
    ) -> list[RowPlaces]:
        """Look bags up; with `places`, return for each of them where its rows lie."""

    def export_bucket(self, table: int, bucket: int) -> bytes: ...
    def copy_rows(self, table: int, keys: NDArray[np.int64]) -> tuple[bytes, NDArray[np.uint8]]:
        """Return the records of `keys` that have a row, in their order, and a source for each."""

    def maintain(self) -> None: ...
    def check_integrity(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

class ServingStore(Store):
    """The tables of one node, whose rows come as versions."""

    def __init__(
        self,
        *,
        tables: list[TableConfig],
        devices: int = 1,
        ddr_budget_bytes: int = ...,
        ssd_budget_bytes: int = 0,
        ssd_directory: str = "",
        ssd_engine: str = "auto",
        window_versions: int = 8,
        ddr_policy: str = ...,
        table_budgets: dict[str, TableBudget] = ...,
        hbm_budget_bytes: int = 0,
        hbm_devices: int = 1,
        hbm_kind: str = "gpu",
        hbm_policy: str = ...,
        sums: str = "fp64",
        index: str = "plain",
    ) -> None: ...
    def stage_records(self, version: int, table: int, bucket: int, records: bytes) -> None: ...
    def commit(self, version: int) -> None: ...
    def set_ddr_shares(self, shares: Sequence[tuple[int, int, int]]) -> None:
        """Give tables shares of DDR: (table, device, bytes of rows); all others have none."""

class TrainingStore(Store):
    """The tables of one trainer rank, whose rows are learned in place."""

    def __init__(
        self,
        *,
        tables: list[TableConfig],
        devices: int = 1,
        ddr_budget_bytes: int = ...,
        ssd_budget_bytes: int = 0,
        ssd_directory: str = "",
        ssd_engine: str = "auto",
        ddr_policy: str = ...,
        table_budgets: dict[str, TableBudget] = ...,
        new_row_accesses: int = 1,
        utility: str = "squares",
        utility_decay: float = ...,
        prune_groups: Sequence[tuple[Sequence[int], int, Sequence[tuple[int, int, float]]]] = ...,
        optimizer: str = "rowwise_adagrad",
        index: str = "plain",
        hold_bytes: int = 0,
    ) -> None: ...
    def ensure_rows(self, table: int, keys: NDArray[np.int64]) -> int: ...
    def bring_rows(self, keys: Sequence[tuple[int, NDArray[np.int64]]], *, threads: int = 1) -> int:
        """Bring rows of (table, keys_N) from the SSD to DDR, in one batch; return how many."""

    def hold_rows(
        self, keys: Sequence[tuple[int, NDArray[np.int64]]]
    ) -> list[tuple[int, NDArray[np.int64]]]:
        """Hold rows of (table, keys_N) in DDR, a key as often as it stands there.

        Returns:
            The keys that were not held before, each once: the others are brought by who held them.

        Raises:
            StoreError: They do not fit `hold_bytes`, or what DDR has for it; none is held then.
        """

    def release_rows(self, keys: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
        """Let go of what one call of `hold_rows` has held."""

    def hold_bytes_of(self, table: int) -> int:
        """Return what a row of a table counts when it is held: its bytes in pages of DDR."""

    def held(self) -> tuple[int, int, int]:
        """Return (keys that are held, bytes that whole rows of them take, bytes that they may)."""

    def apply_gradients(
        self,
        bags: Sequence[BagGradients],
        *,
        learning_rate: float,
        epsilon: float = 1e-8,
        initial_accumulator: float = 0.0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        max_gradient_norm: float = 0.0,
        threads: int = 1,
        places: Sequence[RowPlaces | None] = (),
        parts: Mapping[int, tuple[int, int]] = ...,
    ) -> int:
        """Take a step; `places`, one for each of `bags`, or none: of lookups of the same keys.

        `parts`: of tables that have parts of rows, their first chunk, and the chunks of whole rows;
        behind each gradient stand as many doubles, the squares of the whole row's.
        """

    def add_counts(self, table: int, keys: NDArray[np.int64], logs: NDArray[np.float32]) -> int: ...
    def set_live(self, table: int, key: int, live: int) -> None: ...
    def prune(
        self,
        group: int,
        bytes: int,
        *,
        max_age: int = 0,
        samples: Sequence[builtins.bytes] | None = None,
    ) -> PruneOutcome:
        """Prune to `bytes`; with a sample of every rank, to `bytes` on all ranks together."""

    def prune_rows(self, group: int) -> int: ...
    def prune_sample(self, group: int, rows: int) -> bytes:
        """Return what the rows here say of the price; `rows` are those of all ranks together."""

    def record_sensitivity(self, table: int, at_stake: float, squares: float) -> None: ...
    def prune_room(self, group: int) -> int: ...
    def set_prune_room(self, group: int, bytes: int) -> None: ...
    def seen_bytes(self, group: int) -> int: ...
    def prune_state(self, group: int) -> bytes: ...
    def set_prune_state(self, group: int, state: bytes) -> None: ...
    def load_prune_states(self, group: int, states: Sequence[bytes], *, seen: bool) -> None:
        """Go on from the states of other ranks; `seen`: count the keys that they saw here."""

    def prune_state_of_format_5(self, group: int, state: bytes) -> bytes: ...
    def take_changes(self, table: int, bucket: int) -> bytes: ...
    def import_records(self, table: int, bucket: int, records: bytes) -> None: ...
    def mark_changed(self, table: int, bucket: int, keys: NDArray[np.uint64]) -> None: ...
    def bucket_state(self, table: int, bucket: int) -> BucketState: ...
    def set_bucket_state(self, table: int, bucket: int, states: BucketState) -> None: ...
    def export_rows(self, table: int, keys: NDArray[np.uint64]) -> tuple[bytes, BucketState]:
        """Return records and states of those keys that have a row."""

    def put_rows(self, table: int, records: bytes, states: BucketState) -> None:
        """Have rows be as another store has learned them."""

    def set_states(self, table: int, keys: NDArray[np.uint64], states: BucketState) -> None: ...

class CachePolicy:
    """A policy of admission and eviction, and the memory that it needs for each slot of a tier."""

    @property
    def name(self) -> str: ...
    @property
    def about(self) -> str: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def history_bytes(self) -> int: ...

class CacheResult:
    """What a policy did on a trace; hits + inserted + refused = accesses."""

    @property
    def hits(self) -> int: ...
    @property
    def inserted(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def policy_bytes(self) -> int: ...

class CacheTrace:
    """Keys in the order in which they were asked for; immutable, of use to any thread."""

    def __init__(self, keys: NDArray[np.int64]) -> None: ...
    @property
    def accesses(self) -> int: ...
    @property
    def distinct(self) -> int: ...
    def simulate(
        self,
        policy: str,
        capacity: int,
        *,
        version_accesses: int = 50_000,
        utility_decay: float = 0.9,
    ) -> CacheResult: ...
    def optimal_hits(self, capacity: int) -> int: ...
    def best_fixed_hits(self, capacity: int) -> int: ...

class Transforms:
    """What is done to DENSE before the net sees it; immutable, of use to any thread."""

    def __init__(self, text: str | bytes) -> None:
        """Read the JSON of docs/formats.md, "Transforms"."""

    @property
    def text(self) -> str:
        """The JSON; the same for equal transforms."""

    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    def apply(self, raw_BD: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
        """Return (what the net gets, [B, outputs]; how many values were missing, which is NaN)."""

EVERYWHERE: int
"""Owner of a bucket of which every rank has all rows."""

class Routed:
    """A batch's keys, each once, in the order of their owners; of use to any thread."""

    @property
    def keys(self) -> NDArray[np.int64]: ...
    @property
    def counts(self) -> NDArray[np.uint32]:
        """How often each occurs."""

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """Ranks x tables, flat: how many keys of each table each rank is asked for."""

    def pool(self, rows: NDArray[np.float32], outs: Sequence[tuple[str, NDArray[Any]]]) -> None:
        """Pool rows, in the order of `keys`, into (pooling, out_BD) of each feature routed.

        Pooling is "sum", "mean" or "none", which gives a row for each key.
        """

    def sum(
        self, gradients: Sequence[tuple[NDArray[np.uint32] | None, NDArray[np.float32]]]
    ) -> NDArray[np.float32]:
        """Return the summed gradient of each of `keys`, flat.

        Args:
            gradients: Of each feature routed: its offsets and a gradient for each bag, or None and
                one for each key.
        """

class Router:
    """Says which rank is asked for which keys. Used by one thread at a time."""

    def __init__(
        self,
        tables: Sequence[tuple[int, int, int, NDArray[np.uint16]]],
        *,
        ranks: int,
        rank: int,
    ) -> None:
        """Take, of each table: bucket bits, width of a row, dim of a gradient, owners by bucket."""

    def route(
        self, bags: Sequence[tuple[int, NDArray[np.int64], NDArray[np.uint32] | None]]
    ) -> Routed: ...
    def set_hosts(
        self, table: int, as_table: int, keys: NDArray[np.int64], hosts: NDArray[np.uint16]
    ) -> None:
        """Have keys of a table be asked of these ranks, as keys of table `as_table`."""

    def owners(self, table: int, keys: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Return the rank of each key's bucket; this one for tables that are everywhere."""

    def take_load(self) -> NDArray[np.uint64]:
        """Return keys asked of each bucket since the last call, tables after tables."""

def probe_ssd(directory: str, engine: str = "auto") -> tuple[str, bool, str]:
    """Return (engine of the directory, whether it passes the page cache by, what was refused)."""

def numa_nodes() -> list[int]:
    """Return the nodes whose memory this process may bind."""

def cache_policies() -> list[CachePolicy]: ...
def hash_key(key: int, /) -> int: ...
def initial_value(seed: int, table_id: int, key: int, d: int, scale: float, /) -> float: ...
def crc32c(data: bytes, before: int = 0, /) -> int: ...
def join_crc32c(first: int, second: int, second_bytes: int, /) -> int:
    """Return the CRC32C of two pieces, one behind the other, from those of each."""

def encode_payload(layout: RowLayout, live: int, values: NDArray[np.float32], /) -> bytes: ...
def encode_record(key: int, live: int, kind: int, payload: bytes) -> bytes: ...
def cut_records(
    layout: RowLayout, records: bytes, max_bytes: int
) -> list[tuple[bytes, int, int]]: ...
def decode_records(
    layout: RowLayout, records: bytes
) -> tuple[NDArray[np.uint64], NDArray[np.uint16], NDArray[np.uint64], NDArray[np.float32]]:
    """Return (keys_N, live_N, 0 of tombstones, begin_N+1 in bytes, values_ND) of records."""

def convert_records(old: RowLayout, new: RowLayout, records: bytes, /) -> bytes:
    """Return records of one dtype as those of another: each row's values are encoded anew.

    A value that is too large for the new one becomes its largest; tombstones stay.
    """

def encode_key_records(
    layout: RowLayout, keys: NDArray[np.uint64], items: NDArray[np.int64]
) -> bytes:
    """Return records of rows of keys: items_ND of each of keys_N, a tombstone without any item."""

def decode_key_records(
    layout: RowLayout, records: bytes
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return (keys_N, items_ND) of records of rows of keys."""

def record_keys(layout: RowLayout, records: bytes) -> NDArray[np.uint64]: ...
def find_record(layout: RowLayout, records: bytes, key: int) -> tuple[int, int] | None: ...
def count_live(layout: RowLayout, records: bytes) -> list[int]:
    """Return how many rows have 0, 1, ... `chunks` live chunks."""

def differing_records(layout: RowLayout, records: bytes, others: bytes) -> bytes:
    """Return what of `records` is not in `others`, byte for byte; keys ascend in both."""

def diff_records(layout: RowLayout, before: bytes, after: bytes) -> tuple[int, int, int]:
    """Return how many rows of a bucket were (added, removed, changed); keys ascend in both."""

def merge_records(layout: RowLayout, base: bytes, changes: Sequence[bytes], /) -> bytes:
    """Return the rows of `base` after `changes`, one after the other; keys ascend in all."""

def restore_records(layout: RowLayout, state: bytes, keys: NDArray[np.uint64], /) -> bytes:
    """Return what brings `keys`, which ascend, back to `state`: its records, else tombstones."""

def write_bucket_file(
    directory: str, table: TableConfig, bucket: int, version: int, records: bytes, /
) -> BucketFileInfo: ...
def read_bucket_file(directory: str, table: TableConfig, info: BucketFileInfo, /) -> bytes: ...
def check_manifest(json: str, /) -> str: ...
