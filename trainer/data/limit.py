"""Parts of a source; the mark and the gate that keep a trainer behind a scorer."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
import redis
from numpy.typing import NDArray

from embertide._common.redis_url import client_of, failure
from embertide.trainer.data.base import Batch, DerivedSource, EventSource
from embertide.trainer.errors import TrainerError

_POLL_S = 0.003
# A scorer that stands still this long is gone.
_PATIENCE_S = 600.0


class FirstEvents(DerivedSource):
    """The events of `source` before index `count`; a group of equal ts is in it whole or not."""

    def __init__(self, source: EventSource, count: int) -> None:
        """Limit a source.

        Raises:
            ValueError: `count` is below 1.
        """
        if count < 1:
            raise ValueError(f"events is {count}; it must be at least 1")
        super().__init__(source)
        self._count = count

    def total_events(self) -> int | None:
        """Events, at most."""
        total = super().total_events()
        return self._count if total is None else min(total, self._count)

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Yield batches as the source does, the last one cut."""
        for batch in self._source.batches(batch_size=batch_size, start=start):
            if batch.event_B[-1] < self._count:
                yield batch
                if batch.next_offset >= self._count:
                    return  # a live stream would wait for what nobody wants
                continue
            keep = int(np.searchsorted(batch.event_B, self._count))
            if keep < len(batch):
                keep = int(np.searchsorted(batch.ts_ms_B, batch.ts_ms_B[keep]))
            if keep:
                yield take(batch, 0, keep)
            return


def _cut(
    labels_BL: NDArray[np.float32] | None, rows: slice | NDArray[np.bool_]
) -> NDArray[np.float32] | None:
    return None if labels_BL is None else labels_BL[rows]


def take(batch: Batch, begin: int, end: int) -> Batch:
    """Return rows `begin` to `end` of a batch. Requires: no group of equal ts is cut."""
    if end - begin == len(batch):
        return batch
    return dataclasses.replace(
        batch,
        first=int(batch.event_B[begin]),
        next_offset=int(batch.event_B[end]) if end < len(batch) else batch.next_offset,
        event_B=batch.event_B[begin:end],
        ts_ms_B=batch.ts_ms_B[begin:end],
        keys_BF=batch.keys_BF[begin:end],
        dense_BD=batch.dense_BD[begin:end],
        label_B=batch.label_B[begin:end],
        weight_B=None if batch.weight_B is None else batch.weight_B[begin:end],
        more_labels_BL=_cut(batch.more_labels_BL, slice(begin, end)),
        lists={f: bags.cut(begin, end) for f, bags in batch.lists.items()},
        id_B=None if batch.id_B is None else batch.id_B[begin:end],
        origin=None if batch.origin is None else batch.origin.cut(begin, end),
    )


def where(batch: Batch, keep_B: NDArray[np.bool_]) -> Batch:
    """Return the events of a batch that are to be kept, at least one; offsets stay as they are.

    Where they come from is not kept.
    """
    return dataclasses.replace(
        batch,
        event_B=batch.event_B[keep_B],
        ts_ms_B=batch.ts_ms_B[keep_B],
        keys_BF=batch.keys_BF[keep_B],
        dense_BD=batch.dense_BD[keep_B],
        label_B=batch.label_B[keep_B],
        weight_B=None if batch.weight_B is None else batch.weight_B[keep_B],
        more_labels_BL=_cut(batch.more_labels_BL, keep_B),
        id_B=None if batch.id_B is None else batch.id_B[keep_B],
        origin=None,
        lists={f: bags.where(keep_B) for f, bags in batch.lists.items()},
    )


def blocks(batch: Batch, *, origin_ms: int, every_ms: int) -> Iterator[tuple[int, Batch]]:
    """Yield (block, the events of the batch in it); block n begins at origin + n * every_ms."""
    block_B = (batch.ts_ms_B - origin_ms) // every_ms
    if (block_B == block_B[0]).all():  # nearly always: a batch is short
        yield int(block_B[0]), batch
        return
    cuts = [0, *(np.flatnonzero(np.diff(block_B)) + 1).tolist(), len(batch)]
    for begin, end in itertools.pairwise(cuts):
        yield int(block_B[begin]), take(batch, begin, end)


def scored_key(model: str) -> str:
    """Return the Redis key that says: events before this index were scored by the served model."""
    return f"e:{{{model}:commit}}:scored"


class ScoredMark:
    """Tells trainers, through Redis, how far a scorer is."""

    def __init__(self, url: str, model: str) -> None:
        """Say that nothing is scored yet.

        Raises:
            TrainerError: Redis cannot be reached.
        """
        self._url = url
        self._redis = client_of(url, socket_timeout=5.0, socket_connect_timeout=2.0)
        self._key = scored_key(model)
        self.tell(0)

    def tell(self, end: int) -> None:
        """Say that the events before index `end` are scored.

        Raises:
            TrainerError: Redis cannot be reached.
        """
        try:
            self._redis.set(self._key, end)
        except redis.RedisError as error:
            raise TrainerError(failure("--bus", self._url, error)) from error


class ScoredGate:
    """Lets a trainer read what a scorer has scored, as the scorer says in Redis."""

    def __init__(self, url: str, model: str) -> None:
        """Name the Redis and the model."""
        self._url = url
        self._redis = client_of(url, socket_timeout=5.0)
        self._key = scored_key(model)
        self._scored = 0

    def wait(self, end: int, is_stopping: Callable[[], bool]) -> bool:
        """Return whether all events before index `end` are scored: False only if it is to stop.

        Raises:
            TrainerError: The scorer stood still for ten minutes, or Redis cannot be reached.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while self._scored < end:
            try:
                value = self._redis.get(self._key)
            except redis.RedisError as error:
                raise TrainerError(failure("--bus", self._url, error)) from error
            scored = int(value) if isinstance(value, bytes) else 0
            if scored > self._scored:
                self._scored = scored
                deadline = time.monotonic() + _PATIENCE_S
                continue
            if is_stopping():
                return False
            if time.monotonic() > deadline:
                raise TrainerError(
                    f"nothing was scored for {_PATIENCE_S:.0f} s (at event {self._scored}): is the "
                    "scorer running?"
                )
            time.sleep(_POLL_S)
        return True
