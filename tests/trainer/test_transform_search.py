"""Transforms by trials: clusters, what is chosen and confirmed, bounds, and what is refused.

Shapes: N events.
"""

import concurrent.futures
import dataclasses
import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from shop import RUN, Shop
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.config import DenseConfig, LabelJoin, RunConfig
from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.lab import transform_search
from embertide.trainer.lab.dense_clusters import Description, clusters, describe
from embertide.trainer.lab.transform_search import BLOCKS, Dense, OutOfBoundsError, Pipeline
from embertide.trainer.model.learner import Learner, NotFiniteError
from embertide.trainer.presets import news_model

PLAIN = (DenseConfig(name="price"), DenseConfig(name="size"))
STANDARD = Pipeline(steps=("standardise",))
DESCRIBED = (describe(np.arange(9, dtype=np.float32)),) * 2


# --- clusters -------------------------------------------------------------------------------------


def described(*columns: Any) -> list[Description]:
    return [describe(np.asarray(column, np.float32)) for column in columns]


def test_features_that_are_distributed_alike_are_a_cluster_whatever_their_order() -> None:
    rng = np.random.default_rng(1)
    amount = [np.exp(1 + 1.5 * rng.standard_normal(4000)) for _ in range(3)]
    reading = [base + 5 * rng.standard_normal(4000) for base in (1000, 300)]
    visits = [rng.poisson(3, 4000).astype(np.float64) for _ in range(2)]
    for each in visits:
        each[rng.random(4000) < 0.4] = np.nan
    found = described(amount[0], reading[0], visits[0], amount[1], reading[1], visits[1], amount[2])
    assert clusters(found, most=4) == [(0, 3, 6), (1, 4), (2, 5)]
    assert [len(group) for group in clusters(found, most=2)] in ([4, 3], [5, 2])
    assert clusters(found, most=1) == [tuple(range(7))]


def test_a_feature_that_says_nothing_is_described_and_clustered() -> None:
    nothing = np.full(100, np.nan)
    found = described(nothing, np.zeros(100), np.arange(100), [], [np.inf, 1, 2])
    assert found[0].missing == found[3].missing == 1
    assert found[4].missing == pytest.approx(1 / 3)
    assert all(np.isfinite(each.place).all() for each in found)
    assert sorted(d for group in clusters(found, most=3) for d in group) == [0, 1, 2, 3, 4]
    assert clusters(found[:1], most=3) == [(0,)]
    assert clusters([], most=3) == []


def test_a_column_for_what_is_missing_is_tried_where_something_is() -> None:
    whole = describe(np.arange(9, dtype=np.float32))
    tried = transform_search.pipelines(PLAIN, (whole, whole))
    assert not any(each.missing for each in tried)
    assert Pipeline(steps=("log1p",)) not in tried  # as they are
    gaps = transform_search.pipelines(PLAIN, (whole, describe(np.array([1, np.nan], np.float32))))
    assert len(gaps) == 2 * len(tried) + 1
    assert Pipeline(steps=("log1p",), missing=True) in gaps
    assert len(set(gaps)) == len(gaps)


# --- what is chosen -------------------------------------------------------------------------------


def part(loss: float) -> dict[str, Any]:
    """A part's figures, whose blocks differ."""
    return {"loss": [loss + 0.001 * (block % 2) for block in range(BLOCKS)], "auc": 1 - loss}


class Made:
    """Figures as if they had been measured.

    Attributes:
        worth: The log loss that a pipeline saves of a feature, by (name, steps).
        asked: Choices, seeds and share of each call.
    """

    def __init__(self, worth: Mapping[Any, float], **more: Any) -> None:
        self.worth = worth
        self.confirms = more.get("confirms", 1.0)
        self.noise = more.get("noise", 0.0)
        self.fails = more.get("fails", ())
        self.asked: list[tuple[int, int, int]] = []

    def __call__(self, choices: Sequence[Dense], seeds: int, share: int) -> list[Any]:
        self.asked.append((len(choices), seeds, share))
        return [[self.one(dense, seed) for seed in range(seeds)] for dense in choices]

    def one(self, dense: Dense, seed: int) -> dict[str, Any]:
        if any(each.steps in self.fails for each in dense):
            return {"failed": "loss is nan"}
        saved = sum(self.worth.get((each.name, each.steps), 0.0) for each in dense)
        saved += self.noise * seed * (dense != PLAIN)
        return {"choose": part(0.5 - saved), "confirm": part(0.5 - self.confirms * saved)}


def searched(figures: Made, groups: Any = ((0,), (1,)), **more: Any) -> transform_search.Outcome:
    options = {"seeds": 3, "least_gain": 0.001} | more
    return transform_search.search(PLAIN, DESCRIBED, groups, figures, **options)


def test_each_cluster_gets_the_steps_that_save_most_with_those_before_it() -> None:
    worth = {("price", ("standardise",)): 0.02, ("price", ("quantile",)): 0.03}
    figures = Made(worth | {("size", ("clip", "standardise")): 0.005})
    outcome = searched(figures)
    assert outcome.better
    assert [each.steps for each in outcome.dense] == [("quantile",), ("clip", "standardise")]
    assert outcome.confirmed is not None
    assert outcome.confirmed.loss == pytest.approx(0.035)
    assert [each.taken for each in outcome.searched] == [True, True]
    first = outcome.searched[0]
    assert first.tried[0].pipeline == first.best == Pipeline(steps=("quantile",))
    assert [first.tried[0].round, first.tried[-1].round] == [3, 1]
    # Nine pipelines but the one there is: a part of the events, all, and all seeds; at last both.
    rounds = [(9, 1, transform_search.SHARE), (4, 1, 1), (3, 3, 1)]
    assert figures.asked == [*rounds, *rounds, (2, 3, 1)]


def test_features_of_a_cluster_share_their_steps() -> None:
    outcome = searched(Made({("price", ("standardise",)): 0.02}), groups=((0, 1),))
    assert [each.steps for each in outcome.dense] == [("standardise",)] * 2
    assert [each.name for each in outcome.dense] == ["price", "size"]


@pytest.mark.parametrize(
    "figures",
    [
        Made({}),
        Made({("price", ("quantile",)): 0.0009}),  # less than is asked for
        Made({("price", ("quantile",)): 0.002}, noise=0.05),  # less than chance
        Made({("price", ("quantile",)): 0.02}, confirms=-1.0),  # by chance on what chose
    ],
    ids=["nothing", "too little", "within chance", "not confirmed"],
)
def test_what_is_no_better_stays_as_it_is(figures: Made) -> None:
    outcome = searched(figures, groups=((0, 1),))
    assert outcome.dense == PLAIN
    assert not outcome.better


def test_pipelines_that_break_the_net_are_passed_over() -> None:
    worth = {("price", ("quantile",)): 0.02}
    figures = Made(worth, fails=(("standardise",), ("log1p", "standardise")))
    outcome = searched(figures, groups=((0,),))
    assert outcome.dense[0].steps == ("quantile",)
    assert outcome.searched[0].tried[-1].loss is None
    with pytest.raises(ConfigurationError, match="as they are the net does not stay finite"):
        searched(Made(worth, fails=(("log1p",),)))


def test_bounds_leave_the_clusters_that_come_after_as_they_are() -> None:
    worth = {("price", ("quantile",)): 0.02, ("size", ("quantile",)): 0.02}
    figures = Made(worth)

    def stops(choices: Sequence[Dense], seeds: int, share: int) -> list[Any]:
        if len(figures.asked) == 5 and len(choices) > 2:  # the last round of the second
            raise OutOfBoundsError
        return figures(choices, seeds, share)

    outcome = transform_search.search(
        PLAIN, DESCRIBED, ((0,), (1,)), stops, seeds=3, least_gain=0.001
    )
    assert outcome.left == (("size",),)
    assert [each.steps for each in outcome.dense] == [("quantile",), ("log1p",)]


def test_the_error_of_a_gain_is_of_seeds_and_of_blocks() -> None:
    before = [{"choose": part(0.5)}, {"choose": part(0.5)}]
    after = [{"choose": part(0.4)}, {"choose": part(0.42)}]
    found = transform_search.gain(before, after, "choose")
    assert found is not None
    assert [found.loss, found.error] == pytest.approx([0.09, 0.01])
    assert [found.auc, found.auc_error] == pytest.approx([0.09, 0.01])
    flat = {"loss": [0.4] * BLOCKS, "auc": 0.6}
    found = transform_search.gain(before, [{"choose": flat}] * 2, "choose")
    assert found is not None
    # Blocks of 0.1 and 0.101 by turns: their deviation is 0.0005, of N - 1 a little more.
    assert found.error == pytest.approx(0.0005 / (BLOCKS - 1) ** 0.5)


# --- a window -------------------------------------------------------------------------------------


def test_a_trial_learns_the_first_part_alone_and_scores_each_later_event_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, list[NDArray[np.int64]]] = {"learn": [], "score": []}
    for name, events in seen.items():
        real = getattr(Learner, name)

        def noted(self: Learner, batch: Batch, *, real: Any = real, events: Any = events) -> Any:
            events.append(batch.event_B)
            return real(self, batch)

        monkeypatch.setattr(Learner, name, noted)
    source = Shop(transform_search.MIN_EVENTS)
    window = transform_search.look_at(RUN, source)
    assert (window.events, window.choosing, window.confirming) == (5000, 3000, 4000)
    for share, first in ((1, 0), (3, 2000)):
        for events in seen.values():
            events.clear()
        found = transform_search.measure(RUN, source, window, share=share)
        assert np.array_equal(np.concatenate(seen["learn"]), np.arange(first, 3000))
        assert np.array_equal(np.concatenate(seen["score"]), np.arange(3000, 5000))
        assert all(len(found[name]["loss"]) == BLOCKS for name in ("choose", "confirm"))
        assert all(0.3 < found[name]["auc"] < 0.7 for name in ("choose", "confirm"))


def test_a_net_that_does_not_stay_finite_fails_its_trial_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(*_: object) -> None:
        raise NotFiniteError("the loss is")

    source = Shop(transform_search.MIN_EVENTS)
    window = transform_search.look_at(RUN, source)
    monkeypatch.setattr(Learner, "learn", breaks)
    found = transform_search.measure(RUN, source, window, share=1)
    assert found == {"failed": str(NotFiniteError("the loss is"))}


def one_label(from_event: int) -> EventSource:
    source = Shop(transform_search.MIN_EVENTS)
    source.whole.label_B[from_event:] = 0
    return source


@pytest.mark.parametrize(
    ("run", "source", "says"),
    [
        (RunConfig(model=news_model()), Shop(), "'news' has no dense features"),
        (RUN, Shop(1000), "there are 1,000 events; give at least 5,000"),
        (RUN, one_label(4000), "events 4,000 to 5,000 of 5,000 have one label alone"),
        (dataclasses.replace(RUN, labels=LabelJoin(wait_s=60)), Shop(), "give events with labels"),
    ],
    ids=["no dense", "few", "one label", "late labels"],
)
def test_a_window_that_can_show_nothing_is_refused(
    run: RunConfig, source: EventSource, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        transform_search.look_at(run, source)


# --- the command ----------------------------------------------------------------------------------

RUN_FILE = '''"""A run whose one dense feature lies far from 0, and whose other says nothing."""

from pathlib import Path

from embertide.trainer.config import (
    DenseConfig, FeatureConfig, ModelConfig, OptimizerConfig, RunConfig, TableConfig,
)
from embertide.trainer.data import open_events
from embertide.trainer.data.base import EventSchema, FeatureColumn

source = open_events(
    str(Path(__file__).parent / "events.parquet"),
    schema=EventSchema(
        features=(FeatureColumn(name="user", column="user"),),
        label="y",
        dense=("reading", "noise"),
        ts="ts",
    ),
)
run = RunConfig(
    model=ModelConfig(
        name="readings",
        tables=(TableConfig(name="user", dim=4),),
        features=(FeatureConfig(name="user", table="user"),),
        dense=(DenseConfig(name="reading"), DenseConfig(name="noise")),
        bottom_mlp=(8,),
        top_mlp=(8,),
    ),
    optimizer=OptimizerConfig(dense_learning_rate=0.01),
    batch_size=64,
)
'''


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's file with events; trials are measured here, as processes take seconds to begin."""

    def pool(jobs: int, **_: object) -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(jobs)

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", pool)
    rng = np.random.default_rng(2)
    says_N, events = rng.standard_normal(6000), 6000
    columns = {
        "ts": np.arange(events),
        "user": rng.integers(0, 5, events),
        "reading": (1000 + 5 * says_N).astype(np.float32),
        "noise": np.exp(2 * rng.standard_normal(events)).astype(np.float32),
        "y": (rng.random(events) < 1 / (1 + np.exp(-2 * says_N))).astype(np.int8),
    }
    pq.write_table(pa.table(columns), tmp_path / "events.parquet")
    path = tmp_path / "run.py"
    path.write_text(RUN_FILE)
    return path


def run_it(*arguments: object) -> Any:
    words = ["transform-search", *map(str, arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


def test_the_command_finds_what_was_planted_and_goes_on_from_what_is_kept(
    config: Path, tmp_path: Path
) -> None:
    folder, picture = tmp_path / "kept", tmp_path / "saved.svg"
    options = (folder, "--config", config, "--seeds", 2)
    short = run_it(*options, "--max-trials", 16)
    assert short.exit_code == 0, short.output
    assert "not searched" in short.stdout
    assert "raise --max-trials" in short.stdout
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert 0 < len(before) <= 16

    done = run_it(*options, "--plot", picture, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["verdict"] == "better"
    steps = {each["name"]: each["steps"] for each in found["dense"]}
    assert steps["reading"] != ["log1p"]
    assert found["confirmed"]["loss"] > 4 * found["confirmed"]["error"]
    assert found["confirmed"]["auc"] > 0.05
    assert found["left"] == []
    assert "<svg" in picture.read_text()
    files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {path: files[path] for path in before} == before
    assert len(files) == found["trials"] > len(before)
    assert found["passes"] < found["trials"]

    again = run_it(*options, "--max-minutes", 0.1)  # nothing is left to be measured
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == files
    assert f"put these lines into the model of {config}:" in again.stdout
    lines = again.stdout.split("put these lines", 1)[1].split("\n", 1)[1]
    namespace = runpy.run_path(str(config))
    dense = eval(lines.strip().removeprefix("dense=").rstrip(","), namespace)
    assert [list(each.steps) for each in dense] == [steps["reading"], steps["noise"]]
    # They do what the trials did, in a run of theirs.
    run = namespace["run"]
    changed = dataclasses.replace(run, model=dataclasses.replace(run.model, dense=dense))
    assert changed.model.dense_columns == 2


def test_bounds_that_allow_nothing_are_no_tie(config: Path, tmp_path: Path) -> None:
    options = (tmp_path / "kept", "--config", config, "--max-trials", 2)
    assert json.loads(run_it(*options, "--json").stdout)["verdict"] == "not searched"
    said = run_it(*options).stdout
    assert "raise --max-trials" in said
    assert "tie" not in said


def test_the_command_says_what_it_cannot_do(config: Path, tmp_path: Path) -> None:
    for options, says in (
        ((), "Missing option '--config'"),
        (("--config", config, "--data", "none.parquet"), "none.parquet"),
        (("--config", config, "--events", 100), "there are 100 events; give at least 5,000"),
        (("--config", config, "--plot", tmp_path / "x.doc"), "is none of"),
        (("--config", tmp_path / "none.py"), "there is no such file"),
    ):
        done = run_it(tmp_path / "kept", *options)
        assert done.exit_code == 2, done.output
        assert says in done.output
    assert not (tmp_path / "kept").exists()
