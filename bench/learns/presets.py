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
class Begun(Case):
    """A preset whose net begins at the label rate, or at a half.

    Attributes:
        prior: Whether it is the former.
    """

    prior: bool


class _Stream(Stream):
    def learner(self, case: Case, seed: int) -> FoldedLearner:
        """See `Stream`."""
        assert isinstance(case, Begun)
        learner = FoldedLearner(case, seed)
        learner.is_fresh = case.prior
        return learner


def news_of(given: argparse.Namespace, kind: type[Stream] = Stream) -> Stream:
    """Return the stream of the file that the command names.

    Raises:
        BenchError: It names none.
    """
    if given.news is None:
        raise BenchError("this part needs a file of clicks: --news clicks.parquet")
    return kind(path=given.news.resolve(), days=DAYS, seen_by="cand", events=given.events)


def run(given: argparse.Namespace) -> Iterator[report.Row]:
    """Yield what each preset gains or loses by the prior, and how much longer it takes."""
    seeds = range(FIRST_SEED, FIRST_SEED + given.seeds)
    stream = news_of(given, _Stream)
    for name, of in _PRESETS.items():
        # One after the other, or side by side: their times are compared.
        both = [
            Begun(name=f"{name}, {begins}", run=of, prior=prior)
            for begins, prior in ((_BEFORE, False), ("prior", True))
        ]
        before, now = outcomes(both, seeds, stream, jobs=given.jobs).values()
        yield from _rows(name, now, before)


def _rows(name: str, mine: list[Outcome], peer: list[Outcome]) -> Iterator[report.Row]:
    auc = [each.auc for each in mine], [each.auc for each in peer]
    yield mean_row(name, auc[0], mean_and_error(auc[1])[0], _BEFORE, metric="AUC of days 4 to 9")
    yield difference_row(
        name,
        f"AUC of days 4 to 9, less that with a {_BEFORE}",
        [a - b for a, b in zip(*auc, strict=True)],
        better="higher",
        target=_LOWEST,
        claim=_CLAIM,
    )
    yield report.compare(
        (name, "time of a run", "s"),
        [each.seconds for each in mine],
        [each.seconds for each in peer],
        peer_name=_BEFORE,
        better="lower",
        target=_LONGEST,
        claim=_CLAIM,
    )
