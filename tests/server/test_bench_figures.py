"""Figures that benchmarks make of what they noted: growth over time, versions first seen."""

import math

import numpy as np
import pytest

from bench.fresh import first_at_least
from bench.soak import growth


def test_what_stays_has_no_growth_whatever_its_noise() -> None:
    at_s = [float(s) for s in range(0, 1200, 5)]
    noise = np.random.default_rng(1).normal(0, 2, len(at_s))
    assert abs(growth(at_s, list(100 + noise))) < 0.02


def test_what_leaks_a_tenth_grows_by_a_tenth() -> None:
    at_s = [float(s) for s in range(0, 1200, 5)]
    assert growth(at_s, [100 + s / 1200 * 10 for s in at_s]) == pytest.approx(0.095, abs=0.002)


def test_nothing_at_all_does_not_grow() -> None:
    assert growth([0.0, 1.0], [0.0, 0.0]) == 0.0


def test_a_version_is_first_seen_when_a_later_one_is() -> None:
    answers = [(1, 0.5), (3, 2.0), (2, 2.5), (4, 3.0)]
    seen = list(first_at_least(answers, np.array([1, 2, 3, 4, 5])))
    assert seen[:4] == [0.5, 2.0, 2.0, 3.0]
    assert math.isnan(seen[4])
