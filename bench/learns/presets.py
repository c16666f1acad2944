"""The presets of the news on a file of clicks: nets that begin at the label rate, and at a half.

A day's AUC is of scores with weights half an hour old at most (`embertide.trainer.eval.blocks`).
"""

import argparse
import dataclasses
from collections.abc import Iterator

from bench import report
from bench.servers import BenchError
from bench.train.quality import COUNTERS, CROSSED, DLRM, HISTORY
from bench.train.runs import (
    Case,
    FoldedLearner,
    Outcome,
    Stream,
    difference_row,
    mean_and_error,
    mean_row,
    outcomes,
)

DAYS = (4, 9)
FIRST_SEED = 11
_PRESETS = {
    "news": DLRM,
    "news-history": HISTORY,
    "news-counters": COUNTERS,
    "news-crossed": CROSSED,
}
_CLAIM = "H.2"
_BEFORE = "bias of 0"
_LOWEST, _LONGEST = -0.0005, 1.3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Begun(Stream):
    """A stream that is learned by a net that begins at the label rate, or at a half.

    Attributes:
        prior: Whether it is the former.
    """

    prior: bool = True

    def learner(self, case: Case, seed: int) -> FoldedLearner:
        """See `Stream`."""
        learner = FoldedLearner(case, seed)
        learner.is_fresh = self.prior
        return learner


def news_of(given: argparse.Namespace) -> Begun:
    """Return the stream of the file that the command names.

    Raises:
        BenchError: It names none.
    """
    if given.news is None:
        raise BenchError("this part needs a file of clicks: --news clicks.parquet")
    path = given.news.resolve()
    return Begun(path=path, days=DAYS, seen_by="cand", events=given.events)


def run(given: argparse.Namespace) -> Iterator[report.Row]:
    """Yield what each preset gains or loses by the prior, and how much longer it takes."""
    stream = news_of(given)
    cases = [Case(name=name, run=of) for name, of in _PRESETS.items()]
    seeds = range(FIRST_SEED, FIRST_SEED + given.seeds)
    now, before = (dict[str, list[Outcome]](), dict[str, list[Outcome]]())
    for seed in seeds:  # both in turn: their times are compared
        for kept, prior in ((before, False), (now, True)):
            found = outcomes(cases, [seed], dataclasses.replace(stream, prior=prior), jobs=1)
            for name, each in found.items():
                kept.setdefault(name, []).extend(each)
    for case in cases:
        mine, peer = now[case.name], before[case.name]
        auc = [each.auc for each in mine], [each.auc for each in peer]
        yield mean_row(
            case.name, auc[0], mean_and_error(auc[1])[0], _BEFORE, metric="AUC of days 4 to 9"
        )
        yield difference_row(
            case.name,
            f"AUC of days 4 to 9, less that with a {_BEFORE}",
            [a - b for a, b in zip(*auc, strict=True)],
            better="higher",
            target=_LOWEST,
            claim=_CLAIM,
        )
        yield report.compare(
            (case.name, "time of a run", "s"),
            [each.seconds for each in mine],
            [each.seconds for each in peer],
            peer_name=_BEFORE,
            better="lower",
            target=_LONGEST,
            claim=_CLAIM,
        )
