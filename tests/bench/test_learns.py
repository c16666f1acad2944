"""`bench.learns` names each kind of planted leak, and is quiet on honest tables."""

from pathlib import Path

import numpy as np
import pytest

from bench.learns import planted, priors
from bench.learns.leaks import false_alarms, guess_of, is_said, noted_by_init, noted_by_train
from embertide.trainer.eval.metrics import Summary, summarise


@pytest.mark.parametrize("leak", planted.LEAKS)
def test_a_planted_leak_is_said(leak: str, tmp_path: Path) -> None:
    table, has_clock = planted.table(77, leak)
    found = guess_of(table, has_clock)
    for notes in (noted_by_init(table, found), noted_by_train(table, found, tmp_path)):
        assert is_said(notes, leak), leak
        assert not false_alarms(table, notes, leak)


@pytest.mark.parametrize("seed", range(5001, 5007))
def test_nothing_is_said_of_an_honest_table(seed: int, tmp_path: Path) -> None:
    table, has_clock = planted.table(seed)
    found = guess_of(table, has_clock)
    for notes in (noted_by_init(table, found), noted_by_train(table, found, tmp_path)):
        assert not false_alarms(table, notes)


def test_events_have_the_share_of_positives_that_is_asked_for() -> None:
    columns, true_N = priors.events(0.01, 20_000, seed=1)
    assert true_N.mean() == pytest.approx(0.01, rel=1e-6)
    assert columns["clicked"].mean() == pytest.approx(0.01, abs=0.003)
    assert summarise(columns["clicked"], true_N).auc > 0.75
    assert all(
        np.array_equal(columns[name], again)
        for name, again in priors.events(0.01, 20_000, seed=1)[0].items()
    )


def test_a_calibration_that_is_off_by_more_than_its_bar_misses_it() -> None:
    def runs(first: float, last: float) -> list[priors.Scored]:
        fifth = Summary(events=100, auc=0.7, log_loss=0.1, calibration=1.0)
        return [
            priors.Scored(fifths=[fifth] * 5, true=[first, 1, 1, 1, last + e]) for e in (-0.1, 0.1)
        ]

    def met(first: float, last: float) -> list[bool]:
        rows = priors.rows_of("case", runs(first, last), runs(2, 2))
        return [row.met for row in rows if row.claim == "H.3"]

    assert met(0.81, 1.0) == [True, True]
    assert met(0.79, 0.96) == [False, False]
    assert met(1.26, 1.04) == [False, False]
