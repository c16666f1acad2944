"""The smallest share of bytes whose loss of AUC is within a bound, by trials over a window.

A trial learns the window once, each batch scored before it is learned, and counts the AUC of the
second half of the events: in the first the rows are being made. A pruned trial is compared with the
unpruned one of the same seed, so that what the seed does to both does not count.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import PruneConfig, RunConfig
from embertide.trainer.data.base import EventSource
from embertide.trainer.data.history import with_columns
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.learned import learned
from embertide.trainer.eval.metrics import auc
from embertide.trainer.model.learner import Learner

# Neighbours among the ratios that are tried are so far apart, at most.
APART = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """The result of a ratio.

    Attributes:
        ratio: So many times fewer bytes than those of all keys' rows.
        loss: Loss of AUC against the unpruned model, the mean over the seeds.
        error: Its standard error.
        rows: At the end, the most of any seed.
        within: Whether loss and error together are within the bound.
    """

    ratio: float
    loss: float
    error: float
    rows: int
    within: bool


def pruned_at(run: RunConfig, ratio: float) -> RunConfig:
    """Return the run with that target; a ratio of 1 prunes nothing."""
    if ratio == 1:
        return dataclasses.replace(run, prune=None)
    prune = run.prune or PruneConfig(ratio=ratio)
    return dataclasses.replace(
        run, prune=dataclasses.replace(prune, bytes=0, ratio=ratio, within=0)
    )


def measure(run: RunConfig, source: EventSource) -> dict[str, Any]:
    """Learn all events and return the AUC of the second half, and the rows at the end.

    Raises:
        ConfigurationError: The second half has events of one label alone.
        DataError: As the source.
    """
    source = with_columns(source, run.model)
    learner = Learner(run)
    label_B, score_B = list[NDArray[np.float32]](), list[NDArray[np.float32]]()
    for part, scores in learned(learner, source):
        label_B.append(part.label_B)
        score_B.append(scores)
    labels = np.concatenate(label_B)
    half = len(labels) // 2
    found = auc(labels[half:], np.concatenate(score_B)[half:])
    if np.isnan(found):
        raise ConfigurationError(
            f"the second half of {len(labels)} events has one label alone: give more events"
        )
    return {"auc": found, "rows": learner.rows.stats()["rows"]}


def search(
    figures: Callable[[float], Sequence[dict[str, Any]]],
    *,
    max_lost: float,
    max_ratio: float,
    tried: Callable[[Tried], None] = lambda _one: None,
) -> Tried | None:
    """Return the greatest ratio within the bound: by bisection, so losses should grow with it.

    Args:
        figures: Returns the result of `measure` for a ratio, by seed; 1 is the unpruned run.
        max_lost: The bound of the loss of AUC.
        max_ratio: Where the search begins.
        tried: Told each.

    Returns:
        None if even the least ratio, APART, loses more.
    """
    plain = figures(1)

    def one(ratio: float) -> Tried:
        found = figures(ratio)
        losses = [a["auc"] - b["auc"] for a, b in zip(plain, found, strict=True)]
        error = statistics.stdev(losses) / len(losses) ** 0.5
        loss = statistics.fmean(losses)
        rows = max(each["rows"] for each in found)
        outcome = Tried(
            ratio=ratio, loss=loss, error=error, rows=rows, within=loss + error <= max_lost
        )
        tried(outcome)
        return outcome

    best = one(max_ratio)
    if best.within:
        return best
    low, high = 1.0, max_ratio
    found: Tried | None = None
    while high / low > APART:
        outcome = one(round((low * high) ** 0.5, 2))
        if outcome.within:
            low, found = outcome.ratio, outcome
        else:
            high = outcome.ratio
    return found
