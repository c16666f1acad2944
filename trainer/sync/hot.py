"""Hot rows: rows with a rank of their own, where the buckets of ranks are too uneven to balance.

A bucket is the unit of ownership, and every rank asks its owner for its frequent keys in each step.
With many ranks one bucket alone may be several times a rank's share. A hot row keeps its owner, its
`home`; between two versions another rank, its `host`, answers for it: looks it up, adds up its
gradients in the order of ranks, and takes its steps. Which rank does so changes no bit.

The set is chosen where a version ends, by what was asked since the one before. All ranks choose
alike, by the same counts. docs/design/0034-hot-rows-of-a-run.md has the alternatives.

Shapes: K keys of all tables, U keys of one, R ranks, T tables.
"""

import heapq
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Counts = NDArray[np.int64]
Ranks = NDArray[np.uint16]

COUNTED_EVERY = 4
"""Steps from one whose keys are counted to the next: sorting them takes some ms of many keys."""
UNEVEN = 1.1
"""Load of the busiest rank over the mean, up to which no row is hot."""
# A busy rank is left with that, over the mean: the next keys are not quite those that were counted.
_LEFT = 1.05
# Asks until the next version that make up for moving a row there and back, with its state.
_MIN_ASKS = 8
_KEYS_A_ROW = 4  # keys counted by a rank, for each row that may be hot
_MIN_KEYS = 1 << 14


class HotSet(NamedTuple):
    """Hot rows, the same on all ranks; no key of a table twice.

    Attributes:
        table_K: The tables of the rows.
        key_K: Their keys.
        host_K: The ranks that answer for them.
    """

    table_K: NDArray[np.int32]
    key_K: Keys
    host_K: Ranks

    @classmethod
    def none(cls) -> "HotSet":
        """Return the set without a row."""
        return cls(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.uint16))

    def of(self, mask_K: NDArray[np.bool_]) -> "HotSet":
        """Return some of the rows."""
        return HotSet(self.table_K[mask_K], self.key_K[mask_K], self.host_K[mask_K])


class Asks(NamedTuple):
    """How often ranks asked for keys in the steps that were counted, a key once a rank and step.

    Attributes:
        table_K: The tables of the keys.
        key_K: The keys.
        count_K: How often.
    """

    table_K: NDArray[np.int32]
    key_K: Keys
    count_K: Counts

    def of(self, at_N: NDArray[Any]) -> "Asks":
        """Return some of the keys, by a mask or by their places."""
        return Asks(self.table_K[at_N], self.key_K[at_N], self.count_K[at_N])


class AskCounts:
    """Counts what other ranks and this one ask of this one. For one thread; bounded.

    Where more keys come than there is room for, those that came least are forgotten.
    """

    def __init__(self, tables: int, max_rows: int, left_out: Container[int] = ()) -> None:
        """Count keys of so many tables, of which so many rows may be hot; none of some."""
        self._room = max(_KEYS_A_ROW * max_rows, _MIN_KEYS)
        self._tables = tables
        self._counted = [t for t in range(tables) if t not in left_out]
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.steps = 0
        nothing = np.empty(0, np.int64)
        self._found: list[tuple[Keys, Counts]] = [(nothing, nothing) for _ in range(self._tables)]

    def add(self, keys_RT: Sequence[Sequence[Keys]]) -> bool:
        """Count the keys that each rank asked for in a step; behind the tables, those of hot rows.

        Returns whether they are counted: one step in `COUNTED_EVERY` is.
        """
        self.steps += 1
        if (self.steps - 1) % COUNTED_EVERY:
            return False
        for t in self._counted:
            keys, counts = self._found[t]
            came = [keys_T[at] for keys_T in keys_RT for at in range(t, len(keys_T), self._tables)]
            key_U, place_N = np.unique(np.concatenate([keys, *came]), return_inverse=True)
            count_U = np.bincount(place_N[len(keys) :], minlength=len(key_U))
            count_U[place_N[: len(keys)]] += counts
            self._found[t] = key_U, count_U
        self._forget()
        return True

    def _forget(self) -> None:
        counts = np.concatenate([count_U for _, count_U in self._found])
        if len(counts) <= self._room:
            return
        least = int(np.partition(counts, -self._room)[-self._room])
        for t, (key_U, count_U) in enumerate(self._found):
            kept_U = count_U > least
            self._found[t] = key_U[kept_U], count_U[kept_U]

    def asks(self) -> Asks:
        """Return what was counted, most often first."""
        table_K = np.repeat(
            np.arange(self._tables, dtype=np.int32), [len(keys) for keys, _ in self._found]
        )
        key_K = np.concatenate([keys for keys, _ in self._found])
        count_K = np.concatenate([counts for _, counts in self._found])
        order_K = np.argsort(-count_K, kind="stable")
        return Asks(table_K, key_K, count_K).of(order_K)


def candidates(asks: Asks, home_K: Ranks, load_R: NDArray[Any]) -> Asks:
    """Return those of a rank's keys that may become hot: enough of each home that is too busy.

    Args:
        asks: The rank's, most often first.
        home_K: The owners of the keys' buckets.
        load_R: Keys asked of the buckets of each rank, in the same steps.
    """
    mean = float(load_R.mean())
    kept_K = np.zeros(len(asks.key_K), np.bool_)
    for rank in np.flatnonzero(load_R > UNEVEN * mean).tolist():
        at_N = np.flatnonzero((home_K == rank) & (COUNTED_EVERY * asks.count_K >= _MIN_ASKS))
        enough = int(np.searchsorted(np.cumsum(asks.count_K[at_N]), load_R[rank] - mean)) + 1
        kept_K[at_N[:enough]] = True
    return asks.of(kept_K)


def choose(asks: Asks, home_K: Ranks, load_R: NDArray[Any], max_rows: int) -> HotSet:
    """Choose hot rows and their hosts: as few as make ranks even, the most asked for first.

    Bytes have no part in it: a row is asked for as often at its host as at home. No row is hot
    where the busiest rank has no more than `UNEVEN` of the mean.

    Args:
        asks: The candidates of all ranks.
        home_K: The owners of their keys' buckets.
        load_R: As of `candidates`.
        max_rows: A bound on the rows of the set.
    """
    left_R = load_R.astype(np.float64)
    mean = float(left_R.mean())
    # The same order on all ranks, whoever counted a key.
    order_K = np.lexsort((asks.key_K, asks.table_K, -asks.count_K))
    chosen: list[int] = []
    for k in order_K.tolist():
        if len(chosen) == max_rows:
            break
        home = int(home_K[k])
        if load_R[home] > UNEVEN * mean and left_R[home] > _LEFT * mean:
            left_R[home] -= asks.count_K[k]
            chosen.append(k)
    least = [(load, rank) for rank, load in enumerate(left_R.tolist())]
    heapq.heapify(least)
    hosts: list[int] = []
    for k in chosen:
        load, rank = least[0]
        heapq.heapreplace(least, (load + float(asks.count_K[k]), rank))
        hosts.append(rank)
    return HotSet(asks.table_K[chosen], asks.key_K[chosen], np.array(hosts, np.uint16))
