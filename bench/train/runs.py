"""Training runs of a benchmark, each kept in a file, so that what was stopped goes on.

A run is scored block by block (`embertide.trainer.eval.blocks`). Its file is named by everything
that its figures depend on: the configuration, the seed, the events and the code. One run takes one
core for some minutes; `jobs` of them go at once.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.servers import BUILD, ROOT, BenchError
from embertide.trainer.config import RunConfig
from embertide.trainer.data import open_events
from embertide.trainer.data.assemble import fold
from embertide.trainer.data.base import Batch
from embertide.trainer.data.history import HistorySource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.eval.blocks import BlockQuality
from embertide.trainer.learner import Learner

_CONSOLE = Console(stderr=True, highlight=False)
_DAY_S = 86_400
_FOLDER = BUILD / "bench" / "train"
# What decides the figures beside the configuration.
_CODE = ("trainer", "backend_cpp", "pyproject.toml")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """The events of a run, and how they are scored.

    Attributes:
        path: A file of events.
        days: The first and the last day whose AUC count.
        seen_by: The feature whose first impressions are also left out.
        events: Events at most; None: all.
    """

    path: Path
    days: tuple[int, int]
    seen_by: str
    events: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One configuration; its seed is that of each run.

    Attributes:
        name: Of its rows and files.
        run: The configuration.
        fold: Features whose keys are hashed to so many.
        block_s: How old weights get before they are replaced.
    """

    name: str
    run: RunConfig
    fold: tuple[tuple[str, int], ...] = ()
    block_s: int = 1800


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        auc: Mean of the daily AUC.
        repeated_auc: The same without first impressions.
        bytes: Of the store, the most at the end of any block of the days that count: pages
            of rows and of what training keeps beside them, index, and all else that is charged.
        rows: At the end.
        passes: Of pruning.
        seconds: It took.
    """

    auc: float
    repeated_auc: float
    bytes: int
    rows: int
    passes: int
    seconds: float


class _FoldedLearner(Learner):
    """A learner that sees some keys hashed to fewer: the hashing trick (Weinberger et al. 2009)."""

    def __init__(self, run: RunConfig, fold: Sequence[tuple[str, int]]) -> None:
        super().__init__(run)
        names = [feature.name for feature in run.model.features]
        self._fold = [(names.index(name), rows) for name, rows in fold]

    def _folded(self, batch: Batch) -> Batch:
        keys_BF = batch.keys_BF.copy()
        for f, rows in self._fold:
            keys_BF[:, f] = fold(keys_BF[:, f], rows)
        return dataclasses.replace(batch, keys_BF=keys_BF)

    def score(self, batch: Batch) -> NDArray[np.float32]:
        return super().score(self._folded(batch))

    def learn(self, batch: Batch) -> NDArray[np.float32]:
        return super().learn(self._folded(batch))


def _tree(path: str) -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", f"HEAD:{path}"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    changed = subprocess.run(
        ["git", "-C", str(ROOT), "diff", "HEAD", "--", path], capture_output=True, check=False
    ).stdout
    return done.stdout.strip() + hashlib.sha256(changed).hexdigest()


def _file(case: Case, seed: int, stream: Stream, code: str) -> Path:
    run = dataclasses.replace(case.run, seed=seed)
    said = repr((run, case.fold, case.block_s, stream, code))
    name = hashlib.sha256(said.encode()).hexdigest()[:16]
    return _FOLDER / f"{case.name.replace(' ', '-')}-{seed}-{name}.json"


def _run(case: Case, seed: int, stream: Stream, path: Path) -> None:
    """Train one model; in a process of its own."""
    began = time.monotonic()
    source = open_events(str(stream.path))
    if stream.events is not None:
        source = FirstEvents(source, stream.events)
    if case.run.model.sequences:
        source = HistorySource(source, case.run.model.sequences)
    learner = _FoldedLearner(dataclasses.replace(case.run, seed=seed), case.fold)
    most = 0

    def publish(block: int) -> None:
        """Take what a version would, and note what the store takes."""
        nonlocal most
        for t, _, bucket in learner.rows.places():
            learner.rows.store.take_changes(t, bucket)
        if block * case.block_s >= stream.days[0] * _DAY_S:
            stats = learner.rows.stats()
            most = max(most, stats["ddr_payload_bytes"] + stats["index_bytes"])

    quality = BlockQuality(learner, source, seen_by=stream.seen_by)
    quality.run(block_s=case.block_s, batch_size=case.run.batch_size, after_block=publish)
    outcome = Outcome(
        auc=quality.all.mean_daily(*stream.days),
        repeated_auc=quality.repeated.mean_daily(*stream.days),
        bytes=most,
        rows=learner.rows.stats()["rows"],
        passes=learner.rows.passes,
        seconds=round(time.monotonic() - began, 1),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(dataclasses.asdict(outcome)) + "\n", encoding="utf-8")
    temporary.rename(path)


def outcomes(
    cases: Sequence[Case], seeds: Sequence[int], stream: Stream, *, jobs: int
) -> dict[str, list[Outcome]]:
    """Return each case's outcomes, by seed in the order of `seeds`.

    Raises:
        BenchError: A run failed; those that were complete are kept.
    """
    code = "".join(map(_tree, _CODE))
    files = {(case.name, seed): _file(case, seed, stream, code) for case in cases for seed in seeds}
    todo = [(case, seed) for seed in seeds for case in cases if not files[case.name, seed].exists()]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    spawn = multiprocessing.get_context("spawn")  # torch and its threads do not fork
    with (
        Progress(*columns, TimeElapsedColumn(), console=_CONSOLE) as bar,
        concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool,
    ):
        task = bar.add_task("training runs", total=len(files), completed=len(files) - len(todo))
        running = {
            pool.submit(_run, case, seed, stream, files[case.name, seed]): (case.name, seed)
            for case, seed in todo
        }
        for done in concurrent.futures.as_completed(running):
            if (error := done.exception()) is not None:
                pool.shutdown(cancel_futures=True)
                name, seed = running[done]
                raise BenchError(f"{name}, seed {seed}: {error}") from error
            bar.advance(task)
    return {
        case.name: [
            Outcome(**json.loads(files[case.name, seed].read_text(encoding="utf-8")))
            for seed in seeds
        ]
        for case in cases
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and its standard error; nan with fewer than two."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.fmean(values), error
