"""Labels that come late against labels that are there at once (claim 22.5), on a stream of clicks.

Clicks come up to half an hour after their impressions: by an exponential time of ten minutes on the
average, cut at thirty, by seed. Every impression is scored with the weights of the end of the block
of ten minutes before its own, as a version that is served would, and its AUC is by its true label.
What differs is what those weights have learned from:

    at once                 every event before the block, with its label: what nobody can have
    at once, 30 min stale   every event older than thirty minutes, with its label: as stale as a
                            join that waits for thirty minutes, which is what the claim compares
    wait 30 min             every impression when thirty minutes are over, with its click or without
    wait 5 min              sooner; clicks that come later correct it
    wait 0                  every impression as a negative at once (Ktena et al. 2019)
    wait 5 min, uncorrected sooner, and later clicks are lost
"""

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench import report
from bench.train.runs import Case, Experiment, FoldedLearner, Outcome, Stream, outcomes
from embertide.trainer.config import LabelJoin, RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.labels import DelayedLabelBuffer, Resolved, split
from embertide.trainer.data.limit import blocks
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import news_model, news_rates

_LATE_S, _MEAN_S = 1800.0, 600.0
_BLOCK_S = 600
_MAX_LOSS = 0.003
_RUN = RunConfig(model=news_model(), optimizer=news_rates())
_AT_ONCE, _STALE, _CLAIMED = "at once", "at once, 30 min stale", "wait 30 min"
_JOINS = {
    _CLAIMED: LabelJoin(wait_s=_LATE_S),
    "wait 5 min": LabelJoin(wait_s=300, correct_s=_LATE_S),
    "wait 5 min, uncorrected": LabelJoin(wait_s=300),
    "wait 0": LabelJoin(wait_s=0, correct_s=_LATE_S),
}


class _AtOnce:
    """Learns events with their labels, when they are `stale_s` old."""

    def __init__(self, stale_s: float) -> None:
        self._stale_ms = round(stale_s * 1000)
        self._held: deque[Batch] = deque()

    def learn(self, learner: Learner, part: Batch, until_ms: int) -> None:
        self._held.append(part)
        while self._held and self._held[0].watermark_ms <= until_ms - self._stale_ms:
            learner.learn(self._held.popleft())


class _Joined:
    """Learns events once clicks, which come late, have come, or the wait is over."""

    def __init__(self, config: LabelJoin, seed: int) -> None:
        self.waiting = DelayedLabelBuffer(config)
        self._rng = np.random.default_rng(seed)
        self._clicks: list[tuple[int, int]] = []  # when, on what; of those to come
        self.scores: deque[NDArray[np.float32]] = deque()

    def learn(self, learner: Learner, part: Batch, until_ms: int, batch_size: int) -> None:
        clicked_B = part.label_B == 1
        delay_s = np.minimum(self._rng.exponential(_MEAN_S, int(clicked_B.sum())), _LATE_S)
        when_P = part.ts_ms_B[clicked_B] + np.rint(delay_s * 1000).astype(np.int64)
        self._clicks += zip(when_P.tolist(), part.event_B[clicked_B].tolist(), strict=True)
        hidden = dataclasses.replace(
            part, label_B=np.zeros(len(part), np.float32), id_B=part.event_B
        )
        self.waiting.add(hidden, self.scores.popleft())
        due = sorted(each for each in self._clicks if each[0] <= until_ms)
        self._clicks = [each for each in self._clicks if each[0] > until_ms]
        ids = np.array([id for _, id in due], np.int64)
        times = np.array([when for when, _ in due], np.int64)
        self._step(learner, self.waiting.decide(ids, times, until_ms, batch_size), batch_size)

    def end(self, learner: Learner, until_ms: int, batch_size: int) -> None:
        """Learn the rest, as a version's end does."""
        none = np.empty(0, np.int64)
        self._step(learner, self.waiting.decide(none, none, until_ms), batch_size)

    def _step(self, learner: Learner, decided: Resolved, batch_size: int) -> None:
        for piece in () if decided.learn is None else split(decided.learn, batch_size):
            learner.learn(piece)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LateLabels(Experiment):
    """A stream of which a case learns as its `run.labels` says; without, when it is so old.

    Attributes:
        stream: The events, with their labels, and the days that count.
        stale_s: Delay of labels in a case without a join.
    """

    stream: Stream
    stale_s: float = 0.0

    def measure(self, case: Case, seed: int) -> Outcome:
        """See `Experiment`."""
        labels = case.run.labels
        learner = FoldedLearner(case, seed)
        way = _AtOnce(self.stale_s) if labels is None else _Joined(labels, seed)
        quality, size = Prequential(), case.run.batch_size
        current, parts = 0, list[Batch]()

        def end_block() -> None:
            for part in parts:
                score_B = learner.score(part)
                quality.add(part.ts_ms_B, part.label_B, score_B)
                if isinstance(way, _Joined):
                    way.scores.append(score_B)
            for part in parts:
                if isinstance(way, _Joined):
                    way.learn(learner, part, part.watermark_ms, size)
                else:
                    way.learn(learner, part, part.watermark_ms)
            if isinstance(way, _Joined) and parts:
                way.end(learner, parts[-1].watermark_ms, size)
            learner.rows.forget_changes()

        origin_ms = 0
        for batch in self.stream.source(case).batches(batch_size=size):
            for block, part in blocks(batch, origin_ms=origin_ms, every_ms=_BLOCK_S * 1000):
                if block != current:
                    end_block()
                    learner.note_bytes()
                    current, parts = block, []
                parts.append(part)
        end_block()
        counts = way.waiting.counters() if isinstance(way, _Joined) else {}
        days = quality.daily_summaries()
        first, last = self.stream.days
        of_days = [days[day].calibration for day in range(first, last + 1) if day in days]
        series = {name: [float(count)] for name, count in counts.items()}
        series["calibration"] = [float(np.mean(of_days))]
        return learner.outcome(quality.mean_daily(first, last), series)


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return a row of AUC a case, its loss against labels at once, and its calibration."""
    joins = [
        Case(name=name, run=dataclasses.replace(_RUN, labels=join), block_s=_BLOCK_S)
        for name, join in _JOINS.items()
    ]
    found: dict[str, list[Outcome]] = {}
    for name, stale_s in ((_AT_ONCE, 0.0), (_STALE, _LATE_S)):
        case = Case(name=name, run=_RUN, block_s=_BLOCK_S)
        experiment = LateLabels(stream=stream, stale_s=stale_s)
        found |= outcomes([case], seeds, experiment, jobs=jobs)
    found |= outcomes(joins, seeds, LateLabels(stream=stream), jobs=jobs)
    rows = []
    stale = [each.auc for each in found[_STALE]]
    for name, of_case in found.items():
        aucs = [each.auc for each in of_case]
        rows.append(report.measure((name, "AUC", ""), aucs, better="higher", target=0))
        calibrations = [each.series["calibration"][0] for each in of_case]
        rows.append(
            report.measure(
                (name, "mean score / label", ""), calibrations, better="higher", target=0
            )
        )
        if name in _JOINS:
            losses = [with_all - mine for with_all, mine in zip(stale, aucs, strict=True)]
            target, claim = (_MAX_LOSS, "22.5") if name == _CLAIMED else (0.0, "")
            what = (name, f"AUC lost against {_STALE}", "")
            rows.append(report.measure(what, losses, better="lower", target=target, claim=claim))
    return rows
