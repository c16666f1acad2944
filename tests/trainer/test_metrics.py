"""AUC, log loss and calibration against their definitions, and their accumulation by hour."""

import json
import math

import numpy as np
import pytest

from embertide.trainer.eval import metrics, prequential
from embertide.trainer.eval.metrics import (
    Array,
    auc,
    calibration,
    expected_calibration_error,
    log_loss,
    normalised_entropy,
)
from embertide.trainer.eval.prequential import Prequential

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
        assert resumed.fifths() == whole.fifths()


def test_prequential_holds_the_scores_of_one_day_only() -> None:
    measured, events = Prequential(), 20_000
    label, score = np.arange(events) % 2, np.linspace(0, 1, events)
    for day in range(3):
        measured.add(np.full(events, day * 24 * HOUR_MS), label, score)
    scores = [a for n, a in measured.state()[1].items() if not n.startswith("fifths.")]
    assert sum(array.nbytes for array in scores) == 5 * events


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

    monkeypatch.setattr(prequential, "summarise", never)
    monkeypatch.setattr(prequential, "_join", never)
    assert 0.5 < measured.live_auc()[0] < 1


def test_normalised_entropy_is_one_of_the_mean_and_below_of_better_scores() -> None:
    label = (np.random.default_rng(4).random(500) < 0.1).astype(np.float32)
    p = float(label.mean())
    assert normalised_entropy(label, np.full(500, p)) == pytest.approx(1)
    assert normalised_entropy(label, np.where(label == 1, 0.2, p)) < 0.8
    # He et al. 2014, equation 1, written out.
    score = np.random.default_rng(5).random(500)
    loss = -np.mean(label * np.log(score) + (1 - label) * np.log(1 - score))
    wanted = loss / -(p * np.log(p) + (1 - p) * np.log(1 - p))
    assert normalised_entropy(label, score) == pytest.approx(wanted, rel=1e-6)
    assert metrics.summarise(label, score).normalised_entropy == pytest.approx(wanted, rel=1e-6)
    assert math.isnan(normalised_entropy(np.ones(3), np.full(3, 0.5)))


def test_expected_calibration_error_finds_what_the_ratio_of_means_hides() -> None:
    rng = np.random.default_rng(6)
    score = rng.random(40_000)
    honest = (rng.random(40_000) < score).astype(np.float32)
    blurred = (rng.random(40_000) < 0.5).astype(np.float32)
    assert calibration(blurred, score) == pytest.approx(1, abs=0.02)
    assert expected_calibration_error(honest, score) < 0.02
    assert expected_calibration_error(blurred, score) == pytest.approx(0.25, abs=0.02)
    events, scores, labels = metrics.calibration_curve(honest, score, bins=7)
    assert events.sum() == 40_000
    assert (np.diff(scores) > 0).all()
    assert labels == pytest.approx(scores, abs=0.03)
    assert math.isnan(expected_calibration_error(np.empty(0), np.empty(0)))


def test_live_figures_are_those_of_the_current_day() -> None:
    measured = feed(Prequential(), 0, 4000)
    today = measured.daily_summaries()[2]
    live = measured.live()
    assert live.events == today.events
    assert live.log_loss == pytest.approx(today.log_loss, rel=1e-6)
    assert live.calibration == pytest.approx(today.calibration, rel=1e-6)
    assert live.normalised_entropy == pytest.approx(today.normalised_entropy, rel=1e-6)


def test_figures_of_a_build_that_did_not_note_the_mean_label_are_read() -> None:
    figures, arrays = feed(Prequential(), 0, 4000).state()
    for each in (*figures["hours"], *figures["days"]):
        del each[1]["label_mean"]
    old = Prequential.from_state(figures, arrays).daily_summaries()[0]
    assert math.isnan(old.normalised_entropy)
    assert "normalised_entropy" not in old.as_json()
    assert 0.5 < old.auc < 1


def test_what_is_frozen_stays_as_it_was_and_shares_the_scores() -> None:
    rng = np.random.default_rng(3)
    measured = Prequential()

    def add(first_ms: int) -> None:
        ts_ms_B = np.arange(first_ms, first_ms + 500)
        measured.add(ts_ms_B, rng.integers(2, size=500), rng.random(500))

    add(0)
    frozen = measured.frozen()
    figures, arrays = frozen.state()
    add(1000)
    add(HOUR_MS * 30)  # another day: the scores of before are folded
    after, arrays_after = frozen.state()
    assert after == figures
    assert all(np.array_equal(arrays[name], arrays_after[name]) for name in arrays)
    again = measured.frozen()
    assert again._open[30][0][1] is measured._open[30][0][1]
