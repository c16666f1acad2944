"""A stream of news whose clicks come later than the impressions, as two files or two batches."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embertide.trainer.data import feedback_schema
from embertide.trainer.data.base import Batch, EventSchema, EventSource

FEEDBACK = feedback_schema(id="impression", ts="ts")


def impressions_schema(schema: EventSchema) -> EventSchema:
    """Return the schema of the events without their labels."""
    return dataclasses.replace(schema, label=None, id="impression")


@dataclasses.dataclass(frozen=True)
class Late:
    """Events with ids and without labels, and clicks on them as batches of feedback."""

    impressions: list[Batch]
    clicks: list[Batch]
    schema: EventSchema

    @property
    def positives(self) -> int:
        """Clicks."""
        return sum(len(batch) for batch in self.clicks)

    @property
    def total(self) -> int:
        """Impressions."""
        return sum(len(batch) for batch in self.impressions)


def late(source: EventSource, most_s: float, *, seed: int = 1, batch_size: int = 31) -> Late:
    """Delay the clicks of a stream: by an exponential time, cut at `most_s`."""
    impressions: list[Batch] = []
    ids: list[NDArray[np.int64]] = []
    times: list[NDArray[np.int64]] = []
    rng = np.random.default_rng(seed)
    for batch in source.batches(batch_size=batch_size):
        clicked_B = batch.label_B == 1
        ids.append(batch.event_B[clicked_B])
        delay_s = np.minimum(rng.exponential(most_s / 3, int(clicked_B.sum())), most_s)
        times.append(batch.ts_ms_B[clicked_B] + np.rint(delay_s * 1000).astype(np.int64))
        hidden = np.zeros(len(batch), np.float32)
        impressions.append(dataclasses.replace(batch, label_B=hidden, id_B=batch.event_B))
    id_N, ts_ms_N = np.concatenate(ids), np.concatenate(times)
    order_N = np.argsort(ts_ms_N, kind="stable")
    clicks = list(_feedback(id_N[order_N], ts_ms_N[order_N], batch_size))
    return Late(impressions, clicks, impressions_schema(source.schema))


def _feedback(
    id_N: NDArray[np.int64], ts_ms_N: NDArray[np.int64], batch_size: int
) -> Iterator[Batch]:
    begin = 0
    while begin < len(id_N):
        end = min(begin + batch_size, len(id_N))
        end = int(np.searchsorted(ts_ms_N, ts_ms_N[end - 1], side="right"))
        n = end - begin
        yield Batch(
            first=begin,
            next_offset=end,
            event_B=np.arange(begin, end),
            ts_ms_B=ts_ms_N[begin:end],
            keys_BF=np.empty((n, 0), np.int64),
            dense_BD=np.empty((n, 0), np.float32),
            label_B=np.zeros(n, np.float32),
            id_B=id_N[begin:end],
        )
        begin = end


def write(events: Late, folder: Path) -> tuple[Path, Path]:
    """Write impressions and clicks as Parquet files; return where."""
    schema = events.schema
    rows = [
        {
            feature.column: batch.keys_BF[:, f]
            for f, feature in enumerate(schema.features)
            if feature.transform == "key"
        }
        | {"ts": pa.array(batch.ts_ms_B.view("M8[ms]")), "impression": batch.id_B}
        for batch in events.impressions
    ]
    clicks = [
        {"ts": pa.array(batch.ts_ms_B.view("M8[ms]")), "impression": batch.id_B}
        for batch in events.clicks
    ]
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "impressions.parquet", folder / "clicks.parquet"
    for path, found in zip(paths, (rows, clicks), strict=True):
        pq.write_table(pa.concat_tables([pa.table(each) for each in found]), path)
    return paths
