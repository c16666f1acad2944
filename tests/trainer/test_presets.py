"""The presets that commands take for a stream whose columns they know."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from embertide.trainer import presets
from embertide.trainer.commands import describe, train
from embertide.trainer.commands.inputs import model_for, preset_for, rates_for
from embertide.trainer.config import OptimizerConfig, RunConfig, compatibility
from embertide.trainer.data import base, open_events
from embertide.trainer.data.base import EventSchema, FeatureColumn
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents, blocks
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import news_crossed, news_history, news_model, news_rates

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"


def test_the_news_stream_gets_its_model_and_the_rates_that_were_chosen_for_it() -> None:
    model = model_for(NewsSource())
    assert model == news_model()
    assert rates_for(model) == news_rates() != OptimizerConfig()
    assert rates_for(dataclasses.replace(model, name="ads")) == OptimizerConfig()


def test_the_history_model_reads_the_same_events() -> None:
    assert [each.name for each in news_history().features] == [
        each.name for each in news_model().features
    ]
    assert news_history().dense_features == news_model().dense_features == 0


def test_a_preset_can_be_named_if_it_has_the_features_of_the_events(tmp_path: Path) -> None:
    assert preset_for(None, NewsSource()) == news_model()
    assert preset_for("news-crossed", NewsSource()) == news_crossed()
    (tmp_path / "in.csv").write_text("who,y\n1,1\n")
    schema = EventSchema(features=(FeatureColumn(name="who", column="who"),), label="y")
    likes = open_events(str(tmp_path / "in.csv"), schema=schema)
    with pytest.raises(ConfigurationError, match="model 'news' has the features user, prev"):
        preset_for("news", likes)
    with pytest.raises(ConfigurationError, match="no preset model has the features who; `embert"):
        preset_for(None, likes)


@pytest.mark.parametrize(
    ("name", "says"), [("criteo", "bench/criteo.py of the source tree has it"), ("nws", "-crossed")]
)
def test_a_preset_that_is_not_there_is_refused_with_those_there_are(name: str, says: str) -> None:
    why = rf"there is no preset '{name}'; there are news, news-history.*{says}"
    with pytest.raises(ConfigurationError, match=why):
        preset_for(name, NewsSource())
    app = typer.Typer()
    app.command()(train.command)
    for option in ("--print-config", "--model"):
        done = CliRunner().invoke(app, ["folder", "--demo", option, name], env={"COLUMNS": "300"})
        assert done.exit_code == 2
        assert re.search(why, done.stderr)


def test_a_name_of_before_says_what_it_is_called_now() -> None:
    with pytest.raises(ImportError, match="has no 'globo'; it is called news_model now"):
        exec("from embertide.trainer.presets import globo")
    with pytest.raises(ImportError, match=r"'criteo_schema'; bench/criteo\.py of the source tree"):
        exec("from embertide.trainer.data.base import criteo_schema")
    for module in (presets, base):
        assert not hasattr(module, "never")
    for name in compatibility.CALLED.values():
        assert hasattr(base if name.endswith("schema") else presets, name)


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


@pytest.mark.parametrize(
    ("versions", "most", "least"), [(100, 100, 95), (9000, 500, 450), (1, 20, 10)]
)
def test_describe_takes_the_interval_by_which_there_are_so_many_versions(
    versions: int, most: int, least: int
) -> None:
    """Of 20 seconds to ten minutes: so near 500 and at least 16 in the 9,800 s of these events."""
    app = typer.Typer()
    app.command()(describe.command)
    options = ["--demo", "--events", "20000", "--json", "--versions", str(versions)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert 20 <= found["every_s"] <= 600
    span_s = (found["last_ts_ms"] - found["first_ts_ms"]) / 1000
    assert least <= span_s / found["every_s"] <= most + 1
    assert found["events"] == 20_000


def test_train_learns_at_those_rates_and_tells_the_quality_of_each_day(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(train.command)
    options = ["--demo", "--events", "1500", "--cache", str(CACHE), "--json"]
    done = CliRunner().invoke(app, [str(tmp_path / "pub"), *options])
    assert done.exit_code == 0, done.output
    result = json.loads(done.output.splitlines()[-1])["result"]

    run = RunConfig(model=news_model(), optimizer=news_rates())
    learner, figures = Learner(run), Prequential()
    source, origin_ms = FirstEvents(NewsSource(NewsConfig(hours=96)), 1500), None
    for batch in learner.warm_up(source.batches(batch_size=run.batch_size)):
        origin_ms = int(batch.ts_ms_B[0]) if origin_ms is None else origin_ms
        every_ms = 1000 * run.publish_every_s
        for _, part in blocks(batch, origin_ms=origin_ms, every_ms=every_ms):
            figures.add(part.ts_ms_B, part.label_B, learner.learn(part))
    day = dataclasses.asdict(figures.daily_summaries()[0])
    for name in ("auc", "log_loss", "calibration"):
        assert result[f"{name}_by_day"] == {"0": day[name]}
    assert 0.5 < day["calibration"] < 2
