"""A share of the negatives: repeatable, counted, and the same chance promised."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from killing import train

from embertide.trainer.config import RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.sampling import is_kept, weighed
from embertide.trainer.eval.metrics import Summary
from embertide.trainer.presets import news_model, news_rates
from embertide.trainer.publish.folder import Publication

NEWS = NewsSource(NewsConfig(hours=8, views_per_hour=1500, users=300, new_items_per_hour=5))
RUN = RunConfig(
    model=news_model(),
    optimizer=news_rates(),
    publish_every_s=7200,
    batch_size=64,
    snapshot_every=9,
)


def test_positives_and_a_share_of_the_others_are_kept_whatever_the_batches() -> None:
    (all_of_them,) = NEWS.batches(batch_size=10**6)
    kept_B = is_kept(all_of_them, 0.25, seed=3)
    negative_B = all_of_them.label_B == 0
    assert kept_B[~negative_B].all()
    assert kept_B[negative_B].mean() == pytest.approx(0.25, abs=0.01)
    pieces = [is_kept(batch, 0.25, seed=3) for batch in NEWS.batches(batch_size=77)]
    assert (np.concatenate(pieces) == kept_B).all()
    assert (is_kept(all_of_them, 0.25, seed=4) != kept_B).any()
    assert is_kept(all_of_them, 1.0, seed=3).all()


def test_a_kept_negative_counts_for_those_left_out_and_keeps_its_own_weight() -> None:
    batch = next(NEWS.batches(batch_size=8))
    weight_B = np.full(len(batch), 0.5, np.float32)
    found = weighed(dataclasses.replace(batch, weight_B=weight_B), 0.25).weight_B
    assert found is not None
    assert found.tolist() == np.where(batch.label_B == 1, 0.5, 2.0).tolist()


def figures(rate: float, folder: Path) -> tuple[Summary, int, int]:
    run = dataclasses.replace(RUN, negative_rate=rate)
    trainer = train(run, NEWS, Publication(folder))
    (summary,) = trainer.state.prequential.daily_summaries().values()
    return summary, trainer.state.events, trainer.steps.unsampled


def test_scores_stay_the_chances_that_they_were(tmp_path: Path) -> None:
    every, events, none = figures(1.0, tmp_path / "all")
    some, learned, left_out = figures(0.25, tmp_path / "some")
    assert none == 0
    assert learned + left_out == events
    assert left_out > 0.5 * events
    # All were scored, those that were left out too.
    assert some.events == every.events == events
    assert some.calibration == pytest.approx(every.calibration, abs=0.1)
    assert some.auc > every.auc - 0.03
