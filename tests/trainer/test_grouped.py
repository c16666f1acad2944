"""GAUC against its definition, and its bounded sample of a stream."""

import json
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from embertide.trainer.data.base import MISSING_KEY
from embertide.trainer.eval.grouped import UserSample, gauc, user_aucs
from embertide.trainer.eval.metrics import Array, auc


def events(seed: int, count: int, users: int) -> tuple[NDArray[np.int64], Array, Array]:
    rng = np.random.default_rng(seed)
    user = (rng.zipf(1.5, count) % users).astype(np.int64) - 2
    label = (rng.random(count) < 0.3).astype(np.float32)
    score = (rng.integers(20, size=count) / 20).astype(np.float32)
    return user, label, score


@pytest.mark.parametrize("seed", range(4))
def test_gauc_is_the_mean_of_users_aucs_weighed_by_their_events(seed: int) -> None:
    user, label, score = events(seed, 400, 30)
    total, weight, without = 0.0, 0, 0
    for each in np.unique(user):
        mine = user == each
        value = auc(label[mine], score[mine])
        if math.isnan(value):
            without += 1
            continue
        total += value * int(mine.sum())
        weight += int(mine.sum())
    found = gauc(user, label, score)
    assert without > 0
    assert found.gauc == pytest.approx(total / weight, abs=1e-12)
    assert (found.events, found.one_class_users) == (weight, without)
    assert found.users + without == len(np.unique(user))


def test_gauc_does_not_reward_telling_users_apart() -> None:
    user = np.repeat(np.arange(50), 20)
    label = np.random.default_rng(1).random(1000) < user / 60
    score = user / 60.0
    assert auc(label, score) > 0.75
    assert gauc(user, label, score).gauc == 0.5


def test_gauc_of_nobody_is_nan_and_bad_input_is_refused() -> None:
    assert math.isnan(gauc(np.arange(3), np.ones(3), np.ones(3)).gauc)
    assert gauc(np.empty(0, np.int64), np.empty(0), np.empty(0)).users == 0
    with pytest.raises(ValueError, match="1 scores are nan"):
        gauc(np.arange(1), np.ones(1), np.full(1, np.nan))
    with pytest.raises(ValueError, match="give as many"):
        gauc(np.arange(2), np.ones(1), np.ones(1))


def test_a_sample_that_holds_everything_is_exact() -> None:
    user, label, score = events(5, 2000, 50)
    sample = UserSample(most_events=2000)
    for at in range(0, 2000, 64):
        part = slice(at, at + 64)
        sample.add(user[part], label[part], score[part])
    known = user != MISSING_KEY
    assert sample.level == sample.left_out == 0
    assert sample.gauc(exact=True) == gauc(user[known], label[known], score[known])


def test_a_sample_is_bounded_and_holds_its_users_whole() -> None:
    rng = np.random.default_rng(7)
    count = 60_000
    user = rng.integers(4000, size=count)
    label = rng.random(count) < 0.3
    score = np.clip(label * 0.2 + rng.random(count) * 0.7, 0, 1)
    sample, most = UserSample(most_events=8000), 0
    for at in range(0, count, 500):
        part = slice(at, at + 500)
        sample.add(user[part], label[part], score[part])
        most = max(most, len(sample.state()[1]["user"]))
    assert most <= 8000
    held = sample.state()[1]["user"]
    assert sample.level >= 3
    assert sample.left_out == 0
    for each in np.unique(held):
        assert (held == each).sum() == (user == each).sum()
    exact = gauc(user, label, score).gauc
    aucs = user_aucs(user, label, score).auc_U
    error = float(np.nanstd(aucs)) / math.sqrt(len(np.unique(held)))
    assert sample.gauc(exact=True).gauc == pytest.approx(exact, abs=4 * error)


def test_one_user_with_all_events_does_not_break_the_bound() -> None:
    sample = UserSample(most_events=1600)
    for at in range(20):
        user = np.where(np.arange(200) % 10 == 0, at, 99).astype(np.int64)
        sample.add(user, np.arange(200) % 3 == 0, np.linspace(0, 1, 200))
        assert len(sample.state()[1]["user"]) <= 1600
    assert sample.left_out > 1000


def test_a_sample_goes_on_from_its_state() -> None:
    user, label, score = events(9, 6000, 3000)
    whole, first = UserSample(500), UserSample(500)
    whole.add(user[:3000], label[:3000], score[:3000])
    first.add(user[:3000], label[:3000], score[:3000])
    numbers, arrays = first.state()
    resumed = UserSample.from_state(json.loads(json.dumps(numbers)), arrays)
    for each in (whole, resumed):
        each.add(user[3000:], label[3000:], score[3000:])
    assert resumed.gauc(exact=True) == whole.gauc(exact=True)
    assert resumed.level == whole.level > 0
