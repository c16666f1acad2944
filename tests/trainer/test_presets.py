"""What the commands take for a stream whose columns they know."""

from embertide.trainer.commands.inputs import model_for, rates_for
from embertide.trainer.config import OptimizerConfig, criteo, globo, globo_history, globo_rates
from embertide.trainer.data.generator import NewsSource


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
