"""What parts of a training step take, and what comes now and then: reading, passes, versions."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from bench import report
from embertide.trainer.data.base import EventSource
from embertide.trainer.model.export import tensor_bytes
from embertide.trainer.model.learner import Learner

_REPETITIONS = 5
_STEPS = 4  # of a repetition, after which comes all else

_Call = Callable[..., Any]


def _noting(taken_ms: list[float], of: _Call) -> _Call:
    """Return a function that notes what each of its calls takes."""

    def call(*arguments: object, **options: object) -> object:
        began = time.perf_counter()
        result = of(*arguments, **options)
        taken_ms.append(1e3 * (time.perf_counter() - began))
        return result

    return call


def _take_version(learner: Learner) -> None:
    """Take what a version holds, as the trainer does before files are written."""
    for t, _, bucket in learner.rows.places():
        learner.rows.store.take_changes(t, bucket)
    tensor_bytes(learner.served)


def rows_of(
    learner: Learner, pruned: Learner, source: EventSource, *, batch_size: int
) -> Iterator[report.Row]:
    """Yield a row a stage, beside what a whole step takes; one thread.

    Args:
        learner: Takes the steps; its calls are noted from then on.
        pruned: Has passes of pruning behind it.
        source: The events.
        batch_size: Of a step.
    """
    torch.set_num_threads(1)
    prune = pruned.rows.prune
    assert prune is not None
    stages: dict[str, list[float]] = {}
    for name, owner, method in (
        ("lookup", learner.rows, "forward"),
        ("dense forward", learner.net, "forward"),
        ("dense Adam", learner.optimizer, "step"),
        ("rows' step", learner.rows, "step"),
    ):
        setattr(owner, method, _noting(stages.setdefault(name, []), getattr(owner, method)))
    step_ms: list[float] = []
    other: dict[str, list[float]] = {}
    learn = _noting(step_ms, learner.learn)
    read = _noting(
        other.setdefault("read and prepare, a batch", []),
        lambda: list(source.batches(batch_size=batch_size)),
    )
    prune_pass = _noting(other.setdefault("a pass of pruning", []), pruned.rows.store.prune)
    version = _noting(other.setdefault("what a version takes", []), _take_version)
    _take_version(learner)  # that has every row
    for n in range(_REPETITIONS):
        batches = read()
        for batch in batches[n * _STEPS : (n + 1) * _STEPS]:
            learn(batch)
        prune_pass(0, prune.row_bytes(0))
        version(learner)
    other["read and prepare, a batch"] = [
        each / len(batches) for each in other["read and prepare, a batch"]
    ]
    rest = np.array(step_ms) - np.sum(list(stages.values()), axis=0)
    stages["loss, backward and the rest"] = rest.tolist()
    for name, taken in {**stages, **other}.items():
        yield report.compare(
            (f"stage: {name}, {batch_size:,} samples", "time", "ms"),
            taken,
            [float(np.median(step_ms))] * len(taken),
            peer_name="a step",
            better="lower",
            target=0.0,
        )
