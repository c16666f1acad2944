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
import itertools
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
_COUNTED_FOR_NONE = 8
_STEPS_A_VERSION = 1000
_MAX_ROWS = sum(CRITEO_1TB) // 1000
_HEAD, _SCATTER = 4096, 2_654_435_761
_SEED = 46
_REQUEST = 16  # events of a request, which asks for a key once

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


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The keys that are asked of ranks in a step, by rank and table; behind these, of hosts.

    Attributes:
        tables: Tables, twice: of owners and of hosts.
        key_K: The keys.
        rank_K: The ranks that ask.
        at: Where each rank's keys of each table stand.
    """

    tables: int
    key_K: Keys
    rank_K: NDArray[np.uint16]
    at: list[slice]

    def of(self, rank: int) -> list[Keys]:
        """Return the keys that are asked of a rank, by table."""
        own = self.at[rank * self.tables : (rank + 1) * self.tables]
        return [self.key_K[at] for at in own]

    def askers(self, rank: int, tables: slice = slice(None)) -> NDArray[np.uint16]:
        """Return who asks for these keys, of some tables that stand side by side."""
        own = self.at[rank * self.tables : (rank + 1) * self.tables][tables]
        return self.rank_K[own[0].start : own[-1].stop]

    @property
    def load_R(self) -> Floats:
        """The keys that are asked of each rank."""
        sizes = np.array([at.stop - at.start for at in self.at], np.float64)
        load_R: Floats = sizes.reshape(-1, self.tables).sum(axis=1)
        return load_R


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
        self.router = self._owned(self._loads(range(4)))

    def _owned(self, cost_B: Floats) -> "_store.Router":
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

    def _loads(self, steps: Sequence[int]) -> Floats:
        """Return what each bucket is asked for by ranks, of which each asks for a key once."""
        nobody = [(bits, 1, 1, np.zeros(1 << bits, np.uint16)) for bits in self._bits]
        router = _store.Router(nobody, ranks=1, rank=0)
        for step in steps:
            for part in self._parts(step):
                router.route(part)
        return router.take_load().astype(np.float64)

    def _parts(self, step: int) -> Iterator[list[tuple[int, Keys, None]]]:
        keys_T, ranks = self.draw(step), self.ranks
        for part in range(ranks):
            own = slice(part * _EVENTS // ranks, (part + 1) * _EVENTS // ranks)
            yield [(t, np.ascontiguousarray(keys[own]), None) for t, keys in enumerate(keys_T)]

    def asked(self, step: int) -> "Asked":
        """Return the keys that are asked of each rank in a step."""
        labels = self.ranks * 2 * self.tables
        keys, label_of, rank_of = [], [], []
        for rank, part in enumerate(self._parts(step)):
            routed = self.router.route(part)
            keys.append(routed.keys.copy())
            label_of.append(np.repeat(np.arange(labels, dtype=np.uint16), routed.lengths))
            rank_of.append(np.full(len(routed.keys), rank, np.uint16))
        label_K = np.concatenate(label_of)
        order_K = np.argsort(label_K, kind="stable")
        ends = np.cumsum(np.bincount(label_K, minlength=labels)).tolist()
        return Asked(
            2 * self.tables,
            np.concatenate(keys)[order_K],
            np.concatenate(rank_of)[order_K],
            [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])],
        )

    def choose(self, steps: Sequence[int], max_rows: int = _MAX_ROWS) -> tuple[HotSet, Floats]:
        """Return the set that ranks choose by some steps, and each rank's load as predicted."""
        asked = [self.asked(step) for step in steps]
        load_R = np.sum([each.load_R for each in asked], axis=0)
        counts = [AskCounts(self.tables, max_rows) for _ in range(self.ranks)]
        for rank, counted in enumerate(counts):
            counted.add([each.of(rank) for each in asked])  # as if all came in one step
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


def count(run: Run, step: int) -> Counted:
    """Count a step."""
    asked = run.asked(step)
    load_R = asked.load_R
    hot = sum(len(keys) for rank in range(run.ranks) for keys in asked.of(rank)[run.tables :])
    to_RR = np.array([np.bincount(asked.askers(r), minlength=run.ranks) for r in range(run.ranks)])
    np.fill_diagonal(to_RR, 0)  # rows: whose keys they are; columns: who asks
    asks_R, answers_R = to_RR.sum(axis=0), to_RR.sum(axis=1)
    bytes_R = (_KEY_BYTES + _ROW_BYTES) * asks_R + _ROW_BYTES * answers_R
    return Counted(load_R, bytes_R.astype(np.float64), hot / load_R.sum())


def predicted_bytes(load_R: Floats) -> Floats:
    """Return what each rank sends in a step, [R], by the keys that will be asked of each.

    Ranks ask for equally many keys, and each asks all owners as the mean of ranks does.
    """
    mine = load_R.mean()
    asks_R = mine * (1 - load_R / load_R.sum())
    answers_R = load_R * (1 - 1 / len(load_R))
    bytes_R: Floats = (_KEY_BYTES + _ROW_BYTES) * asks_R + _ROW_BYTES * answers_R
    return bytes_R


def moved_bytes(hot: HotSet) -> float:
    """Return what a step sends for the rows of a set that go out and home, once a version.

    All of them are taken to have changed.
    """
    return 2 * len(hot.key_K) * _MOVED_BYTES / _STEPS_A_VERSION


def copies_bytes(run: Run, step: int) -> Floats:
    """Return what each rank sends in a step, [R], if all ranks held the rows that are out.

    A row's owner gets its gradients from all ranks that have some, adds them up, and gives every
    rank the new row: exact sums can take no fewer bytes.
    """
    asked = run.asked(step)
    bytes_R, touched_R = np.zeros(run.ranks), np.zeros(run.ranks)
    for owner in range(run.ranks):
        asks_R = np.bincount(asked.askers(owner, slice(0, run.tables)), minlength=run.ranks)
        asks_R[owner] = 0
        bytes_R += (_KEY_BYTES + _ROW_BYTES) * asks_R
        bytes_R[owner] += _ROW_BYTES * asks_R.sum()
        for t in range(run.tables):
            keys = asked.of(owner)[run.tables + t]
            rank_K = asked.askers(owner, slice(run.tables + t, run.tables + t + 1))
            home_K = run.router.owners(t, keys)
            bytes_R += (_KEY_BYTES + _ROW_BYTES) * np.bincount(
                rank_K[home_K != rank_K], minlength=run.ranks
            )
            # A row has one host, so its keys all stand here.
            touched_R += np.bincount(run.router.owners(t, np.unique(keys)), minlength=run.ranks)
    return bytes_R + (run.ranks - 1) * (_KEY_BYTES + _ROW_BYTES) * touched_R


def _case(run: Run, name: str, hot: HotSet, load_R: Floats) -> Iterator[report.Row]:
    """Count steps with hot rows, whose loads were predicted, and without."""
    steps = range(_COUNTED, _COUNTED + _JUDGED)
    before = [count(run, step) for step in steps]
    run.send_out(hot)
    after = [count(run, step) for step in steps]
    moved = moved_bytes(hot)
    sent = [each.bytes_R.sum() + moved for each in after]

    def row(metric: str, values: Sequence[float], target: float = 0) -> report.Row:
        return report.measure(
            (name, metric, ""), values, better="lower", target=target, claim="E.2" if target else ""
        )

    yield row("max / mean of keys, without", [each.uneven for each in before])
    yield row("max / mean of keys", [each.uneven for each in after], 1.2)
    yield row("share of the rows", [len(hot.key_K) / sum(CRITEO_1TB)], 0.001)
    yield row("hot rows", [float(len(hot.key_K))])
    yield row("share of the keys", [each.hot for each in after])
    yield row(
        "bytes over those without",
        [s / each.bytes_R.sum() for s, each in zip(sent, before, strict=True)],
        1.1,
    )
    yield row(
        "bytes if all ranks held these rows, over those without",
        [float(copies_bytes(run, steps[0]).sum() / before[0].bytes_R.sum())],
    )
    predicted_R = predicted_bytes(load_R)
    yield row(
        "bytes of all ranks, predicted away from counted",
        [abs((predicted_R.sum() + moved) / s - 1) for s in sent],
        0.05,
    )
    yield row(
        "bytes of the busiest rank, predicted away from counted",
        [abs(predicted_R.max() / each.bytes_R.max() - 1) for each in after],
        0.05,
    )
    run.send_out(HotSet.none())


def _none(run: Run, name: str) -> Iterator[report.Row]:
    """See that no row is hot where that wins nothing."""
    hot, _ = run.choose(range(_COUNTED_FOR_NONE))
    yield report.measure(
        (name, "max / mean of keys", ""),
        [count(run, step).uneven for step in range(_COUNTED, _COUNTED + _JUDGED)],
        better="lower",
        target=0,
    )
    yield report.measure(
        (name, "no row is hot", ""),
        [float(not len(hot.key_K))],
        better="higher",
        target=1,
        claim="E.2",
    )


# --- the plan of training, and that of serving ----------------------------------------------------


def _requests(run: Run, step: int) -> Iterator[tuple[int, Keys, NDArray[np.int64]]]:
    """Yield tables, the keys that requests ask for, each once, and the nodes that they came to."""
    for t, keys in enumerate(run.draw(step)):
        key_QE = np.sort(keys.reshape(-1, _REQUEST), axis=1)
        first_QE = np.ones(key_QE.shape, np.bool_)
        first_QE[:, 1:] = key_QE[:, 1:] != key_QE[:, :-1]
        node_QE = np.broadcast_to(np.arange(len(key_QE))[:, None] % run.ranks, key_QE.shape)
        yield t, key_QE[first_QE], node_QE[first_QE]


def serving_set(run: Run, steps: Sequence[int], rows: int) -> HotSet:
    """Return as many rows as are read most: what all nodes keep copies of (0013-hot-rows.md)."""
    tables, keys, counts = [], [], []
    read: list[list[Keys]] = [[] for _ in range(run.tables)]
    for step in steps:
        for t, key_K, _ in _requests(run, step):
            read[t].append(key_K)
    for t, of in enumerate(read):
        key_U, count_U = np.unique(np.concatenate(of), return_counts=True)
        keys.append(key_U)
        counts.append(count_U)
        tables.append(np.full(len(key_U), t, np.int32))
    most_K = np.argsort(-np.concatenate(counts), kind="stable")[:rows]
    chosen = Asks(np.concatenate(tables), np.concatenate(keys), np.concatenate(counts)).of(most_K)
    return HotSet(chosen.table_K, chosen.key_K, run.homes(chosen))


def read_bytes(run: Run, hot: HotSet, step: int, *, copies: bool) -> float:
    """Return what nodes send one another for requests, with copies of a set or with hosts of it.

    A key travels to its owner or host and its row comes back, unless that is the node itself or it
    has a copy. Owners send each copy anew once a version, as if all rows changed.
    """
    total = 0.0
    for t, key_K, node_K in _requests(run, step):
        at_K = run.router.owners(t, key_K).astype(np.int64)
        of_t = hot.table_K == t
        order = np.argsort(hot.key_K[of_t])
        key_U, host_U = hot.key_K[of_t][order], hot.host_K[of_t][order]
        if len(key_U):
            place_K = np.minimum(np.searchsorted(key_U, key_K), len(key_U) - 1)
            hot_K = key_U[place_K] == key_K
            at_K[hot_K] = node_K[hot_K] if copies else host_U[place_K[hot_K]]
        total += (_KEY_BYTES + _ROW_BYTES) * float((at_K != node_K).sum())
    if copies:
        every = len(hot.key_K) * (run.ranks - 1) * (_KEY_BYTES + _ROW_BYTES)
        return total + every / _STEPS_A_VERSION
    return total + moved_bytes(hot) / 2


def _jobs(run: Run, training: HotSet) -> Iterator[report.Row]:
    """Judge the set with hosts, and as many rows that are read most with copies, at either job."""
    steps = range(_COUNTED, _COUNTED + _JUDGED)
    serving = serving_set(run, range(_COUNTED), len(training.key_K))
    both = set(zip(training.table_K.tolist(), training.key_K.tolist(), strict=True))
    both &= set(zip(serving.table_K.tolist(), serving.key_K.tolist(), strict=True))
    case = f"{run.ranks} ranks or nodes, plans for training and for serving"
    yield report.measure(
        (case, "rows that both plans name", "share"),
        [len(both) / len(training.key_K)],
        better="lower",
        target=0.99,
        claim="E.2",
    )
    run.send_out(training)
    hosts = [count(run, step).bytes_R + moved_bytes(training) / run.ranks for step in steps]
    run.send_out(serving)
    copied = [copies_bytes(run, step) for step in steps]
    run.send_out(HotSet.none())
    for what, of in (("of the busiest rank", np.max), ("of all ranks", np.sum)):
        yield report.measure(
            (case, f"training: bytes {what}, its plan / that of serving", "ratio"),
            [float(of(mine) / of(its)) for mine, its in zip(hosts, copied, strict=True)],
            better="lower",
            target=1,
            claim="E.2",
        )
    yield report.measure(
        (case, "serving: bytes between nodes, its plan / that of training", "ratio"),
        [
            read_bytes(run, serving, step, copies=True)
            / read_bytes(run, training, step, copies=False)
            for step in steps
        ],
        better="lower",
        target=1,
        claim="E.2",
    )


def measure(_: object = None) -> Iterator[report.Row]:
    """Yield the rows of the report."""
    zipf, uniform = (1.05, 1.2), (0.0, 0.0)
    for ranks in (64, 128):
        run = Run(ranks, zipf, as_many=False)
        hot, load_R = run.choose(range(_COUNTED))
        yield from _case(run, f"{ranks} ranks, 10^5 rows a bucket", hot, load_R)
        if ranks == 64:
            yield from _jobs(run, hot)
    yield from _none(Run(2, zipf, as_many=False), "2 ranks, 10^5 rows a bucket")
    yield from _none(Run(2, zipf, as_many=True), "2 ranks, as many buckets as ranks")
    for ranks in (2, 64):
        run = Run(ranks, uniform, as_many=True)
        yield from _none(run, f"{ranks} ranks, uniform keys, as many buckets as ranks")
