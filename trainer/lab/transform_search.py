"""Transforms of dense features, searched cluster by cluster over a window of events.

After ClusterP3S (clustered preprocessing-pipeline search): features that are distributed alike
share a pipeline, so that a search over pipelines is one of clusters and not of features. Where the
paper learns its clusters, ours are by statistics (`dense_clusters`). Where it draws pipelines at
random, ours are few enough to be listed, and are told apart by successive halving (Jamieson &
Talwalkar 2016): all learn a part of the events, the best third learns all, the best third of those
with every seed.

The window is cut in time. A trial learns the first part and scores the others, frozen. The part
after it chooses a pipeline; the last part, which chose nothing, confirms what all clusters came to.
Trials of one seed are compared with one another. A standard error is of the seeds and of the
events, which are looked at in `BLOCKS` blocks of time: both are added up.

Shapes: B events of a part, K blocks, S seeds, D dense features.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import DenseConfig, DenseStep, RunConfig
from embertide.trainer.data.base import EventSource
from embertide.trainer.data.history import with_columns
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.learned import learned
from embertide.trainer.eval.metrics import auc, log_loss
from embertide.trainer.lab.dense_clusters import Description, describe
from embertide.trainer.model.learner import Learner, NotFiniteError

BLOCKS = 20
"""Blocks of a part, in each of which a difference is measured."""

MIN_EVENTS = 5_000
"""Events of a window: a fifth of them chooses, another confirms."""

KEPT = 3
"""One in so many pipelines goes on to the next round, and two at least."""

SHARE = 3
"""The first round learns the newest of so many equal parts of the events."""

MEASURED = 100_000
"""First events by which features are described."""

ERRORS = 2.0
"""Standard errors that a gain must be above 0."""

Part = Literal["choose", "confirm"]
_HELD_OUT = 0.2
_BATCH = 4096


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """The steps for the features of a cluster; attributes are those of `DenseConfig`."""

    steps: tuple[DenseStep, ...]
    points: int = 256
    missing: bool = False

    def of(self, feature: DenseConfig) -> DenseConfig:
        """Return a feature that goes through it."""
        return dataclasses.replace(
            feature, steps=self.steps, points=self.points, missing=self.missing
        )

    def __str__(self) -> str:
        """Say it in a line."""
        said = ", ".join(self.steps)
        said += f" ({self.points} points)" if self.points != 256 else ""
        return said + ("; missing" if self.missing else "")


_SHAPES = (
    Pipeline(steps=("log1p",)),
    Pipeline(steps=("log1p", "standardise")),
    Pipeline(steps=("log1p", "clip", "standardise")),
    Pipeline(steps=("standardise",)),
    Pipeline(steps=("clip", "standardise")),
    Pipeline(steps=("quantile",)),
    Pipeline(steps=("quantile", "standardise")),
    Pipeline(steps=("bucketise",), points=15),
    Pipeline(steps=("bucketise", "standardise"), points=15),
)


def pipelines(features: Sequence[DenseConfig], found: Sequence[Description]) -> list[Pipeline]:
    """Return what is tried for a cluster: with a column for what is missing only if some are."""
    some = any(each.missing > 0 for each in found)
    every = [
        dataclasses.replace(shape, missing=missing)
        for missing in ((False, True) if some else (False,))
        for shape in _SHAPES
    ]
    return [each for each in every if any(each.of(one) != one for one in features)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A window of events, cut in time by event index.

    Attributes:
        events: The number of its events.
        choosing: Those before are learned; from here they choose.
        confirming: From here they confirm.
        found: Descriptions of the D features by the first events that are learned.
    """

    events: int
    choosing: int
    confirming: int
    found: tuple[Description, ...]

    def start(self, share: int) -> int:
        """Return the first event that a trial learns, which is of the newest 1 / share."""
        return self.choosing - self.choosing // share


def look_at(run: RunConfig, source: EventSource) -> Window:
    """Read all events once, and cut them: 12 bytes an event are held.

    Raises:
        ConfigurationError: The model has no dense feature, the events have no labels yet, there
            are too few, or a part has events of one label alone.
        DataError: As the source.
    """
    if not run.model.dense:
        raise ConfigurationError(
            f"model {run.model.name!r} has no dense features, so there is no transform to search"
        )
    if run.labels is not None:
        raise ConfigurationError(
            "the run waits for labels that come as a stream of their own: give events with labels"
        )
    label_B, event_B = list[NDArray[np.float32]](), list[NDArray[np.int64]]()
    dense_ND, held = list[NDArray[np.float32]](), 0
    for batch in source.batches(batch_size=_BATCH):
        label_B.append(batch.label_B)
        event_B.append(batch.event_B)
        if held < MEASURED:
            dense_ND.append(batch.dense_BD[:, : len(run.model.dense)])
            held += len(batch)
    events = sum(map(len, label_B))
    if events < MIN_EVENTS:
        raise ConfigurationError(
            f"there are {events:,} events; give at least {MIN_EVENTS:,}, of which a fifth chooses"
            " and another fifth confirms"
        )
    label_N, event_N = np.concatenate(label_B), np.concatenate(event_B)
    cuts = [round(events * (1 - share)) for share in (2 * _HELD_OUT, _HELD_OUT)]
    for begin, end in itertools.pairwise([0, *cuts, events]):
        if label_N[begin:end].min() == label_N[begin:end].max():
            raise ConfigurationError(
                f"events {begin:,} to {end:,} of {events:,} have one label alone: give more events"
            )
    sample_ND = np.concatenate(dense_ND)[: min(MEASURED, cuts[0])]
    return Window(
        events=events,
        choosing=int(event_N[cuts[0]]),
        confirming=int(event_N[cuts[1]]),
        found=tuple(describe(sample_ND[:, d]) for d in range(sample_ND.shape[1])),
    )


def measure(run: RunConfig, source: EventSource, window: Window, *, share: int) -> dict[str, Any]:
    """Learn the newest 1 / share of the first part and score the others, frozen.

    Returns:
        A part's log loss by block and its AUC, as `{"choose": {"loss": [...], "auc": ...}, ...}`;
        or `{"failed": reason}` where the net did not stay finite.

    Raises:
        DataError: As the source.
    """
    source, learner = with_columns(source, run.model), Learner(run)
    first = FirstEvents(source, window.choosing)
    try:
        for _ in learned(learner, first, start=window.start(share)):
            pass
    except NotFiniteError as error:
        return {"failed": str(error)}
    event_B, label_B, score_B = list[Any](), list[Any](), list[Any]()
    for batch in source.batches(batch_size=_BATCH, start=window.choosing):
        event_B.append(batch.event_B)
        label_B.append(batch.label_B)
        score_B.append(learner.score(batch))
    event_N, label_N, score_N = map(np.concatenate, (event_B, label_B, score_B))
    cut = int(np.searchsorted(event_N, window.confirming))
    return {
        "choose": _figures(label_N[:cut], score_N[:cut]),
        "confirm": _figures(label_N[cut:], score_N[cut:]),
    }


def _figures(label_B: NDArray[np.float32], score_B: NDArray[np.float32]) -> dict[str, Any]:
    blocks = zip(np.array_split(label_B, BLOCKS), np.array_split(score_B, BLOCKS), strict=True)
    return {"loss": [log_loss(*block) for block in blocks], "auc": auc(label_B, score_B)}


# --- comparing ------------------------------------------------------------------------------------

Dense = tuple[DenseConfig, ...]
Figures = list[dict[str, Any]]
"""The results of `measure` for one choice of transforms, by seed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """By how much one choice is better than another on a part.

    Attributes:
        loss: Log loss that it saves, the mean over the seeds.
        error: Its standard error.
        auc: AUC that it gains.
        auc_error: The standard error of that over the seeds.
    """

    loss: float
    error: float
    auc: float
    auc_error: float

    def holds(self, least: float) -> bool:
        """Whether it is as much as `least`, and so many standard errors above 0."""
        return self.loss >= least and self.loss >= ERRORS * self.error


def mean_loss(figures: Figures, part: Part) -> float:
    """Return the mean log loss over the seeds; infinite where a trial failed."""
    if any("failed" in each for each in figures):
        return math.inf
    return statistics.fmean(statistics.fmean(each[part]["loss"]) for each in figures)


def gain(before: Figures, after: Figures, part: Part) -> Gain | None:
    """Compare two choices, seed by seed and block by block; None where a trial failed.

    Requires: two seeds or more.
    """
    if math.inf in (mean_loss(before, part), mean_loss(after, part)):
        return None
    loss_SK, after_SK = (
        np.array([each[part]["loss"] for each in figures]) for figures in (before, after)
    )
    saved_SK = loss_SK - after_SK
    of_seeds, of_blocks = _error(saved_SK.mean(1)), _error(saved_SK.mean(0))
    auc_S = np.array([b[part]["auc"] - a[part]["auc"] for a, b in zip(before, after, strict=True)])
    return Gain(
        loss=float(saved_SK.mean()),
        error=math.hypot(of_seeds, of_blocks),
        auc=float(auc_S.mean()),
        auc_error=_error(auc_S),
    )


def _error(value_N: NDArray[np.float64]) -> float:
    return float(value_N.std(ddof=1)) / math.sqrt(len(value_N))


# --- searching ------------------------------------------------------------------------------------


class OutOfBoundsError(Exception):
    """The next round would take more trials, or more time, than there may be."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A pipeline of a cluster in the last round that it came to.

    Attributes:
        pipeline: The pipeline that was tried.
        round: 1, 2 or 3.
        loss: Its log loss in that round, on the part that chooses; None where a trial failed.
        before: That of the transforms as they were, in the same round.
    """

    pipeline: Pipeline
    round: int
    loss: float | None
    before: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """A cluster that was searched.

    Attributes:
        features: Their names.
        tried: The pipelines, the best first.
        best: The best of the last round.
        gain: Its gain, on the part that chooses; None where a trial failed.
        taken: Whether that gain holds.
    """

    features: tuple[str, ...]
    tried: tuple[Tried, ...]
    best: Pipeline
    gain: Gain | None
    taken: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a search.

    Attributes:
        dense: The features as they are to be; as they were where no gain was confirmed.
        chosen: As the part that chooses would have them.
        searched: Clusters.
        left: Names of the features of clusters that bounds left out.
        confirmed: The gain of `chosen` on the part that confirms; None where nothing was chosen.
    """

    dense: Dense
    chosen: Dense
    searched: tuple[Searched, ...]
    left: tuple[tuple[str, ...], ...]
    confirmed: Gain | None

    @property
    def better(self) -> bool:
        """Whether the features are to change."""
        return self.confirmed is not None and self.dense == self.chosen


def search(
    dense: Dense,
    found: Sequence[Description],
    groups: Sequence[tuple[int, ...]],
    figures: Callable[[Sequence[Dense], int, int], list[Figures]],
    *,
    seeds: int,
    least_gain: float,
) -> Outcome:
    """Search the pipeline of one cluster after the other, each with what was taken before it.

    Args:
        dense: The D features as they are.
        found: Their descriptions.
        groups: Clusters, as places of features.
        figures: Returns the figures of each of some choices, given the choices, a number of seeds
            and a share of the events (`Window.start`). Raises `OutOfBoundsError` where it may not.
        seeds: Seeds of the last round; 2 at least.
        least_gain: Log loss that a change has to save.

    Raises:
        ConfigurationError: The net does not stay finite with the transforms as they are.
    """
    now, searched, left = dense, list[Searched](), list[tuple[str, ...]]()
    for group in groups:
        names = tuple(dense[d].name for d in group)
        if left:
            left.append(names)
            continue
        try:
            one = _search_one(now, found, group, figures, seeds, least_gain)
        except OutOfBoundsError:
            left.append(names)
            continue
        searched.append(one)
        if one.taken:
            now = _with(now, group, one.best)
    confirmed = None
    if now != dense:
        before, after = figures((dense, now), seeds, 1)  # both were measured in a last round
        confirmed = gain(before, after, "confirm")
    holds = confirmed is not None and confirmed.holds(least_gain)
    return Outcome(
        dense=now if holds else dense,
        chosen=now,
        searched=tuple(searched),
        left=tuple(left),
        confirmed=confirmed,
    )


def _with(dense: Dense, group: tuple[int, ...], pipeline: Pipeline) -> Dense:
    return tuple(pipeline.of(each) if d in group else each for d, each in enumerate(dense))


def _search_one(
    now: Dense,
    found: Sequence[Description],
    group: tuple[int, ...],
    figures: Callable[[Sequence[Dense], int, int], list[Figures]],
    seeds: int,
    least_gain: float,
) -> Searched:
    left = pipelines([now[d] for d in group], [found[d] for d in group])
    tried = list[Tried]()
    before, of_left = Figures(), list[Figures]()
    for place, (of_seeds, share) in enumerate(((1, SHARE), (1, 1), (seeds, 1)), start=1):
        if place > 1:
            best_first = sorted(range(len(left)), key=lambda n: mean_loss(of_left[n], "choose"))
            kept = best_first[: max(2, round(len(left) / KEPT))]
            left = [left[n] for n in kept]
        choices = [now, *(_with(now, group, pipeline) for pipeline in left)]
        before, *of_left = figures(choices, of_seeds, share)
        reference = mean_loss(before, "choose")
        if math.isinf(reference):
            reason = next(each["failed"] for each in before if "failed" in each)
            raise ConfigurationError(
                f"with the transforms as they are the net does not stay finite ({reason}): give a "
                "lower rate, or features smaller numbers"
            )
        for pipeline, each in zip(left, of_left, strict=True):
            loss = mean_loss(each, "choose")
            tried.append(
                Tried(
                    pipeline=pipeline,
                    round=place,
                    loss=None if math.isinf(loss) else loss,
                    before=reference,
                )
            )
    at = min(range(len(left)), key=lambda n: mean_loss(of_left[n], "choose"))
    won = gain(before, of_left[at], "choose")
    last = {each.pipeline: each for each in tried}  # of each, the last round that it came to
    return Searched(
        features=tuple(now[d].name for d in group),
        tried=tuple(sorted(last.values(), key=_best_first)),
        best=left[at],
        gain=won,
        taken=won is not None and won.holds(least_gain),
    )


def _best_first(tried: Tried) -> tuple[int, float]:
    return -tried.round, math.inf if tried.loss is None else tried.loss
