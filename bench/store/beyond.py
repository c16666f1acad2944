"""Training with more rows than memory has room for: a quarter of them in DDR against all of them.

A DLRM of Criteo's shape, 26 tables of 200,000 rows of 16 floats, batches of 4,096 events, Zipf keys
of exponents from 1.05 to 1.2. Both learners take the same batches in turns, each batch once; their
first steps, in which the frequent rows come to DDR, do not count. Rows are read ahead of the step,
as the trainer does it. The budget holds the index of all rows, and a quarter of the rows.

Rows of uniform keys, which lie on the SSD for the most part, show what the drive gives: brought to
DDR for a step, against read by a lookup.

Nothing else should run meanwhile; about five minutes.

Shapes: B samples, N keys.
"""

import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bench import keys, report
from bench.report import CONSOLE
from bench.servers import BUILD
from bench.shapes import Shape
from bench.store import ours
from embertide.trainer.config import OptimizerConfig, RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.model.learner import Learner, Prepared

_FOLDER = BUILD / "bench" / "beyond"
_SHAPE = Shape(name="Criteo DLRM", rows=200_000)
_BATCH, _WARM_STEPS, _STEPS, _REPETITIONS = 4096, 100, 10, 7
_SHARE = 0.25
_ENTRY_BYTES = 24.5  # an index entry, as full as tables of this size are
_ROW_BYTES = 4 * _SHAPE.dim + 12 + 4  # payload, what training keeps, rounded to a slot
_ROOM = 1.04  # of the rows' bytes: what is kept free ahead of need
_SPARE_BYTES = 6 << 20
_BAR = 0.5
_UNIFORM_KEYS = 8192


def _learner(*, quarter: bool) -> Learner:
    rows = _SHAPE.tables * _SHAPE.rows
    ddr = int(rows * (_ENTRY_BYTES + _SHARE * _ROW_BYTES * _ROOM)) + _SPARE_BYTES
    run = RunConfig(
        model=_SHAPE.config(),
        optimizer=OptimizerConfig(),
        threads=2,
        ddr_budget_bytes=ddr if quarter else 4 << 30,
        ssd_budget_bytes=3 * rows * _ROW_BYTES if quarter else 0,
        ssd_directory=str(_FOLDER) if quarter else "",
    )
    learner = Learner(run)
    ours.make_rows(learner.rows.store, _SHAPE.tables, _SHAPE.rows)
    return learner


class _Ahead:
    """A learner that prepares a batch while it learns the one before, as `Trainer` does."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._pool = ThreadPoolExecutor(1)

    def learn(self, batches: list[Batch]) -> None:
        prepared = self._pool.submit(self._learner.prepare, batches[0])
        for following in [*batches[1:], None]:
            ready: Prepared = prepared.result()
            if following is not None:
                prepared = self._pool.submit(self._learner.prepare, following)
            self._learner.learn(ready)


def _steps(all_rows: Learner, quarter: Learner) -> Iterator[report.Row]:
    count = _WARM_STEPS + _STEPS * _REPETITIONS
    batches = ours.batches(*keys.draw(_SHAPE, _BATCH * count), count)
    sides = _Ahead(all_rows), _Ahead(quarter)
    warm = [next(batches) for _ in range(_WARM_STEPS)]
    for side in sides:
        side.learn(warm)
    store = quarter.rows.store
    rates: tuple[list[float], list[float]] = [], []
    missed: list[float] = []
    for _ in range(_REPETITIONS):
        turn = [next(batches) for _ in range(_STEPS)]
        before = store.stats()["promotions"]
        for side, measured in zip(sides, rates, strict=True):
            seconds = report.seconds(partial(side.learn, turn))
            measured.append(_BATCH * _STEPS / seconds)
        missed.append((store.stats()["promotions"] - before) / _STEPS)
    case = f"DLRM, {_BATCH:,} events a step, a quarter of 5.2 M rows in DDR"
    yield report.compare(
        (case, "rate", "events/s"),
        rates[1],
        rates[0],
        peer_name="all rows in DDR",
        better="higher",
        target=_BAR,
        claim="20.8",
    )
    yield report.measure(
        (case, "rows read from the SSD", "a step"), missed, better="lower", target=0
    )
    store.check_integrity()


def _uniform(quarter: Learner) -> Iterator[report.Row]:
    rng = np.random.default_rng(5)
    store = quarter.rows.store
    brought: list[float] = []
    looked_up: list[float] = []

    def bring(keys_N: NDArray[np.int64]) -> None:
        store.bring_rows([(0, keys_N)])

    def look_up(keys_N: NDArray[np.int64]) -> None:
        store.lookup(1, keys_N)

    for _ in range(_REPETITIONS):
        for measured, use in ((brought, bring), (looked_up, look_up)):
            keys_N = ours.keys_of(rng.choice(_SHAPE.rows, _UNIFORM_KEYS, replace=False))
            before = store.stats()["ssd"]["blocks_read"]
            seconds = report.seconds(partial(use, keys_N))
            measured.append((store.stats()["ssd"]["blocks_read"] - before) / seconds)
        store.maintain()
    yield report.compare(
        (f"{_UNIFORM_KEYS:,} uniform keys", "blocks read", "blocks/s"),
        brought,
        looked_up,
        peer_name="a lookup",
        better="higher",
        target=0.0,
    )


def run() -> Iterator[report.Row]:
    """Yield the rows of the report."""
    torch.set_num_threads(2)
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _FOLDER.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, _FOLDER, ignore_errors=True)
        CONSOLE.print(f"[dim]{_SHAPE.tables * _SHAPE.rows:,} rows, twice")
        quarter = _learner(quarter=True)
        yield from _uniform(quarter)
        yield from _steps(_learner(quarter=False), quarter)
