"""The planner `recshard` against every answer that there is, on small cases."""

import dataclasses
import itertools

import numpy as np
import pytest

from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.instance import Bools, Floats, Instance, instances, owned_after
from embertide.server.core.plan.layout import Bucket, Holders, Layout, Place
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.recshard import RecShard, _Group
from embertide.server.core.plan.shares import LEAST_SHARE_BYTES, check_shares, messages_of
from embertide.server.core.plan.tier_budgets import (
    Curve,
    by_hulls,
    by_milp,
    least_missed,
    missed,
    share_out,
)
from embertide.server.core.plan.workload import Asking, MissCurve, TableTraits, Workload
from embertide.v1 import plan_pb2

MIB = 1 << 20
CASES = 12  # 200 in bench.drift
DDR = plan_pb2.TIER_DDR


def random_curve(random: np.random.Generator, points: int, size: float) -> Curve:
    """A curve that falls, with cliffs."""
    inner = np.sort(random.uniform(0.05, 0.95, points - 2)) * size
    falls = random.exponential(1.0, points - 1) ** 2
    missed_P = 1 - np.concatenate([[0.0], np.cumsum(falls) / falls.sum()]) * random.uniform(0.5, 1)
    return Curve(np.concatenate([[0.0], inner, [size]]), missed_P)


def brute_shares(curves: list[Curve], room: float) -> float:
    """Return the least that can be missed with one point of each curve."""
    sizes = np.array([0.0])
    total = np.array([0.0])
    for curve in curves:
        sizes = (sizes[:, None] + curve.bytes_P).reshape(-1)
        total = (total[:, None] + curve.missed_P).reshape(-1)
    return float(total[sizes <= room].min())


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
    assert least_missed(curves, room) <= best + 1e-9
    assert np.array_equal(share_out(curves, room, 5.0), given_T)


def make_problem(random: np.random.Generator, devices: int = 2, tables: int = 2) -> Problem:
    """Nodes of one device each, tables of two buckets, room for a part of their rows."""
    budgets = [
        plan_pb2.TierBudget(tier=DDR, budget_bytes=8 * MIB),
        plan_pb2.TierBudget(tier=plan_pb2.TIER_SSD, budget_bytes=64 * MIB),
    ]
    device = plan_pb2.Device(index=0, kind=plan_pb2.DEVICE_KIND_CPU, budgets=budgets)
    nodes = [
        plan_pb2.Node(name=f"n{n}", address=f"n{n}:1", devices=[device]) for n in range(devices)
    ]
    named = [
        plan_pb2.PlannedTable(id=t, name=f"t{t}", bucket_bits=1, chunks=1) for t in range(tables)
    ]
    layout: Layout = {
        Bucket(t, b): Holders((Place(int(random.integers(devices)), 0),))
        for t in range(tables)
        for b in range(2)
    }
    wanted_NB = random.exponential(1000, (devices, 2 * tables)) + 10
    shape = [random_curve(random, 5, random.uniform(1, 6) * MIB) for _ in range(tables)]
    curves = {}
    for table, place in itertools.product(range(tables), (Place(n, 0) for n in range(devices))):
        count = sum(layout[Bucket(table, b)].owners == (place,) for b in range(2))
        if count:
            each = shape[table]
            curves[place, table] = MissCurve(
                tuple(each.bytes_P * count), tuple(each.missed_P.tolist())
            )
    asking = Asking(
        wanted_NB=wanted_NB,
        copied_NT=np.zeros((devices, tables)),
        bytes_B=np.full(2 * tables, 1.0 * MIB),
        traits={t: TableTraits(tier_share=(0.0, 0.5, 0.5)) for t in range(tables)},
        requests_N=np.full(devices, 10.0),
        curves=curves,
        row_room={Place(n, 0): random.uniform(1, 8) * MIB for n in range(devices)},
    )
    plan = plan_pb2.Plan(
        epoch=1, tables=named, topology=plan_pb2.Topology(nodes=nodes), planner="first"
    )
    return Problem(plan=plan, layout=layout, workload=Workload(work={}, asking=asking), limit_s=0.4)


def best_missed_D(group: _Group, owned_DB: Bools) -> Floats:
    """Return what each device's best shares leave to its SSD."""
    found = []
    for device in range(len(group.room_D)):
        tables, curves = group.curves_of(owned_DB, device)
        found.append(brute_shares(curves, group.room(device, tables)) if curves else 0.0)
    return np.array(found)


def proposed(problem: Problem) -> tuple[Instance, Proposal, float, float]:
    """Return what it proposes, with the score of that and the best one of all."""
    (instance,) = instances(problem)
    group = _Group(problem, instance)
    proposal = RecShard().propose(problem)
    owned_DB = owned_after(instance, proposal.owners)
    missed_D = np.zeros(len(group.room_D))
    for device, place in enumerate(instance.places_D):
        tables, curves = group.curves_of(owned_DB, device)
        given = {what.table: size for what, size in proposal.tier_shares.items() if size}
        sizes = {
            what.table: size
            for what, size in proposal.tier_shares.items()
            if what.device == place and size
        }
        assert sorted(sizes) == sorted(tables), given
        missed_D[device] = sum(curve.at(sizes[t]) for t, curve in zip(tables, curves, strict=True))
    ours = group.score_of(owned_DB, missed_D).value
    best = min(
        group.score_of(each, best_missed_D(group, each)).value for each in ownerships(instance)
    )
    return instance, proposal, ours, best


def ownerships(instance: Instance) -> list[Bools]:
    """Return every way to give each bucket one owner."""
    devices, buckets = instance.owned_DB.shape
    found = []
    for owners in itertools.product(range(devices), repeat=buckets):
        owned_DB = np.zeros((devices, buckets), np.bool_)
        owned_DB[list(owners), range(buckets)] = True
        found.append(owned_DB)
    return found


@pytest.mark.parametrize("seed", range(CASES))
def test_owners_and_shares_are_near_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    problem = make_problem(random, devices=2 + seed % 2, tables=2)
    _, proposal, ours, best = proposed(problem)
    assert ours <= best * 1.05
    check_shares(problem.plan, messages_of(proposal.tier_shares))
    assert RecShard().propose(problem) == proposal


def test_shares_fit_the_room_of_each_device() -> None:
    problem = make_problem(np.random.default_rng(5), devices=3, tables=4)
    proposal = RecShard().propose(problem)
    asking = problem.workload.asking
    assert asking is not None
    for place, room in asking.row_room.items():
        given = [size for what, size in proposal.tier_shares.items() if what.device == place]
        assert sum(given) <= room
        assert all(size >= LEAST_SHARE_BYTES for size in given)
    assert "predicted from the SSDs" in proposal.explanation


def test_what_does_not_apply_is_refused() -> None:
    problem = make_problem(np.random.default_rng(1))
    asking = problem.workload.asking
    assert asking is not None

    def refusal(changed: Asking) -> str:
        workload = Workload(work={}, asking=changed)
        with pytest.raises(RefusedError) as refused:
            RecShard().propose(dataclasses.replace(problem, workload=workload))
        return refused.value.message

    assert "no device with an SSD tier" in refusal(dataclasses.replace(asking, row_room={}))
    assert "no node has reported miss curves" in refusal(dataclasses.replace(asking, curves={}))
    tiny = dict.fromkeys(asking.row_room, LEAST_SHARE_BYTES / 2)
    assert "raise its DDR budget" in refusal(dataclasses.replace(asking, row_room=tiny))


def test_a_shunned_node_gets_nothing() -> None:
    problem = dataclasses.replace(make_problem(np.random.default_rng(2)), shunned=frozenset({1}))
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
