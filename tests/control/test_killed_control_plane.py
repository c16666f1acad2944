"""Kill the control plane, or nodes, anywhere: the plan stays valid and the operation ends."""

import contextlib
import random

import pytest
from simulation import Simulation, make_node, make_tables

from embertide.server.core.control import Control, Memory
from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.layout import Bucket, Holders, Place, layout_of
from embertide.v1 import control_pb2, plan_pb2

ENDED = (
    control_pb2.OPERATION_STATE_SUCCEEDED,
    control_pb2.OPERATION_STATE_FAILED,
    control_pb2.OPERATION_STATE_ABORTED,
)


def make_fleet(nodes: int = 3, deadline_ms: int = 100) -> Simulation:
    fleet = Simulation(make_tables(user=3, item=1), expect=nodes, deadline_ms=deadline_ms)
    for index in range(nodes):
        fleet.add(make_node(f"node-{index}", devices=2))
    while not fleet.core.epoch or any(node.held_epoch < 1 for node in fleet.nodes.values()):
        fleet.step()
    return fleet


def start(fleet: Simulation, id: str, table_bucket_node: list[tuple[int, int, int]]) -> None:
    request = control_pb2.StartReshardRequest(
        operation_id=id, budget=control_pb2.ReshardBudget(buckets_at_once=2)
    )
    request.target.base_epoch = fleet.core.epoch
    for table, bucket, node in table_bucket_node:
        request.target.assignments.add(
            table_id=table, bucket_begin=bucket, bucket_count=1, owners=[plan_pb2.Owner(node=node)]
        )
    fleet.core.start(request, fleet.now_ms)
    fleet.settle()


def run_to_end(fleet: Simulation, id: str, steps: int = 2000) -> control_pb2.Operation:
    for _ in range(steps):
        fleet.step()
        if fleet.operation(id).ended_ms:
            return fleet.operation(id)
    raise AssertionError(f"{id} has not ended: {fleet.operation(id)}")


def is_clean(fleet: Simulation) -> bool:
    layout = layout_of(fleet.plan().assignments).values()
    return not any(held.joining or held.leaving for held in layout)


TARGET = [(0, 0, 1), (0, 1, 2), (0, 2, 2), (0, 3, 1), (1, 0, 2)]


def test_killed_after_every_single_step() -> None:
    undisturbed = make_fleet()
    start(undisturbed, "r1", TARGET)
    run_to_end(undisturbed, "r1")
    wanted = undisturbed.plan().assignments
    count = undisturbed.core.epoch
    for at in range(1, count + 1):
        fleet = make_fleet()
        start(fleet, "r1", TARGET)
        while fleet.core.epoch < at:
            fleet.step()
        fleet.restart()
        assert run_to_end(fleet, "r1").state == control_pb2.OPERATION_STATE_SUCCEEDED
        assert list(fleet.plan().assignments) == list(wanted)


def test_killed_between_the_record_and_its_plan() -> None:
    """A record that is a step ahead of the plan: the step is written again."""
    fleet = make_fleet()
    start(fleet, "r1", TARGET)
    saved = fleet.store.load()
    ahead = None
    while ahead is None or not ahead.operations["r1"].moving:
        fleet.now_ms += 50
        fleet.core.tick(fleet.now_ms)
        fleet.core.take()  # decided, and the plan was never written
        ahead = fleet.store.load()
        ahead.operations["r1"].CopyFrom(fleet.core.operations.records["r1"])
    ahead.plan = saved.plan
    fleet.core = Control(fleet.options, ahead, fleet.now_ms, Memory(fleet.options))
    assert run_to_end(fleet, "r1").state == control_pb2.OPERATION_STATE_SUCCEEDED
    assert layout_of(fleet.plan().assignments)[Bucket(0, 0)] == Holders((Place(1, 0),))


@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize("who", ["node-0", "node-1"])
def test_a_node_killed_in_each_step(step: int, who: str) -> None:
    fleet = make_fleet(deadline_ms=2000)
    start(fleet, "r1", [(0, 0, 1)])
    while fleet.core.operations.records["r1"].step != step:
        fleet.step()
    fleet.nodes[who].alive = False
    ended = run_to_end(fleet, "r1")
    target_died = who == "node-1" and step < 4
    wanted = "FAILED" if target_died else "SUCCEEDED"
    assert control_pb2.OperationState.Name(ended.state) == f"OPERATION_STATE_{wanted}"
    assert is_clean(fleet)
    if target_died:
        assert "node-1" in ended.message


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20, 40))]
)
def test_random_kills_leave_valid_plans(seed: int) -> None:
    """`step` checks after each tick that whoever is asked by any live node's plan holds it."""
    dice = random.Random(seed)
    fleet = make_fleet()
    count = 0
    for _ in range(600):
        chance = dice.random()
        node = fleet.nodes[f"node-{dice.randrange(3)}"]
        if chance < 0.05:
            fleet.restart()
        elif chance < 0.08:
            count += 1
            moves = [(0, bucket, dice.randrange(3)) for bucket in range(8) if dice.random() < 0.5]
            try:
                start(fleet, f"r{count}", moves)
            except RefusedError:
                fleet.core.take()
        elif chance < 0.10 and count:
            steering = dice.choice([1, 2, 3])
            request = control_pb2.SteerOperationRequest(id=f"r{dice.randint(1, count)}")
            request.steering = steering  # type: ignore[assignment]
            with contextlib.suppress(RefusedError):
                fleet.core.steer(request, fleet.now_ms)
            fleet.settle()
        elif chance < 0.12:
            node.stuck = not node.stuck
        elif chance < 0.14:
            node.deaf = not node.deaf
        elif chance < 0.15 and sum(each.alive for each in fleet.nodes.values()) == 3:
            node.alive = False
        elif chance < 0.18 and not node.alive:
            fleet.add(node.node)
        fleet.step()
    for each in list(fleet.nodes.values()):
        each.stuck = each.deaf = False
        if not each.alive:
            fleet.add(each.node)
    for record in list(fleet.core.operations.active()):
        if record.operation.state == control_pb2.OPERATION_STATE_PAUSED:
            fleet.core.steer(
                control_pb2.SteerOperationRequest(
                    id=record.operation.id, steering=control_pb2.STEERING_RESUME
                ),
                fleet.now_ms,
            )
    for _ in range(2000):
        if not fleet.core.operations.active():
            break
        fleet.step()
    assert not fleet.core.operations.active()
    assert is_clean(fleet)
    assert len(layout_of(fleet.plan().assignments)) == 10
