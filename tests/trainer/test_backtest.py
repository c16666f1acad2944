"""Backtests by day: the next day frozen, beside the same day learned; killed, they go on."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.eval.metrics import summarise
from embertide.trainer.lab.backtest import over_block, over_days

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"


def test_days_are_scored_frozen_and_a_second_start_measures_nothing_again(tmp_path: Path) -> None:
    config = tmp_path / "run.py"
    config.write_text(
        "from embertide.trainer.config import RunConfig\n"
        "from embertide.trainer.presets import news_model\n"
        "from embertide.trainer.data.generator import NewsConfig, NewsSource\n"
        "run = RunConfig(model=news_model(), batch_size=64, publish_every_s=21600)\n"
        "source = NewsSource(NewsConfig(hours=60, views_per_hour=12, users=60, seed=1))\n"
    )
    folder = tmp_path / "kept"
    command = ["backtest", "--config", str(config), "--folder", str(folder), "--cache", str(CACHE)]

    def run_it() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        done = CliRunner().invoke(app, [*command, "--json"])
        assert done.exit_code == 0, done.output
        found: dict[str, dict[str, dict[str, dict[str, float]]]] = json.loads(done.stdout)
        return found

    said = run_it()
    frozen, learned = (said[name]["by_day"] for name in ("frozen", "prequential"))
    assert list(frozen) == list(learned) == ["1", "2"]
    for day in ("1", "2"):
        assert frozen[day]["events"] == learned[day]["events"] > 100
        assert frozen[day]["log_loss"] != learned[day]["log_loss"]
    assert frozen["2"]["version"] > frozen["1"]["version"] > 1
    (kept,) = folder.iterdir()
    (second_day,) = kept.glob("day-2-*.json")
    # As after a kill between the days: the run is at the end of day 1.
    second_day.unlink()
    (last,) = kept.glob("learning-*.json")
    before = last.stat().st_mtime_ns
    shutil.rmtree(kept / "run")
    again = run_it()
    assert last.stat().st_mtime_ns == before
    assert again["frozen"]["by_day"]["1"] == frozen["1"]
    assert again["frozen"]["by_day"]["2"]["events"] == frozen["2"]["events"]


def test_the_summary_has_the_worst_day_of_each_figure() -> None:
    days = {1: {"auc": 0.7, "log_loss": 0.5}, 2: {"auc": 0.5, "log_loss": 0.3, "gauc": 0.5}}
    assert over_days(days) == {
        "log_loss": {"mean": 0.4, "worst": 0.5, "standard_error": pytest.approx(0.1)},
        "auc": {"mean": 0.6, "worst": 0.5, "standard_error": pytest.approx(0.1)},
    }


def test_blocks_of_days_have_the_figures_of_all_their_events(tmp_path: Path) -> None:
    config = tmp_path / "run.py"
    config.write_text(
        "from embertide.trainer.config import RunConfig\n"
        "from embertide.trainer.presets import news_model\n"
        "from embertide.trainer.data.generator import NewsConfig, NewsSource\n"
        "run = RunConfig(model=news_model(), batch_size=64, publish_every_s=43200)\n"
        "source = NewsSource(NewsConfig(hours=108, views_per_hour=6, users=60, seed=1))\n"
    )
    folder, picture = tmp_path / "kept", tmp_path / "backtest.svg"
    command = ["backtest", "--config", str(config), "--folder", str(folder), "--cache", str(CACHE)]
    done = CliRunner().invoke(app, [*command, "--days", "2", "--json", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert "day 4" in picture.read_text()
    for figures in said.values():
        assert list(figures["by_day"]) == ["2", "4"]
    (kept,) = folder.iterdir()
    (path,) = kept.glob("learning-*.json")
    days = json.loads(path.read_text())
    block = said["prequential"]["by_day"]["2"]
    assert block["events"] == days["2"]["events"] + days["3"]["events"]
    assert block["events"] == said["frozen"]["by_day"]["2"]["events"]
    assert said["prequential"]["by_day"]["4"] == days["4"]


def test_a_block_is_the_sum_of_its_days() -> None:
    rng = np.random.default_rng(3)
    label_B = (rng.random(900) < 0.3).astype(np.float32)
    label_B[600:700] = 0  # a day without an AUC
    score_B = np.clip(0.3 + 0.2 * (label_B - 0.3) + rng.normal(0, 0.1, 900), 0.01, 0.99)
    parts = [slice(0, 600), slice(600, 700), slice(700, 900)]
    days = [summarise(label_B[part], score_B[part]).as_json() for part in parts]
    block, whole = over_block(days), summarise(label_B, score_B).as_json()
    assert "auc" not in days[1]
    days[1]["gauc"], days[2]["gauc"] = math.nan, 0.7  # as of days without users of both labels
    assert over_block([days[1]]) == {n: v for n, v in days[1].items() if n != "gauc"}
    assert over_block(days)["gauc"] == 0.7
    assert block["auc"] == pytest.approx((600 * days[0]["auc"] + 200 * days[2]["auc"]) / 800)
    for name in ("events", "log_loss", "label_mean", "normalised_entropy"):
        assert block[name] == pytest.approx(whole[name]), name


def test_one_day_is_too_few(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["backtest", "--demo", "--hours", "2", "--folder", str(tmp_path)]
    )
    assert done.exit_code == 2
    assert "of 1 day;" in done.stderr
    command = ["backtest", "--demo", "--hours", "50", "--days", "7", "--folder", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "of 1 block of 7 days" in " ".join(done.stderr.split())
