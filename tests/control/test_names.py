"""Operations go by the names of nodes: positions may change under them at any time."""

import random

import pytest
from simulation import Simulation, make_node, make_tables

from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.layout import Bucket, Holders, LaidPlan, Place
from embertide.server.core.plan.names import Roster, changes
from embertide.v1 import control_pb2, plan_pb2

SUCCEEDED, FAILED = control_pb2.OPERATION_STATE_SUCCEEDED, control_pb2.OPERATION_STATE_FAILED


def make_fleet(nodes: int, *, devices: int = 1, expect: int | None = None) -> Simulation:
    fleet = Simulation(make_tables(user=3), expect=expect or nodes, deadline_ms=200)
    for index in range(expect or nodes):
        fleet.add(make_node(f"node-{index}", devices=devices))
    while not fleet.core.epoch:
        fleet.step()
    for index in range(expect or nodes, nodes):
        fleet.add(make_node(f"node-{index}", devices=devices))
    for _ in range(20):
        fleet.step()
    return fleet


def start(fleet: Simulation, id: str, owner: plan_pb2.Owner) -> None:
    target = control_pb2.ReshardTarget(base_epoch=fleet.core.epoch)
    target.assignments.add(bucket_begin=0, bucket_count=6, owners=[owner])
    request = control_pb2.StartReshardRequest(operation_id=id, target=target)
    request.budget.buckets_at_once = 2
    fleet.core.start(request, fleet.now_ms)
    fleet.settle()


def steer(fleet: Simulation, id: str, how: "control_pb2.Steering.ValueType") -> None:
    fleet.core.steer(control_pb2.SteerOperationRequest(id=id, steering=how), fleet.now_ms)
    fleet.settle()


def remove(fleet: Simulation, name: str) -> None:
    request = control_pb2.RemoveNodeRequest(request_id=f"remove-{name}", node=name)
    fleet.core.remove(request, fleet.now_ms)
    fleet.settle()
    del fleet.nodes[name]


def run(fleet: Simulation, id: str) -> None:
    for _ in range(400):
        fleet.step()
        if fleet.operation(id).ended_ms:
            return
    raise AssertionError(fleet.operation(id))


def owners(fleet: Simulation, bucket: int) -> list[str]:
    plan = fleet.plan()
    roster = Roster(plan.topology)
    return [device.node for device in roster.devices(fleet.core.layout[Bucket(0, bucket)].owners)]


def shuffled(plan: LaidPlan, dice: random.Random) -> LaidPlan:
    """Return the same plan with its nodes at other positions."""
    order = list(range(len(plan.head.topology.nodes)))
    dice.shuffle(order)
    head = plan_pb2.Plan()
    head.CopyFrom(plan.head)
    del head.topology.nodes[:]
    head.topology.nodes.extend(plan.head.topology.nodes[position] for position in order)
    now = {position: at for at, position in enumerate(order)}

    def moved(places: tuple[Place, ...]) -> tuple[Place, ...]:
        return tuple(Place(now[at.node], at.device) for at in places)

    return LaidPlan(head, plan.layout.with_holders(lambda each: Holders(*map(moved, each))))


@pytest.mark.parametrize("seed", range(8))
def test_an_operation_goes_on_where_positions_change(seed: int) -> None:
    """As if nodes left and came back between any two of its steps."""
    dice = random.Random(seed)
    fleet = make_fleet(4)
    before = {bucket: owners(fleet, bucket) for bucket in (6, 7)}
    start(fleet, "r1", plan_pb2.Owner(node=3))
    for _ in range(400):
        fleet.step()
        if fleet.operation("r1").ended_ms:
            break
        if fleet.operation("r1").base_epoch and dice.random() < 0.3:
            assert fleet.core.plan is not None
            fleet.core.plan, fleet.core.layout = shuffled(
                LaidPlan(fleet.core.plan, fleet.core.layout), dice
            )
    assert fleet.operation("r1").state == SUCCEEDED, fleet.operation("r1")
    assert fleet.core.plan is not None
    roster = Roster(fleet.core.plan.topology)
    now = {
        at.bucket: [each.node for each in roster.devices(held.owners)]
        for at, held in fleet.core.layout.items()
    }
    assert now == {**{bucket: ["node-3"] for bucket in range(6)}, **before}


def test_a_waiting_operation_keeps_the_node_that_it_names_and_no_other() -> None:
    """node-1 owns nothing and leaves, so those behind it get other positions."""
    fleet = make_fleet(4, expect=1)
    start(fleet, "r1", plan_pb2.Owner(node=2))
    steer(fleet, "r1", control_pb2.STEERING_PAUSE)
    remove(fleet, "node-1")
    assert [node.name for node in fleet.plan().topology.nodes] == ["node-0", "node-2", "node-3"]
    with pytest.raises(RefusedError, match="node-2"):
        remove(fleet, "node-2")
    remove(fleet, "node-3")
    steer(fleet, "r1", control_pb2.STEERING_RESUME)
    run(fleet, "r1")
    assert fleet.operation("r1").state == SUCCEEDED
    assert owners(fleet, 0) == ["node-2"]


def test_an_operation_fails_whose_device_is_gone_and_the_next_one_runs() -> None:
    """Its node came back with one device before the first of its buckets joined."""
    fleet = make_fleet(2, devices=2, expect=1)
    start(fleet, "r1", plan_pb2.Owner(node=1, device=1))
    record = fleet.core.operations.records["r1"]
    fleet.core.operations.begin(record, fleet.core.epoch, fleet.now_ms, made=False)
    fleet.add(make_node("node-1"))
    run(fleet, "r1")
    assert fleet.operation("r1").state == FAILED
    assert fleet.operation("r1").message == "its moves name node-1/1, which has left the fleet"
    start(fleet, "r2", plan_pb2.Owner(node=1))
    run(fleet, "r2")
    assert fleet.operation("r2").state == SUCCEEDED


def test_plans_are_compared_by_the_names_of_nodes() -> None:
    fleet = make_fleet(3, expect=3)
    drain = control_pb2.StartReshardRequest(operation_id="d", drain_node="node-1")
    fleet.core.start(drain, fleet.now_ms)
    fleet.settle()
    run(fleet, "d")
    before = fleet.plan()
    remove(fleet, "node-1")
    after = fleet.plan()
    assert len(after.topology.nodes) == 2
    assert changes(before, after) == {}
    start(fleet, "r1", plan_pb2.Owner(node=1))  # node-2
    run(fleet, "r1")
    changed = changes(before, fleet.plan())
    assert changed
    for old, new in changed.values():
        assert [each.node for each in old.owners] == ["node-0"]
        assert [each.node for each in new.owners] == ["node-2"]
