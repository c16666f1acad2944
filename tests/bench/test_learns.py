"""What `bench.learns` measures: each kind of planted leak is said, and honest tables are quiet."""

from pathlib import Path

import pytest

from bench.learns import planted
from bench.learns.leaks import false_alarms, guess_of, is_said, noted_by_init, noted_by_train


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
