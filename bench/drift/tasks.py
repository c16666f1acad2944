"""Sharding tasks, seeded: tables, how their keys are spread, devices and memory.

Table sizes are those of Criteo's data sets, or of the columns of a stream; key frequencies are
those of the stream, or follow the reuse of Meta's published traces. Row ids are in random order, so
that a block of rows has its share of the hot ones: the best case for row-wise sharding. Letters of
shapes: H hot rows, P equal parts of a table.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from bench.drift.simulator import SimulatedTable

Floats = NDArray[np.float64]
Memory = Literal["tight", "medium", "loose"]

# MLPerf's DLRM on Criteo 1TB: the full tables, their multi-hot sizes, and Criteo Kaggle's tables.
CRITEO_1TB = (
    227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10, 2209,
    11938, 155, 4, 976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36,
)  # fmt: skip
CRITEO_1TB_BAGS = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)  # fmt: skip
CRITEO_KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
CAPS = (None, 40_000_000, 10_000_000, 1_000_000)
DIMS = (16, 32, 64, 128)
FILL: dict[Memory, tuple[float, float]] = {
    "tight": (0.90, 0.95),
    "medium": (0.5, 0.8),
    "loose": (0.1, 0.4),
}
SAMPLES = 512
# Share of all reads by how often a row is read, 1, 2, 4 ... 32,768 and more (dlrm_datasets 2021).
_REUSE = (
    0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.050, 0.049, 0.048, 0.048,
    0.043, 0.031, 0.023, 0.019,
)  # fmt: skip
_READS = 65_536 * 20  # of a table in those traces, about
_HOT = 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """How reads are spread over a table's rows: some hot rows, the others alike.

    Attributes:
        share_H: Shares of the reads.
        row_H: Where the hot rows stand among the rows, in [0, 1).
        hash_H: Where they stand by hash, in [0, 1).
    """

    share_H: Floats
    row_H: Floats
    hash_H: Floats

    def by_hash(self, parts: int) -> Floats:
        """Return the shares of equal parts of the hash space."""
        hot_P = np.bincount((self.hash_H * parts).astype(int), self.share_H, parts)
        shares: Floats = hot_P + (1 - self.share_H.sum()) / parts
        return shares

    def of_rows(self, begin: float, end: float) -> float:
        """Return the share of a range of rows."""
        hot = self.share_H[(self.row_H >= begin) & (self.row_H < end)].sum()
        return float(hot + (1 - self.share_H.sum()) * (end - begin))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A sharding task. Devices are equal; each asks for an equal share of the batch."""

    name: str
    memory: Memory
    tables: Sequence[SimulatedTable]
    spreads: Sequence[Spread]
    devices: int
    capacity: int
    samples: int = SAMPLES

    @property
    def bytes(self) -> int:
        """Size of all tables."""
        return sum(table.bytes for table in self.tables)


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where tasks draw tables from: sizes, and the hot rows' shares if they are known."""

    name: str
    rows: Sequence[int]
    hot: Sequence[Floats | None]
    bags: Sequence[float] | None = None


def sources(news: Path | None, criteo: Path | None) -> list[Source]:
    """Return the sources; a stream whose file is not given is left out."""
    made = [
        Source("criteo-1tb", CRITEO_1TB, [None] * 26, CRITEO_1TB_BAGS),
        Source("criteo-kaggle", CRITEO_KAGGLE, [None] * 26),
    ]
    columns = ["user_id", "prev_article", "cand", "env", "device", "os", "country", "region"]
    if news is not None:
        made.append(_stream("news", news, [*columns, "referrer"]))
    if criteo is not None:
        made.append(_stream("criteo-stream", criteo, [f"C{at}" for at in range(1, 27)]))
    return made


def _stream(name: str, file: Path, columns: Sequence[str]) -> Source:
    rows, hot = [], []
    for column in columns:
        values = parquet.read_table(file, columns=[column])[column].to_numpy()
        _, counts = np.unique(values, return_counts=True)
        rows.append(len(counts))
        hot.append(np.sort(counts)[::-1][:_HOT] / counts.sum())
    return Source(name, rows, hot)


def reuse_shares(rows: int) -> Floats:
    """Return the hot rows' shares of the reads of a table, by the reuse of Meta's traces."""
    shares: list[float] = []
    for bin in reversed(range(len(_REUSE))):
        count = max(1, round(_REUSE[bin] * _READS / 2**bin))
        take = min(count, rows - len(shares), _HOT - len(shares))
        shares += [_REUSE[bin] / count] * take
    share_H = np.array(shares)
    return share_H / share_H.sum() if len(share_H) == rows else share_H


def spread(share_H: Floats, random: np.random.Generator) -> Spread:
    """Put hot rows at random places."""
    return Spread(share_H, random.random(len(share_H)), random.random(len(share_H)))


def make(
    source: Source, memory: Memory, devices: int, count: int, random: np.random.Generator, name: str
) -> Task:
    """Draw a task of `count` tables."""
    cap = CAPS[random.integers(len(CAPS))]
    order = [*random.permutation(len(source.rows)), *random.integers(len(source.rows), size=count)]
    common_dim = int(random.choice(DIMS)) if random.random() < 0.5 else None
    many = random.random() < 0.7  # keys a bag; else one
    tables, spreads = [], []
    for at in order[:count]:
        rows = max(2, int(min(source.rows[at], cap or math.inf)))
        pooling = 1.0
        if many and source.bags is not None:
            pooling = float(source.bags[at])
        elif many:
            pooling = float(np.clip(np.round(random.lognormal(1.5, 1.3)), 1, 100))
        dim = common_dim or int(random.choice(DIMS))
        tables.append(SimulatedTable(rows=rows, dim=dim, pooling=pooling))
        hot_H = source.hot[at]
        spreads.append(spread(reuse_shares(rows) if hot_H is None else hot_H[:rows], random))
    fill = random.uniform(*FILL[memory])
    total = sum(table.bytes for table in tables)
    return Task(
        name=name,
        memory=memory,
        tables=tables,
        spreads=spreads,
        devices=devices,
        capacity=math.ceil(total / fill / devices),
    )


def tasks(
    all_sources: Sequence[Source], count: int, seed: int, tables: tuple[int, int] = (20, 80)
) -> Iterator[Task]:
    """Yield tasks over all sources, memory from tight to loose, 2 to 8 devices.

    Half of the tasks have tight memory, a quarter each medium and loose.
    """
    cycle: tuple[Memory, ...] = ("tight", "medium", "tight", "loose")
    for at in range(count):
        random = np.random.default_rng([seed, at])
        source = all_sources[at % len(all_sources)]
        memory = cycle[(at // len(all_sources)) % len(cycle)]
        devices = int(random.integers(2, 9))
        drawn = int(random.integers(tables[0], tables[1] + 1))
        yield make(source, memory, devices, drawn, random, f"{at:02} {source.name} {memory}")
