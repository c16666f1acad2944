"""A pruned model that does not fit memory: the same model beyond DDR and in it.

The DLRM of `quality.py`. Its unpruned store takes ten times the DDR budget; it is pruned to a tenth
of those bytes, which with index, notes and pages is more than the budget, so rows lie on an SSD.
Beside it the same run with DDR for all. No byte should depend on the tier: the bar allows 0.0005 of
AUC. At the end of every block the store checks its own invariants, both budgets among them.
"""

import dataclasses
import tempfile
from collections.abc import Sequence

from bench import report
from bench.train.pruning import case_of, whole
from bench.train.quality import DLRM
from bench.train.runs import (
    Case,
    FoldedLearner,
    Outcome,
    Stream,
    mean_and_error,
    mean_row,
    outcomes,
)
from embertide.trainer.config import PruneConfig
from embertide.trainer.eval.blocks import BlockQuality

_SHARE = 10
_MAX_LOST = 0.0005
_SSD_BUDGETS = 8  # of DDR's


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beyond(Stream):
    """A stream whose runs say what both tiers held, and check it."""

    def measure(self, case: Case, seed: int) -> Outcome:
        """See `Experiment`."""
        with tempfile.TemporaryDirectory(prefix="embertide-beyond-") as directory:
            on_ssd = case.run.ssd_budget_bytes > 0
            run = dataclasses.replace(case.run, ssd_directory=directory if on_ssd else "")
            learner = FoldedLearner(dataclasses.replace(case, run=run), seed)
            most_ssd, evicted = 0, 0

            def after(_: int) -> None:
                nonlocal most_ssd, evicted
                learner.rows.forget_changes()
                learner.note_bytes()
                learner.rows.store.check_integrity()
                stats = learner.rows.stats()
                most_ssd = max(most_ssd, stats["ssd_bytes"])
                evicted = stats["evictions_to_ssd"]

            quality = BlockQuality(learner, self.source(case), seen_by=self.seen_by)
            quality.run(block_s=case.block_s, batch_size=case.run.batch_size, after_block=after)
            series = {"ssd_bytes": [float(most_ssd)], "evicted": [float(evicted)]}
            return learner.outcome(quality.all.mean_daily(*self.days), series)


def _budget_row(case: str, metric: str, found: Sequence[float], budget: int) -> report.Row:
    shares = [each / budget for each in found]
    return report.measure(
        (case, metric, "of the budget"), shares, better="lower", target=1.0, claim="20.8"
    )


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return rows of the pruned model beyond DDR against that in DDR, paired by seed."""
    events = Beyond(**{f.name: getattr(stream, f.name) for f in dataclasses.fields(stream)})
    (plain,) = outcomes([case_of("unpruned", DLRM)], seeds, stream, jobs=jobs).values()
    target = whole(plain) // _SHARE
    in_ddr = case_of("pruned to a tenth, in DDR", DLRM, PruneConfig(bytes=target))
    beyond = dataclasses.replace(
        in_ddr,
        name="pruned to a tenth, DDR a tenth",
        run=dataclasses.replace(
            in_ddr.run, ddr_budget_bytes=target, ssd_budget_bytes=_SSD_BUDGETS * target
        ),
    )
    found = outcomes([in_ddr, beyond], seeds, events, jobs=jobs)
    peer, ours = found[in_ddr.name], found[beyond.name]
    aucs = [[each.auc for each in of] for of in (peer, ours)]
    mean, _ = mean_and_error(aucs[0])
    _, error = mean_and_error([a - b for a, b in zip(aucs[1], aucs[0], strict=True)])
    beyond_ddr = [each.bytes / target for each in plain]
    rows = [
        report.measure(
            ("unpruned", "bytes of the store", "of that DDR budget"),
            beyond_ddr,
            better="higher",
            target=0.99 * _SHARE,  # budgets are rounded to a hundred kilobytes
            claim="20.8",
        ),
        mean_row(
            beyond.name,
            aucs[1],
            mean,
            "all in DDR",
            bar=mean - _MAX_LOST,
            error=error,
            claim="20.8",
        ),
        _budget_row(beyond.name, "DDR, the most", [each.bytes for each in ours], target),
        _budget_row(
            beyond.name,
            "SSD, the most",
            [each.series["ssd_bytes"][0] for each in ours],
            _SSD_BUDGETS * target,
        ),
    ]
    for metric, values in (
        ("rows at the end", [float(each.rows) for each in ours]),
        ("rows moved to the SSD", [each.series["evicted"][0] for each in ours]),
    ):
        rows.append(report.measure((beyond.name, metric, ""), values, better="lower", target=0.0))
    seconds = [[each.seconds for each in of] for of in (ours, peer)]
    rows.append(
        report.compare(
            (beyond.name, "time of the run", "s"),
            *seconds,
            peer_name="all in DDR",
            better="lower",
            target=0.0,
        )
    )
    return rows
