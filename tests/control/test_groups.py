"""Groups come and go under a control plane that is killed, and many nodes own one bucket."""

import random

import numpy as np
import pytest
from simulation import Simulation, make_node, make_tables

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.bootstrap import first_plan
from embertide.server.core.plan.greedy import Greedy
from embertide.server.core.plan.groups import AddGroup, RemoveGroup, Wish, followed, lacking
from embertide.server.core.plan.instance import instances
from embertide.server.core.plan.layout import Bucket, Place, layout_of, owner
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.validity import OWNERS_MAX, check_plan
from embertide.server.core.plan.workload import Asking, Work, Workload
from embertide.v1 import control_pb2, plan_pb2


def make_fleet() -> Simulation:
    fleet = Simulation(make_tables(user=3, item=1), expect=2, deadline_ms=100)
    for name in ("a-0", "a-1"):
        fleet.add(make_node(name))
    while not fleet.core.epoch:
        fleet.step()
    for name in ("b-0", "b-1"):
        fleet.add(make_node(name, group=1, devices=2))
    return fleet


def start(fleet: Simulation, id: str, **goal: int | str) -> None:
    request = control_pb2.StartReshardRequest(
        operation_id=id,
        budget=control_pb2.ReshardBudget(buckets_at_once=4),
        **goal,  # type: ignore[arg-type]
    )
    fleet.core.start(request, fleet.now_ms)
    fleet.settle()


def run(fleet: Simulation, id: str, dice: random.Random | None = None) -> int:
    """Let an operation end, and what follows it; kill the control plane now and then."""
    kills = 0
    for _ in range(2000):
        fleet.step()
        if dice is not None and dice.random() < 0.1:
            fleet.restart()
            kills += 1
        if fleet.operation(id).ended_ms:
            break
    assert fleet.operation(id).ended_ms, fleet.operation(id)
    for _ in range(10):
        fleet.step()
    return kills


def owned_by_group(fleet: Simulation) -> dict[int, int]:
    plan = fleet.core.plan
    assert plan is not None
    owned = {node.group: 0 for node in plan.topology.nodes}
    for held in fleet.core.layout.values():
        assert not held.joining
        assert not held.leaving
        for at in held.owners:
            owned[plan.topology.nodes[at.node].group] += 1
    return owned


@pytest.mark.parametrize("seed", range(10))
def test_groups_come_and_go_whenever_the_control_plane_is_killed(seed: int) -> None:
    """Every plan is valid, and whoever is asked holds what it is asked for (`Simulation.check`)."""
    dice = random.Random(seed)
    fleet = make_fleet()
    start(fleet, "add", add_group=1)
    kills = run(fleet, "add", dice)
    assert owned_by_group(fleet) == {0: 10, 1: 10}
    assert not fleet.plan().topology.partial_groups
    start(fleet, "remove", remove_group=0)
    kills += run(fleet, "remove", dice)
    assert owned_by_group(fleet) == {0: 0, 1: 10}
    assert list(fleet.plan().topology.partial_groups) == [0]
    assert kills > 0
    for id in ("add", "remove"):
        assert fleet.operation(id).state == control_pb2.OPERATION_STATE_SUCCEEDED


@pytest.mark.parametrize("seed", range(10))
def test_an_operation_on_a_group_that_is_aborted_at_any_time_can_be_undone(seed: int) -> None:
    dice = random.Random(seed)
    fleet = make_fleet()
    goal = {"add_group": 1} if seed % 2 else {"remove_group": 0}
    if "remove_group" in goal:
        start(fleet, "before", add_group=1)
        run(fleet, "before")
    start(fleet, "op", **goal)
    for _ in range(dice.choice([5, 20, 40, 60, 400])):  # at the last it is over
        fleet.step()
    if not fleet.operation("op").ended_ms:
        steering = control_pb2.SteerOperationRequest(id="op", steering=control_pb2.STEERING_ABORT)
        fleet.core.steer(steering, fleet.now_ms)
        fleet.settle()
    run(fleet, "op", dice)
    start(fleet, "back", undo_operation="op")
    run(fleet, "back", dice)
    whole = {0: 10, 1: 10} if "remove_group" in goal else {0: 10, 1: 0}
    owned = owned_by_group(fleet)
    assert {group: owned.get(group, 0) for group in whole} == whole
    if "remove_group" in goal:
        assert not fleet.plan().topology.partial_groups


def test_a_target_that_dies_while_its_group_is_added_is_taken_back() -> None:
    fleet = make_fleet()
    start(fleet, "add", add_group=1)
    while not fleet.operation("add").buckets_done:
        fleet.step()
    fleet.nodes["b-1"].alive = False
    run(fleet, "add")
    assert fleet.operation("add").state == control_pb2.OPERATION_STATE_FAILED
    assert list(fleet.plan().topology.partial_groups) == [1]
    # The missing part goes to the node that lives.
    start(fleet, "again", add_group=1)
    run(fleet, "again")
    assert owned_by_group(fleet) == {0: 10, 1: 10}
    assert not fleet.plan().topology.partial_groups


def make_problem(*, partial: bool, budget: int = 1 << 20) -> Problem:
    """Group 0 owns everything, 1,000 bytes a bucket; of group 1 node b-0 owns one bucket."""
    nodes = [make_node("a-0"), make_node("a-1")]
    plan = first_plan(nodes, make_tables(user=3))
    plan.topology.nodes.extend(make_node(f"b-{at}", group=1, budget=budget) for at in range(2))
    if partial:
        plan.topology.partial_groups.append(1)
    layout = layout_of(plan.assignments).changed(
        {
            Bucket(0, 5): layout_of(plan.assignments)[Bucket(0, 5)]._replace(
                owners=(Place(1, 0), Place(2, 0))
            )
        }
    )
    work = {
        (at, place.node): Work(100 if at.bucket else 5000, 1000)
        for at, held in layout.items()
        for place in held.owners
    }
    asking = Asking(
        wanted_NB=np.ones((4, 8)),
        copied_NT=np.zeros((4, 1)),
        bytes_B=np.full(8, 1000.0),
        traits={},
    )
    return Problem(plan=plan, layout=layout, workload=Workload(work=work, asking=asking))


def test_a_group_that_is_added_again_keeps_what_it_has() -> None:
    problem = make_problem(partial=True)
    owners = AddGroup(1).propose(problem).owners
    assert len(owners) == 7
    assert Bucket(0, 5) not in owners
    for at, places in owners.items():
        assert places[:-1] == problem.layout[at].owners
        assert places[-1].node in (2, 3)


def test_a_group_without_room_is_refused() -> None:
    with pytest.raises(RefusedError, match="take 8,000 bytes, and the budgets of 2 devices") as no:
        AddGroup(1).propose(make_problem(partial=True, budget=3000))
    assert no.value.code is Code.RESOURCE_EXHAUSTED


def test_a_group_whose_nodes_are_dead_is_refused() -> None:
    problem = make_problem(partial=True)
    dead = Problem(
        plan=problem.plan,
        layout=problem.layout,
        workload=problem.workload,
        shunned=frozenset({2, 3}),
    )
    with pytest.raises(RefusedError, match="all nodes of group 1 are dead"):
        AddGroup(1).propose(dead)


def test_what_a_group_that_goes_owns_alone_is_never_given_up() -> None:
    problem = make_problem(partial=True)
    assert RemoveGroup(1).propose(problem).owners == {Bucket(0, 5): (Place(1, 0),)}
    with pytest.raises(RefusedError, match="group 0 is the only one that owns every bucket"):
        RemoveGroup(0).propose(problem)


def test_planners_leave_a_partial_group_alone() -> None:
    problem = make_problem(partial=True)
    assert [each.group for each in instances(problem)] == [0]
    moved = Greedy().propose(problem).owners
    assert moved
    assert all(places[0].node in (0, 1) for places in moved.values())
    # A bucket on a node of the group needs no other place.
    drained = Greedy(drained=2).propose(problem).owners
    assert drained == {Bucket(0, 5): (Place(1, 0), Place(3, 0))}


def test_a_node_that_owns_nothing_may_change_its_group() -> None:
    fleet = make_fleet()
    start(fleet, "add", add_group=1)
    run(fleet, "add")
    with pytest.raises(RefusedError, match=r"node .a-0. is of group 0 in plan .*; drain it first"):
        fleet.add(make_node("a-0", group=1))
    start(fleet, "remove", remove_group=0)
    run(fleet, "remove")
    fleet.add(make_node("a-0", group=1))
    for _ in range(10):
        fleet.step()
    topology = fleet.plan().topology
    assert [(node.name, node.group) for node in topology.nodes[:2]] == [("a-0", 1), ("a-1", 0)]
    assert list(topology.partial_groups) == [0]
    fleet.add(make_node("a-1", group=1))
    for _ in range(10):
        fleet.step()
    assert not fleet.plan().topology.partial_groups


def test_no_group_becomes_partial_if_none_were_whole() -> None:
    plan = first_plan([make_node("a-0")], make_tables(user=1))
    layout = layout_of(plan.assignments)
    registered = {node.name: node for node in plan.topology.nodes}
    assert followed(plan, layout, registered, wish=Wish(0, False)) is None
    assert lacking(plan.topology, layout, [0, 1]) == {1}


def test_twelve_owners_share_a_bucket() -> None:
    """A target gives a bucket twelve owners in one group; 64 are valid, and one more is not."""
    nodes = [make_node(f"node-{at:02}") for at in range(OWNERS_MAX + 1)]
    plan = first_plan(nodes, make_tables(user=7))
    check_plan(plan, previous_epoch=0)
    fleet = Simulation(make_tables(user=2), expect=13, deadline_ms=100)
    for node in nodes[:13]:
        fleet.add(node)
    while not fleet.core.epoch:
        fleet.step()
    target = control_pb2.ReshardTarget(base_epoch=1)
    owners = [owner(Place(at, 0)) for at in range(12)]
    target.assignments.add(table_id=0, bucket_begin=0, bucket_count=1, owners=owners)
    request = control_pb2.StartReshardRequest(operation_id="r1", target=target)
    fleet.core.start(request, fleet.now_ms)
    fleet.settle()
    run(fleet, "r1")
    assert len(fleet.core.layout[Bucket(0, 0)].owners) == 12
    for count, fine in ((OWNERS_MAX, True), (OWNERS_MAX + 1, False)):
        more = plan_pb2.Plan()
        more.CopyFrom(plan)
        del more.assignments[0].owners[:]
        more.assignments[0].owners.extend(owner(Place(at, 0)) for at in range(count))
        if fine:
            check_plan(more, previous_epoch=0)
        else:
            with pytest.raises(RefusedError, match="it has 65 owners; at most 64"):
                check_plan(more, previous_epoch=0)
