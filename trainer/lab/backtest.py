"""Backtest by blocks of days: learn to the end of a block, score the next with the model frozen.

The prequential figures of the same block stand beside: those of a model that goes on learning
within the block. Their difference is what so many days of staleness cost. Each block is scored with
the version that the run publishes at its beginning, loaded as a node loads it.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import Batch, DerivedSource, EventSource
from embertide.trainer.data.history import for_requests
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.metrics import DAY_HOURS, HOUR_MS, Array, day_name, entropy
from embertide.trainer.eval.picture import write_picture
from embertide.trainer.eval.published import PublishedModel
from embertide.trainer.eval.scored import score_events
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BATCH = 65_536
_DAY_MS = DAY_HOURS * HOUR_MS


class _EventsFrom(DerivedSource):
    """The events of a source from an index on."""

    def __init__(self, source: EventSource, begin: int) -> None:
        super().__init__(source)
        self._begin = begin

    def total_events(self) -> int | None:
        total = super().total_events()
        return None if total is None else total - self._begin

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        return self._source.batches(batch_size=batch_size, start=max(start, self._begin))


def blocks_of(source: EventSource, days: int) -> dict[int, int]:
    """Return the index of the first event of each block that has one, by the block's first day.

    Blocks are of `days` days, from the day of the first event on; ascending. Reads the source once.

    Raises:
        ConfigurationError: There are fewer than two blocks.
        DataError: As the source.
    """
    first: dict[int, int] = {}
    begin = None
    for batch in source.batches(batch_size=_BATCH):
        day_B = batch.ts_ms_B // _DAY_MS
        begin = int(day_B[0]) if begin is None else begin
        block_B = begin + (day_B - begin) // days * days
        for block, at in zip(*np.unique(block_B, return_index=True), strict=True):
            first.setdefault(int(block), int(batch.event_B[at]))
    if len(first) < 2:
        said = f"{len(first)} day" if days == 1 else f"{len(first)} block of {days} days"
        raise ConfigurationError(
            f"the events are of {said}; a backtest learns one and scores the next: give more "
            f"events{'' if days == 1 else ', or fewer --days'}"
        )
    return first


def frozen_block(
    run: RunConfig,
    source: EventSource,
    folder: Path,
    *,
    begin: int,
    end: int | None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Learn the events before `begin`, and return the figures of those from there to `end`.

    A run found in the folder goes on, so blocks are to be asked for in order. Asked again after a
    kill, it gives the same figures.

    Raises:
        TrainerError: As the trainer, and as `score_events`.
    """
    trainer = Trainer(run, Publication(folder), program_cache=cache)
    trainer.fit(FirstEvents(source, begin))
    model = PublishedModel.open(folder, ddr_budget_bytes=run.ddr_budget_bytes)
    events = for_requests(source, run.model)
    if end is not None:
        events = FirstEvents(events, end)
    scored = score_events([model], _EventsFrom(events, begin), user=run.evaluation.user or None)
    by_day = [scored.only(day_B).figures() for day_B in _days(scored.ts_ms_B)]
    return {"version": model.number, **over_block(by_day)}


def _days(ts_ms_B: Array) -> Iterator[Array]:
    """Yield for each day that has events which those are."""
    day_B = ts_ms_B // _DAY_MS
    for day in np.unique(day_B):
        yield day_B == day


def learning_days(
    run: RunConfig, source: EventSource, folder: Path, *, cache: Path | None = None
) -> dict[str, dict[str, float]]:
    """Learn all events, and return the prequential figures by day; as `frozen_block`, goes on."""
    trainer = Trainer(run, Publication(folder), program_cache=cache)
    trainer.fit(source)
    gauc = trainer.state.monitor.daily_gauc()
    return {
        str(day): each.as_json() | ({"gauc": gauc[day]} if day in gauc else {})
        for day, each in trainer.state.prequential.daily_summaries().items()
    }


def over_block(days: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of a block of days from those of its days.

    Log loss and normalised entropy are those of all its events, calibration of the days that have a
    label 1. AUC and GAUC are means of the days that have one, by their events: prequential scores
    are of another model each day, and their order over many days says nothing of one.
    """
    # A day none of whose users has both labels has no GAUC.
    days = [{name: each[name] for name in each if not math.isnan(each[name])} for each in days]
    if len(days) == 1:
        return dict(days[0])
    events = sum(each["events"] for each in days)
    found = {"events": events}
    for name in ("label_mean", "log_loss"):
        found[name] = sum(each["events"] * each[name] for each in days) / events
    if found["label_mean"] > 0:  # calibration is the mean score over the mean label
        positives = [each["events"] * each["label_mean"] for each in days]
        scores = sum(
            count * each["calibration"]
            for count, each in zip(positives, days, strict=True)
            if count
        )
        found["calibration"] = scores / (events * found["label_mean"])
    if 0 < found["label_mean"] < 1:
        found["normalised_entropy"] = found["log_loss"] / entropy(found["label_mean"])
    for name in ("auc", "gauc"):
        known = [each for each in days if name in each]
        if known:
            total = sum(each["events"] for each in known)
            found[name] = sum(each["events"] * each[name] for each in known) / total
    return found


def over_days(figures: Mapping[int, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return mean, worst and standard error over the days, of each figure that all have.

    The worst is the least AUC or GAUC, and the greatest log loss or normalised entropy. Days are
    not independent, so the standard error is a lower bound.
    """
    worst = {"log_loss": max, "normalised_entropy": max, "auc": min, "gauc": min}
    found = {}
    for name, pick in worst.items():
        values = [each[name] for each in figures.values() if name in each]
        if values and len(values) == len(figures):
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            found[name] = {
                "mean": statistics.fmean(values),
                "worst": pick(values),
                "standard_error": error,
            }
    return found


def draw(
    picture: "Figure", figures: Mapping[str, Mapping[int, Mapping[str, float]]], output: Path
) -> None:
    """Draw AUC by block, a line for each name in `figures`, and write the picture."""
    axes = picture.add_subplot()
    for name, of_blocks in figures.items():
        known = {block: each["auc"] for block, each in of_blocks.items() if "auc" in each}
        axes.plot([day_name(block) for block in known], list(known.values()), "o-", label=name)
    blocks = [day_name(block) for of_blocks in figures.values() for block in of_blocks]
    ticks = list(dict.fromkeys(blocks))
    axes.set_xticks(range(0, len(ticks), math.ceil(len(ticks) / 12)))  # names fit
    axes.tick_params("x", rotation=45)
    axes.set(ylabel="AUC")
    write_picture(picture, output)
