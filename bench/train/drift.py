"""Pruned models on streams that change: which keys have a row, and how soon a swap is learned.

The resident set is compared, hour by hour of the clicks, with the keys that an oracle would keep:
those with the most impressions in the hour that comes. The swap is of the made-up news: from an
hour on its popular items and users have the ids of unpopular ones.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench import plot, report
from bench.report import CONSOLE
from bench.servers import BUILD
from bench.train import pruning
from bench.train.quality import DLRM
from bench.train.runs import (
    DAY_S,
    Case,
    Experiment,
    FoldedLearner,
    Outcome,
    Stream,
    outcomes,
)
from embertide.trainer.config import PruneConfig, Utility
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import HOUR_S, NewsConfig, NewsSource
from embertide.trainer.data.limit import blocks
from embertide.trainer.eval.metrics import Prequential, auc

_PICTURES = BUILD / "bench"
_SHARES = (10, 50)
_LINES: tuple[tuple[str, Utility], ...]
_LINES = ("squares", "squares"), ("frequency", "accesses")
_ROW_SOURCE = 1  # of a key that has one
_PLAIN = Case(name="unpruned", run=DLRM)
# Large enough that ten minutes tell an AUC to some thousandths; the swap falls on the afternoon.
_NEWS = NewsConfig(hours=24, views_per_hour=25_000, swap_hour=14)
_BACK_WITHIN, _IN_A_ROW = 0.005, 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Residency(Experiment):
    """The rows that are there before each hour, against the keys of that hour.

    Series, a figure an hour: `hours`, its number; `found`, the share of its lookups that find a
    row; `oracle`, the share that N keys could, N being the rows that are there; `top`, the share of
    those N keys that have one.

    Attributes:
        stream: The events, and the days that count.
    """

    stream: Stream

    def measure(self, case: Case, seed: int) -> Outcome:
        """See `Experiment`; the AUC is prequential."""
        learner, quality = FoldedLearner(case, seed), Prequential()
        series: dict[str, list[float]] = {"hours": [], "found": [], "oracle": [], "top": []}
        first, last = self.stream.days
        hour, parts = 0, list[Batch]()

        def end() -> None:
            if parts and hour * HOUR_S // DAY_S in range(first, last + 1):
                learner.note_bytes()
                for name, value in zip(series, (hour, *resident(learner, parts)), strict=True):
                    series[name].append(value)
            for part in parts:
                quality.add(part.ts_ms_B, part.label_B, learner.learn(part))
            learner.rows.forget_changes()

        for batch in self.stream.source(case).batches(batch_size=case.run.batch_size):
            for block, part in blocks(batch, origin_ms=0, every_ms=HOUR_S * 1000):
                if block != hour:
                    end()
                    hour, parts = block, []
                parts.append(part)
        end()
        return learner.outcome(quality.mean_daily(*self.stream.days), series)


def resident(learner: FoldedLearner, parts: Sequence[Batch]) -> tuple[float, float, float]:
    """Return what `Residency` says of an hour: found, oracle, top."""
    rows = learner.rows
    keys_BF = np.concatenate([part.keys_BF for part in parts])
    counts, found = list[NDArray[np.int64]](), list[NDArray[np.bool_]]()
    for f, column in enumerate(rows.config.columns):
        keys, count = np.unique(keys_BF[:, f], return_counts=True)
        _, source, _ = rows.store.lookup(rows.config.table_index(column.table), keys)
        counts.append(count)
        found.append(source == _ROW_SOURCE)
    count_N, found_N = np.concatenate(counts), np.concatenate(found)
    first_N = np.argsort(-count_N, kind="stable")[: rows.stats()["rows"]]
    lookups = count_N.sum()
    return (
        float(count_N[found_N].sum() / lookups),
        float(count_N[first_N].sum() / lookups),
        float(found_N[first_N].mean()) if len(first_N) else 0.0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Swap(Experiment):
    """Made-up news whose popular ids are swapped; each batch is scored, then learned.

    Series: `auc` and `events` of each stretch of `stretch_s` seconds of event time.

    Attributes:
        news: The stream.
        stretch_s: Seconds of event time.
    """

    news: NewsConfig
    stretch_s: int = 600

    def measure(self, case: Case, seed: int) -> Outcome:
        """See `Experiment`; the AUC is of all events."""
        learner = FoldedLearner(case, seed)
        label_S: dict[int, list[NDArray[np.float32]]] = {}
        score_S: dict[int, list[NDArray[np.float32]]] = {}
        for batch in NewsSource(self.news).batches(batch_size=case.run.batch_size):
            for at, part in blocks(batch, origin_ms=0, every_ms=self.stretch_s * 1000):
                if at not in label_S:
                    learner.rows.forget_changes()
                    learner.note_bytes()
                label_S.setdefault(at, []).append(part.label_B)
                score_S.setdefault(at, []).append(learner.learn(part))
        labels = [np.concatenate(parts) for parts in label_S.values()]
        scores = [np.concatenate(parts) for parts in score_S.values()]
        found = [auc(label_B, score_B) for label_B, score_B in zip(labels, scores, strict=True)]
        whole = auc(np.concatenate(labels), np.concatenate(scores))
        return learner.outcome(whole, {"auc": found, "events": [float(len(s)) for s in scores]})


def _case(line: str, utility: Utility, share: int, whole: int) -> Case:
    prune = PruneConfig(bytes=whole // share, utility=utility)
    return Case(name=f"{line} {share}x", run=dataclasses.replace(_PLAIN.run, prune=prune))


def _pruned(whole: int) -> list[Case]:
    return [_case(line, utility, share, whole) for share in _SHARES for line, utility in _LINES]


def _row(name: tuple[str, str, str], ours: float, peer: float, peer_name: str) -> report.Row:
    case, metric, unit = name
    return report.Row(
        case=case,
        metric=metric,
        unit=unit,
        ours=round(ours, 4),
        peer=round(peer, 4),
        peer_name=peer_name,
        ratio=round(ours / peer, 4),
        better="higher",
        n=1,
        spread=0.0,
        target=0.0,
    )


def _residency(stream: Stream, seed: int, jobs: int) -> list[report.Row]:
    """Return means over the hours; they are of 10^5 lookups each, so one seed tells."""
    hours = Residency(stream=stream)
    plain = outcomes([_PLAIN], [seed], hours, jobs=jobs)
    found = plain | outcomes(_pruned(pruning.whole(plain[_PLAIN.name])), [seed], hours, jobs=jobs)
    rows, lines = [], {}
    for name, (outcome,) in found.items():
        series = outcome.series
        share, oracle, top = (float(np.mean(series[key])) for key in ("found", "oracle", "top"))
        rows += [
            _row((name, "lookups with a row", ""), share, oracle, "as many keys of an oracle"),
            _row((name, "the oracle's keys with a row", ""), top, 1.0, "all"),
        ]
        days = np.asarray(series["hours"]) / 24
        ratios = np.divide(series["found"], series["oracle"])
        lines[name] = [(day, ratio, 0.0) for day, ratio in zip(days, ratios, strict=True)]
    picture = _PICTURES / "train_drift_resident.svg"
    title = "Lookups of the next hour that find a row, against as many keys of an oracle"
    plot.curves(title, ("day", "ratio"), lines, picture, in_time=True)
    CONSOLE.print(f"the curve: {picture}")
    return rows


def _recovery(seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return events until a model that saw the swap is near an unpruned one that saw none."""
    swap = Swap(news=_NEWS)
    calm = Swap(news=dataclasses.replace(_NEWS, swap_hour=0))
    reference = outcomes([_PLAIN], seeds, calm, jobs=jobs)[_PLAIN.name]
    cases = [_PLAIN, *_pruned(pruning.whole(reference))]
    found = outcomes(cases, seeds, swap, jobs=jobs)
    first = _NEWS.swap_hour * HOUR_S // swap.stretch_s
    events_S = np.array(reference[0].series["events"])
    hour_S = np.arange(len(events_S)) * swap.stretch_s / HOUR_S
    rows, lines = [], {}
    plain = 0.0
    for name, runs in found.items():
        gap_RS = np.array(
            [
                np.subtract(without.series["auc"], run.series["auc"])
                for without, run in zip(reference, runs, strict=True)
            ]
        )
        counts = [back(gap_S[first:]) for gap_S in gap_RS]
        taken = float(np.mean([events_S[first:][:count].sum() for count in counts]))
        plain = plain or taken  # the unpruned model comes first
        before = gap_RS[:, first - HOUR_S // swap.stretch_s : first].mean()
        said = f"{name}: {before:.4f} lost in the hour before, {gap_RS[:, first:].max():.3f} after"
        never = counts.count(None)
        rows.append(
            dataclasses.replace(
                _row((said, "events until back", ""), taken, plain, "unpruned"),
                case=f"{said}; {never} of {len(runs)} not within the stream" if never else said,
                better="lower",
                n=len(runs),
            )
        )
        mean_S = gap_RS.mean(axis=0)
        lines[name] = [(hour, gap, 0.0) for hour, gap in zip(hour_S, mean_S, strict=True)]
    picture = _PICTURES / "train_drift_swap.svg"
    title = f"AUC lost against an unpruned model without the swap, at hour {_NEWS.swap_hour}"
    plot.curves(title, ("hour", "loss of AUC"), lines, picture, in_time=True)
    CONSOLE.print(f"the curve: {picture}")
    return rows


def back(gap_S: NDArray[np.float64]) -> int | None:
    """Return stretches up to the first that is small in the mean with those after it; or None."""
    for at in range(len(gap_S) - _IN_A_ROW + 1):
        if gap_S[at : at + _IN_A_ROW].mean() <= _BACK_WITHIN:
            return at + 1
    return None


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return rows of the resident set, of one seed, and of the swap, of all."""
    return _residency(stream, seeds[0], jobs) + _recovery(seeds, jobs)
