"""The search: what it finds and counts, and that it takes nothing that does not fit."""

import dataclasses
import math
import random

import numpy as np
import pytest
from stepprofiles import LINK, NO_WORK, profile, table

from embertide.trainer.config.sync import AllReduce
from embertide.trainer.sync.placing.search import (
    Space,
    at_random,
    draw,
    every_strategy,
    greedy,
    metropolis,
    propose,
    start_of,
    usual,
)
from embertide.trainer.sync.placing.step import StepModel
from embertide.trainer.sync.plan import EVERYWHERE

# The second of two ranks takes five times as long to apply gradients.
_UNEVEN = profile(
    ranks=(LINK, dataclasses.replace(LINK, pace=5.0)),
    tables=(table("a", (0.25,) * 4), table("b", (0.5, 0.5)), table("c")),
    work=dataclasses.replace(NO_WORK, update_s=1e-4, lookup_s=1e-5),
)
_SPACE = Space(profile=_UNEVEN, ranks=(2,))


def test_metropolis_finds_the_best_of_all_strategies() -> None:
    model = StepModel(_UNEVEN, 2)
    best = min(model.step_s(strategy) for strategy in every_strategy(_SPACE))
    found = metropolis(_SPACE, 400, seed=1)
    assert found.step_s == pytest.approx(best, rel=1e-9)
    assert found.step_s < model.step_s(start_of(_SPACE))
    assert model.step_s(found.strategy) == found.step_s


@pytest.mark.parametrize("search", [metropolis, greedy, at_random])
def test_each_search_times_as_many_as_it_may_and_repeats(search: object) -> None:
    assert callable(search)
    found, again = (search(_SPACE, 50, seed=7) for _ in range(2))
    assert found.evaluations == 50
    assert found.curve == again.curve
    assert [step_s for _, step_s in found.curve] == sorted(
        (step_s for _, step_s in found.curve), reverse=True
    )


def test_a_search_ends_when_the_time_is_up() -> None:
    used = iter([0.1] * 10)
    found = metropolis(_SPACE, 1000, seed=1, used=lambda: next(used, 1.0))
    assert found.evaluations == 11


def test_what_a_run_takes_without_a_plan_is_never_beaten_by_what_does_not_fit() -> None:
    space = dataclasses.replace(_SPACE, profile=dataclasses.replace(_UNEVEN, budget_bytes=26_000))
    found = metropolis(space, 300, seed=1)
    assert math.isfinite(found.step_s)
    assert StepModel(space.profile, 2).memory_bytes(found.strategy.owners).max() <= 26_000


def test_where_nothing_fits_the_step_is_infinite() -> None:
    space = dataclasses.replace(_SPACE, profile=dataclasses.replace(_UNEVEN, budget_bytes=1))
    assert metropolis(space, 20, seed=1).step_s == math.inf


def test_proposals_stay_in_the_space() -> None:
    space = dataclasses.replace(_SPACE, ranks=(1, 2, 3), everywhere=False)
    chance = random.Random(1)
    strategy, seen = start_of(space), set()
    for _ in range(500):
        strategy = propose(space, strategy, chance)
        seen.add(strategy.owners.ranks)
        for owner_P, of in zip(strategy.owners.owners_T, _UNEVEN.tables, strict=True):
            assert len(owner_P) == len(of.load_P)
            assert owner_P.dtype == np.uint16
            assert owner_P.max() < strategy.owners.ranks
        assert strategy.sync == AllReduce()
    assert seen == {1, 2, 3}


def test_a_table_is_everywhere_in_all_its_buckets_or_in_none() -> None:
    chance = random.Random(2)
    strategy, found = start_of(_SPACE), 0
    for _ in range(500):
        strategy = propose(_SPACE, strategy, chance)
        for owner_P in (*strategy.owners.owners_T, *draw(_SPACE, chance).owners.owners_T):
            everywhere = owner_P == EVERYWHERE
            assert everywhere.all() or not everywhere.any()
            found += int(everywhere.all())
    assert found


def test_the_usual_owners_are_even() -> None:
    even = profile(tables=tuple(table(f"t{n}", (0.25,) * 4) for n in range(3)))
    share_TR, everywhere_T = StepModel(even, 2).shares(usual(even, 2))
    assert share_TR.sum(axis=0).tolist() == [1.5, 1.5]
    assert not everywhere_T.any()
