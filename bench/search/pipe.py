"""A window of batches whose rows are held, over an SSD: a tenth of the rows in DDR against all.

A DLRM of Criteo's shape, 26 tables of rows of 16 floats, batches of 4,096 events, Zipf keys of
exponents from 1.05 to 1.2. Three learners take the same batches in turns: all rows in DDR; a tenth
of them there and the next batch brought (today's policy); the same with a window that chooses its
length. Their first steps, in which frequent rows come to DDR, do not count. Each turn begins with
an empty window, whose first batch nothing hides.

The drive's bound is the time that it takes for as many blocks as a step reads, or a step with all
rows in DDR, where that is longer. It is measured after each turn: two readers look rows up in a
store of its own, of which a tenth of the rows is in DDR and which never changes, by the engine that
steps read by, and nothing else works. The quickest of some rounds counts. What a step writes is
left out, so no step can be quicker than the bound.

Nothing else should run meanwhile; about ten minutes. `--rows 20000 --steps 3` only tries it.

Shapes: B samples, N keys.
"""

import contextlib
import dataclasses
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

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
from embertide.trainer.model.export import tensor_bytes
from embertide.trainer.model.learner import Learner
from embertide.trainer.run.window import Window

_FOLDER = BUILD / "bench" / "pipe"
BATCH = 4096
_REPETITIONS = 5
_WARM = 3  # turns that do not count
_SHARE = 0.1
_ENTRY_BYTES = 24.5  # an index entry, as full as tables of this size are
_SPARE_BYTES = 8 << 20  # directories, notes of rows that are held, what is kept free ahead of need
_UNIFORM_KEYS = 8192  # of a lookup: as many rows as are brought at once, at most
_READERS, _ROUNDS = 2, 5  # one reader's last blocks leave the drive room for another's
_STEP_BAR, _DRIVE_BAR = 1.1, 0.9


class Side:
    """A learner of batches, and the window that it takes them through."""

    def __init__(self, run: RunConfig, shape: Shape) -> None:
        """Make all rows."""
        self.learner = Learner(run)
        ours.make_rows(self.learner.rows.store, shape.tables, shape.rows)
        self.window = Window(self.learner, run)
        self.scores = list[NDArray[np.float32]]()
        self.learned_s = list[float]()
        self._in_ddr = run.ssd_budget_bytes == 0

    def learn(self, batches: Iterable[Batch]) -> None:
        """Learn batches as a run does between two versions.

        `scores` and `learned_s`, the times when they were learned, are those of the last call.
        """
        self.scores.clear()
        self.learned_s.clear()
        for batch in batches:
            if self._in_ddr:
                self._add(self.learner.learn(batch))
                continue
            self.window.enter(batch, batch, None, self._learn_next)
        while self.learn_meanwhile():
            pass

    def learn_meanwhile(self) -> bool:
        """Learn the oldest batch that waits; false: none does."""
        if len(self.window) == 0:
            return False
        self._learn_next()
        return True

    def _learn_next(self, on_rows_ready: Any = lambda: None) -> None:
        oldest = self.window.take()
        ready = oldest.ready.result()
        assert ready is not None
        self._add(self.learner.learn(ready, on_rows_ready))
        self.window.done(oldest)

    def _add(self, scores: NDArray[np.float32]) -> None:
        self.scores.append(scores)
        self.learned_s.append(time.monotonic())

    def blocks_read(self) -> int:
        """Return how many blocks were read from its SSD."""
        return int(self.learner.rows.stats()["ssd"]["blocks_read"])


class _Drive:
    """The rate of the drive when it is asked for many blocks at once and nothing else works."""

    def __init__(self, side: Side, shape: Shape) -> None:
        self._side, self._shape = side, shape
        self._rng = np.random.default_rng(5)

    def blocks_per_s(self) -> float:
        """Return the rate of the quickest of some rounds of lookups of uniform keys."""
        with ThreadPoolExecutor(_READERS) as pool:
            return max(self._round(pool) for _ in range(_ROUNDS))

    def _round(self, pool: ThreadPoolExecutor) -> float:
        rows = self._shape.rows
        tables = self._rng.choice(self._shape.tables, _READERS, replace=False).tolist()
        asked = [
            (table, ours.keys_of(self._rng.choice(rows, min(_UNIFORM_KEYS, rows), replace=False)))
            for table in tables
        ]
        before, began_s = self._side.blocks_read(), time.perf_counter()
        for done in [pool.submit(self._side.learner.rows.store.lookup, *each) for each in asked]:
            done.result()
        return (self._side.blocks_read() - before) / (time.perf_counter() - began_s)


def sides_of(shape: Shape) -> tuple[dict[str, Side], _Drive]:
    """Return the learners, and the drive; `folder` is to be there."""
    rows = shape.tables * shape.rows
    row_bytes = 4 * shape.dim + 12 + 4  # payload, what training keeps, rounded to a slot
    in_ddr = RunConfig(
        model=shape.config(), optimizer=OptimizerConfig(), threads=2, ddr_budget_bytes=4 << 30
    )
    tenth = dataclasses.replace(
        in_ddr,
        batch_size=BATCH,
        ddr_budget_bytes=int(rows * (_ENTRY_BYTES + _SHARE * row_bytes)) + _SPARE_BYTES,
        ssd_budget_bytes=max(3 * rows * row_bytes, 32 << 20),
    )
    held = dataclasses.replace(tenth, hold_bytes=tenth.ddr_budget_bytes // 2)
    found = {}
    for name, run in (("DDR", in_ddr), ("today", tenth), ("window", held), ("drive", tenth)):
        directory = str(_FOLDER / name) if run.ssd_budget_bytes else ""
        found[name] = Side(dataclasses.replace(run, ssd_directory=directory), shape)
    return found, _Drive(found.pop("drive"), shape)


def _steps(sides: dict[str, Side], drive: _Drive, shape: Shape, steps: int) -> Iterator[report.Row]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    blocks, rates = list[float](), list[float]()
    equal = list[float]()
    turns = _WARM + _REPETITIONS
    count = turns * steps
    batches = list(ours.batches(*keys.draw(shape, BATCH * count), count))
    for n in range(turns):
        turn = batches[n * steps : (n + 1) * steps]
        before = sides["window"].blocks_read()
        took = {name: report.seconds(partial(side.learn, turn)) for name, side in sides.items()}
        first, *others = [
            [each.tobytes() for each in side.scores] + [tensor_bytes(side.learner.net)]
            for side in sides.values()
        ]
        equal.append(float(all(first == each for each in others)))
        CONSOLE.print(f"turn {n}: {took}, {sides['window'].window.figures()}")
        if n < _WARM:
            continue
        blocks.append((sides["window"].blocks_read() - before) / steps)
        for name, seconds in took.items():
            times[name].append(1e3 * seconds / steps)
        rates.append(drive.blocks_per_s())
    drive_ms = [1e3 * count / rate for count, rate in zip(blocks, rates, strict=True)]
    suffices = statistics.median(drive_ms) <= statistics.median(times["DDR"])
    case = f"DLRM, {BATCH:,} events a step, a tenth of {shape.tables * shape.rows:,} rows in DDR"
    yield report.compare(
        (case, "step with a window", "ms"),
        times["window"],
        times["DDR"],
        peer_name="all rows in DDR",
        better="lower",
        target=_STEP_BAR if suffices else 0,
        claim="E.1" if suffices else "",
    )
    yield report.compare(
        (case, "step with today's policy", "ms"),
        times["today"],
        times["DDR"],
        peer_name="all rows in DDR",
        better="lower",
        target=0,
    )
    bounds = [max(*each) for each in zip(drive_ms, times["DDR"], strict=True)]
    yield report.measure(
        (case, "the drive's bound / step with a window", "share"),
        [bound / step for bound, step in zip(bounds, times["window"], strict=True)],
        better="higher",
        target=0 if suffices else _DRIVE_BAR,
        claim="" if suffices else "E.1",
    )
    yield report.measure(
        (case, "scores and nets equal to those of DDR, bit for bit", "share"),
        [min(equal)],
        better="higher",
        target=1,
        claim="E.1",
    )
    yield from _figures(case, sides["window"])
    for metric, unit, values in (
        ("blocks read a step", "blocks", blocks),
        ("blocks that the drive gives", "blocks/s", rates),
    ):
        yield report.measure((case, metric, unit), values, better="lower", target=0)
    for side in sides.values():
        side.learner.rows.store.check_integrity()


def _figures(case: str, side: Side) -> Iterator[report.Row]:
    found = side.window.figures()
    looked_up = found["hits"] + found["misses"]
    yield report.measure(
        (case, "lookups of the train stage that found their row in DDR", "share"),
        [found["hits"] / looked_up],
        better="higher",
        target=1,
        claim="E.1",
    )
    yield report.measure(
        (case, "bytes held at most / bytes that may be", "share"),
        [found["most_held_bytes"] / found["bound_bytes"]],
        better="lower",
        target=1,
        claim="E.1",
    )
    for metric, unit, value in (
        ("length of the window", "batches", found["length"]),
        ("batches learned without", "batches", found["unheld"]),
        ("delay of a batch whose rows are there", "ms", found["delay_ms"]),
        ("the longest such delay", "ms", found["most_delay_ms"]),
    ):
        yield report.measure((case, metric, unit), [value], better="lower", target=0)


@contextlib.contextmanager
def folder() -> Iterator[None]:
    """Give the sides' SSDs an empty folder, and take it away."""
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _FOLDER.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(_FOLDER, ignore_errors=True)


def run(given: Any) -> Iterator[report.Row]:
    """Yield the rows of the report."""
    torch.set_num_threads(2)
    shape = Shape(name="Criteo DLRM", rows=given.rows)
    with folder():
        CONSOLE.print(f"[dim]{shape.tables * shape.rows:,} rows, four times")
        yield from _steps(*sides_of(shape), shape, given.steps)
