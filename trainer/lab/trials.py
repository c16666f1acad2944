"""Trials: figures that take minutes each, kept in files, so that what was stopped goes on.

A trial's file is named by everything that its figures depend on, so that a figure is measured once
and is never that of something else. Several trials are measured at a time, each in a process of its
own, for torch's threads and seed are the process's.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embertide.trainer.errors import TrainerError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One measurement.

    Attributes:
        name: The name that people call it by.
        depends: All that its figures depend on, as text.
        measure: Returns the figures, as JSON has them; called in another process.
    """

    name: str
    depends: str
    measure: Callable[[], dict[str, Any]]

    def file(self, folder: Path) -> Path:
        """Return where its figures are kept."""
        digest = hashlib.sha256(self.depends.encode()).hexdigest()[:16]
        return folder / f"{self.name.replace(' ', '-')}-{digest}.json"


def _keep(trial: Trial, path: Path) -> None:
    figures = trial.measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    temporary.rename(path)


def measured(
    trials: Sequence[Trial],
    folder: Path,
    *,
    jobs: int,
    done: Callable[[int], None] = lambda _count: None,
) -> list[dict[str, Any]]:
    """Return the figures of each trial, in their order; those that are not in the folder are taken.

    Args:
        trials: The trials to measure.
        folder: Folder of the files; made if need be.
        jobs: Processes at a time.
        done: Told how many are there: those of before, then one more each time.

    Raises:
        TrainerError: One failed; those that were complete are kept.
    """
    files = [trial.file(folder) for trial in trials]
    todo = {path: trial for path, trial in zip(files, trials, strict=True) if not path.exists()}
    count = len(trials) - len(todo)
    done(count)
    spawn = multiprocessing.get_context("spawn")  # torch and its threads do not fork
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        running = {pool.submit(_keep, trial, path): trial for path, trial in todo.items()}
        for future in concurrent.futures.as_completed(running):
            if (error := future.exception()) is not None:
                pool.shutdown(cancel_futures=True)
                raise TrainerError(f"{running[future].name}: {error}") from error
            count += 1
            done(count)
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]
