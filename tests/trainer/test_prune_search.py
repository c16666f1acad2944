"""The smallest within a loss of AUC: what is chosen, and that trials are kept."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from shop import RUN, Shop
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.config import PruneConfig, RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.errors import ConfigurationError, TrainerError
from embertide.trainer.lab import prune_search
from embertide.trainer.lab.trials import Trial, measured
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import news_model


def losing(noise: float = 0.0) -> Any:
    """Return figures of a model that loses 0.0001 a ratio; `noise` tells the two seeds apart."""

    def figures(ratio: float) -> list[dict[str, Any]]:
        lost = 0.0 if ratio == 1 else 0.0001 * ratio
        apart = 0.0 if ratio == 1 else noise
        return [
            {"auc": 0.8 - lost + apart, "rows": 1000 // ratio},
            {"auc": 0.7 - lost - apart, "rows": 900 // ratio},
        ]

    return figures


def test_the_greatest_ratio_within_the_bound_is_found_in_few_trials() -> None:
    tried: list[prune_search.Tried] = []
    best = prune_search.search(losing(), max_lost=0.002, max_ratio=64, tried=tried.append)
    assert best is not None
    assert 20 / prune_search.APART <= best.ratio <= 20
    assert best.loss == pytest.approx(0.0001 * best.ratio)
    assert len(tried) <= 7
    assert [each.within for each in tried] == [each.ratio <= 20 for each in tried]


def test_what_the_bound_holds_is_the_loss_and_its_error() -> None:
    best = prune_search.search(losing(noise=0.001), max_lost=0.002, max_ratio=64)
    # Two losses 0.002 apart: a standard error of 0.001.
    assert best is not None
    assert best.error == pytest.approx(0.001)
    assert 10 / prune_search.APART <= best.ratio <= 10


def test_the_greatest_is_taken_at_once_and_none_is_said() -> None:
    best = prune_search.search(losing(), max_lost=0.002, max_ratio=16)
    assert best is not None
    assert best.ratio == 16
    assert prune_search.search(losing(), max_lost=0.0, max_ratio=16) is None


def test_the_rest_of_what_the_run_says_of_pruning_stays() -> None:
    run = RunConfig(model=news_model(), prune=PruneConfig(bytes=10_000, half_life=7))
    assert prune_search.pruned_at(run, 1).prune is None
    assert prune_search.pruned_at(run, 3).prune == PruneConfig(ratio=3, half_life=7)


def test_a_window_of_one_label_is_refused() -> None:
    news = NewsSource(NewsConfig(hours=1, views_per_hour=100, base=-50.0))
    with pytest.raises(ConfigurationError, match="one label alone"):
        prune_search.measure(RunConfig(model=news_model()), news)


def test_a_window_is_learned_as_train_learns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed: list[int] = []
    refresh = Learner.refresh

    def noted(learner: Learner, now_ms: int) -> None:
        refreshed.append(now_ms)
        refresh(learner, now_ms)

    monkeypatch.setattr(Learner, "refresh", noted)
    # Its dense features are fitted first; its events go on for 7,500 s.
    found = prune_search.measure(RUN, Shop())
    assert 0.3 < found["auc"] < 0.7
    assert found["rows"] == 50
    assert refreshed == [version * 600_000 - 1 for version in range(1, 13)]


def trial(value: int, depends: str = "") -> Trial:
    measure = functools.partial(json.loads, json.dumps({"value": value}))
    return Trial(name=f"of {value}", depends=depends or str(value), measure=measure)


def test_trials_are_measured_once_and_told_apart_by_what_they_depend_on(tmp_path: Path) -> None:
    counts: list[int] = []
    assert measured([trial(1), trial(2)], tmp_path, jobs=2, done=counts.append) == [
        {"value": 1},
        {"value": 2},
    ]
    assert counts == [0, 1, 2]
    kept = trial(1).file(tmp_path)
    kept.write_text('{"value": "kept"}')
    counts.clear()
    again = measured([trial(1), trial(1, "other")], tmp_path, jobs=1, done=counts.append)
    assert again == [{"value": "kept"}, {"value": 1}]
    assert counts == [1, 2]


def test_a_trial_that_fails_is_named_and_leaves_the_others(tmp_path: Path) -> None:
    bad = Trial(name="broken", depends="", measure=functools.partial(json.loads, "{"))
    with pytest.raises(TrainerError, match="broken: "):
        measured([trial(1), bad], tmp_path, jobs=1)
    assert [path.name for path in tmp_path.iterdir()] == [trial(1).file(tmp_path).name]


def test_the_command_finds_a_ratio_and_goes_on_from_what_is_kept(tmp_path: Path) -> None:
    arguments = [
        "prune-search",
        str(tmp_path),
        "--demo",
        "--hours",
        "1",
        "--events",
        "4000",
        "--seeds",
        "2",
    ]
    arguments += ["--max-ratio", "2", "--max-auc-loss", "0.9", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["chosen"]["ratio"] == 2
    assert found["tried"] == [found["chosen"]]
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(files) == 4
    assert json.loads(CliRunner().invoke(app, arguments).stdout) == found
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files


def test_the_command_says_what_it_cannot_read(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["prune-search", str(tmp_path), "--data", "none.parquet"])
    assert done.exit_code == 2
    assert "none.parquet" in done.output
