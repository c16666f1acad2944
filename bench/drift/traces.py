"""Traces of keys by table, which planners are planned on in one half and scored on in the other.

Shapes: N samples, T tables; each sample reads one key of each table.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

Keys = NDArray[np.int64]

# Share of accesses to rows that are read so often, and the mean reuse of each bin: locality
# statistics of 856 embedding tables that Meta published in 2021 (dlrm_datasets).
_REUSE = (1, 1.5, 3, 6, 12, 24, 48, 96, 192, 384, 768, 1536, 3072, 6144, 12_288, 24_576, 49_152)
_ACCESSES = (
    *(0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052),
    *(0.050, 0.049, 0.048, 0.048, 0.043, 0.031, 0.023, 0.019),
)
_NEWS = ("user_id", "prev_article", "cand", "region", "country", "os", "device", "referrer", "env")


@dataclasses.dataclass(frozen=True, slots=True)
class TableTrace:
    """Keys of several tables in the order in which they are read.

    Attributes:
        name: The trace's name.
        keys_NT: The keys.
        dims_T: Dimensions of the tables' rows.
    """

    name: str
    keys_NT: Keys
    dims_T: NDArray[np.int64]

    def half(self, which: int) -> Keys:
        """Return the first (0) or second (1) half."""
        return np.array_split(self.keys_NT, 2)[which]

    @property
    def distinct_T(self) -> NDArray[np.int64]:
        """Distinct keys of each table."""
        return np.array([len(np.unique(keys_N)) for keys_N in self.keys_NT.T])


def news(path: Path, samples: int, piece: int) -> TableTrace:
    """Return a piece of the news stream, dimension 64 each."""
    columns = pq.read_table(path, columns=list(_NEWS))
    keys_NT = np.stack([columns[name].to_numpy().astype(np.int64) for name in _NEWS], axis=1)
    keys_NT = keys_NT[piece * samples : (piece + 1) * samples]
    return TableTrace("news", keys_NT, np.full(len(_NEWS), 64))


def criteo(path: Path, samples: int, turn: int, *, by_size: bool = False) -> TableTrace:
    """Return the categorical columns of the Criteo sample, begun anew at a later row each turn.

    Args:
        path: The sample.
        samples: So many rows of it.
        turn: Begin with the row at a fifth of it, two fifths, and so on.
        by_size: Dimensions grow with a table's keys, as 6 x keys^(1/4), instead of 16 each.
    """
    names = [f"C{at}" for at in range(1, 27)]
    columns = pq.read_table(path, columns=names)
    keys_NT = np.stack([columns[name].to_numpy().astype(np.int64) for name in names], axis=1)
    keys_NT = np.roll(keys_NT, -turn * len(keys_NT) // 5, axis=0)[:samples]
    dims_T = np.full(26, 16)
    if by_size:
        distinct_T = np.array([len(np.unique(keys_N)) for keys_N in keys_NT.T])
        dims_T = np.clip(4 * np.round(6 * distinct_T**0.25 / 4), 4, 128).astype(np.int64)
    return TableTrace("criteo, dims by size" if by_size else "criteo", keys_NT, dims_T)


def reuse(samples: int, seed: int, tables: int = 12) -> TableTrace:
    """Return tables whose rows are read as often as those of Meta's published tables.

    Tables differ: of some, most rows are read once; of others, hardly any is.
    """
    random = np.random.default_rng(seed)
    columns = []
    for _ in range(tables):
        tilt = random.uniform(-0.4, 0.4)
        weights = np.array(_ACCESSES) * np.array(_REUSE) ** tilt
        bins_N = random.choice(len(_REUSE), samples, p=weights / weights.sum())
        # Rows of a bin are as many as give each its reuse.
        rows_B = np.maximum(1, np.bincount(bins_N, minlength=len(_REUSE)) / np.array(_REUSE))
        row_N = (random.random(samples) * rows_B[bins_N]).astype(np.int64)
        columns.append(bins_N.astype(np.int64) << 32 | row_N)
    return TableTrace("reuse histogram", np.stack(columns, axis=1), np.full(tables, 32))
