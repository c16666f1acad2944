"""AUC of models that keep every key, each block scored with the weights of the block before."""

from collections.abc import Sequence

from bench import report
from bench.train.runs import Case, Stream, mean_and_error, outcomes
from embertide.trainer.config import (
    RunConfig,
    globo,
    globo_counters,
    globo_history,
    globo_rates,
)

DLRM = RunConfig(model=globo(), optimizer=globo_rates())
HISTORY = RunConfig(model=globo_history(), optimizer=globo_rates())
COUNTERS = RunConfig(model=globo_counters(), optimizer=globo_rates())
# (case, the bar of its AUC; 0: none)
_CASES = (
    (Case(name="DLRM, T=30", run=DLRM), 0.870),
    (Case(name="history, T=30", run=HISTORY), 0.884),
    (Case(name="counters, T=30", run=COUNTERS), 0.892),
    (Case(name="counters, T=10", run=COUNTERS, block_s=600), 0.901),
)


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return a row a case; its spread is the standard error over the seeds."""
    found = outcomes([case for case, _ in _CASES], seeds, stream, jobs=jobs)
    rows = []
    for case, bar in _CASES:
        auc, error = mean_and_error([outcome.auc for outcome in found[case.name]])
        rows.append(
            report.Row(
                case=case.name,
                metric="AUC",
                unit="",
                ours=round(auc, 5),
                peer=bar,
                peer_name="the bar",
                ratio=round(auc / bar, 5) if bar else 0.0,
                better="higher",
                n=len(seeds),
                spread=round(error, 6),
                target=1.0 if bar else 0.0,
            )
        )
    return rows
