"""The output of `train` at its end."""

import math
from pathlib import Path

import pytest

from embertide.trainer.commands.result import days_told, mean_of, show
from embertide.trainer.eval.metrics import Summary


def day(events: int, auc: float, calibration: float = 1.0, error: float = 0.001) -> Summary:
    return Summary(events=events, auc=auc, log_loss=0.5, calibration=calibration, auc_error=error)


DAYS = {
    15_000: day(1000, 0.6, 0.5),
    15_001: day(3, 0.01),
    15_002: day(3000, 0.8, 1.5),
    15_003: day(500, math.nan),
    15_004: day(1000, 0.7),
}


def test_days_of_few_events_or_of_one_label_are_not_told() -> None:
    told = days_told(DAYS)
    assert list(told) == [15_000, 15_002, 15_004]
    assert mean_of(told, "auc") == pytest.approx((0.6 + 3 * 0.8 + 0.7) / 5)
    assert list(days_told({1: day(3, 0.5), 2: day(4, math.nan)})) == [1]
    assert math.isnan(mean_of({}, "auc"))


def test_the_end_of_a_run_is_a_table_and_not_a_list_of_days(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(
        Path("build/x"),
        events=5503,
        version=46,
        days=DAYS,
        fifths=[day(0, math.nan, math.nan), *[day(1375, 0.7, 1.0 + n / 10) for n in range(4)]],
        rejected={"label is missing": 3, "ts goes backwards": 40},
        set_aside=0,
        unsampled=0,
        has_clock=True,
    )
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert "0.7000 on the last day (2011-01-30)" in words
    assert "0.7400 mean of 3 days, 0.6000 worst (2011-01-26)" in words
    assert "5,503 learned, 43 rejected 40: ts goes backwards 3: label is missing" in words
    assert "2 days of few events, or of one label, are left out" in words
    assert "AUC 0.7000 ± 0.002, log loss 0.5000, calibration 1.300" in words
    assert "by fifths calibration - 1.000 1.100 1.200 1.300" in words
    assert "unstable" not in words
    assert "embertide serve build/x" in words


def test_days_of_few_events_of_a_label_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    days = {
        15_000: day(1000, 0.6, error=0.01),
        15_001: day(900, 0.5, error=0.04),
        15_002: day(800, 0.9, error=math.nan),
    }
    few = Summary(events=800, auc=0.9, log_loss=0.1, calibration=1, label_mean=1 / 800)
    days[15_002] = few
    assert [each.is_unstable for each in days.values()] == [False, True, True]
    assert not day(800, 0.9, error=math.nan).is_unstable, "an older build did not note it"
    show(
        Path("x"),
        events=2700,
        version=2,
        days=days,
        fifths=[few] * 5,
        rejected={},
        set_aside=0,
        unsampled=0,
        has_clock=True,
    )
    words = " ".join(capsys.readouterr().out.split())
    assert "0.9000 (unstable) on the last day" in words
    assert "0.5000 ± 0.078 worst (2011-01-27)" in words
    assert "2 of the 3 days are unstable" in words
    assert "last fifth AUC 0.9000 (unstable)" in words


def test_where_rows_are_the_clock_no_day_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        Path("x"),
        events=9,
        version=2,
        days={0: day(9, 0.75)},
        fifths=[day(9, 0.7)] * 5,
        rejected={},
        set_aside=2,
        unsampled=1200,
        has_clock=False,
    )
    words = " ".join(capsys.readouterr().out.split())
    assert "AUC 0.7500 ± 0.002, each event scored before it was learned" in words
    assert "put aside 2 events" in words
    assert "1,200 of label 0 scored and left out (negative_rate)" in words
    assert "day" not in words
