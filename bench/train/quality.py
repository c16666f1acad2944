"""AUC of models that keep every key, each block scored with the weights of the block before."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bench import report
from bench.train.runs import (
    Case,
    Experiment,
    FoldedLearner,
    Outcome,
    Stream,
    mean_row,
    outcomes,
)
from embertide.trainer.config import ModelConfig, RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.eval.blocks import BlockQuality
from embertide.trainer.eval.metrics import auc
from embertide.trainer.presets import (
    news_counters,
    news_crossed,
    news_history,
    news_model,
    news_rates,
)

DLRM = RunConfig(model=news_model(), optimizer=news_rates())
HISTORY = RunConfig(model=news_history(), optimizer=news_rates())
COUNTERS = RunConfig(model=news_counters(), optimizer=news_rates())
CROSSED = RunConfig(model=news_crossed(), optimizer=news_rates())
# A block of ten minutes is learned better in smaller steps; one of thirty hardly.
_SMALL = dataclasses.replace(COUNTERS, batch_size=128)
# (case, the bar of its AUC)
_CASES = (
    (Case(name="DLRM, T=30", run=DLRM), 0.870),
    (Case(name="history, T=30", run=HISTORY), 0.884),
    (Case(name="counters, T=30", run=COUNTERS), 0.892),
    (Case(name="counters and crosses, T=30", run=CROSSED), 0.900),
    (Case(name="counters, T=10", run=_SMALL, block_s=600), 0.901),
)
# Chosen on the first twelve hours of the stream whose items fade soonest. What is clicked depends
# on products of what users and items are, which DLRM is slow to find.
_PAIRS: ModelConfig = dataclasses.replace(
    COUNTERS.model,
    tables=tuple(dataclasses.replace(table, dim=16) for table in COUNTERS.model.tables),
    sequences=(),
    net="deepfm",
)
_MADE_UP = Case(
    name="DeepFM with counters, T=1",
    run=RunConfig(
        model=_PAIRS, optimizer=dataclasses.replace(news_rates(), sparse_learning_rate=0.2)
    ),
    block_s=60,
)
# Few users and many views: the ceiling is of one who knows every user and item.
_FAST = NewsConfig(hours=24, views_per_hour=100_000, users=500)
_SLOW = dataclasses.replace(_FAST, new_items_per_hour=15, lifetime_hours=96, half_life_hours=24.0)
_NEWS = {"items fade in 4 hours": _FAST, "items fade in a day": _SLOW}
_BELOW_CEILING = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MadeUp(Experiment):
    """Made-up news, whose probabilities are known; the AUC is the mean of the last hours'.

    Series: `ceiling`, the AUC of the probabilities themselves over the same hours; `events`.

    Attributes:
        news: The stream.
        last: Hours that count.
    """

    news: NewsConfig
    last: int = 6

    def measure(self, case: Case, seed: int) -> Outcome:
        """See `Experiment`."""
        source, learner = NewsSource(self.news), FoldedLearner(case, seed)
        quality = BlockQuality(learner, source, seen_by="cand")
        quality.run(
            block_s=case.block_s,
            batch_size=case.run.batch_size,
            after_block=lambda _block: learner.rows.forget_changes(),
        )
        learner.note_bytes()
        hours = range(self.news.hours - self.last, self.news.hours)
        found = quality.all.hourly()
        ceiling = [auc(*source.truth(hour, hour + 1)) for hour in hours]
        series = {"ceiling": [float(np.mean(ceiling))], "events": [float(source.total_events())]}
        return learner.outcome(float(np.mean([found[hour] for hour in hours])), series)


def _row(
    name: str, found: Sequence[Outcome], peer: float, peer_name: str, bar: float
) -> report.Row:
    return mean_row(name, [outcome.auc for outcome in found], peer, peer_name, bar=bar)


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return a row a case, and one a made-up stream."""
    found = outcomes([case for case, _ in _CASES], seeds, stream, jobs=jobs)
    rows = [_row(case.name, found[case.name], bar, "the bar", bar) for case, bar in _CASES]
    for name, news in _NEWS.items():
        made_up = outcomes([_MADE_UP], seeds, MadeUp(news=news), jobs=jobs)[_MADE_UP.name]
        ceiling, events = (made_up[0].series[key][0] for key in ("ceiling", "events"))
        case = f"generator, {name}, {events / 1e6:.1f} M events"
        rows.append(_row(case, made_up, ceiling, "the ceiling", ceiling - _BELOW_CEILING))
    return rows
