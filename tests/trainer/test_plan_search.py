"""The search: what it finds and counts, and that it takes nothing that does not fit."""

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import pytest
from stepprofiles import LINK, NO_WORK, profile, table

from embertide.trainer.config import Codecs
from embertide.trainer.config.sync import AllReduce
from embertide.trainer.sync.placing.aimed import relieved, respread
from embertide.trainer.sync.placing.profile import HotKey, Profile
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
from embertide.trainer.sync.placing.step import StepModel, Strategy, is_possible
from embertide.trainer.sync.plan import EVERYWHERE, Ownership, read_for, text_for

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


# --- column-wise tables ---------------------------------------------------------------------------


def _chunked(*, floats: int = 256, budget_bytes: int = 1 << 30) -> Profile:
    """Four ranks; one table of one bucket and four chunks has nearly all of a step's floats."""
    wide = dataclasses.replace(table("wide", floats=floats), chunks=4)
    work = dataclasses.replace(NO_WORK, update_s=1e-7, lookup_s=1e-7)
    return profile(
        ranks=(LINK,) * 4,
        tables=(wide, table("narrow")),
        work=work,
        budget_bytes=budget_bytes,
    )


def _columns(*ranks_C: int, hot_rows: int | None = None) -> Strategy:
    homes = tuple(np.array([t], np.uint16) for t in (0, 1))
    return Strategy(Ownership(4, homes, (ranks_C, ()), hot_rows=hot_rows))


def test_a_rank_sends_its_part_of_rows_and_is_asked_for_all_keys() -> None:
    """By hand: a part of 250 events asks 250 keys of 256 floats; a link sends a byte a us."""
    model = StepModel(_chunked(), 4)
    costs = model._costs(_columns(0, 1, 1, 2))
    rows = 250 * 1024 * 3
    out_s = {rank: costs["rows out", rank][0] for rank in range(4)}
    # Rank 1 also has the other table: 16 bytes a row.
    expected = {0: rows / 4, 1: rows / 2 + 250 * 16 * 3, 2: rows / 4, 3: 0.0}
    assert out_s == pytest.approx({rank: size / 1e6 for rank, size in expected.items()})
    lengths = 4 * 2 * 3
    asks = {0: 2 + 1, 1: 2, 2: 2 + 1, 3: 3 + 1}  # ranks with a part, and that of the other table
    for rank, count in asks.items():
        size = lengths + 8 * 250 * count
        assert costs["keys out", rank][0] == pytest.approx(size / 1e6)
    # 1,000 distinct keys of all ranks: 8 bytes a key, chunk and other rank with a part.
    gradients = 250 * 1024 * 3 / 4 + 250 * 16
    assert costs["gradients out", 0][0] == pytest.approx((gradients + 8 * 1000 * 2) / 1e6)
    looked = costs["lookup", 3][0], costs["lookup", 0][0]
    assert looked == pytest.approx((0.0, 1000 * 1e-7))


def test_columns_are_found_where_one_table_is_most_of_a_step_and_read_back(tmp_path: Path) -> None:
    profile_ = _chunked()
    found = metropolis(Space(profile=profile_, ranks=(4,)), 300, seed=1)
    without = metropolis(Space(profile=profile_, ranks=(4,), columns=False), 300, seed=1)
    assert len(found.strategy.owners.columns(0)) > 1
    assert found.step_s < 0.7 * without.step_s
    path = tmp_path / "plan.json"
    path.write_text(text_for(["wide", "narrow"], found.strategy.owners))
    read = read_for(path, {"wide": 1, "narrow": 1}, 4, chunks={"wide": 4, "narrow": 1})
    assert StepModel(profile_, 4).step_s(Strategy(read)) == found.step_s
    said = StepModel(profile_, 4).predict(found.strategy).beyond
    assert any("column-wise" in sentence for sentence in said)


def test_columns_are_not_found_where_rows_are_narrow_or_memory_is_short() -> None:
    narrow = metropolis(Space(profile=_chunked(floats=1), ranks=(4,)), 300, seed=1)
    assert not any(narrow.strategy.owners.ranks_TC)
    # Homes keep whole rows: 1,000 rows of 1,024 bytes fit once.
    short = _chunked(budget_bytes=1_024_000 + 40_000)
    found = metropolis(Space(profile=short, ranks=(4,)), 300, seed=1)
    owners = found.strategy.owners
    assert StepModel(short, 4).memory_bytes(owners).max() <= short.budget_bytes
    home = StepModel(short, 4).memory_bytes(_columns(0, 1, 2, 3).owners)
    assert home.max() > short.budget_bytes


def test_what_no_run_can_be_is_never_taken() -> None:
    assert is_possible(_columns(0, 1, 2, 3))
    assert not is_possible(_columns(0, 1, 2, 3, hot_rows=5))
    int8 = dataclasses.replace(_columns(0, 1, 2, 3), codecs=Codecs(gradients="int8"))
    assert not is_possible(int8)
    space = Space(profile=_chunked(), ranks=(4,), codecs=(Codecs(gradients="int8"),))
    assert not any(metropolis(space, 200, seed=2).strategy.owners.ranks_TC)


def test_proposals_keep_homes_that_a_run_has() -> None:
    space = Space(profile=_chunked(), ranks=(2, 4))
    chance, strategy, seen = random.Random(3), draw(space, random.Random(3)), 0
    for _ in range(500):
        strategy = propose(space, strategy, chance)
        owners = strategy.owners
        for t, ranks_C in enumerate(owners.ranks_TC):
            if not ranks_C:
                continue
            seen += 1
            assert t == 0
            assert len(ranks_C) == 4
            parts = owners.columns(t)
            assert len({part.rank for part in parts}) == len(parts) > 1
            assert not owners.everywhere(t)
            assert owners.owners_T[t].tolist() == [0]
    assert seen > 50
