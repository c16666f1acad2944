"""Training runs of a benchmark, kept in files (`embertide.trainer.lab.trials`).

What a run is scored by is an `Experiment`; a run's file is named by it, the configuration, the seed
and the code. One run takes one core for some minutes; `jobs` of them go at once.
"""

import abc
import dataclasses
import functools
import hashlib
import inspect
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import report
from bench.report import CONSOLE
from bench.servers import BUILD, ROOT
from embertide.trainer.config import RunConfig
from embertide.trainer.data import open_events
from embertide.trainer.data.assemble import fold
from embertide.trainer.data.base import PADDING_KEY, Batch, EventSchema, EventSource
from embertide.trainer.data.history import with_columns
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.eval.blocks import BlockQuality
from embertide.trainer.lab.trials import Trial, measured
from embertide.trainer.model.learner import Learner, Prepared

DAY_S = 86_400
_FOLDER = BUILD / "bench" / "train"
# Files that decide the figures, beside the configuration and the experiment.
_CODE = ("trainer", "backend_cpp", "pyproject.toml")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One configuration; its seed is that of each run.

    Attributes:
        name: The name of its rows and files.
        run: The configuration.
        fold: Columns of KEYS whose keys are hashed to so many.
        block_s: How old weights get before they are replaced.
    """

    name: str
    run: RunConfig
    fold: tuple[tuple[str, int], ...] = ()
    block_s: int = 1800


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a run; the experiment says over which events.

    Attributes:
        auc: AUC over all of them.
        bytes: Bytes of the store, the largest of all looks: pages of rows and of what training
            keeps beside them, index, and all else that is charged.
        rows: At the end.
        passes: Passes of pruning.
        seconds: It took.
        series: Figures beside these, by name.
    """

    auc: float
    bytes: int
    rows: int
    passes: int
    seconds: float
    series: dict[str, list[float]]


class FoldedLearner(Learner):
    """A learner that sees some keys hashed to fewer: the hashing trick (Weinberger et al. 2009)."""

    def __init__(self, case: Case, seed: int) -> None:
        """Open the store and make the net."""
        super().__init__(dataclasses.replace(case.run, seed=seed))
        names = [column.name for column in case.run.model.columns]
        self._fold = [(names.index(name), rows) for name, rows in case.fold]
        self._began = time.monotonic()
        self._most = 0

    def _folded(self, batch: Batch) -> Batch:
        keys_BF = batch.keys_BF.copy()
        for f, rows in self._fold:
            taken_B = keys_BF[:, f] != PADDING_KEY
            keys_BF[taken_B, f] = fold(keys_BF[taken_B, f], rows)
        return dataclasses.replace(batch, keys_BF=keys_BF)

    def prepare(self, batch: Batch) -> Prepared:
        """See `Learner`."""
        return super().prepare(self._folded(batch))

    def note_bytes(self) -> None:
        """Look at what the store takes."""
        stats = self.rows.stats()
        self._most = max(self._most, stats["ddr_payload_bytes"] + stats["index_bytes"])

    def outcome(self, auc: float, series: dict[str, list[float]]) -> Outcome:
        """Return what it came to."""
        return Outcome(
            auc=auc,
            bytes=self._most,
            rows=self.rows.stats()["rows"],
            passes=self.rows.passes,
            seconds=round(time.monotonic() - self._began, 1),
            series=series,
        )


class Experiment(abc.ABC):
    """Events, and what is measured of a model that learns from them: a frozen dataclass."""

    @abc.abstractmethod
    def measure(self, case: Case, seed: int) -> Outcome:
        """Train one model; in a process of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stream(Experiment):
    """Days of events, each block scored and then learned (`embertide.trainer.eval.blocks`).

    The AUC is the mean of the daily ones, `repeated` the same without first impressions.

    Attributes:
        path: A file of events.
        days: The first and the last day whose AUC count.
        seen_by: The feature whose first impressions are also left out.
        events: Events at most; None: all.
        schema: The columns to read from the file; None: those of the news.
    """

    path: Path
    days: tuple[int, int]
    seen_by: str
    events: int | None = None
    schema: EventSchema | None = None

    def source(self, case: Case) -> EventSource:
        """Open the events, with what the case's model asks for."""
        source: EventSource = open_events(str(self.path), schema=self.schema)
        if self.events is not None:
            source = FirstEvents(source, self.events)
        return with_columns(source, case.run.model)

    def learner(self, case: Case, seed: int) -> FoldedLearner:
        """Make the model that is measured."""
        return FoldedLearner(case, seed)

    def measure(self, case: Case, seed: int) -> Outcome:
        """See `Experiment`."""
        learner = self.learner(case, seed)

        def after(block: int) -> None:
            learner.rows.forget_changes()
            if block * case.block_s >= self.days[0] * DAY_S:
                learner.note_bytes()

        quality = BlockQuality(learner, self.source(case), seen_by=self.seen_by)
        quality.run(block_s=case.block_s, batch_size=case.run.batch_size, after_block=after)
        repeated = quality.repeated.mean_daily(*self.days)
        return learner.outcome(quality.all.mean_daily(*self.days), {"repeated": [repeated]})


def tree_of(path: str) -> str:
    """Name what a path of the project holds, changes that are not committed included."""
    git = ["git", "-C", str(ROOT), "rev-parse", f"HEAD:{path}"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    changed = subprocess.run(
        ["git", "-C", str(ROOT), "diff", "HEAD", "--", path], capture_output=True, check=False
    ).stdout
    return done.stdout.strip() + hashlib.sha256(changed).hexdigest()


def _figures(experiment: Experiment, case: Case, seed: int) -> dict[str, Any]:
    return dataclasses.asdict(experiment.measure(case, seed))


def outcomes(
    cases: Sequence[Case], seeds: Sequence[int], experiment: Experiment, *, jobs: int
) -> dict[str, list[Outcome]]:
    """Return each case's outcomes, by seed in the order of `seeds`.

    Raises:
        TrainerError: A run failed; those that were complete are kept.
    """
    code = [*map(tree_of, _CODE), inspect.getsource(type(experiment))]
    trials = [
        Trial(
            name=f"{case.name} {seed}",
            depends=repr((case, seed, experiment, code)),
            measure=functools.partial(_figures, experiment, case, seed),
        )
        for seed in seeds
        for case in cases
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=CONSOLE) as bar:
        task = bar.add_task("training runs", total=len(trials))
        found = measured(
            trials, _FOLDER, jobs=jobs, done=lambda count: bar.update(task, completed=count)
        )
    by_seed = [found[i : i + len(cases)] for i in range(0, len(found), len(cases))]
    return {
        case.name: [Outcome(**figures[i]) for figures in by_seed] for i, case in enumerate(cases)
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and its standard error; nan with fewer than two."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.fmean(values), error


def difference_row(
    case: str,
    metric: str,
    differences: Sequence[float],
    *,
    shown: Callable[[float], float] = float,
    better: Literal["higher", "lower"],
    target: float,
    claim: str,
) -> report.Row:
    """Return the row of the mean of differences by seed, as `shown`; the spread is its error."""
    mean, error = mean_and_error(differences)
    return report.Row(
        case=case,
        metric=metric,
        unit="",
        ours=round(shown(mean), 5),
        peer=0.0,
        peer_name="",
        ratio=0.0,
        better=better,
        n=len(differences),
        spread=0.0 if math.isnan(error) else round(error, 6),
        target=target,
        claim=claim,
    )


def mean_row(
    case: str,
    found: Sequence[float],
    peer: float,
    peer_name: str,
    *,
    bar: float = 0.0,
    error: float | None = None,
    metric: str = "AUC",
    better: Literal["higher", "lower"] = "higher",
    claim: str = "",
) -> report.Row:
    """Return the row of a figure's mean over the seeds.

    Args:
        case: The case that was run.
        found: The figure, by seed.
        peer: The figure to compare it with.
        peer_name: The name of that figure.
        bar: The bar for the mean; 0: none.
        error: The spread; by default the standard error of the mean.
        metric: The figure's name.
        better: Which way it should go.
        claim: As `report.Row` has it.
    """
    mean, of_mean = mean_and_error(found)
    return report.Row(
        case=case,
        metric=metric,
        unit="",
        ours=round(mean, 5),
        peer=round(peer, 5),
        peer_name=peer_name,
        ratio=round(mean / peer, 5),
        better=better,
        n=len(found),
        spread=round(of_mean if error is None else error, 6),
        target=round(bar / peer, 5),
        claim=claim,
    )
