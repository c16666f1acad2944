"""The model and the settings of a run whose input nobody has seen before.

One rule for all inputs: nothing is tuned for one.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from embertide.trainer.config import (
    CorrectionConfig,
    DenseConfig,
    DenseStep,
    FeatureConfig,
    ModelConfig,
    OptimizerConfig,
    TableConfig,
)
from embertide.trainer.data.base import EventSchema
from embertide.trainer.presets import bucket_bits

MIN_EVENTS = 2_000
"""Events of a version, in the mean: fewer teach nodes little, and each version is files."""

MAX_VERSIONS = 200
"""Versions of a file that a run is guessed for, but for one whose events come fast."""

FAST_EVENTS = 5_000
"""Events of a version, in the mean, where there may be more: the news is worth the files."""

MIN_EVERY_S = 600
"""Event time between versions, where that many events come sooner."""

USUAL_SNAPSHOT_EVERY = 6

_MAX_SNAPSHOTS = 20
_DAY_S = 86_400
# Lengths of time that people use.
_NICE_S = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1200, 1800),
    *(3600, 7200, 10_800, 14_400, 21_600, 43_200),
    *(_DAY_S * days for days in (1, 2, 3, 5, 7, 10, 14, 21, 30, 60, 90, 120, 180, 365)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSchedule:
    """How often a run publishes.

    Attributes:
        publish_every_s: Event time between versions, in seconds.
        snapshot_every: Versions from snapshot to snapshot.
    """

    publish_every_s: int
    snapshot_every: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "PublishSchedule | None":
        """Return that of a run's settings, as a checkpoint has them; None: they do not say."""
        names = [field.name for field in fields(cls)]
        if not all(isinstance(settings.get(name), int) for name in names):
            return None
        return cls(**{name: settings[name] for name in names})


def max_versions(events: int, span_s: float) -> int:
    """Return how many versions the run of a file has at most.

    News changes within the hour, and its events are many: versions of so many events may come
    every `MIN_EVERY_S`. Other files have too few events, or too short a clock, for that.
    """
    return max(MAX_VERSIONS, min(events // FAST_EVENTS, int(span_s) // MIN_EVERY_S))


USUAL_SCHEDULE = PublishSchedule(publish_every_s=MIN_EVERY_S, snapshot_every=USUAL_SNAPSHOT_EVERY)
"""Schedule of a stream, whose rate nobody knows yet, and of the synthetic news."""


def schedule_of_clock(events: int, span_s: float, *, most: int | None = None) -> PublishSchedule:
    """Return how often a run over a file publishes: as its events and its clock deserve.

    Args:
        events: Number of events in the file.
        span_s: Event time from its first event to its last, in seconds.
        most: Versions at most; None: as many as there are `MIN_EVERY_S`.
    """
    versions = max(1.0, events / MIN_EVENTS)
    least_s = MIN_EVERY_S if most is None else 1
    versions = versions if most is None else min(versions, most)
    every_s = _nice(max(least_s, math.ceil(span_s / versions)))
    versions = max(1.0, span_s / every_s)
    snapshots = max(USUAL_SNAPSHOT_EVERY, math.ceil(versions / _MAX_SNAPSHOTS))
    return PublishSchedule(publish_every_s=every_s, snapshot_every=snapshots)


def schedule_of_rows(events: int, *, most: int | None = None) -> PublishSchedule:
    """Return the schedule where the order of rows is time: a row then counts as a millisecond."""
    versions = max(1.0, events / MIN_EVENTS)
    versions = min(versions, MAX_VERSIONS if most is None else most)
    every_s = max(1, math.ceil(events / versions / 1000))
    count = max(1.0, events / (1000 * every_s))
    snapshots = max(USUAL_SNAPSHOT_EVERY, math.ceil(count / _MAX_SNAPSHOTS))
    return PublishSchedule(publish_every_s=every_s, snapshot_every=snapshots)


def _nice(seconds: int) -> int:
    at = bisect.bisect_left(_NICE_S, seconds)
    return _NICE_S[at] if at < len(_NICE_S) else seconds


def model_of(
    name: str, schema: EventSchema, expected: Mapping[str, int], missing: Sequence[str] = ()
) -> ModelConfig:
    """Return the model of an input of this schema.

    Args:
        name: The model's.
        schema: The schema of the input.
        expected: Different keys of each column of keys, as far as one can reckon.
        missing: Dense columns that lack values in some rows.
    """
    names = [(feature.name, feature.column, feature.is_list) for feature in schema.features]
    return ModelConfig(
        name=name,
        tables=tuple(
            TableConfig(name=each, dim=DIM, bucket_bits=bucket_bits(expected.get(column, 24)))
            for each, column, _ in names
        ),
        features=tuple(
            FeatureConfig(
                name=each,
                table=each,
                keys="list" if is_list else "one",
                pooling="mean" if is_list else "sum",
            )
            for each, _, is_list in names
        ),
        dense=tuple(
            DenseConfig(name=each.lower(), steps=_AMOUNT, missing=each in missing)
            for each in schema.dense
        ),
        bottom_mlp=(64,) if schema.dense else (),
        top_mlp=(128, 64),
        net="dlrm",
        top_sees_embeddings=len(names) <= _MAX_SEEN,
    )


DIM = 16
"""Width of every row: what the net multiplies has one width."""

# Shares of values below, around 0 and as wide as what the net begins with elsewhere.
_AMOUNT: tuple[DenseStep, ...] = ("quantile", "standardise")

# With more features the dot products say enough, and the first layer would be wide.
_MAX_SEEN = 40


FEW_EVENTS = 8
"""Events of a step where labels of neighbouring events are alike (data/alike.py)."""


# Events of a step, below so many events of a file; by each of the first three at most 3,125 steps.
_STEP_BELOW = ((25_000, FEW_EVENTS), (50_000, 16), (100_000, 32), (500_000, 128))
_LARGEST_STEP = 256
_FULL_RATE_EVENTS = 64


def rates(batch_size: int, *, quick: bool = False) -> OptimizerConfig:
    """Return the rates of an unknown input; of rows twice as high if it is to be followed quickly.

    The net's is in proportion to the events of a step, up to 64: Adam's steps are as long as the
    rate however few events one has, so that small ones would take the net further, and by chance.
    Adagrad's of rows are not (docs/results/learns.md).

    A row's first step would be as long as the rate however small its gradient is, and of a rare
    label it is nearly always a negative's: rows of positives would start from where those steps
    led. This accumulator lies above the square of a negative's gradient there, and below those of
    a frequent label (docs/results/learns.md).
    """
    usual = OptimizerConfig().sparse_learning_rate
    of_net = OptimizerConfig().dense_learning_rate * min(1.0, batch_size / _FULL_RATE_EVENTS)
    return OptimizerConfig(
        sparse_learning_rate=2 * usual if quick else usual,
        dense_learning_rate=of_net,
        initial_accumulator=1e-6,
    )


def correction() -> CorrectionConfig:
    """Return the running correction of an unknown input, whose label rate may move within a day.

    Where it does not, the run finds that none is best. The bound is twenty times the odds.
    """
    return CorrectionConfig(half_life=0, bound=3.0)


def batch_size(events: int) -> int:
    """Return the events of a step: fewer where a file has few.

    A step scores its events before it learns any, so that small ones learn sooner; but each takes
    some 2 ms however few it has, and of 100,000 events and more they bring nothing
    (docs/results/learns.md).
    """
    return next((size for below, size in _STEP_BELOW if events < below), _LARGEST_STEP)


def large_step(events: int) -> int:
    """Return the events of a step that is a large one for so many."""
    return 256 if events >= 500_000 else 128 if events >= 50_000 else 64
