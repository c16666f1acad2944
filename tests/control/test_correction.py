"""Predicted gains learn from measured ones: by generated records and by single ones."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embertide.server.core.drift.correction import (
    BALANCE,
    FULL_SAVING,
    GAIN_MAX,
    HALF_LIFE_MS,
    HELD_BACK,
    KINDS,
    PRIOR,
    RATIO_MAX,
    RATIO_MIN,
    WORK,
    Factor,
    Measured,
    factors,
    kind_of,
    measured_of,
)
from embertide.v1 import control_pb2

AGES = st.integers(min_value=-1000, max_value=10 * HALF_LIFE_MS)
ANY = st.floats(allow_nan=True, allow_infinity=True)
RECORDS = st.lists(st.builds(Measured, st.sampled_from(KINDS), ANY, ANY, AGES), max_size=80)
GAINS = st.floats(min_value=-10, max_value=GAIN_MAX)


def saved(predicted: float, ratio: float) -> float:
    """Return the gain of an operation that saved so many times what it was to save."""
    return -math.expm1(ratio * math.log1p(-predicted))


def of_ratio(ratio: float, count: int, kind: str = WORK) -> list[Measured]:
    gains = [0.05 + 0.4 * at / max(count, 1) for at in range(count)]
    return [Measured(kind, each, saved(each, ratio)) for each in gains]


@given(records=RECORDS, gains=st.tuples(GAINS, GAINS))
def test_what_is_expected_grows_with_what_is_predicted(
    records: Sequence[Measured], gains: tuple[float, float]
) -> None:
    low, high = sorted(gains)
    for factor in factors(records).values():
        assert factor.expected(low) <= factor.expected(high) < 1
        assert math.copysign(1, factor.expected(low)) == math.copysign(1, low)


@given(records=RECORDS)
def test_factors_are_bounded_whatever_is_on_record(records: Sequence[Measured]) -> None:
    for kind, factor in factors(records).items():
        assert RATIO_MIN <= factor.value <= RATIO_MAX
        assert 1 <= factor.spread <= RATIO_MAX / RATIO_MIN
        of_kind = [each for each in records if kind in ("", each.kind)]
        assert factor.operations + factor.left_out == len(of_kind)


@given(records=RECORDS, seed=st.integers())
def test_the_order_of_the_records_does_not_matter(records: list[Measured], seed: int) -> None:
    shuffled = list(records)
    random.Random(seed).shuffle(shuffled)
    assert factors(shuffled) == factors(records)


@given(ratio=st.floats(min_value=1 / 3, max_value=3), kind=st.sampled_from(KINDS))
def test_the_factor_comes_to_the_true_ratio(ratio: float, kind: str) -> None:
    off = [abs(math.log(factors(of_ratio(ratio, n, kind))[kind].value / ratio)) for n in (5, 50)]
    assert off[1] <= off[0] + 1e-9
    assert off[1] <= abs(math.log(ratio)) * (2 * PRIOR / 50) + 1e-9


@given(ratio=st.floats(min_value=1 / 2, max_value=2), predicted=GAINS, measured=ANY)
def test_one_outlier_does_not_ruin_it(ratio: float, predicted: float, measured: float) -> None:
    good = of_ratio(ratio, 9)
    spoilt = factors([*good, Measured(WORK, predicted, measured)])[WORK].value
    low, high = sorted((1.0, ratio))
    assert 0.99 * low <= spoilt <= 1.01 * high
    assert abs(math.log(spoilt / factors(good)[WORK].value)) <= 0.1 * abs(math.log(ratio)) + 0.01


def test_without_a_record_predictions_stay_as_they_are() -> None:
    for factor in factors([]).values():
        assert (factor.value, factor.operations, factor.spread, factor.left_out) == (1, 0, 1, 0)
        assert factor.expected(0.3) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("predicted", "measured"),
    [
        (math.nan, 0.1), (0.1, math.nan), (math.inf, 0.1), (0.1, math.inf), (0.1, -math.inf),
        (0.0, 0.1), (-0.1, 0.1), (1.0, 0.1), (1e300, 0.1), (0.1, 1.0), (0.1, 1e300), (0.1, -1e300),
    ],
)  # fmt: skip
def test_a_record_that_is_no_measurement_is_refused_and_counted(
    predicted: float, measured: float
) -> None:
    good = of_ratio(1.5, 5)
    found = factors([*good, Measured(WORK, predicted, measured)])
    expected = factors(good)[WORK]
    assert (found[WORK].value, found[WORK].operations) == (expected.value, expected.operations)
    assert (found[WORK].left_out, found[BALANCE].left_out, found[""].left_out) == (1, 0, 1)


def test_an_operation_that_made_it_worse_counts_against_its_kind() -> None:
    assert factors([Measured(WORK, 0.2, -0.1)] * 5)[WORK].value < 0.5


def test_a_kind_with_few_records_follows_all_operations() -> None:
    found = factors([*of_ratio(2, 20), *of_ratio(0.5, 1, BALANCE)])
    assert found[WORK].value == pytest.approx(2, rel=0.15)
    assert found[WORK].value > found[BALANCE].value > 1, "one record against twenty"
    assert found[BALANCE].operations == 1


def test_what_was_to_save_little_says_little() -> None:
    small = [Measured(WORK, FULL_SAVING / 20, saved(FULL_SAVING / 20, 4))] * 10
    assert factors([*of_ratio(1, 5), *small])[""].value == pytest.approx(1, rel=0.05)


def test_what_was_measured_long_ago_is_forgotten() -> None:
    then = [Measured(WORK, 0.2, 0.01, 10 * HALF_LIFE_MS)] * 20
    now = [Measured(WORK, 0.2, 0.01)] * 20
    assert factors(now)[WORK].value < 0.35
    assert factors(then)[WORK].value > 0.9


def test_the_spread_is_that_of_half_of_the_records() -> None:
    gains = [Measured(WORK, 0.2, saved(0.2, ratio)) for ratio in (0.5, 1, 1, 2, 2, 2, 2, 4, 4)]
    assert factors(gains)[WORK].spread == pytest.approx(2)


def cost(busiest_us: float, mean_us: float) -> control_pb2.PlanCost:
    return control_pb2.PlanCost(busiest_us=busiest_us, mean_us=mean_us)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (cost(200, 100), cost(100, 100), BALANCE),
        (cost(200, 100), cost(100, 50), WORK),
        (cost(200, 100), cost(150, 90), BALANCE),
        (cost(200, 100), cost(160, 80), WORK),
        (cost(0, 0), cost(0, 0), BALANCE),
        (cost(math.nan, 1), cost(1, math.inf), BALANCE),
        (cost(1e308, 1e-308), cost(1e-308, 1e308), BALANCE),
    ],
)
def test_the_kind_is_what_the_plan_saves_more_of(
    before: control_pb2.PlanCost, after: control_pb2.PlanCost, kind: str
) -> None:
    assert kind_of(before, after, ["skew"]) == kind
    assert kind_of(before, after, ["skew", HELD_BACK]) == f"{kind}, held back"


def test_what_varies_is_believed_later() -> None:
    alike, apart = (
        factors(Measured(WORK, 0.2, saved(0.2, ratio)) for ratio in ratios * 2)[WORK]
        for ratios in ((2, 2, 2, 2, 2), (0.3, 0.3, 2, 4, 4))
    )
    assert (alike.spread, apart.spread) == pytest.approx((1, 2))
    assert alike.value == pytest.approx(2, rel=0.05)
    assert 1.5 < apart.value < alike.value - 0.1


def test_only_operations_that_were_measured_are_on_record() -> None:
    acted, advised = control_pb2.DECISION_OUTCOME_ACTED, control_pb2.DECISION_OUTCOME_ADVISED
    decisions = [
        control_pb2.Decision(outcome=acted, predicted_gain=0.2, measured_gain=0.3, measured_ms=7),
        control_pb2.Decision(outcome=acted, predicted_gain=0.2),
        control_pb2.Decision(outcome=advised, predicted_gain=0.2, measured_gain=0.3, measured_ms=7),
    ]
    assert measured_of(decisions, 10) == [Measured(BALANCE, 0.2, 0.3, 3)]
    assert Factor(kind=WORK, value=1.5).expected(0.3) == pytest.approx(1 - 0.7**1.5)
