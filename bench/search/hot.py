"""Hot rows at 64 and 128 ranks: who is asked for what, counted by the product's own parts.

No rank runs. Batches of Criteo 1TB's tables are drawn, each rank's part is routed by a `Router`,
what owners are asked for is counted by `AskCounts`, and `choose` makes the set. Steps that come
after those it was chosen by are counted again, with the set and without.

  * Tables are the 26 of MLPerf's DLRM on Criteo 1TB, of 128 fp32 values, one key an event and
    table; keys follow Zipf's law with exponents from 1.05 to 1.2, or are uniform.
  * A batch has 65,536 events. A table has a bucket for 10^5 rows, as `presets.bucket_bits` has it:
    those of 20.6. `as many buckets as ranks` is the way out that a new run has.
  * Bytes are of keys, rows and gradients, and of rows that go out and home, once in as many steps
    as a version of ten minutes has, taken as `_STEPS_A_VERSION`.

Shapes: B buckets of all tables, K keys of all tables, R ranks, T tables.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bench import report
from bench.drift.tasks import CRITEO_1TB
from embertide import _store
from embertide.trainer.presets import bucket_bits
from embertide.trainer.sync.hot import AskCounts, Asks, HotSet, candidates, choose
from embertide.trainer.sync.plan import spread

_EVENTS, _DIM = 65_536, 128
_KEY_BYTES, _ROW_BYTES = 8, 4 * _DIM
_MOVED_BYTES = _ROW_BYTES + 64  # of a row that goes out or home: with its state
_COUNTED, _JUDGED = 32, 6
_STEPS_A_VERSION = 1000
_MAX_ROWS = sum(CRITEO_1TB) // 1000
_HEAD, _SCATTER = 4096, 2_654_435_761
_SEED = 46

Floats = NDArray[np.float64]
Keys = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Law:
    """Zipf's law over a table, drawn in constant memory: the first ranks exactly, then by integral.

    Attributes:
        rows: Keys of the table.
        exponent: 0 is uniform.
    """

    rows: int
    exponent: float

    @functools.cached_property
    def _head(self) -> Floats:
        return np.cumsum(np.arange(1, min(self.rows, _HEAD) + 1, dtype=float) ** -self.exponent)

    def draw(self, rng: np.random.Generator, count: int) -> Keys:
        """Return keys below `rows`, frequent ones scattered among them."""
        if self.exponent == 0:
            return rng.integers(0, self.rows, count)
        head, power = self._head, 1 - self.exponent
        begin = len(head) + 0.5
        tail = 0.0
        if self.rows > len(head):
            tail = ((self.rows + 0.5) ** power - begin**power) / power
        weights = rng.random(count) * (head[-1] + tail)
        ranks = np.searchsorted(head, weights, side="right")
        far = ranks == len(head)
        if self.rows > len(head):
            over = power * (weights[far] - head[-1])
            ranks[far] = np.floor((begin**power + over) ** (1 / power) - 0.5)
        found: Keys = np.minimum(ranks, self.rows - 1).astype(np.int64) * _SCATTER % self.rows
        return found


class Run:
    """A run of so many ranks, as far as it asks for keys.

    Args:
        ranks: The number of ranks.
        exponents: Of the tables' keys: from, to.
        as_many: Whether a table has at least as many buckets as there are ranks.
    """

    def __init__(self, ranks: int, exponents: tuple[float, float], *, as_many: bool) -> None:
        """Give buckets owners by what was asked in some steps, as the trainer does."""
        self.ranks = ranks
        spread_T = np.linspace(*exponents, len(CRITEO_1TB))
        self._laws = [Law(r, float(s)) for r, s in zip(CRITEO_1TB, spread_T, strict=True)]
        least = (ranks - 1).bit_length() if as_many else 0
        self._bits = [max(bucket_bits(rows), least) for rows in CRITEO_1TB]
        self.tables = len(self._laws)
        self.load_B, self.reads_B = self._loads(range(4))
        self.router = self.owned(self.load_B)

    def owned(self, cost_B: Floats) -> "_store.Router":
        """Return a router for owners that are even by some cost of buckets."""
        owner_B = np.array(spread(cost_B.tolist(), self.ranks), np.uint16)
        owners = np.split(owner_B, np.cumsum([1 << bits for bits in self._bits])[:-1])
        routed = [(bits, _DIM, _DIM, of) for bits, of in zip(self._bits, owners, strict=True)]
        nobody = np.zeros(1, np.uint16)
        hot = [(0, _DIM, _DIM, nobody)] * self.tables
        return _store.Router([*routed, *hot], ranks=self.ranks, rank=0)

    def draw(self, step: int) -> list[Keys]:
        """Return a batch's keys, by table."""
        return [
            law.draw(np.random.default_rng([_SEED, step, t]), _EVENTS)
            for t, law in enumerate(self._laws)
        ]

    def _loads(self, steps: Sequence[int]) -> tuple[Floats, Floats]:
        """Return what buckets are asked for: by ranks, each key once, and by each event."""
        nobody = [(bits, 1, 1, np.zeros(1 << bits, np.uint16)) for bits in self._bits]
        router = _store.Router(nobody, ranks=1, rank=0)
        found = []
        for parts in (self.ranks, _EVENTS // 16):  # a request has some events of its own
            for step in steps:
                for part in self._parts(step, parts):
                    router.route(part)
            found.append(router.take_load().astype(np.float64))
        return found[0], found[1]

    def _parts(self, step: int, parts: int) -> Iterator[list[tuple[int, Keys, None]]]:
        keys_T = self.draw(step)
        for part in range(parts):
            own = slice(part * _EVENTS // parts, (part + 1) * _EVENTS // parts)
            yield [(t, np.ascontiguousarray(keys[own]), None) for t, keys in enumerate(keys_T)]

    def asked(self, step: int, router: "_store.Router | None" = None) -> list[list[list[Keys]]]:
        """Return the keys that are asked of each rank, [R], by each rank and table, [R, 2 T]."""
        asked: list[list[list[Keys]]] = [[] for _ in range(self.ranks)]
        for part in self._parts(step, self.ranks):
            routed = (router or self.router).route(part)
            pieces = np.split(routed.keys.copy(), np.cumsum(routed.lengths)[:-1])
            for rank in range(self.ranks):
                asked[rank].append(pieces[rank * 2 * self.tables : (rank + 1) * 2 * self.tables])
        return asked

    def choose(self, steps: Sequence[int], max_rows: int = _MAX_ROWS) -> tuple[HotSet, Floats]:
        """Return the set that ranks choose by some steps, and each rank's load as predicted."""
        counts = [AskCounts(self.tables, max_rows) for _ in range(self.ranks)]
        load_R = np.zeros(self.ranks)
        for step in steps:
            for rank, keys_RT in enumerate(self.asked(step)):
                counts[rank].steps = 0  # each step is one that is counted
                counts[rank].add(keys_RT)
                load_R[rank] += sum(len(keys) for keys_T in keys_RT for keys in keys_T)
        found = []
        for count in counts:
            asks = count.asks()
            found.append(candidates(asks, self.homes(asks), load_R))
        every = Asks(*(np.concatenate(each) for each in zip(*found, strict=True)))
        home_K = self.homes(every)
        hot = choose(every, home_K, load_R, max_rows)
        of_key = zip(every.table_K.tolist(), every.key_K.tolist(), strict=True)
        count_of = dict(zip(of_key, every.count_K.tolist(), strict=True))
        chosen = zip(hot.table_K.tolist(), hot.key_K.tolist(), strict=True)
        count_K = [count_of[each] for each in chosen]
        left_R = load_R - np.bincount(self.homes(hot), count_K, self.ranks)
        return hot, (left_R + np.bincount(hot.host_K, count_K, self.ranks)) / len(steps)

    def homes(self, of: Asks | HotSet) -> NDArray[np.uint16]:
        """Return the owners of keys' buckets."""
        home_K = np.empty(len(of.key_K), np.uint16)
        for t in np.unique(of.table_K).tolist():
            home_K[of.table_K == t] = self.router.owners(t, of.key_K[of.table_K == t])
        return home_K

    def send_out(self, hot: HotSet) -> None:
        """Route the keys of a set to their hosts."""
        for t in range(self.tables):
            of_t = hot.table_K == t
            self.router.set_hosts(t, self.tables + t, hot.key_K[of_t], hot.host_K[of_t])


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """A step, as it was counted.

    Attributes:
        load_R: Keys asked of each rank.
        bytes_R: Bytes that each rank sends: keys and gradients of its own, rows of others.
        hot: The share of the keys that were asked of hosts.
    """

    load_R: Floats
    bytes_R: Floats
    hot: float

    @property
    def uneven(self) -> float:
        """The busiest rank's keys, over the mean."""
        return float(self.load_R.max() / self.load_R.mean())


def count(run: Run, step: int, router: "_store.Router | None" = None) -> Counted:
    """Count a step."""
    asked = run.asked(step, router)
    to_RR = np.array([[sum(map(len, keys_T)) for keys_T in keys_RT] for keys_RT in asked])
    hot = sum(len(keys) for of in asked for keys_T in of for keys in keys_T[run.tables :])
    load_R = to_RR.sum(axis=1).astype(np.float64)
    np.fill_diagonal(to_RR, 0)  # rows: whose keys they are; columns: who asks
    asks_R, answers_R = to_RR.sum(axis=0), to_RR.sum(axis=1)
    bytes_R = (_KEY_BYTES + _ROW_BYTES) * asks_R + _ROW_BYTES * answers_R
    return Counted(load_R, bytes_R.astype(np.float64), hot / load_R.sum())


def copies_bytes(run: Run, hot: HotSet, step: int) -> float:
    """Return what a step sends where all ranks hold the rows of a set, over what it does without.

    A rank that adds up a row's gradients gets them from all ranks that have some, and gives every
    rank the new row: exact sums can take no fewer bytes.
    """
    asked = run.asked(step)
    total = sum(len(keys) for of in asked for keys_T in of for keys in keys_T)
    without = total * (run.ranks - 1) / run.ranks * (_KEY_BYTES + 2 * _ROW_BYTES)
    extra = 0.0
    for t in range(run.tables):
        keys = np.concatenate([keys_T[run.tables + t] for of in asked for keys_T in of])
        _, asks_U = np.unique(keys, return_counts=True)
        extra += float((run.ranks - asks_U).sum()) * (_KEY_BYTES + _ROW_BYTES)
    return 1 + extra / without


def _case(run: Run, name: str, *, claim: bool) -> Iterator[report.Row]:
    steps = range(_COUNTED, _COUNTED + _JUDGED)
    before = [count(run, step) for step in steps]
    hot, predicted_R = run.choose(range(_COUNTED))
    run.send_out(hot)
    after = [count(run, step) for step in steps]
    moved = 2 * len(hot.key_K) * _MOVED_BYTES / _STEPS_A_VERSION
    sent = [each.bytes_R.sum() + moved for each in after]
    of = "E.2" if claim else ""

    def row(metric: str, values: Sequence[float], target: float = 0) -> report.Row:
        return report.measure(
            (name, metric, ""), values, better="lower", target=target, claim=of if target else ""
        )

    yield row("max / mean of keys, without", [each.uneven for each in before])
    yield row("max / mean of keys", [each.uneven for each in after], 1.2 if claim else 0)
    yield row("share of the rows", [len(hot.key_K) / sum(CRITEO_1TB)], 0.001 if claim else 0)
    yield row("hot rows", [float(len(hot.key_K))])
    yield row("share of the keys", [each.hot for each in after])
    if not claim:
        return
    yield row(
        "bytes over those without",
        [s / each.bytes_R.sum() for s, each in zip(sent, before, strict=True)],
        1.1,
    )
    predicted = predicted_R.sum() * (run.ranks - 1) / run.ranks * (_KEY_BYTES + 2 * _ROW_BYTES)
    yield row(
        "bytes of all ranks, away from counted",
        [abs((predicted + moved) / s - 1) for s in sent],
        0.05,
    )
    yield row(
        "keys of the busiest rank, away from counted",
        [abs(predicted_R.max() / each.load_R.max() - 1) for each in after],
        0.05,
    )
    yield row(
        "bytes if all ranks held these rows, over those without",
        [copies_bytes(run, hot, steps[0])],
    )
    run.send_out(HotSet.none())


def _jobs(run: Run) -> Iterator[report.Row]:
    """Judge owners that are even for training, and for serving, at either job."""
    steps = range(_COUNTED, _COUNTED + _JUDGED)
    for name, router in (
        ("training", run.owned(run.load_B)),
        ("serving", run.owned(run.reads_B)),
    ):
        case = f"{run.ranks} ranks, owners by the keys of {name}"
        judged = [count(run, step, router).uneven for step in steps]
        yield report.measure(
            (case, "max / mean of a step's keys", ""), judged, better="lower", target=0
        )
        reads = [_read(run, step, router) for step in steps]
        yield report.measure(
            (case, "max / mean of requests' keys", ""), reads, better="lower", target=0
        )


def _read(run: Run, step: int, router: "_store.Router") -> float:
    reads_R = np.zeros(run.ranks)
    for t, keys in enumerate(run.draw(step)):
        of_events = keys.reshape(-1, 16)  # a request has sixteen, and asks for a key once
        of_events = np.sort(of_events, axis=1)
        first = np.ones(of_events.shape, np.bool_)
        first[:, 1:] = of_events[:, 1:] != of_events[:, :-1]
        reads_R += np.bincount(router.owners(t, of_events[first]), minlength=run.ranks)
    return float(reads_R.max() / reads_R.mean())


def measure(_: object = None) -> Iterator[report.Row]:
    """Yield the rows of the report."""
    zipf, uniform = (1.05, 1.2), (0.0, 0.0)
    for ranks in (64, 128):
        run = Run(ranks, zipf, as_many=False)
        yield from _case(run, f"{ranks} ranks, 10^5 rows a bucket", claim=True)
    for ranks in (2, 16):
        run = Run(ranks, zipf, as_many=False)
        yield from _case(run, f"{ranks} ranks, 10^5 rows a bucket", claim=False)
    run = Run(64, uniform, as_many=True)
    yield from _case(run, "64 ranks, uniform keys, as many buckets as ranks", claim=False)
    yield from _jobs(Run(16, zipf, as_many=True))
