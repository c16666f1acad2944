"""AUC, log loss and calibration against their definitions, and their accumulation by hour."""

import json
import math

import numpy as np
import pytest

from embertide.trainer.eval import metrics
from embertide.trainer.eval.metrics import Array, Prequential, auc, calibration, log_loss

HOUR_MS = 3_600_000


def brute_auc(label: Array, score: Array) -> float:
    pairs = [(p > n) + 0.5 * (p == n) for p in score[label == 1] for n in score[label == 0]]
    return float(np.mean(pairs)) if pairs else math.nan


@pytest.mark.parametrize("levels", [2, 5, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_auc_counts_pairs_and_ties_a_half(levels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    label = (rng.random(60) < 0.3).astype(np.float32)
    score = (rng.integers(levels, size=60) / levels).astype(np.float32)
    assert auc(label, score) == pytest.approx(brute_auc(label, score), abs=1e-12)


@pytest.mark.parametrize("label", [[], [1], [0, 0]])
def test_auc_of_one_class_is_nan(label: list[int]) -> None:
    assert math.isnan(auc(np.array(label), np.full(len(label), 0.5)))


def test_auc_of_constant_scores_is_a_half() -> None:
    assert auc(np.array([0, 1, 1]), np.zeros(3)) == 0.5


def test_a_nan_score_is_an_error_that_counts_them() -> None:
    with pytest.raises(ValueError, match="1 scores are nan"):
        auc(np.array([0, 1]), np.array([0.5, np.nan]))


def test_log_loss_and_calibration_follow_their_definitions() -> None:
    label, score = np.array([1, 0, 1, 0]), np.array([0.9, 0.2, 0.6, 0.4])
    assert log_loss(label, score) == pytest.approx(-np.log([0.9, 0.8, 0.6, 0.6]).mean())
    assert calibration(label, score) == pytest.approx(2.1 / 2)
    assert math.isnan(calibration(np.zeros(2), np.ones(2)))


def test_log_loss_of_a_certain_error_is_finite_and_of_no_probability_an_error() -> None:
    assert 10 < log_loss(np.array([1]), np.array([0.0])) < 20
    with pytest.raises(ValueError, match="probabilities"):
        log_loss(np.array([1]), np.array([1.5]))


def stream() -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(3)
    ts = np.sort(rng.integers(0, 60 * HOUR_MS, size=4000))
    label = (rng.random(4000) < 0.3).astype(np.float32)
    score = np.clip(0.2 * label + rng.random(4000) * 0.8, 0, 1).astype(np.float32)
    return ts, label, score


def feed(into: Prequential, begin: int, end: int) -> Prequential:
    ts, label, score = stream()
    for at in range(begin, end, 100):
        into.add(ts[at : at + 100], label[at : at + 100], score[at : at + 100])
    return into


def test_prequential_gives_the_auc_of_each_hour_and_day() -> None:
    ts, label, score = stream()
    measured = feed(Prequential(), 0, 4000)
    for unit, figures in ((HOUR_MS, measured.hourly()), (24 * HOUR_MS, measured.daily())):
        bins = ts // unit
        assert list(figures) == sorted(set(bins.tolist()))
        for name, value in figures.items():
            assert value == auc(label[bins == name], score[bins == name])
    daily = measured.daily()
    assert measured.mean_daily(1, 2) == pytest.approx((daily[1] + daily[2]) / 2)
    assert math.isnan(measured.mean_daily(7, 9))
    assert measured.daily_summaries()[0].events == int((ts < 24 * HOUR_MS).sum())


def test_prequential_survives_a_checkpoint_at_any_point() -> None:
    whole = feed(Prequential(), 0, 4000)
    for cut in (100, 1700, 3900):
        figures, arrays = feed(Prequential(), 0, cut).state()
        resumed = Prequential.from_state(json.loads(json.dumps(figures)), arrays)
        feed(resumed, cut, 4000)
        assert resumed.daily_summaries() == whole.daily_summaries()
        assert resumed.hourly() == whole.hourly()


def test_prequential_holds_the_scores_of_one_day_only() -> None:
    measured, events = Prequential(), 20_000
    label, score = np.arange(events) % 2, np.linspace(0, 1, events)
    for day in range(3):
        measured.add(np.full(events, day * 24 * HOUR_MS), label, score)
    assert sum(array.nbytes for array in measured.state()[1].values()) == 5 * events


def test_prequential_refuses_a_day_that_was_closed() -> None:
    measured = feed(Prequential(), 0, 4000)
    one = np.ones(1)
    with pytest.raises(ValueError, match="day 0 comes after day 2"):
        measured.add(np.array([5]), one, one)
    with pytest.raises(ValueError, match="descends"):
        measured.add(np.array([60, 59]) * HOUR_MS, np.ones(2), np.ones(2))


@pytest.mark.parametrize("spread", [1.0, 0.05, 0.001])
def test_the_live_auc_is_within_its_bound_and_of_the_current_day(spread: float) -> None:
    ts, label, score = stream()
    measured = Prequential()
    assert all(map(math.isnan, measured.live_auc()))
    for at in range(0, 4000, 100):
        part = slice(at, at + 100)
        measured.add(ts[part], label[part], (score[part] * spread).astype(np.float32))
        daily = measured.daily()
        live, bound = measured.live_auc()
        assert live == pytest.approx(daily[max(daily)], abs=bound + 1e-12)
        assert bound < 0.002 / spread**0.5
    figures, arrays = measured.state()
    resumed = Prequential.from_state(json.loads(json.dumps(figures)), arrays)
    assert resumed.live_auc() == measured.live_auc()


def test_the_live_auc_does_not_look_at_events_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = feed(Prequential(), 0, 4000)

    def never(*_: object) -> None:
        raise AssertionError("the scores of the day are looked at")

    monkeypatch.setattr(metrics, "summarise", never)
    monkeypatch.setattr(metrics, "_join", never)
    assert 0.5 < measured.live_auc()[0] < 1
