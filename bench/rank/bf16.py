"""The AUC that bf16 costs on Criteo's ads: each event scored in both ways before it is learned.

Shapes: B events of a batch, N of all.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench import report
from bench.criteo import criteo, schema
from embertide.trainer.config import Bf16Config, RunConfig
from embertide.trainer.data import open_events
from embertide.trainer.eval.metrics import auc
from embertide.trainer.model.learner import Learner

_CLAIM = "F.3"
_SEEDS = (1, 2, 3)
_LOSS = 0.0005
"""The AUC that may be lost."""


def rows(data: Path) -> Iterator[report.Row]:
    """Learn the file once for each seed; give the AUC that is lost, and how far scores differ."""
    found = [_lost(data, seed) for seed in _SEEDS]
    losses, errors = zip(*found, strict=True)
    yield from _rows(losses, errors)


def _rows(losses: Sequence[float], errors: Sequence[float]) -> Iterator[report.Row]:
    case, largest = f"Criteo, {len(losses)} seeds", Bf16Config().max_error
    yield report.measure(
        (case, "AUC lost in bf16", "AUC"), losses, better="lower", target=_LOSS, claim=_CLAIM
    )
    yield report.measure(
        (case, "AUC lost in bf16, of any seed", "AUC"),
        [max(losses)],
        better="lower",
        target=_LOSS,
        claim=_CLAIM,
    )
    yield report.measure(
        (case, "largest difference of a score", "score"),
        errors,
        better="lower",
        target=largest,
        claim=_CLAIM,
    )


def _lost(data: Path, seed: int) -> tuple[float, float]:
    run = RunConfig(model=criteo(), seed=seed)
    learner = Learner(run)
    events = open_events(str(data), schema=schema)
    labels, exact, bf16 = [], [], []
    for batch in learner.warm_up(events.batches(batch_size=run.batch_size, start=0)):
        scores_BH, bf16_BH = learner.score_precisions(batch)
        labels.append(batch.label_B)
        exact.append(scores_BH[:, 0])
        bf16.append(bf16_BH[:, 0])
        learner.learn(batch)
    label_N, exact_N, bf16_N = map(np.concatenate, (labels, exact, bf16))
    report.CONSOLE.print(f"seed {seed}: AUC {auc(label_N, exact_N):.5f} of {len(label_N)} events")
    loss = auc(label_N, exact_N) - auc(label_N, bf16_N)
    return loss, float(np.abs(exact_N - bf16_N).max())
