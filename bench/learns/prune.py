"""Pruning within a bound of AUC: what it costs on days to come, and how many bytes are kept.

Each block of half an hour is scored with the weights of the end of the block before
(`embertide.trainer.eval.blocks`), by the rows that are served and by those of all keys: the latter
are, bit for bit, a run of the same seed that does not prune. A day's loss is the difference of its
AUCs; bytes are the stores' account, pages and index included.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import report
from bench.learns.presets import DAYS, FIRST_SEED, news_of
from bench.train.pruning import case_of
from bench.train.quality import CROSSED, DLRM
from bench.train.runs import (
    DAY_S,
    Case,
    Experiment,
    Outcome,
    Stream,
    difference_row,
    mean_row,
    outcomes,
)
from embertide.trainer.config import PruneConfig, RunConfig
from embertide.trainer.config.tables import RowDtype
from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.eval.blocks import BlockQuality
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.model.learner import Learner

WITHIN = 0.001
_CLAIM = "H.5"
_BUDGET = 1 << 30  # of each store
# (preset, its run, half-life of utilities as chosen on days 2 and 3, type of rows, least factor)
_PRESETS: tuple[tuple[str, RunConfig, int, RowDtype, float], ...] = (
    ("news", DLRM, 4000, "int8", 8.0),
    ("news-crossed", CROSSED, 500, "int8", 15.0),
)
_LATER = (7, 9)
_DRIFTING = NewsConfig(hours=96, views_per_hour=20_000, users=20_000)
_DRIFT_HALF_LIFE, _DRIFT_DAYS = 2000, (2, 3)
# The generator's drift: hours in which an item is there, and in which half of its clicks come.
_SPEEDS: Mapping[str, tuple[int, float]] = {
    "fades in 4 hours": (24, 4.0),
    "fades in a day": (96, 24.0),
    "fades in four days": (240, 96.0),
}


class BothQuality(BlockQuality):
    """The figures of a run with a bound, and those that it would have without pruning.

    Attributes:
        unpruned: The latter, of every event.
    """

    def __init__(self, learner: Learner, source: EventSource, *, seen_by: str) -> None:
        """Name the model, whose pruning has a bound, and the events."""
        super().__init__(learner, source, seen_by=seen_by)
        self.unpruned = Prequential()

    def _block(self, parts: list[Batch]) -> None:
        for part in parts:
            self.unpruned.add(part.ts_ms_B, part.label_B, self._learner.score_unpruned(part))
        super()._block(parts)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bounded(Stream):
    """A stream that a model with a bound learns.

    Series, by day: `loss` of AUC, `factor` (the unpruned bytes at the end over the run's, the most
    of that day), `measured` and `error` (as the run says them at the day's end), `ratio`.
    """

    def measure(self, case: Case, seed: int) -> Outcome:
        """See `Experiment`."""
        return bounded(self, self.source(case), case, seed)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drifting(Experiment):
    """Generated news whose items fade at some speed, learned as `Bounded`.

    Attributes:
        news: The stream.
    """

    news: NewsConfig

    def measure(self, case: Case, seed: int) -> Outcome:
        """See `Experiment`."""
        stream = Bounded(path=Path(), days=(0, 0), seen_by="cand")
        return bounded(stream, NewsSource(self.news), case, seed)


def bounded(stream: Stream, source: EventSource, case: Case, seed: int) -> Outcome:
    """Train a model with a bound on some events; `auc` is the loss over the stream's days."""
    learner = stream.learner(case, seed)
    unpruned = learner.unpruned
    assert unpruned is not None
    sizes: dict[int, int] = {}
    told: dict[int, dict[str, float]] = {}
    began = time.monotonic()

    def after(block: int) -> None:
        learner.rows.forget_changes()
        day = block * case.block_s // DAY_S
        figures = unpruned.figures()
        sizes[day] = max(sizes.get(day, 0), figures["bytes"])
        told[day] = {name: figures[name] or 0.0 for name in ("loss", "error", "ratio")}
        if block % 12 == 0:
            print(
                f"{case.name} {seed} block {block}, {time.monotonic() - began:.0f} s:"
                f" {learner.rows.stats()['rows']} of {figures['unpruned_rows']} rows,"
                f" {figures['factor']:.2f}x, ratio {figures['ratio']:.2f},"
                f" loss {told[day]['loss']:.5f} ± {told[day]['error']:.5f}",
                flush=True,
            )

    quality = BothQuality(learner, source, seen_by=stream.seen_by)
    quality.run(block_s=case.block_s, batch_size=case.run.batch_size, after_block=after)
    learner.note_bytes()
    whole = unpruned.figures()["unpruned_bytes"]
    mine, theirs = quality.all.daily(), quality.unpruned.daily()
    days = sorted(mine)
    series = {
        "day": [float(day) for day in days],
        "unpruned": [theirs[day] for day in days],
        "loss": [theirs[day] - mine[day] for day in days],
        "bytes": [float(sizes[day]) for day in days],
        "factor": [whole / sizes[day] for day in days],
        "measured": [told[day]["loss"] for day in days],
        "error": [told[day]["error"] for day in days],
        "ratio": [told[day]["ratio"] for day in days],
    }
    first, last = stream.days
    lost = [loss for day, loss in zip(days, series["loss"], strict=True) if first <= day <= last]
    return learner.outcome(sum(lost) / max(len(lost), 1), series)


def _mean(outcome: Outcome, name: str, days: tuple[int, int]) -> float:
    """Return the mean of a series over some days."""
    values = zip(outcome.series["day"], outcome.series[name], strict=True)
    return statistics.fmean(value for day, value in values if days[0] <= day <= days[1])


def _factor(outcome: Outcome, days: tuple[int, int]) -> float:
    """Return the unpruned bytes at the end over the most that the run takes on some days."""
    values = zip(outcome.series["day"], outcome.series["factor"], strict=True)
    return min(value for day, value in values if days[0] <= day <= days[1])


def _rows(
    case: str, found: Sequence[Outcome], days: tuple[int, int], least_factor: float
) -> Iterator[report.Row]:
    """Yield loss and factor over some days, against their bars."""
    said = f"days {days[0]} to {days[1]}"
    yield difference_row(
        case,
        f"loss of AUC, {said}",
        [_mean(each, "loss", days) for each in found],
        better="lower",
        target=WITHIN,
        claim=_CLAIM,
    )
    yield mean_row(
        case,
        [_factor(each, days) for each in found],
        1.0,
        "unpruned",
        metric=f"times fewer bytes, {said}",
        bar=least_factor,
        claim=_CLAIM if least_factor else "",
    )


def _case(name: str, base: RunConfig, half_life: int, dtype: RowDtype) -> Case:
    case = case_of(name, base, PruneConfig(within=WITHIN, half_life=half_life), dtype=dtype)
    return dataclasses.replace(case, run=dataclasses.replace(case.run, ddr_budget_bytes=_BUDGET))


def run(given: argparse.Namespace) -> Iterator[report.Row]:
    """Yield losses and factors of the presets that H.5 names, and of generated news."""
    stream = news_of(given)
    bounded_stream = Bounded(
        path=stream.path, days=DAYS, seen_by=stream.seen_by, events=stream.events
    )
    seeds = range(FIRST_SEED, FIRST_SEED + given.seeds)
    for name, base, half_life, dtype, least in _PRESETS:
        case = _case(f"{name}, rows of {dtype}", base, half_life, dtype)
        found = outcomes([case], seeds, bounded_stream, jobs=1)[case.name]
        for days, factor in ((DAYS, least), (_LATER, 0.0)):
            yield from _rows(case.name, found, days, factor)
    for speed, (lifetime, half_life_hours) in _SPEEDS.items():
        news = dataclasses.replace(
            _DRIFTING, lifetime_hours=lifetime, half_life_hours=half_life_hours
        )
        case = _case(f"generated news, an item {speed}", DLRM, _DRIFT_HALF_LIFE, "fp32")
        found = outcomes([case], seeds, Drifting(news=news), jobs=1)[case.name]
        yield from _rows(case.name, found, (_DRIFT_DAYS[0], _DRIFT_DAYS[1]), 0.0)
