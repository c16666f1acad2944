"""Backtest by day: learn to the end of a day, score the next one with the model frozen.

The prequential figures of the same day stand beside: those of a model that goes on learning within
the day. Their difference is what a day of staleness costs. Each day is scored with the version that
the run publishes at its beginning, loaded as a node loads it.
"""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import Batch, DerivedSource, EventSource
from embertide.trainer.data.history import for_requests
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.metrics import DAY_HOURS, HOUR_MS
from embertide.trainer.eval.published import PublishedModel
from embertide.trainer.eval.scored import score_events
from embertide.trainer.loop import Trainer
from embertide.trainer.publish.folder import Publication

_BATCH = 65_536


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


def days_of(source: EventSource) -> dict[int, int]:
    """Return the index of the first event of each day, ascending; reads the source once.

    Raises:
        ConfigurationError: There are fewer than two days.
        DataError: As the source.
    """
    first: dict[int, int] = {}
    for batch in source.batches(batch_size=_BATCH):
        day_B = batch.ts_ms_B // (DAY_HOURS * HOUR_MS)
        for day, event in zip(day_B.tolist(), batch.event_B.tolist(), strict=True):
            first.setdefault(day, event)
    if len(first) < 2:
        raise ConfigurationError(
            f"the events are of {len(first)} day; a backtest learns one and scores the next"
        )
    return first


def frozen_day(
    run: RunConfig,
    source: EventSource,
    folder: Path,
    *,
    begin: int,
    end: int | None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Learn the events before `begin`, and return the figures of those from there to `end`.

    A run found in the folder goes on, so days are to be asked for in order. Asked again after a
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
    return {"version": model.number, **scored.figures()}


def learning_days(
    run: RunConfig, source: EventSource, folder: Path, *, cache: Path | None = None
) -> dict[str, dict[str, float]]:
    """Learn all events, and return the prequential figures by day; as `frozen_day`, goes on."""
    trainer = Trainer(run, Publication(folder), program_cache=cache)
    trainer.fit(source)
    gauc = trainer.state.monitor.daily_gauc()
    return {
        str(day): each.as_json() | ({"gauc": gauc[day]} if day in gauc else {})
        for day, each in trainer.state.prequential.daily_summaries().items()
    }


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
