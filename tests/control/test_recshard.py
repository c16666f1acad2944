"""The planner `recshard` against every answer that there is, on small cases."""

import dataclasses

import numpy as np
import pytest
from small_cases import CASES, brute_shares, random_curve, tiers_answer, tiers_problem

from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.instance import instances, owned_after
from embertide.server.core.plan.recshard import RecShard
from embertide.server.core.plan.shares import SHARE_BYTES_MIN, check_shares, messages_of
from embertide.server.core.plan.tier_budgets import (
    Curve,
    by_hulls,
    by_milp,
    min_missed,
    missed,
    share_out,
)
from embertide.server.core.plan.workload import Asking, Workload

MIB = 1 << 20


@pytest.mark.parametrize("seed", range(CASES))
def test_shares_leave_no_more_to_the_ssd_than_the_best_ones(seed: int) -> None:
    random = np.random.default_rng(seed)
    curves = [random_curve(random, 6, random.uniform(1, 10) * MIB) for _ in range(4)]
    curves = [Curve(each.bytes_P, each.missed_P * random.uniform(1, 100)) for each in curves]
    room = random.uniform(0.1, 0.9) * sum(float(each.bytes_P[-1]) for each in curves)
    best = brute_shares(curves, room)
    given_T = share_out(curves, room, 5.0)
    assert given_T.sum() <= room + 1
    assert missed(curves, given_T) <= best * 1.001
    found = by_milp(curves, room, 5.0)
    assert found is not None
    assert missed(curves, found) <= best * 1.001
    # Hulls give a bound below, and an answer that is near.
    assert min_missed(curves, room) <= best + 1e-9
    assert np.array_equal(share_out(curves, room, 5.0), given_T)


@pytest.mark.parametrize("seed", range(CASES))
def test_owners_and_shares_are_near_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    problem = tiers_problem(random, devices=2 + seed % 2, tables=2)
    proposal, ours, best = tiers_answer(problem)
    assert ours <= best * 1.05
    check_shares(problem.plan, messages_of(proposal.tier_shares))
    assert RecShard().propose(problem) == proposal


def test_shares_fit_the_room_of_each_device() -> None:
    problem = tiers_problem(np.random.default_rng(5), devices=3, tables=4)
    proposal = RecShard().propose(problem)
    asking = problem.workload.asking
    assert asking is not None
    for place, room in asking.row_room.items():
        given = [size for what, size in proposal.tier_shares.items() if what.device == place]
        assert sum(given) <= room
        assert all(size >= SHARE_BYTES_MIN for size in given)
    assert "predicted from the SSDs" in proposal.explanation


def test_what_does_not_apply_is_refused() -> None:
    problem = tiers_problem(np.random.default_rng(1))
    asking = problem.workload.asking
    assert asking is not None

    def refusal(changed: Asking) -> str:
        workload = Workload(work={}, asking=changed)
        with pytest.raises(RefusedError) as refused:
            RecShard().propose(dataclasses.replace(problem, workload=workload))
        return refused.value.message

    assert "no device with an SSD tier" in refusal(dataclasses.replace(asking, row_room={}))
    assert "no node has reported miss curves" in refusal(dataclasses.replace(asking, curves={}))
    tiny = dict.fromkeys(asking.row_room, SHARE_BYTES_MIN / 2)
    assert "raise its DDR budget" in refusal(dataclasses.replace(asking, row_room=tiny))


def test_a_shunned_node_gets_nothing() -> None:
    problem = dataclasses.replace(tiers_problem(np.random.default_rng(2)), shunned=frozenset({1}))
    proposal = RecShard().propose(problem)
    (instance,) = instances(problem)
    gained = owned_after(instance, proposal.owners)[1] & ~instance.owned_DB[1]
    assert not gained.any()
    assert all(what.device.node == 0 for what in proposal.tier_shares)


def test_hulls_are_within_3_percent_of_the_program() -> None:
    gaps = []
    for seed in range(CASES):
        random = np.random.default_rng(1000 + seed)
        curves = [random_curve(random, 20, random.uniform(1, 10) * MIB) for _ in range(12)]
        room = random.uniform(0.1, 0.9) * sum(float(each.bytes_P[-1]) for each in curves)
        exact = by_milp(curves, room, 5.0)
        assert exact is not None
        gaps.append(missed(curves, by_hulls(curves, room)) / missed(curves, exact) - 1)
    assert np.mean(gaps) <= 0.03
