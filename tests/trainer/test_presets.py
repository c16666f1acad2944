"""What the commands take for a stream whose columns they know."""

import dataclasses
import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from embertide.trainer.commands import train
from embertide.trainer.commands.inputs import model_for, rates_for
from embertide.trainer.config import OptimizerConfig, RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents, blocks
from embertide.trainer.eval.metrics import Prequential
from embertide.trainer.learner import Learner
from embertide.trainer.presets import criteo, globo, globo_history, globo_rates

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


def test_train_learns_at_those_rates_and_tells_the_quality_of_each_day(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(train.command)
    options = ["--events", "1500", "--cache", str(CACHE), "--json"]
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
