"""Plans for many ranks: who owns which bucket, by what was asked of the buckets before.

Buckets are shared out as the trainer's balanced plan does. Three ways to cut tables:

    whole      a table has one owner
    rows       about 10^5 rows a bucket, as `embertide.trainer.presets.bucket_bits` has it
    ranks      ... and at least as many buckets as there are ranks, whatever the rows

A table could also be everywhere, if that sent fewer bytes. It never does: each rank would send its
keys and gradients to all R - 1 others in place of asking one owner, (R-1) (8 + row) bytes a key
in place of (R-1)/R (8 + 2 row); so no plan here does it.

Shapes: P buckets of all tables, T tables.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from bench.ranks.workload import Owners, Workload
from embertide.trainer.presets import bucket_bits
from embertide.trainer.sync.plan import spread

Cut = Literal["whole", "rows", "ranks"]
CUTS: tuple[Cut, ...] = ("whole", "rows", "ranks")


def bits(workload: Workload, cut: Cut, ranks: int) -> list[int]:
    """Return the bits of each table's buckets."""
    if cut == "whole":
        return [0] * len(workload.laws)
    by_rows = [bucket_bits(law.rows) for law in workload.laws]
    return by_rows if cut == "rows" else [max(each, (ranks - 1).bit_length()) for each in by_rows]


def place(costs_P: Sequence[float], ranks: int) -> Owners:
    """Return the owner of each bucket."""
    return np.array(spread(costs_P, ranks), np.int64)


def guess(bits_T: Sequence[int]) -> list[float]:
    """Return what buckets cost before anything was asked: tables alike, and their buckets."""
    return [1 / (1 << each) for each in bits_T for _ in range(1 << each)]
