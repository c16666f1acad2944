"""Events of a file as published versions score them, and the exact figures of those scores.

Held in memory: 25 bytes an event, 8 more for each slice, 4 for each further model.

Shapes: B events, M models.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import HOUR_OF_DAY
from embertide.trainer.data.base import EventSource
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.grouped import gauc
from embertide.trainer.eval.metrics import Array, expected_calibration_error, summarise
from embertide.trainer.eval.published import PublishedModel
from embertide.trainer.eval.slices import SliceTable, slice_column, slice_table

_BATCH = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEvents:
    """All events, in the order of the input.

    Attributes:
        ts_ms_B: Their times.
        label_B: 0 or 1.
        score_MB: Scores of each model.
        user_B: Keys of the users; None: there are none.
        slice_B: Values by slice.
    """

    ts_ms_B: NDArray[np.int64]
    label_B: Array
    score_MB: list[Array]
    user_B: NDArray[np.int64] | None
    slice_B: dict[str, NDArray[np.int64]]

    def figures(self, model: int = 0) -> dict[str, float]:
        """Return the figures of one model that exist, by name."""
        label_B, score_B = self.label_B, self.score_MB[model]
        said = summarise(label_B, score_B).as_json()
        said["expected_calibration_error"] = expected_calibration_error(label_B, score_B)
        if self.user_B is not None:
            found = gauc(self.user_B, label_B, score_B)
            if found.users:
                said |= {"gauc": found.gauc, "gauc_users": found.users}
            said["gauc_one_class_users"] = found.one_class_users
        return said

    def only(self, which_B: NDArray[np.bool_]) -> "ScoredEvents":
        """Return some of the events."""
        return ScoredEvents(
            ts_ms_B=self.ts_ms_B[which_B],
            label_B=self.label_B[which_B],
            score_MB=[score_B[which_B] for score_B in self.score_MB],
            user_B=None if self.user_B is None else self.user_B[which_B],
            slice_B={name: value_B[which_B] for name, value_B in self.slice_B.items()},
        )

    def table(self, name: str, most: int, model: int = 0) -> SliceTable:
        """Return the figures of one model by a slice's values."""
        return slice_table(self.slice_B[name], self.label_B, self.score_MB[model], most=most)


def score_events(
    models: Sequence[PublishedModel],
    source: EventSource,
    *,
    user: str | None = None,
    slices: Sequence[str] = (),
    progress: Callable[[int], None] = lambda _events: None,
) -> ScoredEvents:
    """Score all events of a source by some versions; nothing is learned.

    Args:
        models: The versions, all of which get the same events.
        source: The events, with the columns that requests carry.
        user: The feature of the users; None: "user" if there is one, empty: none.
        slices: Features, or "hour_of_day".
        progress: Told how many events are scored.

    Raises:
        ConfigurationError: The events are not those of a model; there is none; a feature does not
            exist or is a list; or a score is not finite.
    """
    for model in models:
        model.check(source)
    names = [feature.name.lower() for feature in source.schema.features]
    lists = {each.name.lower() for each in source.schema.features if each.is_list}
    if user is None:
        user = "user" if "user" in names and "user" not in lists else ""
    for name in (*([user] if user else []), *slices):
        if name == HOUR_OF_DAY and name in slices:
            continue
        if name not in names or name in lists:
            ones = ", ".join(each for each in names if each not in lists)
            raise ConfigurationError(
                f"{name!r} is no feature of one key; there are {ones}, and {HOUR_OF_DAY} as a slice"
            )
    parts: list[list[Any]] = []
    done = 0
    for batch in source.batches(batch_size=_BATCH):
        scores = [model.score(batch) for model in models]
        for model, score_B in zip(models, scores, strict=True):
            if not np.isfinite(score_B).all():
                raise ConfigurationError(
                    f"version {model.number} gives scores that are not finite, first to event "
                    f"{int(batch.event_B[~np.isfinite(score_B)][0])}: the model diverged"
                )
        users = [batch.keys_BF[:, names.index(user)].copy()] if user else []
        values = [slice_column(name, names, batch).copy() for name in slices]
        parts.append([batch.ts_ms_B.copy(), batch.label_B.copy(), *scores, *users, *values])
        done += len(batch)
        progress(done)
    if not parts:
        raise ConfigurationError("there is no event to score")
    columns = [np.concatenate(each) for each in zip(*parts, strict=True)]
    ts_ms_B, label_B, *rest = columns
    count = len(models)
    return ScoredEvents(
        ts_ms_B=ts_ms_B,
        label_B=label_B,
        score_MB=rest[:count],
        user_B=rest[count] if user else None,
        slice_B=dict(zip(slices, rest[count + bool(user) :], strict=True)),
    )
