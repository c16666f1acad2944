"""What transforms of dense features are worth: `python -m bench.train dense --data ads.parquet`.

The model of `criteo.py` with the same steps for all of Criteo's dense features, with a column that
says what is missing and without. Steps are fitted on the first events.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from bench import report
from bench.train.criteo import DLRM, ads_of
from bench.train.runs import Case, Outcome, Stream, mean_and_error, mean_row, outcomes
from embertide.trainer.config import DenseConfig, DenseStep

_FITTED_ON = 10_000
_STEPS: dict[str, tuple[DenseStep, ...]] = {
    "none": (),
    "log1p": ("log1p",),
    "clip, standardise": ("clip", "standardise"),
    "log1p, clip, standardise": ("log1p", "clip", "standardise"),
    "quantile": ("quantile",),
    "bucketise": ("bucketise",),
}
_DEFAULT = "log1p"
_FIGURES: tuple[tuple[str, Literal["higher", "lower"], Callable[[Outcome], float]], ...] = (
    ("AUC", "higher", lambda outcome: outcome.auc),
    ("log loss", "lower", lambda outcome: outcome.series["log_loss"][0]),
)


def _case(name: str, steps: tuple[DenseStep, ...], missing: bool) -> Case:
    dense = tuple(
        DenseConfig(name=feature.name, steps=steps, missing=missing) for feature in DLRM.model.dense
    )
    model = dataclasses.replace(DLRM.model, dense=dense)
    run = dataclasses.replace(DLRM, model=model, warmup_events=_FITTED_ON)
    return Case(name=name + ("; missing" if missing else ""), run=run)


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return a row of AUC and one of log loss a case, against the default's.

    Raises:
        BenchError: The file is not of Criteo's ads.
    """
    cases = [
        _case(name, steps, missing) for name, steps in _STEPS.items() for missing in (False, True)
    ]
    found = outcomes(cases, seeds, ads_of(stream), jobs=jobs)
    rows = []
    for metric, better, figure in _FIGURES:
        by_case = {name: [figure(outcome) for outcome in runs] for name, runs in found.items()}
        peer, _ = mean_and_error(by_case[_DEFAULT])
        rows += [
            mean_row(name, values, peer, _DEFAULT, metric=metric, better=better)
            for name, values in by_case.items()
        ]
    return rows
