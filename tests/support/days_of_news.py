"""Synthetic news for the trials of trainers, and the command that trains."""

import dataclasses
import sys
from collections.abc import Sequence

import numpy as np

from bench.servers import BUILD
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource

CACHE = BUILD / "cache" / "dense"
TRAINER = (sys.executable, "-m", "embertide.trainer")
_DAY_HOURS = 4


def news(days: int, views_per_hour: int = 300) -> list[Batch]:
    """Generate news for so many days of four hours each; return a batch for each day."""
    config = NewsConfig(
        hours=_DAY_HOURS * days, views_per_hour=views_per_hour, users=200, new_items_per_hour=5
    )
    found: list[list[Batch]] = [[] for _ in range(days)]
    first_ms = None
    for batch in NewsSource(config).batches(batch_size=1):
        first_ms = int(batch.ts_ms_B[0]) if first_ms is None else first_ms
        day = (int(batch.ts_ms_B[0]) - first_ms) // (_DAY_HOURS * 3_600_000)
        found[min(day, days - 1)].append(batch)
    return [_joined(each) for each in found]


def _joined(batches: Sequence[Batch]) -> Batch:
    arrays = ("event_B", "ts_ms_B", "keys_BF", "dense_BD", "label_B")
    joined = {n: np.concatenate([getattr(each, n) for each in batches]) for n in arrays}
    end = batches[-1].next_offset
    return dataclasses.replace(batches[0], next_offset=end, **joined)


def event_at(batch: Batch, row: int) -> Batch:
    """Return one event of a batch, its arrays its own."""
    return dataclasses.replace(
        batch,
        event_B=batch.event_B[row : row + 1].copy(),
        ts_ms_B=batch.ts_ms_B[row : row + 1].copy(),
        keys_BF=batch.keys_BF[row : row + 1].copy(),
        dense_BD=batch.dense_BD[row : row + 1].copy(),
        label_B=batch.label_B[row : row + 1].copy(),
    )
