"""Shares of tiers: what a target may say, what a plan then says, and what is refused."""

import numpy as np
import pytest
from virtual import VirtualFleet, make_tables

from embertide.server.core.drift.options import DriftOptions
from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.layout import Place
from embertide.server.core.plan.shares import ShareKey, messages_of, shares_of
from embertide.v1 import control_pb2, node_pb2, plan_pb2

MIB = 1 << 20
DDR = plan_pb2.TIER_DDR
USER = ShareKey(Place(0, 0), DDR, 0)
ITEM = ShareKey(Place(0, 0), DDR, 1)


def make_node(number: int, ddr: int = 8 * MIB, ssd: int = 64 * MIB) -> plan_pb2.Node:
    budgets = [plan_pb2.TierBudget(tier=DDR, budget_bytes=ddr)]
    if ssd:
        budgets.append(plan_pb2.TierBudget(tier=plan_pb2.TIER_SSD, budget_bytes=ssd))
    device = plan_pb2.Device(index=0, kind=plan_pb2.DEVICE_KIND_CPU, budgets=budgets)
    return plan_pb2.Node(name=f"node-{number}", address=f"node-{number}:7000", devices=[device])


def make_fleet() -> VirtualFleet:
    fleet = VirtualFleet(
        nodes=[make_node(0), make_node(1)],
        tables=make_tables([1, 1]),
        demand=lambda _: np.full((2, 4), 10.0),
        bytes_B=np.full(4, 1000),
        drift=DriftOptions(mode="off"),
    )
    fleet.run(10)
    return fleet


def return_as(fleet: VirtualFleet, node: plan_pb2.Node) -> None:
    """Register a node again, with other budgets."""
    request = control_pb2.RegisterNodeRequest(
        request_id="again", node=node, model="virtual", tables=fleet.tables
    )
    fleet.core.register(request, fleet.now_ms)
    fleet.core.tick(fleet.now_ms)


def ask(
    fleet: VirtualFleet, id: str, shares: dict[ShareKey, int], **goal: str
) -> control_pb2.StartReshardResponse:
    request = control_pb2.StartReshardRequest(operation_id=id, **goal)  # type: ignore[arg-type]
    if not goal:
        request.target.base_epoch = fleet.core.epoch
        request.target.tier_shares.extend(messages_of(shares))
    answer = fleet.core.start(request, fleet.now_ms)
    fleet.run(10)
    return answer


def state(fleet: VirtualFleet, id: str) -> str:
    operation = fleet.core.operations.find(id).operation
    return control_pb2.OperationState.Name(operation.state).removeprefix("OPERATION_STATE_")


def planned(fleet: VirtualFleet) -> dict[ShareKey, int]:
    assert fleet.core.plan is not None
    return shares_of(fleet.core.plan.tier_shares)


def test_shares_become_part_of_the_plan_and_an_undo_takes_them_back() -> None:
    fleet = make_fleet()
    answer = ask(fleet, "r1", {USER: 2 * MIB, ITEM: MIB})
    assert shares_of(answer.tier_shares) == {USER: 2 * MIB, ITEM: MIB}
    assert "2 shares of tiers" in answer.explanation
    assert state(fleet, "r1") == "SUCCEEDED"
    assert planned(fleet) == {USER: 2 * MIB, ITEM: MIB}
    # A repeated share is no change; 0 takes one away.
    epoch = fleet.core.epoch
    assert not ask(fleet, "r2", {USER: 2 * MIB}).tier_shares
    assert fleet.core.epoch == epoch
    ask(fleet, "r3", {ITEM: 0, USER: 3 * MIB})
    assert planned(fleet) == {USER: 3 * MIB}
    undone = ask(fleet, "r4", {}, undo_operation="r3")
    assert shares_of(undone.tier_shares) == {USER: 2 * MIB, ITEM: MIB}
    assert planned(fleet) == {USER: 2 * MIB, ITEM: MIB}
    ask(fleet, "r5", {}, undo_operation="r1")
    assert planned(fleet) == {}


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ({ShareKey(Place(0, 0), DDR, 9): MIB}, "share of table 9, which does not exist"),
        ({ShareKey(Place(5, 0), DDR, 0): MIB}, "device 5/0: node 5, device 0 does not exist"),
        (
            {ShareKey(Place(0, 0), plan_pb2.TIER_SSD, 0): MIB},
            "share of table 'table-0' on device node-0/0: SSD cannot be shared out",
        ),
        ({USER: 1000}, "1,000 bytes; at least 65,536"),
        ({USER: 9 * MIB}, "9,437,184 bytes exceed the DDR budget of 8,388,608"),
        ({ITEM: 7 * MIB}, "with the shares before it, 9,437,184 bytes exceed"),
    ],
)
def test_an_impossible_share_is_refused_by_name(shares: dict[ShareKey, int], says: str) -> None:
    fleet = make_fleet()
    ask(fleet, "r1", {USER: 2 * MIB})
    epoch = fleet.core.epoch
    with pytest.raises(RefusedError) as refused:
        ask(fleet, "bad", shares)
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert says in refused.value.message
    assert (fleet.core.epoch, planned(fleet)) == (epoch, {USER: 2 * MIB})


def test_a_share_that_stands_twice_and_one_without_an_ssd_are_refused() -> None:
    fleet = make_fleet()
    request = control_pb2.StartReshardRequest(operation_id="twice")
    request.target.base_epoch = fleet.core.epoch
    request.target.tier_shares.extend(messages_of({USER: MIB}) * 2)
    with pytest.raises(RefusedError, match="stands twice"):
        fleet.core.start(request, fleet.now_ms)
    return_as(fleet, make_node(0, ssd=0))
    with pytest.raises(RefusedError, match="no SSD tier"):
        ask(fleet, "no-ssd", {USER: MIB})


def test_a_node_that_comes_back_smaller_loses_shares_that_it_cannot_give() -> None:
    fleet = make_fleet()
    other = ShareKey(Place(1, 0), DDR, 0)
    ask(fleet, "r1", {USER: 4 * MIB, other: 4 * MIB})
    return_as(fleet, make_node(0, ddr=2 * MIB))
    assert planned(fleet) == {other: 4 * MIB}


def test_a_share_that_became_impossible_while_it_waited_fails_its_operation() -> None:
    fleet = make_fleet()
    request = control_pb2.StartReshardRequest(operation_id="r1")
    request.target.base_epoch = fleet.core.epoch
    request.target.tier_shares.extend(messages_of({USER: 4 * MIB}))
    fleet.core.start(request, fleet.now_ms)
    assert fleet.core.plan is not None
    record = fleet.core.operations.find("r1")
    record.tier_shares[0].bytes = 9 * MIB
    fleet.run(10)
    assert state(fleet, "r1") == "FAILED"
    assert "exceed the DDR budget" in record.operation.message
    assert planned(fleet) == {}


def test_recshard_makes_shares_of_the_curves_that_nodes_report() -> None:
    fleet = make_fleet()
    for name in ("node-0", "node-1"):
        load = node_pb2.NodeServiceGetLoadResponse()
        load.CopyFrom(fleet.core.loads.by_node[name])
        load.row_rooms.add(device=0, bytes=6 * MIB)
        # Half of the user's rows answer nearly all of its reads; items are read but once.
        size = [0, 2 * MIB, 4 * MIB]
        load.miss_curves.add(table_id=0, bytes=size, missed=[1, 0.05, 0])
        load.miss_curves.add(table_id=1, bytes=[0, 4 * MIB, 8 * MIB], missed=[1, 0.95, 0.9])
        fleet.core.load(name, load, fleet.now_ms)
    answer = ask(fleet, "r1", {}, planner="recshard")
    assert "keys/s predicted from the SSDs" in answer.explanation
    assert state(fleet, "r1") == "SUCCEEDED"
    shares = planned(fleet)
    for node in (0, 1):
        user, item = (shares[ShareKey(Place(node, 0), DDR, table)] for table in (0, 1))
        assert user >= 2 * MIB
        assert user + item <= 6 * MIB
