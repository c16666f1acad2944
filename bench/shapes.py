"""The measured shapes: DLRMs of Criteo's shape over tables of a given size.

The peer's model imports this inside Triton, so it needs no compiled part of the project.
"""

import dataclasses

from bench.criteo import criteo
from embertide.trainer.config import ModelConfig
from embertide.trainer.presets import bucket_bits

# Every value the benchmark draws comes from this seed.
SEED = 20_240_607


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A model to measure and how its requests look."""

    name: str
    rows: int  # of one table
    dim: int = 16
    bag: int = 1  # keys a feature; above 1, requests are jagged
    tables: int = 26
    buckets: int | None = None  # of a table, a power of two; None: about 10^5 rows each

    def __post_init__(self) -> None:
        """Refuse shapes that the Criteo net has no place for."""
        if not 1 <= self.tables <= 26:
            raise ValueError(f"tables is {self.tables}; the Criteo net has 1 to 26")
        if min(self.rows, self.dim, self.bag) < 1:
            raise ValueError(f"{self}: rows, dim and bag must be at least 1")
        if self.buckets is not None and self.buckets.bit_count() != 1:
            raise ValueError(f"buckets is {self.buckets}; it must be a power of two")

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows' values."""
        return self.tables * self.rows * self.dim * 4

    def config(self) -> ModelConfig:
        """Return the DLRM of Criteo's shape over tables of this size."""
        base = criteo()
        bits = bucket_bits(self.rows) if self.buckets is None else self.buckets.bit_length() - 1
        tables = tuple(
            dataclasses.replace(table, dim=self.dim, bucket_bits=bits)
            for table in base.tables[: self.tables]
        )
        features = base.features[: self.tables]
        return dataclasses.replace(base, name=self.name, tables=tables, features=features)
