"""Shares of DDR that `recshard` plans on the first half of a trace, scored on the second.

Three ways to use the same bytes of DDR over an SSD are compared by the reads of the SSD: whole
tables by size, the smallest first; one clock that all tables share, which is what a node does by
itself; and the planner's shares. A real store with an SSD tier then replays the traces both ways,
and its hits are compared with those that were predicted. Nothing is timed.

The first read of a key is a read of the SSD for all but whole tables, whatever the shares. It is
counted, and rows of their own say what is left without. Small problems are compared with the best
of all answers.

Shapes: N samples, T tables, P points of a curve.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench import report
from bench.drift.traces import Keys, TableTrace, criteo, news, reuse
from bench.report import CONSOLE
from bench.store import ours
from embertide import _store
from embertide._store import CacheTrace
from embertide.server.core.plan.layout import Bucket, Holders, Place
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.recshard import RecShard
from embertide.server.core.plan.workload import Asking, MissCurve, TableTraits, Workload
from embertide.trainer.data.keys import buckets_of
from embertide.v1 import plan_pb2

_SHARE = 0.25  # of all rows' bytes
_POINTS = 100
_BATCH = 16  # samples between two turns of upkeep
_PAGE_BYTES = 64 << 10
_BY_SIZE, _CLOCK, _PREDICTED = 20.0, 0.9, 0.10
_PIECES = 5


def _trace(keys_N: Keys) -> CacheTrace:
    return CacheTrace(np.ascontiguousarray(keys_N))


def _misses(keys_N: Keys, counted: int, capacity: int) -> int:
    """Return the misses among the last `counted` keys of a clock of so many rows."""
    hits = _trace(keys_N).simulate("clock", capacity).hits
    warm_N = keys_N[: len(keys_N) - counted]
    return counted - (hits - _trace(warm_N).simulate("clock", capacity).hits)


def curve_of(keys_N: Keys, row_bytes: int) -> MissCurve:
    """Return a table's miss curve, warmed up by the first half of its reads."""
    distinct = _trace(keys_N).distinct
    counted = len(keys_N) - len(keys_N) // 2
    sizes = np.unique(np.geomspace(1, max(2, distinct), _POINTS).astype(np.int64))
    bytes_P, missed_P = [0.0], [1.0]
    for size in sizes:
        bytes_P.append(float(size) * row_bytes)
        missed_P.append(min(missed_P[-1], _misses(keys_N, counted, int(size)) / counted))
    return MissCurve(tuple(bytes_P), tuple(missed_P))


def problem_of(trace: TableTrace, room: float) -> Problem:
    """Return the problem of one device whose tables were read as the first half of a trace says."""
    first_NT = trace.half(0)
    tables = [
        plan_pb2.PlannedTable(id=t, name=f"table{t}", bucket_bits=0, chunks=1)
        for t in range(first_NT.shape[1])
    ]
    budgets = [
        plan_pb2.TierBudget(tier=plan_pb2.TIER_DDR, budget_bytes=int(room * 2) + (8 << 20)),
        plan_pb2.TierBudget(tier=plan_pb2.TIER_SSD, budget_bytes=1 << 40),
    ]
    device = plan_pb2.Device(index=0, kind=plan_pb2.DEVICE_KIND_CPU, budgets=budgets)
    node = plan_pb2.Node(name="node", address="node:1", devices=[device])
    plan = plan_pb2.Plan(epoch=1, tables=tables, topology=plan_pb2.Topology(nodes=[node]))
    place = Place(0, 0)
    asking = Asking(
        wanted_NB=np.full((1, len(tables)), 1000.0),
        copied_NT=np.zeros((1, len(tables))),
        bytes_B=np.ones(len(tables)),
        traits={t: TableTraits() for t in range(len(tables))},
        requests_N=np.ones(1),
        curves={
            (place, t): curve_of(first_NT[:, t], 4 * int(trace.dims_T[t]))
            for t in range(len(tables))
        },
        row_room={place: room},
    )
    layout = {Bucket(t, 0): Holders((place,)) for t in range(len(tables))}
    return Problem(plan=plan, layout=layout, workload=Workload(work={}, asking=asking))


def shares_of(trace: TableTrace, room: float) -> NDArray[np.int64]:
    """Return the bytes that the planner gives each table."""
    proposal = RecShard(moves=False).propose(problem_of(trace, room))
    shares_T = np.zeros(len(trace.dims_T), np.int64)
    for what, size in proposal.tier_shares.items():
        shares_T[what.table] = size
    return shares_T


class Scored(NamedTuple):
    """Reads of the SSD in the second half, and those of keys that were never read before."""

    by_size: int
    clock: int
    shares: int
    first_reads: int


def simulated(trace: TableTrace, shares_T: NDArray[np.int64], room: float) -> Scored:
    """Score all three by the simulator. Requires: all rows are of one size."""
    row_bytes = 4 * int(trace.dims_T[0])
    second_NT = trace.half(1)
    tables, counted = second_NT.shape[1], len(second_NT)
    left, by_size = room, 0
    for table in np.argsort(trace.distinct_T, kind="stable"):
        size = int(trace.distinct_T[table]) * row_bytes
        fits = size <= left
        left -= size if fits else 0
        by_size += 0 if fits else counted
    # Keys of several tables in the order in which samples read them.
    tagged_N = (trace.keys_NT & ((1 << 50) - 1)) | (np.arange(tables) << 50)
    shared = _misses(tagged_N.reshape(-1), counted * tables, int(room) // row_bytes)
    own = sum(
        _misses(trace.keys_NT[:, t], counted, max(1, int(shares_T[t]) // row_bytes))
        for t in range(tables)
    )
    return Scored(by_size, shared, own, first_reads(trace))


def first_reads(trace: TableTrace) -> int:
    """Return the reads of the second half whose keys were never read before."""
    first_NT, second_NT = trace.half(0), trace.half(1)
    return sum(
        len(np.setdiff1d(second_NT[:, t], first_NT[:, t])) for t in range(second_NT.shape[1])
    )


class _Store:
    """A real store with the rows of all keys of a trace, most of them on its SSD."""

    def __init__(self, trace: TableTrace, ddr_budget_bytes: int, folder: str) -> None:
        self._trace = trace
        tables = [
            ours.table_of(int(rows), int(dim), bucket_rows=5000, number=t)
            for t, (rows, dim) in enumerate(zip(trace.distinct_T, trace.dims_T, strict=True))
        ]
        payload = int((trace.distinct_T * trace.dims_T * 4).sum())
        self._store = _store.ServingStore(
            tables=tables,
            ddr_budget_bytes=ddr_budget_bytes,
            ssd_budget_bytes=max(64 << 20, 4 * payload),
            ssd_directory=folder,
        )
        rng = np.random.default_rng(1)
        for t, table in enumerate(tables):
            keys_R = np.unique(trace.keys_NT[:, t]).view(np.uint64)
            buckets_R = buckets_of(keys_R, table.bucket_bits)
            for bucket in range(1 << table.bucket_bits):
                records = ours.records_of(rng, keys_R[buckets_R == bucket], int(trace.dims_T[t]))
                self._store.stage_records(1, t, bucket, records)
        self._store.commit(1)

    @property
    def index_bytes(self) -> int:
        """Bytes of its index."""
        return int(self._store.stats()["index_bytes"])

    def share(self, shares_T: NDArray[np.int64]) -> None:
        """Give the tables shares."""
        self._store.set_ddr_shares([(t, 0, int(size)) for t, size in enumerate(shares_T)])
        for _ in range(200):
            self._store.maintain()

    def ssd_reads(self, keys_NT: Keys) -> int:
        """Read keys in batches of samples; return how many rows came from the SSD.

        A key that a batch has several times is looked up once: its row comes to DDR between
        batches, and would count as often before.
        """
        before = self._store.stats()["hits"]["ssd"]
        for batch_NT in np.array_split(keys_NT, max(1, len(keys_NT) // _BATCH)):
            for t in range(keys_NT.shape[1]):
                self._store.lookup(t, np.unique(batch_NT[:, t]))
            self._store.maintain()
        return int(self._store.stats()["hits"]["ssd"] - before)

    @property
    def row_bytes(self) -> int:
        """Bytes of DDR that rows take now, waste of pages included."""
        return int(self._store.stats()["ddr_payload_bytes"])


class Replayed(NamedTuple):
    """Reads of a real store's SSD in the second half, and the bytes that its rows took."""

    clock: int
    clock_bytes: int
    shares: int
    predicted: int


def replayed(trace: TableTrace, room: float) -> Replayed:
    """Replay a trace on a real store: as it is by itself, then with shares of as many bytes."""
    with tempfile.TemporaryDirectory() as folder:
        # The index and 5 % that are kept ready; a store has no less than a MiB.
        budget = max(1 << 20, int(room * 1.05) + _Store(trace, 1 << 30, folder).index_bytes)
    with tempfile.TemporaryDirectory() as folder:
        store = _Store(trace, budget, folder)
        store.ssd_reads(trace.half(0))
        clock = store.ssd_reads(trace.half(1))
        taken = store.row_bytes
    # Rows of each size have a page that is not full.
    shares_T = shares_of(trace, taken - len(set(trace.dims_T)) * _PAGE_BYTES // 2)
    with tempfile.TemporaryDirectory() as folder:
        store = _Store(trace, budget, folder)
        store.share(shares_T)
        store.ssd_reads(trace.half(0))
        own = store.ssd_reads(trace.half(1))
    predicted = sum(
        _misses(
            trace.keys_NT[:, t],
            len(trace.half(1)),
            max(1, int(shares_T[t]) // (4 * int(trace.dims_T[t]))),
        )
        for t in range(len(trace.dims_T))
    )
    return Replayed(clock, taken, own, predicted)


def _traces(data: Path | None, clicks: Path | None) -> Iterator[list[TableTrace]]:
    """Yield the pieces of each trace; real ones only where their files are given."""
    if data is not None:
        yield [news(data, 80_000, piece) for piece in range(_PIECES)]
    if clicks is not None:
        yield [criteo(clicks, 20_000, turn) for turn in range(_PIECES)]
        yield [criteo(clicks, 20_000, turn, by_size=True) for turn in range(_PIECES)]
    yield [reuse(40_000, seed) for seed in range(_PIECES)]


def _by_clock(
    what: tuple[str, str, str], shares: Sequence[float], clock: Sequence[float]
) -> report.Row:
    return report.compare(
        what,
        shares,
        clock,
        peer_name="one clock for all tables",
        better="lower",
        target=_CLOCK,
        claim="19.5",
    )


def _rows_of(pieces: Sequence[TableTrace]) -> list[report.Row]:
    rooms = [_SHARE * float((each.distinct_T * each.dims_T * 4).sum()) for each in pieces]
    name, rows = pieces[0].name, []
    if len(set(pieces[0].dims_T)) == 1:
        scored = [
            simulated(trace, shares_of(trace, room), room)
            for trace, room in zip(pieces, rooms, strict=True)
        ]
        CONSOLE.print(f"{name}: simulated {scored}")
        rows += [
            report.compare(
                (name, "SSD reads by whole tables over the shares'", "x"),
                [float(each.by_size) for each in scored],
                [float(each.shares) for each in scored],
                peer_name="shares",
                better="higher",
                target=_BY_SIZE,
                claim="19.5",
            ),
            _by_clock(
                (name, "simulated SSD reads", "reads"),
                [float(each.shares) for each in scored],
                [float(each.clock) for each in scored],
            ),
            _by_clock(
                (name, "simulated SSD reads without first reads", "reads"),
                [float(each.shares - each.first_reads) for each in scored],
                [float(each.clock - each.first_reads) for each in scored],
            ),
        ]
    real = [replayed(trace, room) for trace, room in zip(pieces, rooms, strict=True)]
    CONSOLE.print(f"{name}: real store {real}")
    reads = [trace.half(1).size for trace in pieces]
    firsts = [first_reads(trace) for trace in pieces]
    rows += [
        _by_clock(
            (name, "SSD reads of a real store", "reads"),
            [float(each.shares) for each in real],
            [float(each.clock) for each in real],
        ),
        _by_clock(
            (name, "SSD reads of a real store without first reads", "reads"),
            [float(each.shares - first) for each, first in zip(real, firsts, strict=True)],
            [float(each.clock - first) for each, first in zip(real, firsts, strict=True)],
        ),
        report.measure(
            (name, "SSD reads of a real store, over those predicted, minus 1", "share"),
            [abs(each.shares / each.predicted - 1) for each in real],
            better="lower",
            target=_PREDICTED,
            claim="19.5",
        ),
        report.measure(
            (name, "hits of a real store, over those predicted, minus 1", "share"),
            [
                abs((count - each.shares) / (count - each.predicted) - 1)
                for each, count in zip(real, reads, strict=True)
            ],
            better="lower",
            target=_PREDICTED,
            claim="19.5",
        ),
    ]
    return rows


def measure(data: Path | None, clicks: Path | None) -> list[report.Row]:
    """Return the rows of the report.

    Args:
        data: The news file.
        clicks: Criteo's sample.
    """
    return [row for pieces in _traces(data, clicks) for row in _rows_of(pieces)]
