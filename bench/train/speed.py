"""How fast the trainer learns: the DLRM of Criteo's shape beside FBGEMM's TBE with torch.

The peer has TBE with exact row-wise Adagrad, fp32, over dense ids, and the very same dense net with
the same Adam; ours has hashed 64-bit keys, and keeps utilities. Both take the same batches, in
turns, each batch once in a side's turn; every row is there, in huge pages where the system gives
them. The pipeline reads a Parquet file that is written for it, and is compared with steps over the
batches that it gives.

The peer needs FBGEMM (`make build/.peers`). Nothing else should run meanwhile; about ten minutes.

Shapes: B samples, N samples of all batches, F features, L keys a feature, D dense columns, E all
embedding values of a sample.
"""

import copy
import dataclasses
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bench import keys, report
from bench.criteo import schema
from bench.report import CONSOLE
from bench.servers import BUILD
from bench.shapes import Shape
from bench.store import ours, peers
from embertide.trainer.config import OptimizerConfig, PruneConfig, RunConfig
from embertide.trainer.data import open_events
from embertide.trainer.data.ahead import read_ahead
from embertide.trainer.data.bags import Bags
from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.model.learner import Learner

_REPETITIONS = 5  # and one more, first, that does not count
_THREADS = (1, 2)
_DLRM = Shape(name="Criteo DLRM", rows=200_000)
_WIDE = Shape(name="wide", rows=200_000, dim=64, bag=20)
_RUN = RunConfig(
    model=_DLRM.config(),
    optimizer=OptimizerConfig(),
    ddr_budget_bytes=4 << 30,  # more than the rows of either shape take
)
# Samples of a batch and steps of a repetition, of FACTS' batches and of the default run.
_STEPS = {4096: 4, 1024: 12, 256: 40}
_WIDE_STEPS = {512: 4, 2048: 1}
# Two chunks of a file: the second is read while steps over the first are taken.
_FILE_EVENTS, _FILE_BATCH = 262_144, 4096
# To a tenth of all rows' bytes, which quality still bears; a repetition has a pass at least.
_PRUNE_SHARE, _PRUNE_BATCH, _PRUNE_EVERY = 10, 256, 200
_STEP_BAR, _SIDE_BAR, _WIDE_BAR, _PRUNE_BAR, _FILE_BAR = 0.97, 1.0, 1.2, 1 / 1.05, 0.9

_Side = Callable[[int], object]  # what a side does in a repetition


@dataclasses.dataclass(frozen=True, slots=True)
class _Both:
    """A batch for both sides: keys in it, or in bags, are hashed; TBE's ids are not."""

    batch: Batch
    bags_F: list[Bags]
    ids: Tensor  # features one after the other
    offsets: Tensor
    gradient_BE: Tensor  # where no net gives any


def _drawn(shape: Shape, samples: int, count: int) -> list[_Both]:
    """Return batches of Zipf keys; none repeats another."""
    ids_NFL, dense_ND = keys.draw(shape, samples * count)
    ends = np.arange(samples + 1, dtype=np.uint32) * np.uint32(shape.bag)
    offsets = torch.arange(samples * shape.tables + 1) * shape.bag
    drawn = []
    batches = ours.batches(ids_NFL, dense_ND, count)
    for ids_BFL, batch in zip(np.split(ids_NFL, count), batches, strict=True):
        ids_FN = np.ascontiguousarray(ids_BFL.transpose(1, 0, 2)).reshape(shape.tables, -1)
        bags_F = [Bags(ours.keys_of(ids_N), ends) for ids_N in ids_FN]
        ids = torch.from_numpy(ids_FN).reshape(-1)
        gradient_BE = torch.randn(samples, shape.tables * shape.dim) / samples
        drawn.append(_Both(batch, bags_F, ids, offsets, gradient_BE))
    return drawn


def _learner(run: RunConfig = _RUN) -> Learner:
    """Return a learner that has every row."""
    learner = Learner(run)
    ours.make_rows(learner.rows.store, _DLRM.tables, _DLRM.rows)
    return learner


def _tbe(shape: Shape) -> peers.TrainingTbe:
    rates = _RUN.optimizer.sparse_learning_rate, _RUN.optimizer.epsilon
    return peers.TrainingTbe(shape.tables, shape.rows, shape.dim, *rates)


class _Fbgemm:
    """The peer: TBE, and a learner's net and its optimizer once more."""

    name = "FBGEMM TBE + torch"

    def __init__(self, of: Learner) -> None:
        """Make tables of as many rows."""
        self.tbe = _tbe(_DLRM)
        self._net = copy.deepcopy(of.net)
        self._optimizer = torch.optim.Adam(self._net.parameters(), **of.optimizer.defaults)
        self._loss = nn.BCEWithLogitsLoss()

    def learn(self, both: _Both) -> NDArray[np.float32]:
        """Take a step as `Learner.learn` does."""
        self._optimizer.zero_grad()
        label_B = torch.from_numpy(both.batch.label_B)
        pooled_BE = self.tbe.forward(both.ids, both.offsets)
        logits_B: Tensor = self._net(torch.from_numpy(both.batch.dense_BD), pooled_BE)
        self._loss(logits_B, label_B).backward()
        self._optimizer.step()
        return torch.sigmoid(logits_B.detach()).numpy()


@dataclasses.dataclass(frozen=True, slots=True)
class _Comparison:
    """Two sides at the same work."""

    case: str
    events: int  # of a repetition
    peer_name: str
    bar: float  # 0: none

    def row(self, threads: int, mine: _Side, theirs: _Side) -> report.Row:
        """Let them take turns."""
        torch.set_num_threads(threads)
        rates: tuple[list[float], list[float]] = [], []
        for n in range(_REPETITIONS + 1):
            for side, measured in zip((mine, theirs), rates, strict=True):
                began = time.perf_counter()
                side(n)
                measured.append(self.events / (time.perf_counter() - began))
        name = f"{self.case}, {threads} thread{'s' * (threads > 1)}", "rate", "events/s"
        series = (measured[1:] for measured in rates)
        peer_name, bar = self.peer_name, self.bar
        return report.compare(name, *series, peer_name=peer_name, better="higher", target=bar)


def _each(drawn: Sequence[_Both], steps: int, step: Callable[[_Both], object]) -> _Side:
    """Return a side that takes so many steps a repetition, each with a batch of its own."""
    return lambda n: [step(both) for both in drawn[n * steps : (n + 1) * steps]]


def _learning(learner: Learner) -> Callable[[_Both], object]:
    return lambda both: learner.learn(both.batch)


def _looking_up(rows: EmbeddingStore) -> Callable[[_Both], object]:
    """Return the embedding side of a step of single keys."""

    def step(both: _Both) -> None:
        rows(both.batch.keys_BF).grad = both.gradient_BE
        rows.step()

    return step


def _pooling(rows: EmbeddingStore) -> Callable[[_Both], object]:
    """Return the embedding side of a step of bags."""

    def step(both: _Both) -> None:
        rows.pool(both.bags_F).grad = both.gradient_BE
        rows.step()

    return step


def _of_tbe(tbe: peers.TrainingTbe) -> Callable[[_Both], object]:
    """Return the embedding side of the peer's step."""

    def step(both: _Both) -> None:
        tbe.forward(both.ids, both.offsets)
        tbe.backward(both.gradient_BE)

    return step


def _steps(learner: Learner) -> Iterator[report.Row]:
    """Compare whole steps, and the embedding side alone."""
    peer = _Fbgemm(learner)
    for samples, steps in _STEPS.items():
        drawn = _drawn(_DLRM, samples, steps * (_REPETITIONS + 1))
        whole, theirs = (_each(drawn, steps, of) for of in (_learning(learner), peer.learn))
        events = samples * steps
        for threads in _THREADS:
            case = f"step, {samples:,} samples"
            yield _Comparison(case, events, peer.name, _STEP_BAR).row(threads, whole, theirs)
            sides = (
                _each(drawn, steps, of) for of in (_looking_up(learner.rows), _of_tbe(peer.tbe))
            )
            case = f"embedding side, {samples:,} samples"
            yield _Comparison(case, events, peer.tbe.name, _SIDE_BAR).row(threads, *sides)


def _wide() -> Iterator[report.Row]:
    """Compare the embedding side of long bags and wide rows."""
    budget = _RUN.ddr_budget_bytes
    rows = EmbeddingStore(_WIDE.config(), optimizer=_RUN.optimizer, ddr_budget_bytes=budget)
    ours.make_rows(rows.store, _WIDE.tables, _WIDE.rows)
    tbe = _tbe(_WIDE)
    for samples, steps in _WIDE_STEPS.items():
        drawn = _drawn(_WIDE, samples, steps * (_REPETITIONS + 1))
        case = (
            f"embedding side, 26 tables x {_WIDE.bag} keys x dim {_WIDE.dim}, {samples:,} samples"
        )
        for threads in _THREADS:
            sides = (_each(drawn, steps, of) for of in (_pooling(rows), _of_tbe(tbe)))
            yield _Comparison(case, samples * steps, tbe.name, _WIDE_BAR).row(threads, *sides)


def _pruned(learner: Learner, pruned: Learner) -> report.Row:
    """Compare steps, with their passes of pruning, with those of a learner that prunes nothing."""
    drawn = _drawn(_DLRM, _PRUNE_BATCH, _PRUNE_EVERY * (_REPETITIONS + 1))
    sides = (_each(drawn, _PRUNE_EVERY, _learning(of)) for of in (pruned, learner))
    case = f"pruned to 1/{_PRUNE_SHARE}, {_PRUNE_BATCH} samples"
    comparison = _Comparison(case, _PRUNE_BATCH * _PRUNE_EVERY, "not pruned", _PRUNE_BAR)
    row = comparison.row(1, *sides)
    CONSOLE.print(f"{pruned.rows.passes} passes: {pruned.rows.pruning()}")
    return row


def _write_file(path: Path) -> None:
    """Write events with the columns of Criteo's ads."""
    ids_NFL, dense_ND = keys.draw(_DLRM, _FILE_EVENTS)
    columns = dict(zip(schema.dense, (dense_ND * 100).astype(np.int32).T, strict=True))
    columns |= {
        feature.column: ours.keys_of(ids_NFL[:, f, 0]) for f, feature in enumerate(schema.features)
    }
    columns[str(schema.label)] = (np.random.default_rng(2).random(_FILE_EVENTS) < 0.25).astype(
        np.int32
    )
    pq.write_table(pa.table(columns), path)


def _pipeline(learner: Learner, source: EventSource) -> report.Row:
    """Compare a run over a file with bare steps over its batches.

    A run reads, prepares, learns and keeps the prequential figures: what `Trainer.fit` does between
    two versions.
    """
    ready = list(source.batches(batch_size=_FILE_BATCH))

    def whole(_: int) -> None:
        prequential = Prequential()
        unread = source.batches(batch_size=_FILE_BATCH)
        with read_ahead(unread, _RUN.ahead_bytes) as batches:
            for batch in batches:
                prequential.add(batch.ts_ms_B, batch.label_B, learner.learn(batch))

    def bare(_: int) -> None:
        for batch in ready:
            learner.learn(batch)

    case = f"from Parquet, {_FILE_BATCH:,} samples"
    return _Comparison(case, _FILE_EVENTS, "the bare step", _FILE_BAR).row(1, whole, bare)


def run(_: int | None) -> list[report.Row]:
    """Return the rows of the report."""
    learner = _learner()
    rows = list(_steps(learner))
    gc.collect()
    payload = learner.rows.stats()["ddr_payload_bytes"]
    prune = PruneConfig(bytes=payload // _PRUNE_SHARE, every=_PRUNE_EVERY)
    pruned = _learner(dataclasses.replace(_RUN, prune=prune))
    rows.append(_pruned(learner, pruned))
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        path = Path(folder) / "events.parquet"
        _write_file(path)
        source = open_events(str(path), schema=schema)
        rows.append(_pipeline(learner, source))
    del learner, pruned
    gc.collect()
    rows += _wide()
    return rows
