"""What the drift benchmark says of a resident set and of a recovery."""

import numpy as np
import pytest

from bench.train.drift import back, resident
from bench.train.runs import Case, FoldedLearner
from embertide.trainer.config import FeatureConfig, ModelConfig, RunConfig, TableConfig
from embertide.trainer.data.assemble import Ints
from embertide.trainer.data.base import Batch

MODEL = ModelConfig(
    name="m",
    tables=(TableConfig(name="user", dim=4), TableConfig(name="item", dim=4)),
    features=(FeatureConfig(name="who", table="user"), FeatureConfig(name="what", table="item")),
)


def batch(keys_BF: Ints) -> Batch:
    count = len(keys_BF)
    return Batch(
        first=0,
        next_offset=count,
        event_B=np.arange(count),
        ts_ms_B=np.arange(count),
        keys_BF=keys_BF,
        dense_BD=np.zeros((count, 0), np.float32),
        label_B=np.ones(count, np.float32),
    )


def test_the_resident_set_is_compared_with_the_keys_of_the_hour() -> None:
    learner = FoldedLearner(Case(name="c", run=RunConfig(model=MODEL)), seed=1)
    # Rows of user 1 and of items 1 and 2: three of them.
    learner.learn(batch(np.array([[1, 1], [1, 2]])))
    hour = [batch(np.array([[1, 1], [1, 1], [1, 9]])), batch(np.array([[1, 9], [7, 9]]))]
    # User 1 comes four times, item 9 three times, item 1 twice, user 7 once.
    found, oracle, top = resident(learner, hour)
    assert found == pytest.approx((4 + 2) / 10)
    assert oracle == pytest.approx((4 + 3 + 2) / 10)
    assert top == pytest.approx(2 / 3)


def test_a_recovery_is_where_the_gap_stays_small() -> None:
    assert back(np.array([0.2, 0.004, 0.03, 0.006, 0.004, 0.004, 0.0, 0.0])) == 4
    assert back(np.full(9, 0.01)) is None
    assert back(np.zeros(9)) == 1
