"""The effect of a reshard on answers given meanwhile: how many, how late, how far from a copy's.

The answers are those of requests and of checks. One is *meanwhile* if it was sent before the
operation ended and came after it began. All of these must have been compared, and none may have
changed. Shapes: B events, F features.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embertide.trainer.data.base import Batch
from embertide.trainer.data.keys import buckets_of
from embertide.trainer.errors import TrainerError
from embertide.trainer.eval.compare import EQUAL
from embertide.trainer.eval.records import Records


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reshard:
    """An operation that ended, as whoever started it wrote it down.

    Attributes:
        features: Bits and moved buckets of each feature's table, in the order of the features.
        buckets: The number of buckets of all tables.
        decision: Why it was made and what it gained, where the control plane decided it.
    """

    began_ms: int
    ended_ms: int
    buckets: int
    buckets_moved: int
    buckets_moved_to_other_nodes: int
    bytes_moved: int
    features: list[tuple[int, list[int]]]
    decision: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read its JSON.

        Raises:
            TrainerError: It is not there, or says something else.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise TrainerError(
                f"{path} does not tell of a reshard: {error}; give another file"
            ) from error


class MovedKeys:
    """The figures of a reshard, from the records of requests and checks, and from the input."""

    def __init__(self, reshard: Reshard, records: Records) -> None:
        """Read the records."""
        self._reshard = reshard
        tables = [pq.read_table(records.requests)]
        if records.checks.is_file():
            tables.append(pq.read_table(records.checks))
        self._is_check = np.repeat([False, True][: len(tables)], [len(each) for each in tables])
        table = pa.concat_tables(tables)
        self._columns = {name: table.column(name).to_numpy() for name in table.column_names}
        sent_ms = self._columns["sent_ms"]
        answered_ms = sent_ms + self._columns["latency_us"] // 1000
        self._meanwhile = (sent_ms <= reshard.ended_ms) & (answered_ms >= reshard.began_ms)
        # The quiet time is judged where the copy was asked too: it shares the machine.
        self._before = (answered_ms < reshard.began_ms) & self._columns["compared"]
        self._moved = []
        for bits, buckets in reshard.features:
            moved = np.zeros(1 << bits, np.bool_)
            moved[buckets] = True
            self._moved.append((bits, moved))
        first = self._columns["first"][self._meanwhile]
        end = first + self._columns["events"][self._meanwhile]
        self._begin, self._end = (int(first.min()), int(end.max())) if len(first) else (0, 0)
        # Whether each event from `_begin` on has a key in a moved bucket.
        self._touched = np.zeros(self._end - self._begin, np.bool_)

    def add(self, batch: Batch) -> None:
        """Look which events of a batch have a key in a bucket that moved."""
        inside = (batch.event_B >= self._begin) & (batch.event_B < self._end)
        if not inside.any():
            return
        keys_BF = batch.keys_BF[inside].view(np.uint64)
        touched: NDArray[np.bool_] = np.zeros(len(keys_BF), np.bool_)
        for feature, (bits, moved) in enumerate(self._moved):
            touched |= moved[buckets_of(keys_BF[:, feature], bits)]
        self._touched[batch.event_B[inside] - self._begin] = touched

    def figures(self) -> dict[str, Any]:
        """Return them as JSON values."""
        reshard, columns = self._reshard, self._columns
        mine, checks = self._meanwhile, self._is_check
        compared = mine & columns["compared"] & ~np.isnan(columns["difference"])
        apart = columns["difference"][compared]
        impressions = int(columns["events"][compared].sum())
        # Impressions with a moved bucket's key, by compared answer.
        until = np.concatenate([[0], np.cumsum(self._touched)])
        first = columns["first"][compared] - self._begin
        touched = until[first + columns["events"][compared]] - until[first]
        return {
            "buckets_moved": reshard.buckets_moved,
            "buckets_moved_to_other_nodes": reshard.buckets_moved_to_other_nodes,
            "buckets": reshard.buckets,
            "bytes_moved": reshard.bytes_moved,
            "seconds": (reshard.ended_ms - reshard.began_ms) / 1000,
            "answers": int(mine.sum()),
            "failed_requests": int(columns["failures"][mine].sum()),
            "compared": len(apart),
            "checks": int((compared & checks).sum()),
            "answers_changed": int((apart > EQUAL).sum()),
            "largest_difference": float(apart.max()) if len(apart) else None,
            "compared_impressions": impressions,
            "touched": float((touched > 0).mean()) if len(apart) else None,
            "touched_impressions": float(touched.sum() / impressions) if impressions else None,
            "versions": len(np.unique(columns["version"][mine])),
            "p99_ms": _p99_ms(columns["latency_us"][mine & ~checks]),
            "p99_before_ms": _p99_ms(columns["latency_us"][self._before & ~checks]),
            "decision": reshard.decision,
        }


def _p99_ms(latency_us: NDArray[Any]) -> float | None:
    return float(np.percentile(latency_us, 99)) / 1000 if len(latency_us) else None
