"""What transforms of dense features are worth: `python -m bench.train.dense --data criteo.parquet`.

The reference DLRM learns the first four fifths of a file of Criteo's columns once, and then scores
the last fifth. One run after the other; a line a case, of the mean and the standard error.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.train.runs import mean_and_error
from embertide.trainer.config import DenseConfig, DenseStep, RunConfig
from embertide.trainer.data import open_events
from embertide.trainer.data.base import EventSource
from embertide.trainer.eval.metrics import Summary, summarise
from embertide.trainer.learner import Learner
from embertide.trainer.presets import criteo

_BATCH = 64
_CASES: dict[str, tuple[DenseStep, ...]] = {
    "none": (),
    "log1p": ("log1p",),
    "clip, standardise": ("clip", "standardise"),
    "log1p, clip, standardise": ("log1p", "clip", "standardise"),
    "quantile": ("quantile",),
    "bucketise": ("bucketise",),
}


def _run(source: EventSource, steps: tuple[DenseStep, ...], seed: int, missing: bool) -> Summary:
    """Learn, and score what was not learned."""
    base = criteo()
    dense = tuple(
        DenseConfig(name=feature.name, steps=steps, missing=missing) for feature in base.dense
    )
    model = dataclasses.replace(base, dense=dense)
    learner = Learner(RunConfig(model=model, seed=seed, batch_size=_BATCH, warmup_events=10_000))
    total = source.total_events() or 0
    labels, scores = [], []
    for batch in learner.warm_up(iter(source.batches(batch_size=_BATCH))):
        if batch.first < total * 4 // 5:
            learner.learn(batch)
        else:
            labels.append(batch.label_B)
            scores.append(learner.score(batch))
    return summarise(np.concatenate(labels), np.concatenate(scores))


def _lines(source: EventSource, seeds: int) -> Iterator[tuple[str, str, str]]:
    for name, steps in _CASES.items():
        for missing in (False, True):
            found = [_run(source, steps, seed, missing) for seed in range(1, seeds + 1)]
            figures = ([each.auc for each in found], [each.log_loss for each in found])
            auc, loss = (f"{m:.4f} ± {e:.4f}" for m, e in map(mean_and_error, figures))
            yield name + (", and missing" if missing else ""), auc, loss


def main() -> None:
    """Print the table; some ten seconds a run."""
    parser = argparse.ArgumentParser(prog="bench.train.dense", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="PATH")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    arguments = parser.parse_args()
    table = Table("steps", "AUC", "log loss")
    console = Console()
    for line in _lines(open_events(str(arguments.data)), arguments.seeds):
        console.print(*line, sep=" | ")
        table.add_row(*line)
    console.print(table)


if __name__ == "__main__":
    main()
