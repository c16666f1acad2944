"""The planner `neuroshard`: within budgets, always the same answer, better by another's rules."""

import dataclasses
import io

import numpy as np
import pytest
from optimum import Shape, make_problem

from bench.drift import heuristics
from bench.drift.placed import outcome, placement_of, planned, problem_of
from bench.drift.simulator import Outcome
from bench.drift.tasks import Memory, Task, make, sources
from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan import cost_net
from embertide.server.core.plan.fill import filled
from embertide.server.core.plan.instance import (
    Bools,
    Instance,
    instances,
    owned_after,
    owners_of,
    rates,
)
from embertide.server.core.plan.neuroshard import Neuroshard
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.polish import Placement, fits, polished
from embertide.server.core.plan.relabel import relabelled
from embertide.server.core.plan.shard_costs import ShardCosts
from embertide.v1 import plan_pb2

SHAPE = Shape(nodes=4, bits=(4, 3, 3), room=1.4, skew=1.0, locality=0.8)
ALL = 8  # owners


def group(problem: Problem) -> Instance:
    [instance] = instances(problem)
    return instance


def quick(problem: Problem) -> Problem:
    """A search that is short."""
    return dataclasses.replace(problem, limit_s=1.0)


def value(instance: Instance, owned_DB: Bools) -> float:
    costs = ShardCosts(instance, cost_net.shipped())
    return float(costs.values(costs.all_contributions(owned_DB).sum(axis=0)[None])[0])


def task(memory: Memory, *, devices: int = 3, tables: int = 12, seed: int = 1) -> Task:
    [source, *_] = sources(None, None)
    return make(source, memory, devices, tables, np.random.default_rng(seed), "task")


def with_second_device(problem: Problem) -> Problem:
    """Each node has its budget on two devices."""
    plan = plan_pb2.Plan()
    plan.CopyFrom(problem.plan)
    for node in plan.topology.nodes:
        [device] = node.devices
        device.budgets[0].budget_bytes //= 2
        node.devices.add(index=1).MergeFrom(device)
        node.devices[1].index = 1
    return dataclasses.replace(problem, plan=plan)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_plans_hold_what_is_asked_of_them(seed: int, devices: int) -> None:
    problem = dataclasses.replace(make_problem(seed, SHAPE), shunned=frozenset({3}), limit_s=1.0)
    if devices == 2:
        problem = with_second_device(problem)
    instance = group(problem)
    proposal = Neuroshard().propose(problem)
    owned_DB = owned_after(instance, proposal.owners)
    assert proposal.owners
    assert fits(instance, owned_DB, ALL)
    # A shunned node keeps its buckets, and gets none.
    of_node = np.flatnonzero(instance.node_D == 3)
    stays_B = instance.owned_DB[of_node].any(axis=0)
    assert stays_B.any()
    assert not owned_DB[np.ix_(of_node, ~stays_B)].any()
    assert (owned_DB[:, stays_B] == instance.owned_DB[:, stays_B]).all()


def test_the_same_problem_has_the_same_answer() -> None:
    problem = quick(make_problem(5, SHAPE))
    assert Neuroshard().propose(problem) == Neuroshard().propose(problem)


def test_the_search_stops_by_its_limit() -> None:
    problem = problem_of(task("tight", devices=8, tables=60))
    instance = group(problem)
    spent = []
    for limit_s in (0.01, 0.5):

        class Counted(ShardCosts):
            def __init__(self, instance: Instance, net: cost_net.CostNet) -> None:
                super().__init__(instance, net)
                spent.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("embertide.server.core.plan.neuroshard.ShardCosts", Counted)
            Neuroshard().propose(dataclasses.replace(problem, limit_s=limit_s))
    assert len(instance.tables) == 60
    assert spent[0].spent_us < spent[1].spent_us < 0.5e6


def test_nothing_moves_where_nothing_is_to_be_gained() -> None:
    alone = quick(make_problem(2, SHAPE._replace(nodes=1)))
    assert Neuroshard().propose(alone).owners == {}
    nobody_open = dataclasses.replace(make_problem(2, SHAPE), shunned=frozenset(range(4)))
    assert Neuroshard().propose(nobody_open).owners == {}


def test_all_is_copied_where_memory_allows() -> None:
    problem = quick(make_problem(1, SHAPE._replace(room=4.5)))
    owned_DB = owned_after(group(problem), Neuroshard().propose(problem).owners)
    assert rates(group(problem), owned_DB).asked_NT.sum() < 1e-6


def test_what_does_not_fit_is_refused() -> None:
    problem = quick(make_problem(1, SHAPE))
    for node in problem.plan.topology.nodes:
        node.devices[0].budgets[0].budget_bytes = 1000
    with pytest.raises(RefusedError, match="do not fit into the budgets") as refused:
        Neuroshard().propose(problem)
    assert refused.value.code == Code.RESOURCE_EXHAUSTED


def test_large_fleets_are_refused() -> None:
    problem = make_problem(1, SHAPE._replace(nodes=33))
    with pytest.raises(RefusedError, match="33 devices and 32 buckets; neuroshard searches 32"):
        Neuroshard().propose(problem)


@pytest.mark.parametrize("memory", ["tight", "medium", "loose"])
def test_the_busiest_device_does_less_than_by_any_heuristic(memory: Memory) -> None:
    given = task(memory)
    ours = planned(given, quick(problem_of(given)), Neuroshard())
    best = min(outcome(given, each).busiest_us for each in heuristics.placements(given))
    assert ours.busiest_us < 0.95 * best
    assert ours.bytes_D.max() <= given.capacity + 1


def simulated(given: Task, owned_DB: Bools) -> Outcome:
    problem = problem_of(given)
    owners = {at: held.owners for at, held in problem.layout.items()}
    owners.update(owners_of(group(problem), owned_DB, owners))
    return outcome(given, placement_of(given, owners))


@pytest.mark.parametrize("seed", range(3))
def test_the_cost_net_predicts_the_simulator(seed: int) -> None:
    given = task("medium", tables=20, devices=4, seed=seed)
    instance = group(problem_of(given))
    costs = ShardCosts(instance, cost_net.shipped())
    random = np.random.default_rng(seed)
    owned_DB = random.random(instance.owned_DB.shape) < 0.2
    owned_DB[random.integers(4, size=owned_DB.shape[1]), np.arange(owned_DB.shape[1])] = True
    came = simulated(given, owned_DB)
    predicted_D = costs.costs(costs.all_contributions(owned_DB).sum(axis=0)) * costs.unit_us
    assert predicted_D == pytest.approx(came.compute_us_D + came.link_us_D, rel=0.03)


def test_a_bag_costs_a_sum_for_each_owner_of_its_keys() -> None:
    given = task("medium", devices=3, tables=1)
    [table] = given.tables
    given = dataclasses.replace(given, tables=[dataclasses.replace(table, pooling=20.0)])
    instance = group(problem_of(given))
    costs = ShardCosts(instance, cost_net.shipped())
    together_DB = np.zeros_like(instance.owned_DB)
    together_DB[0] = True
    apart_DB = np.zeros_like(together_DB)
    apart_DB[np.arange(apart_DB.shape[1]) % 2, np.arange(apart_DB.shape[1])] = True
    for owned_DB, sums in ((together_DB, 1), (apart_DB, 2)):
        _, traffic_CD2 = costs.features(0, owned_DB[None])
        received = traffic_CD2[0, 2, 1] * costs.unit_us / cost_net.shipped().us_per_byte
        assert received == pytest.approx(given.samples * table.dim * 4 * sums, rel=0.01)


def exchange_problem() -> tuple[Instance, Bools]:
    """Two full devices; the hot buckets are on one of them."""
    problem = make_problem(3, Shape(nodes=2, bits=(1, 1), room=1.0))
    instance = group(problem)
    owned_DB = np.array([[True, True, False, False], [False, False, True, True]])
    instance = dataclasses.replace(
        instance,
        owned_DB=owned_DB,
        bytes_B=np.full(4, 1000.0),
        budget_D=np.full(2, 2000.0),
        wanted_NB=np.tile([100.0, 100.0, 1.0, 1.0], (2, 1)),
        copied_NT=np.zeros((2, 2)),
    )
    return instance, owned_DB


def test_buckets_are_exchanged_where_devices_are_full() -> None:
    instance, owned_DB = exchange_problem()
    costs = ShardCosts(instance, cost_net.shipped())
    better = polished(instance, costs, Placement(owned_DB, np.inf), 1e9, ALL)
    assert sorted(better.owned_DB[:, :2].sum(axis=1).tolist()) == [1, 1]
    assert fits(instance, better.owned_DB, ALL)
    assert better.value == pytest.approx(value(instance, better.owned_DB), rel=1e-4)


def test_room_is_filled_with_what_is_asked_most_a_byte() -> None:
    instance, owned_DB = exchange_problem()
    instance = dataclasses.replace(instance, budget_D=np.array([2000.0, 3500.0]))
    copied_DB = filled(instance, owned_DB, ALL)
    assert (copied_DB & ~owned_DB).sum(axis=1).tolist() == [0, 1]
    assert copied_DB[1, :2].any()
    assert (filled(instance, owned_DB, 1) == owned_DB).all()


def test_devices_keep_what_they_have() -> None:
    instance, owned_DB = exchange_problem()
    costs = ShardCosts(instance, cost_net.shipped())
    turned = Placement(owned_DB[::-1].copy(), value(instance, owned_DB[::-1]))
    assert (relabelled(instance, costs, turned, ALL).owned_DB == owned_DB).all()


def test_weights_are_read_as_they_were_written() -> None:
    file = io.BytesIO()
    cost_net.save(cost_net.shipped(), file)
    file.seek(0)
    read = cost_net.load(file)
    features_XF = np.random.default_rng(1).random((5, cost_net.FEATURES), dtype=np.float32)
    vectors_XE = cost_net.shipped().vectors(features_XF)
    assert (read.vectors(features_XF) == vectors_XE).all()
    assert vectors_XE.shape == (5, read.width)
    traffic_X2 = features_XF[:, :2]
    assert (
        read.costs(vectors_XE, traffic_X2) == cost_net.shipped().costs(vectors_XE, traffic_X2)
    ).all()
    nothing = np.zeros((1, read.width), np.float32)
    assert read.costs(nothing, np.zeros((1, 2), np.float32)).tolist() == [0.0]
