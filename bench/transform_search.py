"""What `embertide transform-search` finds: `python -m bench.transform_search [--criteo PATH]`.

*Planted*: made-up events whose twelve dense features are of four kinds, each of which hides what it
says from one transform or another. The events have a log loss that no model can be expected to
beat, as their probabilities are known.

    amounts    log-normal; the logarithm says it
    readings   1000 and a little; a logarithm rounds the little off
    rates      10^-6 to 10^-2; the place among the others says it
    visits     counts of which two fifths are missing; that they are says it

*Criteo*: ads, where the default suits most features. What steps for all features alike come to
there, `bench.train dense` tells.

In both, the command sees the first events alone. A model with what it found then learns the same
events, and so does one with the default transforms, and of planted data one with the best steps for
all features alike. The events after them are scored.
"""

import argparse
import dataclasses
import hashlib
import inspect
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from bench import report
from bench.criteo import schema
from bench.report import CONSOLE
from bench.servers import BUILD, ROOT, BenchError
from bench.train.criteo import DLRM, Ads, ads_of
from bench.train.runs import Case, Outcome, Stream, mean_and_error, mean_row, outcomes
from embertide.trainer.commands.run_file import explained
from embertide.trainer.config import (
    DenseConfig,
    FeatureConfig,
    ModelConfig,
    RunConfig,
    TableConfig,
)
from embertide.trainer.data.base import EventSchema, FeatureColumn
from embertide.trainer.errors import TrainerError
from embertide.trainer.eval.metrics import log_loss

_FOLDER = BUILD / "bench" / "transform_search"
_CLAIM = "22.9"
_ERRORS = 2.0
_SCHEMA_IMPORTS = "from embertide.trainer.data.base import EventSchema, EventTimes, FeatureColumn"
_KINDS = ("amount", "reading", "rate", "visits")
_OF_KIND = 3
_DENSE = tuple(f"{kind}{n}" for kind in _KINDS for n in range(1, _OF_KIND + 1))
_KEYS = {"user": 300, "item": 100}
_EVENTS, _LEARNED = 40_000, 30_000
_DEFAULT, _FOUND, _ALIKE = "default", "found", "one for all"


def planted_schema() -> EventSchema:
    """Return the schema of the made-up events."""
    features = tuple(FeatureColumn(name=name, column=name) for name in _KEYS)
    return EventSchema(features=features, dense=_DENSE, label="y", ts="ts")


def planted_run() -> RunConfig:
    """Return a run of theirs, with the default transforms."""
    tables = tuple(TableConfig(name=name, dim=8) for name in _KEYS)
    return RunConfig(
        model=ModelConfig(
            name="planted",
            tables=tables,
            features=tuple(FeatureConfig(name=name, table=name) for name in _KEYS),
            dense=tuple(DenseConfig(name=name) for name in _DENSE),
            bottom_mlp=(64, 32),
            top_mlp=(32,),
        ),
        batch_size=64,
    )


def planted_events(seed: int, events: int) -> tuple[dict[str, Any], Any]:
    """Return columns by name, and the probabilities of label 1; no two events depend on another."""
    rng = np.random.default_rng([seed, events])
    columns: dict[str, Any] = {"ts": np.arange(events)}
    logit_N = np.full(events, -1.2)
    for name, keys in _KEYS.items():
        columns[name] = rng.integers(0, keys, events)
        logit_N += 0.5 * rng.standard_normal(keys)[columns[name]]
    for name in _DENSE:
        says_N = rng.standard_normal(events)
        worth = 0.4 * rng.choice((-1, 1))
        if name.startswith("amount"):
            value_N = np.exp(1 + 1.5 * says_N)
        elif name.startswith("reading"):
            value_N = 1000 + 5 * says_N
        elif name.startswith("rate"):
            share_N = rng.random(events)
            value_N, says_N = 10 ** (4 * share_N - 6), 3.5 * (share_N - 0.5)
        else:
            gone_N = rng.random(events) < 0.4
            value_N = np.where(gone_N, np.nan, rng.poisson(3, events).astype(np.float64))
            says_N = np.where(gone_N, 1.2, -0.8)
        columns[name] = value_N.astype(np.float32)
        logit_N += worth * says_N
    p_N = 1 / (1 + np.exp(-logit_N))
    columns["y"] = (rng.random(events) < p_N).astype(np.int8)
    return columns, p_N


def _write_planted(seed: int) -> tuple[Stream, Path, float]:
    """Return the events, the run's file of what the search sees, and the log loss of the truth."""
    code = hashlib.sha256(inspect.getsource(planted_events).encode()).hexdigest()[:8]
    folder = _FOLDER / f"planted-{seed}-{code}"
    folder.mkdir(parents=True, exist_ok=True)
    columns, p_N = planted_events(seed, _EVENTS)
    path = folder / "events.parquet"
    if not path.exists():  # trials know a file by when it was written
        parquet.write_table(pa.table(columns), path)
    config = folder / "run.py"
    config.write_text(
        f"{explained(planted_run())}\n"
        f"from embertide.trainer.data import open_events\n{_SCHEMA_IMPORTS}\n\n"
        f"source = open_events({str(path)!r}, schema={planted_schema()!r})\n"
    )
    stream = Stream(path=path, days=(0, 0), seen_by="user", schema=planted_schema())
    held = slice(_LEARNED, None)
    return stream, config, log_loss(columns["y"][held], p_N[held])


def _search(folder: Path, *options: object) -> dict[str, Any]:
    """Run the command.

    Raises:
        BenchError: It failed.
    """
    words = ["transform-search", str(folder), "--json", *map(str, options)]
    done = subprocess.run(
        [sys.executable, "-m", "embertide.trainer", *words],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BenchError(f"embertide {' '.join(words)} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    for each in found["searched"]:
        gain = each["gain"] or {"loss": float("nan"), "error": float("nan")}
        best = each["best"]
        CONSOLE.print(
            f"  {' '.join(each['features'])}: {', '.join(best['steps'])}"
            f"{', missing' if best['missing'] else ''} {gain['loss']:+.5f} ± {gain['error']:.5f}"
            f"{' taken' if each['taken'] else ''}"
        )
    CONSOLE.print(f"  {found['verdict']}: {found['trials']} trials, {found['passes']} passes")
    return found


def _case(name: str, run: RunConfig, dense: Sequence[dict[str, Any]] | None) -> Case:
    if dense is None:
        return Case(name=name, run=run)
    features = tuple(
        DenseConfig(**{**each, "steps": tuple(each["steps"]), "clip": tuple(each["clip"])})
        for each in dense
    )
    return Case(
        name=name,
        run=dataclasses.replace(run, model=dataclasses.replace(run.model, dense=features)),
    )


def _auc(outcome: Outcome) -> float:
    return outcome.auc


def _loss(outcome: Outcome) -> float:
    return outcome.series["log_loss"][0]


_FIGURES: tuple[tuple[str, Literal["lower", "higher"], Callable[[Outcome], float], int], ...] = (
    ("log loss", "lower", _loss, -1),
    ("AUC", "higher", _auc, 1),
)


def _in_errors(values: Sequence[float]) -> float:
    """Return the mean over its standard error; 0 where nothing differs."""
    mean, error = mean_and_error(values)
    return mean / error if error else 0.0


def _rows(
    case: str, found: dict[str, list[list[Outcome]]], least: float, *, by_data: bool
) -> list[report.Row]:
    """Return rows of the found transforms against the default's.

    Args:
        case: What the data are.
        found: By choice of transforms, the outcomes of each data set, by seed.
        least: Standard errors that the gain has to reach.
        by_data: Whether data sets are what the error is of; else seeds are.
    """
    rows = []
    for metric, better, figure, sign in _FIGURES:
        values = {
            name: [[figure(outcome) for outcome in of_data] for of_data in of_choice]
            for name, of_choice in found.items()
        }
        means = {
            name: [statistics.fmean(each) for each in of_choice] if by_data else of_choice[0]
            for name, of_choice in values.items()
        }
        peer = statistics.fmean(means[_DEFAULT])
        for name in (each for each in found if each != _DEFAULT):
            gains = [
                sign * (ours - theirs)
                for ours, theirs in zip(means[name], means[_DEFAULT], strict=True)
            ]
            rows.append(
                mean_row(
                    f"{case}: {name}",
                    means[name],
                    peer,
                    _DEFAULT,
                    error=mean_and_error(gains)[1],
                    metric=metric,
                    better=better,
                )
            )
            if name == _FOUND:
                rows.append(
                    report.measure(
                        (f"{case}: {name}", f"{metric} gained", "standard errors"),
                        [_in_errors(gains)],
                        better="higher",
                        target=least,
                        claim=_CLAIM,
                    )
                )
    return rows


def planted(
    data_seeds: Sequence[int], seeds: Sequence[int], jobs: int, options: Sequence[object]
) -> list[report.Row]:
    """Return rows over data sets of their own; the error is of the data sets.

    Raises:
        BenchError: A search failed.
    """
    found: dict[str, list[list[Outcome]]] = {_DEFAULT: [], _FOUND: [], _ALIKE: []}
    truths = []
    for seed in data_seeds:
        CONSOLE.print(f"planted, seed {seed}")
        stream, config, truth = _write_planted(seed)
        truths.append(truth)
        said = ("--config", config, "--events", _LEARNED, "--jobs", jobs, *options)
        plot = ("--plot", _FOLDER / f"planted-{seed}.svg")
        cases = [
            _case(_DEFAULT, planted_run(), None),
            _case(_FOUND, planted_run(), _search(config.parent, *said, *plot)["dense"]),
            _case(_ALIKE, planted_run(), _search(config.parent, *said, "--clusters", 1)["dense"]),
        ]
        each = outcomes(cases, seeds, Ads(stream=stream, learned=_LEARNED), jobs=jobs)
        for name, of_choice in each.items():
            found[name].append(of_choice)
    truth_row = report.measure(
        ("planted: the truth", "log loss", "nats"), truths, better="lower", target=0
    )
    return [*_rows("planted", found, _ERRORS, by_data=True), truth_row]


def criteo(
    path: Path, seeds: Sequence[int], jobs: int, options: Sequence[object]
) -> list[report.Row]:
    """Return rows of Criteo's ads; the error is of the seeds.

    Raises:
        BenchError: The file is not of Criteo's ads, or a search failed.
    """
    CONSOLE.print("criteo")
    stream = Stream(path=path.resolve(), days=(0, 0), seen_by="C1")
    ads = ads_of(stream)
    folder = _FOLDER / "criteo"
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "run.py"
    config.write_text(f"{explained(DLRM)}\n{_SCHEMA_IMPORTS}\n\nschema = {schema!r}\n")
    window = ("--config", config, "--data", stream.path, "--events", ads.learned)
    said = (*window, "--jobs", jobs, *options)
    plot = ("--plot", _FOLDER / "criteo.svg")
    cases = [
        _case(_DEFAULT, DLRM, None),
        _case(_FOUND, DLRM, _search(folder, *said, *plot)["dense"]),
    ]
    each = outcomes(cases, seeds, ads, jobs=jobs)
    found = {name: [of_choice] for name, of_choice in each.items()}
    # A loss that is within two standard errors is none.
    return _rows("Criteo", found, -_ERRORS, by_data=False)


def main() -> int:
    """Print a table and write build/bench/transform_search.json; the exit code is of the run."""
    parser = argparse.ArgumentParser(prog="bench.transform_search", description=__doc__)
    parser.add_argument("--criteo", type=Path, metavar="PATH", help="a file of Criteo's ads")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each choice")
    parser.add_argument("--data-seeds", type=int, default=3, help="planted data sets")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--max-minutes", type=float, default=120, help="of each search")
    given = parser.parse_args()
    options = ("--max-minutes", given.max_minutes)
    seeds = range(1, given.seeds + 1)
    try:
        rows = planted(range(1, given.data_seeds + 1), seeds, given.jobs, options)
        if given.criteo is not None:
            rows += criteo(given.criteo, seeds, given.jobs, options)
    except (BenchError, TrainerError) as error:
        CONSOLE.print(f"[red]bench-transforms: {error}")
        return 1
    report.write(BUILD / "bench" / "transform_search.json", ROOT, rows)
    report.show("transforms that a search found", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
