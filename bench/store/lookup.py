"""Pooled lookups: ours by hashed 64-bit keys through a pinned view, TBE by dense ids.

Ten million rows that fit no cache, in huge pages on all sides. Batches of 200,000 keys that no
repetition shares; the sides take turns. The random-line limit of the machine is measured in turn
with them. Shapes: N keys, B bags.

Cases, each a store of its own: `dense` (fp32 rows of each size), `lean` (the same, by an index of
lean entries), `fp32` (the same, added in fp32), `fp16` (fp16 rows of 16 values), `int8` and `int4`
(rows of these, against TBE's of fp32), `half` (half of the chunks dead), `pruned` (against FBGEMM's
hash map of pruned rows).
"""

import ctypes
import dataclasses
import gc
import itertools
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench import costs, report
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError
from bench.store import ours, peers
from embertide import _store

ROWS = 10_000_000
DIMS = (16, 64, 128)
BAGS = (1, 10, 50)
EXPONENTS = (0.0, 0.8, 1.05, 1.2)
THREADS = (1, 2)
KEYS = 200_000
_REPETITIONS = 7  # and one more, first, that does not count
CASES = ("dense", "lean", "fp32", "fp16", "int8", "int4", "half", "pruned")
# Of FBGEMM TBE's rate, by vectors and dim.
_BARS = {"avx2": {16: 0.52, 64: 0.80, 128: 1.05}, "avx512": {16: 0.60, 64: 0.90, 128: 1.2}}
_MORE_BY_FP32_SUMS = 0.05
_FP16_BAR = 0.85
_HALF_DEAD_BARS = {64: 1.0, 128: 1.2}
_PRUNED_HASH_BAR = 2.0
_CLAIM = "23.1"
_LINE = 64
_AHEAD = 32

Measure = Callable[[], object]


class RandomLines:
    """Reads single lines of a region as large as the rows, at random."""

    def __init__(self, region: int) -> None:
        """Compile the loop and take the memory."""
        source = Path(__file__).parent / "random_lines.cc"
        library = BUILD / "bench" / "librandom_lines.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        command = ["g++", "-O2", "-shared", "-fPIC", "-std=c++20", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchError(f"{source} does not compile:\n{done.stderr}")
        self._read = ctypes.CDLL(str(library)).ReadLines
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
        self._memory = torch.ones(region // 4)
        peers.use_huge_pages(self._memory)
        self.count = region // _LINE

    def read(self, lines_N: NDArray[np.uint64]) -> None:
        """Read the lines with these numbers."""
        self._read(self._memory.data_ptr(), lines_N.ctypes.data, len(lines_N), _AHEAD)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    dim: int
    bag: int
    exponent: float
    threads: int
    rows: str = ""  # what is special of them

    def __str__(self) -> str:
        """Name it in the report."""
        spread = f"Zipf {self.exponent:g}" if self.exponent else "uniform"
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"dim {self.dim}{self.rows}, bags of {self.bag}, {spread}, {threads}"


class Ours:
    """A store, asked by one thread or by two that share a batch's bags out."""

    def __init__(self, store: _store.Store) -> None:
        """Keep two threads for it."""
        self._store = store
        self._pool = ThreadPoolExecutor(max(THREADS))

    def _lookup(self, keys_N: NDArray[np.int64], offsets_B: NDArray[np.uint32]) -> None:
        self._store.lookup(0, keys_N, pooling="sum", offsets=offsets_B)

    def lookup(self, keys_N: NDArray[np.int64], bag: int, threads: int) -> Measure:
        """Return the pooled lookup of a batch."""
        bags = np.arange(len(keys_N) // bag + 1, dtype=np.uint32) * np.uint32(bag)
        parts = np.array_split(np.arange(len(bags) - 1), threads)
        work = [
            (
                keys_N[bags[part[0]] : bags[part[-1] + 1]],
                bags[part[0] : part[-1] + 2] - bags[part[0]],
            )
            for part in parts
        ]
        if threads == 1:
            return lambda: self._lookup(*work[0])
        return lambda: list(self._pool.map(lambda part: self._lookup(*part), work))


def turns(sides: Sequence[Sequence[Measure]]) -> list[list[float]]:
    """Time each side's repetitions in turn; the first does not count."""
    times: list[list[float]] = [[] for _ in sides]
    for repetition in zip(*sides, strict=True):
        for each, run in zip(times, repetition, strict=True):
            each.append(report.seconds(run))
    return [each[1:] for each in times]


def _rates(times: Sequence[float]) -> list[float]:
    return [KEYS / seconds / 1e6 for seconds in times]


def _row(case: Case, times: Sequence[float], peer: Sequence[float], name: str) -> report.Row:
    return report.compare(
        (str(case), "pooled lookup", "M rows/s"),
        _rates(times),
        _rates(peer),
        peer_name=name,
        better="higher",
        target=0.0,  # single cases have no bar; their geometric mean has
    )


def _cases(dim: int, rows: str = "") -> Iterator[Case]:
    for exponent, threads, bag in itertools.product(EXPONENTS, THREADS, BAGS):
        yield Case(dim, bag, exponent, threads, rows)


def _batches(rng: np.random.Generator, rows: int) -> dict[float, list[NDArray[np.int64]]]:
    count = _REPETITIONS + 1
    return {each: ours.draw(rng, rows, each, count, KEYS) for each in EXPONENTS}


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """The peculiarities of a store's rows, and what TBE's fp32 rows need for a comparison."""

    special: str
    bar: float
    dtype: str = "fp32"
    sums: str = "fp64"
    live_chunks: int = ours.CHUNKS
    index: str = "plain"


def _kinds(level: str, case: str, dim: int) -> Iterator[Kind]:
    """Yield the kind that a case has at a dim, if any."""
    bar = _BARS[level].get(dim, 0.0)
    half = ours.CHUNKS // 2
    if case == "dense":
        yield Kind("", bar)
    elif case == "fp32":
        yield Kind(", fp32 sums", round(bar + _MORE_BY_FP32_SUMS, 2), sums="fp32")
    elif case == "lean":
        yield Kind(", lean index", 0.0, index="lean")
    elif case == "fp16" and dim == min(DIMS):
        yield Kind(", fp16 rows", _FP16_BAR, dtype="fp16")
    elif case in ("int8", "int4"):
        yield Kind(f", {case} rows", 0.0, dtype=case)
    elif case == "half" and dim in _HALF_DEAD_BARS:
        special = f", {half} of {ours.CHUNKS} chunks live"
        yield Kind(special, _HALF_DEAD_BARS[dim], live_chunks=half)


def _against_dense(dim: int, rows: int, kind: Kind) -> Iterator[report.Row]:
    """Yield rows against TBE and the random-line limit."""
    special = kind.special
    options = {"sums": kind.sums, "index": kind.index}
    side = Ours(ours.fill(rows, dim, kind.dtype, live_chunks=kind.live_chunks, **options))
    tbe = peers.Tbe(rows, dim)
    lines = RandomLines(min(rows * dim * 4, 1 << 30))
    rng = np.random.default_rng(2)
    batches = _batches(rng, rows)
    for case in _cases(dim, special):
        torch.set_num_threads(case.threads)
        drawn = batches[case.exponent]
        offsets = torch.arange(0, KEYS + 1, case.bag)
        ids = [torch.from_numpy(each) for each in drawn]
        places = [rng.integers(0, lines.count, KEYS).astype(np.uint64) for _ in drawn]
        ours_s, tbe_s, line_s = turns(
            [
                [side.lookup(ours.keys_of(each), case.bag, case.threads) for each in drawn],
                [partial(tbe.lookup, each, offsets) for each in ids],
                [partial(lines.read, each) for each in places],
            ]
        )
        yield _row(case, ours_s, tbe_s, tbe.name)
        if case.exponent == 0 and case.threads == 1:
            yield _share_of_limit(case, ours_s, line_s, kind)


def _share_of_limit(
    case: Case, ours_s: Sequence[float], line_s: Sequence[float], kind: Kind
) -> report.Row:
    """Return our lines/s over the lines/s that one core reads at random.

    A uniform lookup touches the row's lines and one of the index; further groups of the index are
    not counted, so the share is a little more than stated.
    """
    row_lines = -(-ours.payload_bytes(case.dim, kind.dtype, kind.live_chunks) // _LINE)
    touched = 1 + row_lines
    return report.compare(
        (f"{case}: {touched} lines a row", "lines/s of the random-line limit", "M lines/s"),
        [touched * rate for rate in _rates(ours_s)],
        _rates(line_s),
        peer_name="single lines at random",
        better="higher",
        target=0.8,
    )


def _against_pruned_hash(dim: int, rows: int) -> Iterator[report.Row]:
    side = Ours(ours.fill(rows, dim))
    peer = peers.PrunedHash(rows, dim)
    batches = _batches(np.random.default_rng(3), rows)
    for case in _cases(dim):
        torch.set_num_threads(case.threads)
        drawn = batches[case.exponent]
        offsets = torch.arange(0, KEYS + 1, case.bag, dtype=torch.int32)
        ids = [peer.ids(each) for each in drawn]
        ours_s, peer_s = turns(
            [
                [side.lookup(ours.keys_of(each), case.bag, case.threads) for each in drawn],
                [partial(peer.lookup, each, offsets) for each in ids],
            ]
        )
        yield _row(case, ours_s, peer_s, peer.name)


def _mean(name: str, rows: Sequence[report.Row], target: float, claim: str) -> report.Row:
    """Return the geometric mean of the rows' ratios, which is what the bars are for."""
    return report.Row(
        case=name,
        metric="geometric mean of the ratios",
        unit="M rows/s",
        ours=round(statistics.geometric_mean(row.ours for row in rows), 3),
        peer=round(statistics.geometric_mean(row.peer for row in rows), 3),
        peer_name=rows[0].peer_name,
        ratio=round(statistics.geometric_mean(row.ratio for row in rows), 4),
        better="higher",
        n=rows[0].n,
        spread=max(row.spread for row in rows),
        target=target,
        claim=claim,
    )


def _means(
    rows: Sequence[report.Row], dim: int, special: str, target: float, claim: str = ""
) -> Iterator[report.Row]:
    """Yield the mean over all, which has the bar, and over each bag size and number of threads."""
    yield _mean(f"dim {dim}{special}", rows, target, claim)
    for threads, bag in itertools.product(THREADS, BAGS):
        cases = {str(Case(dim, bag, each, threads, special)) for each in EXPONENTS}
        chosen = [row for row in rows if row.case in cases]
        where = f"dim {dim}{special}, bags of {bag}, {threads} thread{'s' * (threads > 1)}"
        yield _mean(where, chosen, 0.0, "")


def measure(
    level: str, cases: Sequence[str], *, rows: int = ROWS, dims: Sequence[int] = DIMS
) -> Iterator[report.Row]:
    """Yield the rows of cases by the vectors of this process, means behind what they are of."""
    for dim, name in itertools.product(dims, cases):
        for kind in _kinds(level, name, dim):
            CONSOLE.print(f"pooled lookup, {level}, dim {dim}{kind.special}: {rows:,} rows")
            dense = list(_against_dense(dim, rows, kind))
            yield from dense
            if name == "dense":
                usual = next(row for row in dense if row.case == str(Case(dim, 10, 0.0, 1)))
                costs.note("ddr_us", row_bytes=4 * dim, us=1 / usual.ours, by="make bench-store")
            of_tbe = [row for row in dense if row.peer_name == peers.Tbe.name]
            yield from _means(of_tbe, dim, kind.special, kind.bar, _CLAIM)
            gc.collect()
        if name == "pruned":
            CONSOLE.print(f"pooled lookup, {level}, dim {dim}, pruned: {rows:,} rows")
            pruned = list(_against_pruned_hash(dim, rows))
            yield from pruned
            yield from _means(pruned, dim, "", _PRUNED_HASH_BAR)
            gc.collect()
