"""The search: what it finds and counts, and that it takes nothing that does not fit."""

import dataclasses
import math
import random

import numpy as np
import pytest
from stepprofiles import LINK, NO_WORK, profile, table

from embertide.trainer.config.sync import AllReduce
from embertide.trainer.sync.placing.aimed import relieved, respread
from embertide.trainer.sync.placing.profile import HotKey
from embertide.trainer.sync.placing.search import (
    Space,
    at_random,
    draw,
    every_strategy,
    greedy,
    hot_choices,
    metropolis,
    propose,
    start_of,
    usual,
)
from embertide.trainer.sync.placing.step import StepModel, Strategy
from embertide.trainer.sync.plan import EVERYWHERE, Ownership

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
    assert 5 < found.evaluations <= 11


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


def test_owners_that_are_dealt_out_anew_keep_the_shares_of_all_others() -> None:
    chance = random.Random(3)
    cost_TP = [np.full(64, 1.0), np.full(32, 2.0), np.full(8, 5.0)]
    owners_T = (np.arange(64) % 4, np.arange(32) % 4, np.full(8, EVERYWHERE))
    owners = Ownership(4, tuple(each.astype(np.uint16) for each in owners_T), hot_rows=7)
    seen = set()
    for _ in range(40):
        changed = respread(owners, cost_TP, chance)
        assert changed.hot_rows == 7
        assert changed.owners_T[2].tolist() == [EVERYWHERE] * 8, "stays everywhere"
        share_R = np.zeros(4)
        for t in (0, 1):
            share_R += np.bincount(changed.owners_T[t], cost_TP[t], 4)
        assert share_R.sum() == 128
        other = int(np.argmax(abs(share_R - np.median(share_R))))
        even = np.delete(share_R, other)
        assert even.max() - even.min() <= 2, "the other three have as much as one another"
        seen.add(share_R[other] > even.mean())
    assert seen == {False, True}


def test_a_rank_that_bounds_the_step_is_relieved_by_the_one_that_bounds_it_least() -> None:
    chance = random.Random(4)
    owners = Ownership(3, ((np.arange(48) % 3).astype(np.uint16), np.zeros(4, np.uint16)))
    for _ in range(40):
        changed = relieved(owners, [2.0, 0.0, -1.0], chance)
        before, after = (
            np.bincount(np.concatenate(each.owners_T), minlength=3) for each in (owners, changed)
        )
        assert after[0] < before[0]
        assert after[1] == before[1]
        assert after[2] - before[2] == before[0] - after[0]


def test_what_bounds_a_step_is_what_a_rank_owns_or_what_it_asks_for() -> None:
    model = StepModel(_UNEVEN, 2)
    model.step_s(start_of(_SPACE))
    assert model.pulls()[1] > model.pulls()[0], "the second rank takes five times as long"
    slow = dataclasses.replace(LINK, bytes_per_s=1e4)
    sends = StepModel(profile(ranks=(slow, LINK), tables=(table("a", (0.5, 0.5)),)), 2)
    sends.step_s(Strategy(Ownership(2, (np.array([1, 1], np.uint16),))))
    assert sends.pulls()[0] < 0, "its gradients are what takes long: it had better own more"


# --- hot rows -------------------------------------------------------------------------------------

_HOT = tuple(HotKey(0, 0, share) for share in (0.2, 0.1, 0.1, 0.1, 0.1, 0.1))
_ONE_BUCKET = profile(
    ranks=(LINK,) * 4,
    tables=(table("a"),),
    work=dataclasses.replace(NO_WORK, lookup_s=1e-4, update_s=1e-4, count_s=1e-8),
)
_HOT_SPACE = Space(
    profile=dataclasses.replace(_ONE_BUCKET, hot=_HOT, version_steps=1000.0),
    ranks=(4,),
    everywhere=False,
    hot_rows=(0, 6),
)


def test_hot_rows_are_chosen_where_a_bucket_is_more_than_a_share() -> None:
    found = metropolis(_HOT_SPACE, 200, seed=1)
    assert found.strategy.owners.hot_rows == 6
    model = StepModel(_HOT_SPACE.profile, 4)
    without = dataclasses.replace(found.strategy.owners, hot_rows=0)
    assert found.step_s < 0.6 * model.step_s(Strategy(without))
    share_TR, _ = model.shares(found.strategy.owners)
    assert share_TR.sum() == pytest.approx(1)
    # By the run's own rule: its owner is left with what is not hot, and others have the rest.
    assert sorted(share_TR[0].tolist()) == pytest.approx([0.2, 0.2, 0.3, 0.3])


@pytest.mark.parametrize("why", ["even", "two ranks", "a version a step", "counting", "memory"])
def test_no_row_is_hot_where_none_pays(why: str) -> None:
    made, ranks = _HOT_SPACE.profile, 4
    wide = dataclasses.replace(made.tables[0], row_bytes=1 << 20)
    if why == "even":
        made = dataclasses.replace(made, tables=(table("a", (0.25,) * 4),))
    elif why == "two ranks":
        made = dataclasses.replace(
            made, ranks=(LINK, LINK), tables=(table("a", (0.5, 0.5)), table("b", (0.5, 0.5)))
        )
        ranks = 2
    elif why == "a version a step":  # rows go out and home in each
        made = dataclasses.replace(made, tables=(wide,), version_steps=1.0)
    elif why == "counting":
        made = dataclasses.replace(made, work=dataclasses.replace(made.work, count_s=1e-2))
    else:
        made = dataclasses.replace(made, budget_bytes=1 << 20)
    space = dataclasses.replace(_HOT_SPACE, profile=made, ranks=(ranks,))
    for search in (metropolis, greedy):
        assert search(space, 200, seed=1).strategy.owners.hot_rows == 0


def test_how_many_rows_may_be_hot_is_bounded_by_memory() -> None:
    assert hot_choices(_HOT_SPACE.profile, now=3) == (3, 0, 6)
    small = dataclasses.replace(_HOT_SPACE.profile, budget_bytes=1 << 20)
    assert hot_choices(small) == (0,)
    assert hot_choices(_ONE_BUCKET) == (0,), "none was counted"


def test_a_prediction_says_which_hot_rows_were_not_counted() -> None:
    owners = Ownership(4, (np.zeros(1, np.uint16),), hot_rows=100)
    said = StepModel(_HOT_SPACE.profile, 4).predict(Strategy(owners)).beyond
    assert any("6 keys were counted" in sentence for sentence in said)
    unknown = dataclasses.replace(_HOT_SPACE.profile, version_steps=0.0)
    said = StepModel(unknown, 4).predict(Strategy(owners)).beyond
    assert any("out and home" in sentence for sentence in said)


# --- strategies -----------------------------------------------------------------------------------


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
