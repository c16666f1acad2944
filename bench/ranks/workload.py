"""What ranks send one another in a step: counted from drawn batches, and predicted by formulas.

The exchange is that of embertide.trainer.sync: every rank takes an equal part of the batch and asks
for each of its distinct keys once, by table, at the rank that owns the key's bucket. For a step, a
rank sends to every other rank

    lengths     4 bytes a table: how many keys of it follow
    keys        8 bytes for each key that it asks for
    rows        a row for each key that it was asked for
    gradients   a row's gradient for each key that it asked for
    dense       its share of a ring all-reduce of the net's gradients: 2 (R-1)/R of them, in
                2 (R-1) messages
    events      the whole batch, from rank 0 by a binomial tree, or each rank's part, from rank 0
                directly. A column of keys is its distinct keys and a code for each sample, or,
                plain, a key for each sample.

What a rank owns itself it does not send. Protocol headers are not counted.

Shapes: T tables, K keys, P buckets of all tables, R ranks (from, to).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bench.ranks.zipf import Floats, Zipf
from embertide.trainer.data.keys import buckets_of

Kind = Literal["events", "lengths", "keys", "rows", "gradients", "dense"]
KINDS: tuple[Kind, ...] = ("events", "lengths", "keys", "rows", "gradients", "dense")
EXCHANGED: tuple[Kind, ...] = ("lengths", "keys", "rows", "gradients")
"""What grows with the tables, apart from events and the dense net."""
EventPath = Literal["tree", "parts"]

KEY_BYTES, LENGTH_BYTES, CODE_BYTES = 8, 4, 4
_SEED = 20
_RANK_BITS = 40  # above any key of a table

Owners = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its batches.

    Attributes:
        laws: How the keys of each table are drawn, one key a sample and table.
        samples: Of a batch, all ranks together.
        row_bytes: A row on the wire; its gradient is as long.
        dense_parameters: Of the net, fp32.
        sample_bytes: Of an event beside its keys: dense features, label, number, time.
        coded: Whether columns of keys are sent as distinct keys and codes.
        events: How events reach the ranks.
    """

    laws: tuple[Zipf, ...]
    samples: int
    row_bytes: int
    dense_parameters: int
    sample_bytes: int = 13 * 4 + 4 + 8 + 8
    coded: bool = True
    events: EventPath = "tree"

    @property
    def dense_bytes(self) -> int:
        """Of the net's gradients."""
        return 4 * self.dense_parameters

    def event_bytes(self, samples: int, distinct: float) -> float:
        """Return what samples with so many distinct keys take, all columns together."""
        if not self.coded:
            return samples * (self.sample_bytes + KEY_BYTES * len(self.laws))
        columns = samples * CODE_BYTES * len(self.laws) + KEY_BYTES * distinct
        return samples * self.sample_bytes + columns

    def draw(self, step: int) -> list[NDArray[np.int64]]:
        """Return the keys of a step's samples, by table."""
        return [
            law.draw_keys(np.random.default_rng([_SEED, step, table]), self.samples)
            for table, law in enumerate(self.laws)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """Messages and bytes of one kind."""

    messages: float
    bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """The distinct keys of every rank's part of one batch.

    Attributes:
        asked_RP: Keys that each rank asks of each bucket.
        distinct: Distinct keys of the whole batch.
    """

    asked_RP: NDArray[np.int64]
    distinct: int

    @property
    def load_P(self) -> NDArray[np.int64]:
        """Keys that all ranks ask of each bucket."""
        load_P: NDArray[np.int64] = self.asked_RP.sum(axis=0)
        return load_P

    def matrix(self, owner_P: Owners) -> NDArray[np.int64]:
        """Return how many keys each rank (row) asks of each rank (column)."""
        ranks = len(self.asked_RP)
        to_RR = np.zeros((ranks, ranks), np.int64)
        for rank, asked_P in enumerate(self.asked_RP):
            to_RR[rank] = np.bincount(owner_P, weights=asked_P, minlength=ranks).astype(np.int64)
        return to_RR


def ask(workload: Workload, bits: Sequence[int], ranks: int, step: int) -> Asked:
    """Draw a batch and find each rank's distinct keys, by bucket.

    Args:
        workload: The batch.
        bits: A table has 2^bits buckets.
        ranks: How many ranks there are.
        step: Which batch.
    """
    part = np.arange(workload.samples) * ranks // workload.samples << _RANK_BITS
    parts, distinct = [], 0
    for keys_K, table_bits in zip(workload.draw(step), bits, strict=True):
        own_K = np.unique(part | keys_K)
        rank_K, key_K = own_K >> _RANK_BITS, own_K & ((1 << _RANK_BITS) - 1)
        bucket_K = buckets_of(key_K.astype(np.uint64), table_bits).astype(np.int64)
        buckets = 1 << table_bits
        counts = np.bincount(rank_K * buckets + bucket_K, minlength=ranks * buckets)
        parts.append(counts.reshape(ranks, buckets))
        distinct += len(np.unique(key_K))
    return Asked(asked_RP=np.concatenate(parts, axis=1), distinct=distinct)


def tree_children(rank: int, ranks: int) -> list[int]:
    """Return whom a rank of a binomial tree from rank 0 sends to, in order, as gloo does."""
    first = rank.bit_length()
    steps = range(first, max(ranks - 1, 0).bit_length())
    return [rank + (1 << step) for step in steps if rank + (1 << step) < ranks]


def count(workload: Workload, asked: Asked, owner_P: Owners) -> list[dict[Kind, Sent]]:
    """Return what each rank sends in a step."""
    ranks = len(asked.asked_RP)
    to_RR = asked.matrix(owner_P)
    np.fill_diagonal(to_RR, 0)
    some_RR = to_RR > 0
    counted: list[dict[Kind, Sent]] = []
    for rank in range(ranks):
        asks, answers = int(to_RR[rank].sum()), int(to_RR[:, rank].sum())
        to, back = int(some_RR[rank].sum()), int(some_RR[:, rank].sum())
        others = ranks - 1
        counted.append(
            {
                "events": _events(workload, asked, rank),
                "lengths": Sent(others, others * LENGTH_BYTES * len(workload.laws)),
                "keys": Sent(to, asks * KEY_BYTES),
                "rows": Sent(back, answers * workload.row_bytes),
                "gradients": Sent(to, asks * workload.row_bytes),
                "dense": Sent(2 * others, 2 * others / ranks * workload.dense_bytes),
            }
        )
    return counted


def _events(workload: Workload, asked: Asked, rank: int) -> Sent:
    ranks = len(asked.asked_RP)
    if workload.events == "tree":
        size = workload.event_bytes(workload.samples, asked.distinct)
        messages = len(tree_children(rank, ranks))
        return Sent(messages, messages * size)
    if rank > 0:
        return Sent(0, 0)
    samples = workload.samples * (ranks - 1) // ranks
    return Sent(ranks - 1, workload.event_bytes(samples, int(asked.asked_RP[1:].sum())))


@functools.lru_cache(maxsize=256)
def _expected_distinct(laws: tuple[Zipf, ...], draws: float) -> float:
    return sum(law.expected_distinct(draws) for law in laws)


def predict(workload: Workload, ranks: int) -> dict[Kind, Sent]:
    """Return what a rank sends in a step, in the mean over ranks and batches.

    It needs no plan: ranks ask alike, and one in `ranks` of them owns the key. Every rank is taken
    to ask something of every other.
    """
    others = ranks - 1
    away = others / ranks
    keys = away * _expected_distinct(workload.laws, workload.samples / ranks)
    if workload.events == "tree":
        whole = _expected_distinct(workload.laws, workload.samples)
        size = workload.event_bytes(workload.samples, whole)
    else:
        own = _expected_distinct(workload.laws, workload.samples / ranks)
        size = workload.event_bytes(workload.samples, own * ranks) / ranks
    return {
        "events": Sent(away, away * size),
        "lengths": Sent(others, others * LENGTH_BYTES * len(workload.laws)),
        "keys": Sent(others, keys * KEY_BYTES),
        "rows": Sent(others, keys * workload.row_bytes),
        "gradients": Sent(others, keys * workload.row_bytes),
        "dense": Sent(2 * others, 2 * away * workload.dense_bytes),
    }


def total_bytes(sent: Mapping[Kind, Sent], kinds: Sequence[Kind] = KINDS) -> float:
    """Add up the bytes of some kinds."""
    return sum(sent[kind].bytes for kind in kinds)


def mean(of: Sequence[Mapping[Kind, Sent]]) -> dict[Kind, Sent]:
    """Return the mean over ranks or steps."""
    return {
        kind: Sent(
            float(np.mean([each[kind].messages for each in of])),
            float(np.mean([each[kind].bytes for each in of])),
        )
        for kind in KINDS
    }


def loads(asked: Sequence[Asked], owner_P: Owners) -> Floats:
    """Return max / mean over ranks of the keys asked of each, by step."""
    ranks = len(asked[0].asked_RP)
    load_SR = np.array([np.bincount(owner_P, each.load_P, minlength=ranks) for each in asked])
    return np.asarray(load_SR.max(axis=1) / load_SR.mean(axis=1))
