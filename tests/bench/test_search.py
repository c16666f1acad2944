"""Plans that are measured: many kinds for two ranks, and how good predictions of them are."""

import numpy as np
import pytest

from bench.search.measured import SETTINGS, errors, rank_correlation
from bench.search.real import parser, plans
from embertide.trainer.sync.plan import EVERYWHERE


def test_plans_are_of_two_ranks_and_differ() -> None:
    made = plans(20, [8] * 8, seed=1)
    assert len(made) == 20
    for _name, owners in made:
        assert [len(owner_P) for owner_P in owners.owners_T] == [8] * 8
        assert {int(each) for of in owners.owners_T for each in of} <= {0, 1, int(EVERYWHERE)}
    assert len({str([of.tolist() for of in owners.owners_T]) for _, owners in made}) > 15
    again = plans(20, [8] * 8, seed=1)
    assert all(
        np.array_equal(a, b)
        for (_, one), (_, other) in zip(made, again, strict=True)
        for a, b in zip(one.owners_T, other.owners_T, strict=True)
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=[each.name for each in SETTINGS])
def test_settings_are_arguments_of_the_program_and_have_plans_enough(setting: object) -> None:
    assert hasattr(setting, "arguments")
    given = parser().parse_args(setting.arguments)
    assert given.plans >= 20
    assert len(given.row_us.split(",")) == len(given.event_us.split(",")) == 2


def test_predictions_are_compared_by_order_and_by_size() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert errors([1.1, 1.0], [1.0, 2.0]) == pytest.approx([0.1, 0.5])
