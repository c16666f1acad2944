"""A training step as tasks of ranks: what it takes by a profile, under a strategy.

What each rank does (docs/design/0016-ranks.md) becomes tasks on its devices:

    core     other work of a step, lookup, encode rows | pool | forward layers | backward layers,
             give | select | adam, apply; with one core also what the next two lines have
    asker    route the next batch's keys, from when the rows of this one are there
    writer   publish
    drive    rows that are not in memory
    out, in  its link in each direction: keys, rows, gradients, sums

An exchange is one task of each sender's link, and one of each receiver's, which begins to receive
while senders send. Sums travel in groups of layers as the runtime groups them, those of the last
layers first. Two steps are simulated, and the time from the end of the first to the end of the
second is what a step takes.

Which tasks there are depends on how many ranks there are alone. All else of a strategy changes
what tasks take, and the timeline re-times what that touches.

Shapes: T tables, R ranks, D kinds of demand.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import Codecs
from embertide.trainer.config.sync import DCT, AllReduce
from embertide.trainer.sync.hot import UNEVEN, Asks, HotSet, choose
from embertide.trainer.sync.placing.profile import Profile, RankProfile
from embertide.trainer.sync.placing.timeline import Task, Timeline
from embertide.trainer.sync.plan import EVERYWHERE, Ownership

Floats = NDArray[np.float64]
Synchronous = AllReduce | DCT

_STEPS = 2
_KEY_BYTES, _LENGTH_BYTES = 8, 4
_VALUE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
_SCALE_BYTES = 4  # of a row as int8
_PLACE_BYTES = 2  # of a gradient that DCT sends
_SQUARE_BYTES = 8  # of a key's gradient, of each chunk of a column-wise table
_TOGETHER_BYTES = 1 << 20  # of gradients that travel together, as in trainer.sync.dense
_PARTS = ("core", "asker", "writer", "drive", "out", "in")
# Tasks that take longer on a rank that owns more, and those that take less there.
_OF_OWNERS = ("lookup", "late rows", "keys in", "rows out", "gradients in", "apply")
_OF_OTHERS = ("keys out", "rows in", "gradients out")


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """How ranks share a step.

    Attributes:
        owners: Who owns which bucket, how many ranks there are, and how many rows may be hot.
        sync: How the dense net's gradients are added up.
        codecs: The codecs of rows and of their gradients.
    """

    owners: Ownership
    sync: Synchronous = dataclasses.field(default_factory=AllReduce)
    codecs: Codecs = dataclasses.field(default_factory=Codecs)


class Bound(NamedTuple):
    """A part of what a step takes.

    Attributes:
        what: Work and rank, as "apply of rank 1".
        seconds: Seconds of the step.
    """

    what: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted time of a step.

    Attributes:
        step_s: Seconds.
        bounds: The parts of the step along its critical path, the longest first.
        spans: Its tasks: (device, name, begin_s, end_s), the step's begin at 0.
        beyond: The parts of the strategy that were not measured, a sentence each.
    """

    step_s: float
    bounds: tuple[Bound, ...]
    spans: tuple[tuple[str, str, float, float], ...]
    beyond: tuple[str, ...]


class StepModel:
    """Steps of so many ranks. For one thread.

    Attributes:
        profile: The costs of steps.
        ranks: The number of ranks.
        evaluations: Strategies that were timed.
        timeline: The timeline of the strategy that was timed last.
    """

    def __init__(self, profile: Profile, ranks: int) -> None:
        """Make the tasks, which take no time yet.

        Raises:
            ValueError: There is no rank.
        """
        if ranks < 1:
            raise ValueError(f"ranks is {ranks}; give 1 or more")
        self.profile = profile
        self.ranks = ranks
        self.evaluations = 0
        self._part = profile.events / ranks
        self._load_T = [np.array(table.load_P) / sum(table.load_P) for table in profile.tables]
        self._distinct_T = np.array([t.distinct_keys(self._part) for t in profile.tables])
        hot = profile.hot
        self._hot_table_K = np.array([key.table for key in hot], np.int32)
        self._hot_bucket_K = np.array([key.bucket for key in hot], np.int64)
        self._hot_share_K = np.array([key.share for key in hot], np.float64)
        self._groups = _groups(profile)
        self._tasks: list[Task] = []
        # Numbers of the tasks of a kind, by rank and step: they all take the same.
        self._numbers: dict[tuple[str, int], list[int]] = {}
        for step in range(_STEPS):
            self._add_step(step)
        self._ends = [
            [number for rank in range(ranks) for number in self._of("apply", rank, step)]
            for step in range(_STEPS)
        ]
        self.timeline = Timeline(self._tasks)
        self._seconds: dict[tuple[str, int], tuple[float, float]] = {}

    # --- tasks ------------------------------------------------------------------------------------

    def _device(self, part: str, rank: int) -> int:
        cores = self.profile.cores
        if part == "writer" and cores == 2:
            part = "asker"
        if part in ("asker", "writer") and cores == 1:
            part = "core"
        return rank * len(_PARTS) + _PARTS.index(part)

    def _add(self, kind: str, part: str, rank: int, after: Sequence[int] = ()) -> int:
        number = len(self._tasks)
        self._tasks.append(Task(kind, self._device(part, rank), 0.0, tuple(sorted({*after}))))
        self._numbers.setdefault((kind, rank), []).append(number)
        return number

    def _of(self, kind: str, rank: int, step: int) -> list[int]:
        """Return the task of a kind in a step, if it is there."""
        return self._numbers.get((kind, rank), [])[step : step + 1]

    def _exchange(self, kind: str, after_R: Sequence[Sequence[int]]) -> list[int]:
        """Add an exchange between all ranks; return the task by which each has its part."""
        if self.ranks == 1:
            return [self._add(f"{kind} in", "in", 0, after_R[0])]
        out_R = [self._add(f"{kind} out", "out", r, after) for r, after in enumerate(after_R)]
        return [
            self._add(f"{kind} in", "in", rank, [n for r, n in enumerate(out_R) if r != rank])
            for rank in range(self.ranks)
        ]

    def _add_step(self, step: int) -> None:
        every = range(self.ranks)
        layers = range(len(self.profile.layers))

        def chain(names: Sequence[str], rank: int, after: Sequence[int]) -> list[int]:
            made: list[int] = []
            for name in names:
                made.append(self._add(name, "core", rank, made[-1:] or after))
            return made

        begin_R = [self._of("apply", rank, step - 1) if step else [] for rank in every]
        asking_R = [
            [self._add("route", "asker", r, self._of("pool", r, step - 1) if step else [])]
            for r in every
        ]
        keys_R = self._exchange("keys", asking_R)
        for rank in every:
            self._add("publish", "writer", rank, begin_R[rank])
        late_R = [self._add("late rows", "drive", r, [keys_R[r]]) for r in every]
        other_R = [self._add("other", "core", r, [keys_R[r], *begin_R[r]]) for r in every]
        looked_R = [[self._add("lookup", "core", r, [late_R[r], other_R[r]])] for r in every]
        rows_R = self._exchange("rows", looked_R)
        gradients_R: list[list[int]] = []
        backward_R: list[list[int]] = []
        names = [f"forward {n}" for n in layers]
        for r in every:
            forward = chain(["pool", *names], r, [rows_R[r], *looked_R[r]])
            back: list[int] = []
            for n in reversed(layers):
                back.append(self._add(f"backward {n}", "core", r, back[-1:] or forward[-1:]))
                if n == self.profile.rows_enter:
                    back.append(self._add("give", "core", r, back[-1:]))
                    gradients_R.append(back[-1:])
            back.append(self._add("select", "core", r, back[-1:]))
            backward_R.append(back)
        given_R = self._exchange("gradients", gradients_R)
        summed: list[int] = []
        for g, first in enumerate(self._groups):
            ready = (
                [number for r in every for number in self._of(f"backward {first}", r, step)]
                if g < len(self._groups) - 1
                else [back[-1] for back in backward_R]
            )
            if self.ranks > 1:
                summed += [self._add(f"sum {g}", "out", r, ready) for r in every]
        for r in every:
            adam = self._add("adam", "core", r, [*summed, backward_R[r][-1]])
            self._add("apply", "core", r, [adam, given_R[r]])

    # --- what they take ---------------------------------------------------------------------------

    def shares(self, owners: Ownership) -> tuple[Floats, NDArray[np.bool_]]:
        """Return each rank's share of a table's rows, [T, R], and which tables are everywhere.

        Hot rows are their hosts'. Of a column-wise table a rank has its part of each row.
        """
        return self._shares(owners, self.hot_set(owners))

    def _shares(self, owners: Ownership, hot: HotSet) -> tuple[Floats, NDArray[np.bool_]]:
        share_TR, everywhere_T = self._owned(owners)
        for t in self._columns_T(owners):
            share_TR[t] = 0.0
            for part in owners.columns(t):
                share_TR[t, part.rank] = part.chunks / self.profile.tables[t].chunks
        share_K = self._hot_share_K[hot.key_K]
        np.add.at(share_TR, (hot.table_K, hot.host_K), share_K)
        np.subtract.at(share_TR, (hot.table_K, self._homes(owners, hot.key_K)), share_K)
        return np.maximum(share_TR, 0.0), everywhere_T

    @staticmethod
    def _columns_T(owners: Ownership) -> list[int]:
        """Return which tables are column-wise."""
        return [t for t, ranks_C in enumerate(owners.ranks_TC) if ranks_C]

    def _squares(self, owners: Ownership) -> Floats:
        """Return bytes of squares that a rank sends and gets for column-wise tables, [R, 2]."""
        bytes_RD = np.zeros((self.ranks, 2))
        for t in self._columns_T(owners):
            table, parts = self.profile.tables[t], owners.columns(t)
            size = _SQUARE_BYTES * table.distinct_keys(self.profile.events)
            for part in parts:
                bytes_RD[part.rank, 0] += size * part.chunks * (len(parts) - 1)
                bytes_RD[part.rank, 1] += size * (table.chunks - part.chunks)
        return bytes_RD

    def _owned(self, owners: Ownership) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the same of the owners of buckets alone."""
        share_TR = np.zeros((len(self._load_T), self.ranks))
        everywhere_T = np.zeros(len(self._load_T), bool)
        for t, (owner_P, load_P) in enumerate(zip(owners.owners_T, self._load_T, strict=True)):
            if owner_P[0] == EVERYWHERE:
                everywhere_T[t] = True
            else:
                share_TR[t] = np.bincount(owner_P, load_P, self.ranks)
        return share_TR, everywhere_T

    def hot_set(self, owners: Ownership) -> HotSet:
        """Return the rows that become hot, as `trainer.sync.hot` chooses them by what was counted.

        Keys stand for the places of `Profile.hot`.
        """
        nothing = HotSet.none()
        if not owners.hot_rows or not len(self._hot_table_K) or self.ranks == 1:
            return nothing
        share_TR, everywhere_T = self._owned(owners)
        load_R = self._distinct_T @ share_TR
        if load_R.max() <= UNEVEN * load_R.mean():
            return nothing
        key_K = np.flatnonzero(~everywhere_T[self._hot_table_K])
        table_K = self._hot_table_K[key_K]
        asks = Asks(table_K, key_K, self._distinct_T[table_K] * self._hot_share_K[key_K])
        return choose(asks, self._homes(owners, key_K), load_R, owners.hot_rows)

    def _homes(self, owners: Ownership, key_K: NDArray[np.int64]) -> NDArray[np.uint16]:
        at_K = zip(self._hot_table_K[key_K], self._hot_bucket_K[key_K], strict=True)
        return np.array([owners.owners_T[t][bucket] for t, bucket in at_K], np.uint16)

    def _moved_bytes(self, owners: Ownership, hot: HotSet) -> float:
        """Return what the rank sends that sends most, for rows to go out and home once.

        Of column-wise tables, all rows that were seen go home.
        """
        home_K = self._homes(owners, hot.key_K)
        size_K = np.array([t.row_bytes for t in self.profile.tables], np.float64)[hot.table_K]
        sent_R = np.bincount(home_K, size_K, self.ranks)
        sent_R = sent_R + np.bincount(hot.host_K, size_K, self.ranks)
        for t in self._columns_T(owners):
            table = self.profile.tables[t]
            for part in owners.columns(t):
                sent_R[part.rank] += table.rows * table.row_bytes * part.chunks / table.chunks
        return float(sent_R.max(initial=0.0))

    def memory_bytes(self, owners: Ownership) -> Floats:
        """Return what rows take on each rank, [R]."""
        memory_R = np.zeros(self.ranks)
        for table, owner_P in zip(self.profile.tables, owners.owners_T, strict=True):
            size = table.rows * table.row_bytes
            if owner_P[0] == EVERYWHERE:
                memory_R += size
            else:
                memory_R += size * np.bincount(owner_P, minlength=self.ranks) / len(owner_P)
        for t in self._columns_T(owners):
            table = self.profile.tables[t]
            for part in owners.columns(t):  # beside whole rows at home
                memory_R[part.rank] += table.rows * table.row_bytes * part.chunks / table.chunks
        if owners.hot_rows and self.ranks > 1:
            memory_R += hot_bytes(self.profile, owners.hot_rows)
        return memory_R

    def _costs(self, strategy: Strategy) -> dict[tuple[str, int], tuple[float, float]]:
        """Return (seconds, lead) of each kind of task of each rank."""
        profile, work, others = self.profile, self.profile.work, self.ranks - 1
        hot = self.hot_set(strategy.owners)
        share_TR, everywhere_T = self._shares(strategy.owners, hot)
        is_counted = bool(strategy.owners.hot_rows) and others > 0
        moved_bytes = self._moved_bytes(strategy.owners, hot)
        # The router has each table twice, its own rows and the hosted ones.
        blocks = len(profile.tables) * (2 if is_counted else 1)
        asked_T = np.where(everywhere_T, 0.0, self._distinct_T)
        everywhere = np.where(everywhere_T, self._distinct_T, 0.0)
        rows, gradients = strategy.codecs.rows, strategy.codecs.gradients
        row_T = np.array([_wire_bytes(rows, t.row_floats) for t in profile.tables])
        row_floats_T = np.array([t.row_floats for t in profile.tables])
        gradient_T = np.array([_wire_bytes(gradients, t.gradient_floats) for t in profile.tables])
        gradient_floats_T = np.array([t.gradient_floats for t in profile.tables])
        late_T = np.array([t.late for t in profile.tables])
        # A part asks each owner for so many keys, bytes and floats of rows, bytes and floats of
        # gradients, and late rows.
        kinds_TD = np.stack(
            [np.ones(len(row_T)), row_T, row_floats_T, gradient_T, gradient_floats_T, late_T],
            axis=1,
        )
        own_RD = (asked_T[:, None] * share_TR).T @ kinds_TD
        rest_RD = (asked_T[:, None] * np.maximum(1 - share_TR, 0)).T @ kinds_TD
        squares_RD = self._squares(strategy.owners)
        for t in self._columns_T(strategy.owners):
            # Each rank with a part is asked for every key. No part is on a drive.
            has_R = (share_TR[t] > 0).astype(np.float64)
            own_RD[:, 0] += asked_T[t] * (has_R - share_TR[t])
            rest_RD[:, 0] += asked_T[t] * (has_R.sum() - has_R - np.maximum(1 - share_TR[t], 0))
            own_RD[:, 5] -= asked_T[t] * share_TR[t] * late_T[t]
        copied_D = everywhere @ kinds_TD
        keys = self._part * sum(table.keys for table in profile.tables)
        costs: dict[tuple[str, int], tuple[float, float]] = {}
        layer = list(enumerate(profile.layers))
        parameters = sum(each.parameters for each in profile.layers)
        is_dct = isinstance(strategy.sync, DCT) and strategy.sync.density != 1
        sums = self._sum_bytes(strategy.sync)
        slowest = min(profile.rank(r).bytes_per_s for r in range(self.ranks))
        for r in range(self.ranks):
            at = profile.rank(r)
            own_D, rest_D = own_RD[r], rest_RD[r]
            row_codec = at.pace * work.codec_s.get(rows, 0.0)
            gradient_codec = at.pace * work.codec_s.get(gradients, 0.0)
            lookup_s, pool_s = (
                work.lookup_s * at.pace_of("lookup"),
                work.pool_s * at.pace_of("pool"),
            )
            update_s, give_s = (
                work.update_s * at.pace_of("update"),
                work.give_s * at.pace_of("give"),
            )
            select_s = work.select_s * at.pace if is_dct and others else 0.0

            def core(kind: str, seconds: float, rank: int = r) -> None:
                costs[kind, rank] = (seconds, 0.0)

            def link(
                kind: str,
                sent: float,
                got: float,
                messages: int = 1,
                rank: int = r,
                at: RankProfile = at,
            ) -> None:
                took = at.exchange_s(sent, got) + messages * at.latency_s * bool(others)
                costs[f"{kind} out", rank] = (took, 0.0)
                costs[f"{kind} in", rank] = (got / at.bytes_per_s, got / at.bytes_per_s)

            core("route", keys * work.route_s * at.pace_of("route"))
            core("publish", work.publish_s * at.pace)
            costs["late rows", r] = (
                work.late_s * (own_D[5] * self.ranks + copied_D[5]) if work.late_s else 0.0,
                0.0,
            )
            looked = own_D[0] * self.ranks + copied_D[0]
            other_s = work.step_s + is_counted * looked * work.count_s * at.pace
            if moved_bytes and profile.version_steps:
                other_s += moved_bytes / slowest / profile.version_steps
            core("other", other_s)
            core("lookup", looked * lookup_s + own_D[2] * others * row_codec)
            core("pool", keys * pool_s + rest_D[2] * row_codec)
            for n, each in layer:
                core(f"forward {n}", self._part * each.forward_s * at.pace_of("net"))
                core(f"backward {n}", self._part * each.backward_s * at.pace_of("net"))
            sent_floats = rest_D[4] + copied_D[4] * bool(others)
            core("give", keys * give_s + sent_floats * gradient_codec)
            core("select", parameters * select_s * self.ranks)
            core("adam", parameters * work.adam_s * at.pace_of("adam"))
            got_floats = (own_D[4] + copied_D[4]) * others
            updates = (own_D[0] + copied_D[0]) * self.ranks
            core("apply", updates * update_s + got_floats * gradient_codec)
            lengths = _LENGTH_BYTES * blocks * others
            link(
                "keys",
                lengths + _KEY_BYTES * (rest_D[0] + copied_D[0] * others),
                lengths + _KEY_BYTES * (own_D[0] + copied_D[0]) * others,
            )
            link("rows", own_D[1] * others, rest_D[1])
            # Squares follow gradients before rows take their step, in two messages of their own.
            sent, got = squares_RD[r]
            link(
                "gradients",
                rest_D[3] + copied_D[3] * others + sent,
                (own_D[3] + copied_D[3]) * others + got,
                messages=3 if squares_RD.any() else 1,
            )
            if not others:
                continue
            turns = others if is_dct else 2 * others
            for g, size in enumerate(sums):
                rate = at.bytes_per_s if is_dct else at.sum_bytes_per_s
                costs[f"sum {g}", r] = (size / rate + turns * at.latency_s * bool(size), 0.0)
        return costs

    def _sum_bytes(self, sync: Synchronous) -> list[float]:
        """Return what a rank sends for the sum of each group."""
        layers, others = self.profile.layers, self.ranks - 1
        if isinstance(sync, DCT) and sync.density != 1:
            parameters = sum(each.parameters for each in layers)
            entry = _VALUE_BYTES[sync.values] + _PLACE_BYTES
            sent = sync.density_of(self.ranks) * parameters * entry * others
            return [0.0] * (len(self._groups) - 1) + [sent]
        value = _VALUE_BYTES[sync.values]
        ends = [len(layers), *self._groups]
        sizes = [
            float(sum(each.parameters for each in layers[low:high]))
            for high, low in itertools.pairwise(ends)
        ]
        # At the least, what is added up beside: scores of all events.
        sizes[-1] += self.profile.events * 4 / value
        return [value * 2 * others / self.ranks * size for size in sizes]

    # --- evaluation -------------------------------------------------------------------------------

    def step_s(self, strategy: Strategy) -> float:
        """Return what a step takes, and leave the timeline at that.

        Raises:
            ValueError: The strategy is for another number of ranks.
        """
        if strategy.owners.ranks != self.ranks:
            raise ValueError(f"a strategy of {strategy.owners.ranks} ranks, not {self.ranks}")
        costs = self._costs(strategy)
        changes: dict[int, tuple[float, float]] = {}
        for at, took in costs.items():
            if self._seconds.get(at) != took:
                changes.update(dict.fromkeys(self._numbers.get(at, ()), took))
        self._seconds = costs
        self.evaluations += 1
        self.timeline.retime(changes)
        return self._length()

    def _length(self) -> float:
        first, second = (self.timeline.end_s(numbers) for numbers in self._ends)
        return second - first

    def _path(self) -> list[tuple[Task, float]]:
        """Return the tasks that decide what the step takes that was timed last, and their parts."""
        counted_s, spans = self.timeline.end_s(self._ends[0]), self.timeline.spans()
        found: list[tuple[Task, float]] = []
        for number in self.timeline.critical_path(
            max(self._ends[1], key=lambda number: spans[number].end_s)
        ):
            # Receiving overlaps with sending, which is what it is counted as.
            took = spans[number].end_s - max(spans[number].begin_s, counted_s)
            counted_s = max(spans[number].end_s, counted_s)
            if took > 0:
                found.append((self._tasks[number], took))
        return found

    def pulls(self) -> list[float]:
        """Return by rank what its share of the keys adds to the step that was timed last, [R].

        Below 0 a rank bounds the step by what it asks of others: it had better own more.
        """
        pull_R = [0.0] * self.ranks
        for task, took in self._path():
            sign = (task.name in _OF_OWNERS) - (task.name in _OF_OTHERS)
            pull_R[task.device // len(_PARTS)] += sign * took
        return pull_R

    def predict(self, strategy: Strategy) -> Prediction:
        """Return what a step takes, of what it is made, and what of it was not measured."""
        step_s = self.step_s(strategy)
        begin_s, spans = self.timeline.end_s(self._ends[0]), self.timeline.spans()
        parts: dict[str, float] = {}
        for task, took in self._path():
            name = f"{_plain(task.name)} of rank {task.device // len(_PARTS)}"
            parts[name] = parts.get(name, 0.0) + took
        bounds = sorted((Bound(*each) for each in parts.items()), key=lambda each: -each.seconds)
        shown = tuple(
            (
                self._device_name(task.device),
                task.name,
                span.begin_s - begin_s,
                span.end_s - begin_s,
            )
            for task, span in zip(self._tasks, spans, strict=True)
            if span.end_s > begin_s and span.end_s > span.begin_s
        )
        codecs = (strategy.codecs.rows, strategy.codecs.gradients)
        selects = isinstance(strategy.sync, DCT) and self.ranks > 1
        beyond = self.profile.beyond(
            self.ranks, codecs, selects=selects, hot_rows=strategy.owners.hot_rows or 0
        )
        if any(strategy.owners.ranks_TC):
            beyond.append(
                "column-wise tables: making new rows and adding up squares are taken to cost"
                " nothing, and the lookup of a part as much as that of a row"
            )
        return Prediction(step_s, tuple(bounds), shown, tuple(beyond))

    def _device_name(self, device: int) -> str:
        rank, part = divmod(device, len(_PARTS))
        return f"rank {rank} {_PARTS[part]}"


def _plain(name: str) -> str:
    """Return a kind of task without the number of its layer or group."""
    words = name.split()
    return words[0] if words[0] in ("forward", "backward", "sum") else name


def _groups(profile: Profile) -> list[int]:
    """Return the first layer of each group whose gradients travel together, the last group first.

    As trainer.sync.dense makes them: from the last layer on until there is a MiB; what is left, if
    nothing, goes with what is added up beside.
    """
    firsts: list[int] = []
    size = 0
    for n in range(len(profile.layers) - 1, -1, -1):
        size += 4 * profile.layers[n].parameters
        if size >= _TOGETHER_BYTES:
            firsts.append(n)
            size = 0
    return [*firsts, 0]


def _wire_bytes(codec: str, floats: int) -> float:
    return floats * _VALUE_BYTES[codec] + (_SCALE_BYTES if codec == "int8" else 0)


def hot_bytes(profile: Profile, rows: int) -> float:
    """Return what hot rows take on each rank, any of which may host all of them.

    As `trainer.embedding.hot.guests_bytes`, which refuses more than half of a rank's memory.
    """
    widest = max(table.row_floats for table in profile.tables)
    return float((1 << 20) + rows * 2 * (2 * 4 * widest + 64))


def fits(model: StepModel, owners: Ownership) -> bool:
    """Whether the rows that each rank owns fit its memory."""
    return bool(model.memory_bytes(owners).max() <= model.profile.budget_bytes)


def is_possible(strategy: Strategy) -> bool:
    """Whether a run could be placed so: column-wise tables do not go with all that there is."""
    columns = any(strategy.owners.ranks_TC)
    return not (columns and (strategy.owners.hot_rows or strategy.codecs.gradients == "int8"))


def models(profile: Profile, ranks: Sequence[int]) -> Mapping[int, StepModel]:
    """Return models of steps by how many ranks there are."""
    return {count: StepModel(profile, count) for count in ranks}
