"""Decayed counts of events, kept as logarithms that need no upkeep.

A count as of time t, of events at t_i with a half-life h, is

    sum of 2^-((t - t_i) / h)  =  2^(s - now(t)),  where  now(t) = NO_TIME + (t - origin) / h

and s = log2(sum of 2^now(t_i)) changes only when there are events: rows hold s, whoever reads them
knows now(t). That is Cormode et al.'s forward decay ("Forward Decay: A Practical Time Decay Model
for Streaming Systems", ICDE 2009), with its sums as logarithms. A row that never counted has s = 0,
which is a count of 2^-NO_TIME or less.

Shapes: B events of a batch, N events that wait, U keys, C counters of a table.
"""

import struct

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import NO_TIME, CountersConfig, ModelConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.embedding.store import EmbeddingStore

_MAX_EVENTS = 1 << 16
"""Events that wait to be summed by key."""

Keys = NDArray[np.int64]
Logs = NDArray[np.float64]


def log_sums(
    config: CountersConfig,
    origin_ms: int,
    keys_N: Keys,
    ts_ms_N: Keys,
    label_N: NDArray[np.float32],
) -> tuple[Keys, Logs]:
    """Return keys_U, ascending, and logs_UC of their events; 0 where there is none."""
    keys_U, place_N = np.unique(keys_N, return_inverse=True)
    logs_UC = np.zeros((len(keys_U), config.values))
    last_ms = int(ts_ms_N.max())
    for i, half_life_s in enumerate(config.half_lives_s):
        weight_N = np.exp2((ts_ms_N - last_ms) / (1000 * half_life_s))
        now = NO_TIME + (last_ms - origin_ms) / (1000 * half_life_s)
        for c, each_N in ((2 * i, weight_N), (2 * i + 1, weight_N * label_N)):
            sum_U = np.bincount(place_N, each_N, len(keys_U))
            np.log2(sum_U, out=logs_UC[:, c], where=sum_U > 0)
            logs_UC[sum_U > 0, c] += now
    return keys_U, logs_UC


def merged(keys_N: Keys, logs_NC: Logs) -> tuple[Keys, Logs]:
    """Add up what stands for one key, in order; returns keys_U, ascending, and logs_UC."""
    order_N = np.argsort(keys_N, kind="stable")
    keys_U, first_U = np.unique(keys_N[order_N], return_index=True)
    logs_NC = np.where(logs_NC == 0, -np.inf, logs_NC)[order_N]
    logs_UC = np.logaddexp2.reduceat(logs_NC, first_U, axis=0)
    return keys_U, np.where(np.isneginf(logs_UC), 0.0, logs_UC)


class _Pending:
    """Events of one table that its rows do not count yet: no more than some times its keys."""

    def __init__(self, config: CountersConfig, table: int, column: int, width: int) -> None:
        self.config, self.table, self.column, self.width = config, table, column, width
        self._events: list[tuple[Keys, Keys, NDArray[np.float32]]] = []
        self._count = 0
        self._summed: list[tuple[Keys, Logs]] = []
        self._least = 0  # keys when they were last merged

    def add(self, batch: Batch, origin_ms: int) -> None:
        keys_B = np.ascontiguousarray(batch.keys_BF[:, self.column])
        self._events.append((keys_B, batch.ts_ms_B, batch.label_B))
        self._count += len(batch)
        if self._count >= _MAX_EVENTS:
            self._sum(origin_ms)

    @property
    def waiting(self) -> int:
        return self._count + sum(len(keys) for keys, _ in self._summed)

    def _sum(self, origin_ms: int) -> None:
        if self._events:
            keys_N, ts_ms_N, label_N = (np.concatenate(a) for a in zip(*self._events, strict=True))
            self._summed.append(log_sums(self.config, origin_ms, keys_N, ts_ms_N, label_N))
            self._events, self._count = [], 0
        if sum(len(keys) for keys, _ in self._summed) > 2 * self._least + _MAX_EVENTS:
            self._merge()

    def _merge(self) -> None:
        keys, logs = zip(*self._summed, strict=True)
        self._summed = [merged(np.concatenate(keys), np.concatenate(logs))]
        self._least = len(self._summed[0][0])

    def sums(self, origin_ms: int) -> tuple[Keys, Logs]:
        self._sum(origin_ms)
        if not self._summed:
            return np.empty(0, np.int64), np.empty((0, self.config.values))
        self._merge()
        return self._summed[0]

    def put(self, keys_U: Keys, logs_UC: Logs) -> None:
        assert not self.waiting
        if len(keys_U):
            self._summed = [(keys_U, logs_UC)]

    def take(self, origin_ms: int) -> tuple[Keys, NDArray[np.float32]]:
        self._sum(origin_ms)
        if not self._summed:
            return np.empty(0, np.int64), np.empty((0, self.width), np.float32)
        self._merge()
        keys_U, logs_UC = self._summed.pop()
        self._least = 0
        full_UC = np.zeros((len(keys_U), self.width), np.float32)  # a chunk may have room for more
        full_UC[:, : self.config.values] = logs_UC
        return keys_U, full_UC


class Counters:
    """The events that a model's tables count. Used by one thread.

    Events wait until `flush`, which is when a version ends: the state of a run between two versions
    is not all in its rows.

    Attributes:
        uncounted: Keys whose events were left out, for they had no row; counted at each flush.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Begin with no events."""
        self.uncounted = 0
        self._tables = [
            _Pending(
                table.counters,
                t,
                config.feature_index(table.counters.feature),
                table.width - table.dim,
            )
            for t, table in enumerate(config.tables)
            if table.counters is not None
        ]

    @property
    def waiting(self) -> int:
        """Events, and keys with sums, that wait: at most 131,072 and thrice a table's keys each."""
        return sum(table.waiting for table in self._tables)

    def add(self, batch: Batch, origin_ms: int) -> None:
        """Take note of events that were learned.

        Args:
            batch: Its arrays are kept until the next flush.
            origin_ms: The run's time origin, the same in every call.
        """
        for table in self._tables:
            table.add(batch, origin_ms)

    def waiting_sums(self, origin_ms: int) -> bytes:
        """Return what waits, for `put_sums` of other ranks."""
        parts = list[bytes]()
        for table in self._tables:
            keys_U, logs_UC = table.sums(origin_ms)
            parts += (struct.pack("<Q", len(keys_U)), keys_U.tobytes(), logs_UC.tobytes())
        return b"".join(parts)

    def put_sums(self, data: bytes) -> None:
        """Have what waits on another rank wait here, where nothing waits."""
        at = 0
        for table in self._tables:
            (keys,) = struct.unpack_from("<Q", data, at)
            keys_U = np.frombuffer(data, np.int64, keys, at + 8)
            at += 8 + keys_U.nbytes
            shape = (keys, table.config.values)
            logs_UC = np.frombuffer(data, np.float64, int(np.prod(shape)), at).reshape(shape)
            at += logs_UC.nbytes
            table.put(keys_U, logs_UC)

    def flush(
        self, rows: EmbeddingStore, origin_ms: int, beside: EmbeddingStore | None = None
    ) -> None:
        """Add them to their keys' rows; of many ranks, to those that this one holds.

        `beside` is a store that counts the same: the unpruned rows.
        """
        for table in self._tables:
            keys_U, logs_UC = table.take(origin_ms)
            if rows.exchange is not None:
                mine_U = rows.exchange.mine(table.table, keys_U)
                keys_U, logs_UC = keys_U[mine_U], logs_UC[mine_U]
            if len(keys_U) and beside is not None:
                beside.store.add_counts(table.table, keys_U, logs_UC)
            if len(keys_U):
                self.uncounted += len(keys_U) - rows.store.add_counts(table.table, keys_U, logs_UC)
