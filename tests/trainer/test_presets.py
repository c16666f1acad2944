"""What the commands take for a stream whose columns they know."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from embertide.trainer.commands import describe, train
from embertide.trainer.commands.inputs import model_for, preset_for, rates_for
from embertide.trainer.config import OptimizerConfig, RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents, blocks
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.metrics import Prequential
from embertide.trainer.learner import Learner
from embertide.trainer.presets import criteo, globo, globo_crossed, globo_history, globo_rates

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"


def test_the_news_stream_gets_its_model_and_the_rates_that_were_chosen_for_it() -> None:
    model = model_for(NewsSource())
    assert model == globo()
    assert rates_for(model) == globo_rates() != OptimizerConfig()
    assert rates_for(criteo()) == OptimizerConfig()


def test_the_history_model_reads_the_same_events() -> None:
    assert [each.name for each in globo_history().features] == [
        each.name for each in globo().features
    ]
    assert globo_history().dense_features == globo().dense_features == 0


def test_a_preset_can_be_named_if_it_has_the_features_of_the_events() -> None:
    assert preset_for(None, NewsSource()) == globo()
    assert preset_for("news-crossed", NewsSource()) == globo_crossed()
    with pytest.raises(ConfigurationError, match="model 'criteo' has the features c1, c2"):
        preset_for("criteo", NewsSource())


def test_describe_counts_the_rows_of_crosses_and_histories() -> None:
    app = typer.Typer()
    app.command()(describe.command)

    def described(model: str) -> dict[str, int]:
        options = ["--demo", "--events", "20000", "--model", model, "--json"]
        done = CliRunner().invoke(app, options)
        assert done.exit_code == 0, done.output
        found: dict[str, int] = json.loads(done.output)
        return found

    plain, liked, crossed = map(described, ("news", "news-history", "news-crossed"))
    (batch,) = FirstEvents(NewsSource(NewsConfig(hours=96)), 20_000).batches(batch_size=100_000)
    likes = batch.keys_BF[batch.label_B > 0, 0]
    users, times = np.unique(likes, return_counts=True)
    articles = [np.unique(batch.keys_BF[:, 1:3])]  # of one table in place of two
    apart = sum(len(np.unique(batch.keys_BF[:, f])) for f in (1, 2)) - len(articles[0])
    assert liked["rows"] == plain["rows"] - apart + len(users)
    learned = (plain["rows"] - apart) * 32 * 4
    assert liked["row_bytes"] == learned + 8 * np.minimum(times, 10).sum()
    assert crossed["rows"] > 2 * liked["rows"]
    assert crossed["changed_rows"] > liked["changed_rows"] > plain["changed_rows"]
    assert crossed["index_bytes"] > liked["index_bytes"]


def test_train_learns_at_those_rates_and_tells_the_quality_of_each_day(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(train.command)
    options = ["--demo", "--events", "1500", "--cache", str(CACHE), "--json"]
    done = CliRunner().invoke(app, [str(tmp_path / "pub"), *options])
    assert done.exit_code == 0, done.output
    result = json.loads(done.output.splitlines()[-1])["result"]

    run = RunConfig(model=globo(), optimizer=globo_rates())
    learner, figures = Learner(run), Prequential()
    source, origin_ms = FirstEvents(NewsSource(NewsConfig(hours=96)), 1500), None
    for batch in source.batches(batch_size=run.batch_size):
        origin_ms = int(batch.ts_ms_B[0]) if origin_ms is None else origin_ms
        every_ms = 1000 * run.publish_every_s
        for _, part in blocks(batch, origin_ms=origin_ms, every_ms=every_ms):
            figures.add(part.ts_ms_B, part.label_B, learner.learn(part))
    day = dataclasses.asdict(figures.daily_summaries()[0])
    for name in ("auc", "log_loss", "calibration"):
        assert result[f"{name}_by_day"] == {"0": day[name]}
    assert 0.5 < day["calibration"] < 2
