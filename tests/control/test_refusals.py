"""Bad input, all of it in one table: each is refused by a status of its own, and changes nothing.

Every request goes to a real control plane over gRPC, with a real Redis. Its answer must have the
code of the error tables in control.proto, and words that name the value and what to do instead.
The store must hold the same bytes afterwards: plans, nodes, operations, decisions and settings.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from control_bench import Bench, Client
from fake_node import TABLES
from odd_planners import Dying, Failing, Slow
from simulation import make_node, make_registration
from waiting import wait_until

from embertide.server.core.plan import planners
from embertide.v1 import control_pb2, plan_pb2

STATUS = control_pb2.ControlServiceGetStatusRequest()
NAMES = ["node-0", "node-1", "small", "other"]  # by position; `other` is alone in group 1
LIMIT_S = 1.0


@dataclasses.dataclass
class World:
    """The state that requests are made from."""

    client: Client
    url: str

    @property
    def plan(self) -> plan_pb2.Plan:
        plan: plan_pb2.Plan = self.client.call("GetPlan", control_pb2.GetPlanRequest()).plan
        return plan

    def node(self, name: str) -> control_pb2.RegisterNodeRequest:
        with redis.Redis.from_url(self.url) as store:
            written: Any = store.hget("c:{news}:nodes", name)
        return control_pb2.RegisterNodeRequest.FromString(written)

    def content(self) -> dict[bytes, object]:
        """All that the store holds, as bytes, but the timeline: refused nodes are told there."""
        found: dict[bytes, object] = {}
        with redis.Redis.from_url(self.url) as store:
            for key in store.scan_iter(count=1000):
                kind = store.type(key)
                if key != b"c:{news}:events":
                    found[key] = store.hgetall(key) if kind == b"hash" else store.get(key)
        return found


@dataclasses.dataclass(frozen=True)
class Case:
    """A wrong request, its status, and words that its message must have."""

    name: str
    rpc: str
    request: Callable[[World], Any]
    code: str
    says: tuple[str, ...]


def registration(**changed: Any) -> Callable[[World], Any]:
    """A node that could register, but for some fields."""

    def make(world: World) -> Any:
        fields = dict(changed)
        node = make_node(fields.pop("name", "new"), address="127.0.0.1:1")
        request = make_registration(node, fields.pop("tables", TABLES), id=fields.pop("id", "new"))
        for field, value in fields.items():
            if field == "devices":
                del request.node.devices[:]
            elif field == "table_bytes":
                request.table_bytes.extend(value)
            elif hasattr(node, field):
                setattr(request.node, field, value)
            else:
                setattr(request, field, value)
        return request

    return make


def known(name: str, **changed: Any) -> Callable[[World], Any]:
    """A registered node's own registration, but for some fields."""

    def make(world: World) -> Any:
        request = world.node(name)
        for field, value in changed.items():
            if field == "devices":
                del request.node.devices[value:]
            else:
                target = request if hasattr(request, field) else request.node
                setattr(target, field, value)
        return request

    return make


def reshard(id: str = "bad", **goal: Any) -> Callable[[World], Any]:
    return lambda world: control_pb2.StartReshardRequest(operation_id=id, **goal)


def target(*runs: tuple[int, int, int, list[int]], base: int | None = None) -> Callable[..., Any]:
    """Runs as (table, first bucket, buckets, positions of nodes)."""

    def make(world: World) -> Any:
        wanted = control_pb2.ReshardTarget(base_epoch=world.plan.epoch if base is None else base)
        for table, begin, count, nodes in runs:
            wanted.assignments.add(
                table_id=table,
                bucket_begin=begin,
                bucket_count=count,
                owners=[plan_pb2.Owner(node=at % 1000, device=at // 1000) for at in nodes],
            )
        return control_pb2.StartReshardRequest(operation_id="bad", target=wanted)

    return make


def hot_rows(*tables: int) -> Callable[[World], Any]:
    def make(world: World) -> Any:
        wanted = control_pb2.ReshardTarget(base_epoch=world.plan.epoch)
        for table in tables:
            wanted.hot_rows.add(table_id=table, rows=5)
        return control_pb2.StartReshardRequest(operation_id="bad", target=wanted)

    return make


def joining(world: World) -> Any:
    request = target((0, 0, 1, [0, 3]))(world)
    request.target.assignments[0].joining.add(node=1)
    return request


def beat(**fields: Any) -> Callable[[World], Any]:
    base = {"node": "node-0", "incarnation": "old", "sequence": 1}
    return lambda world: control_pb2.HeartbeatRequest(**{**base, **fields})


def removal(node: str, id: str = "bad") -> Callable[[World], Any]:
    return lambda world: control_pb2.RemoveNodeRequest(request_id=id, node=node)


def steer(id: str, steering: "control_pb2.Steering.ValueType") -> Callable[[World], Any]:
    return lambda world: control_pb2.SteerOperationRequest(id=id, steering=steering)


def drift(**settings: Any) -> Callable[[World], Any]:
    return lambda world: control_pb2.SetDriftSettingsRequest(
        settings=control_pb2.DriftSettings(**settings)
    )


def given(request: Any) -> Callable[[World], Any]:
    return lambda world: request


INVALID, PRECONDITION = "INVALID_ARGUMENT", "FAILED_PRECONDITION"
NOT_FOUND, IN_USE, FULL = "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"
PAUSE, ABORT = control_pb2.STEERING_PAUSE, control_pb2.STEERING_ABORT

WITHOUT_A_PLAN = [
    Case("no plan", "GetPlan", given(control_pb2.GetPlanRequest()), NOT_FOUND, ("0 of 4", "wait")),
    Case("no plan yet", "StartReshard", reshard(planner="greedy"), PRECONDITION, ("0 of 4",)),
    Case("no plan for a group", "StartReshard", reshard(add_group=0), PRECONDITION, ("0 of 4",)),
]

SERVING = [
    # RegisterNode
    Case("address", "RegisterNode", registration(address="nowhere"), INVALID, ("nowhere", "HOST:")),
    Case("name", "RegisterNode", registration(name=""), INVALID, ("'' is no name", "use 1 to 64")),
    *(
        Case("odd name", "RegisterNode", registration(name=name), INVALID, ("no name", "use 1 to"))
        for name in ("[/b]", "\x1b[2J", "a b", "a/b", "x" * 65)
    ),
    Case("odd model", "RegisterNode", registration(model="\x1b]0;"), INVALID, ("no name", "use")),
    Case("id", "RegisterNode", registration(id="a b"), INVALID, ("'a b'", "use 1 to 64")),
    Case("devices", "RegisterNode", registration(devices=0), INVALID, ("0 devices", "use 1 to 16")),
    Case("no tables", "RegisterNode", registration(tables=[]), INVALID, ("empty", "name the")),
    Case("bytes", "RegisterNode", registration(table_bytes=[1]), INVALID, ("1 entries", "each")),
    Case("model", "RegisterNode", registration(model="shop"), PRECONDITION, ("'shop'", "'news'")),
    Case("tables", "RegisterNode", registration(tables=TABLES[:1]), PRECONDITION, ("user", "item")),
    Case("schema", "RegisterNode", registration(schema_id=9), PRECONDITION, ("0x9", "0x7")),
    Case(
        "two of one name",
        "RegisterNode",
        registration(name="node-0"),
        PRECONDITION,
        ("'node-0' is alive at 127.0.0.1:", "two nodes have one name"),
    ),
    Case(
        "fewer devices",
        "RegisterNode",
        known("node-0", request_id="again", devices=1),
        INVALID,
        ("'node-0'", "gives buckets to its device 1", "drain it first"),
    ),
    Case(
        "another group",
        "RegisterNode",
        known("node-0", request_id="again", group=1),
        INVALID,
        ("of group 0", "not of 1", "drain it first"),
    ),
    Case(
        "id of another",
        "RegisterNode",
        lambda world: registration(id=world.node("node-0").request_id)(world),
        IN_USE,
        ("other content", "make a new id"),
    ),
    # Heartbeat
    Case("unknown node", "Heartbeat", beat(node="node-9"), NOT_FOUND, ("'node-9'", "register it")),
    Case("replaced", "Heartbeat", beat(), PRECONDITION, ("'old'", "'node-0'", "replaced by")),
    Case("sequence", "Heartbeat", beat(sequence=0), INVALID, ("sequence is 0", "is 1")),
    # GetPlan, GetFleetLoad
    Case(
        "future plan",
        "GetPlan",
        given(control_pb2.GetPlanRequest(epoch=99)),
        "OUT_OF_RANGE",
        ("plan 99", "ask for 1 to"),
    ),
    Case(
        "hot keys",
        "GetFleetLoad",
        given(control_pb2.GetFleetLoadRequest(hot_keys=1001)),
        INVALID,
        ("1001", "at most 1000"),
    ),
    # RemoveNode
    Case("unknown", "RemoveNode", removal("node-9"), NOT_FOUND, ("'node-9'", "look at status")),
    Case("it owns", "RemoveNode", removal("node-0"), PRECONDITION, ("'node-0'", "drain it first")),
    Case("no id", "RemoveNode", removal("node-0", id=""), INVALID, ("''", "use 1 to 64")),
    Case(
        "id in use",
        "RemoveNode",
        lambda world: removal("small", id=world.node("node-0").request_id)(world),
        IN_USE,
        ("other content", "make a new id"),
    ),
    # StartReshard: targets
    Case("no goal", "StartReshard", reshard(), INVALID, ("goal is not said", "give target")),
    Case("bad id", "StartReshard", reshard("a/b", planner="greedy"), INVALID, ("'a/b'", "use 1")),
    Case(
        "empty target",
        "StartReshard",
        target(),
        INVALID,
        ("target is empty", "name the buckets"),
    ),
    Case(
        "overlap",
        "StartReshard",
        target((0, 0, 4, [0, 3]), (0, 3, 1, [1, 3])),
        INVALID,
        ("overlap", "bucket 3 of table 'user'", "name it once"),
    ),
    Case(
        "bucket out of range",
        "StartReshard",
        target((0, 15, 2, [0, 3])),
        INVALID,
        ("buckets 15 to 16", "use 0 to 15"),
    ),
    Case(
        "no bucket", "StartReshard", target((0, 0, 0, [0, 3])), INVALID, ("among its 16", "use 0")
    ),
    Case(
        "unknown table",
        "StartReshard",
        target((9, 0, 1, [0, 3])),
        INVALID,
        ("table 9 does not exist", "the plan has [0, 1]"),
    ),
    Case(
        "unknown node",
        "StartReshard",
        target((0, 0, 1, [7, 3])),
        NOT_FOUND,
        ("no such node: position 7", "read the plan"),
    ),
    Case(
        "unknown device",
        "StartReshard",
        target((0, 0, 1, [5000, 3])),
        INVALID,
        ("'node-0' has no device 5", "it has 2"),
    ),
    Case(
        "an owner twice",
        "StartReshard",
        target((0, 0, 1, [0, 1000, 3])),
        INVALID,
        ("bucket 0 of table 'user'", "stands twice", "name it once"),
    ),
    Case(
        "a group missing",
        "StartReshard",
        target((0, 0, 1, [0])),
        INVALID,
        ("group 1 has no owner", "name one of each group"),
    ),
    Case(
        "all groups missing",
        "StartReshard",
        target((0, 0, 1, [])),
        INVALID,
        ("group 0 has no owner", "name one of each group"),
    ),
    Case("joining", "StartReshard", joining, INVALID, ("owners alone", "leave joining")),
    Case(
        "stale epoch",
        "StartReshard",
        target((0, 0, 1, [0, 3]), base=1),
        PRECONDITION,
        ("base_epoch is 1", "the plan is", "try again"),
    ),
    Case(
        "no epoch",
        "StartReshard",
        target((0, 0, 1, [0, 3]), base=0),
        INVALID,
        ("base_epoch is 0", "give the epoch"),
    ),
    Case(
        "no room",
        "StartReshard",
        target((0, 0, 16, [2, 3])),
        FULL,
        ("small/0 has no room", "in a budget of 9,000", "raise it"),
    ),
    Case("hot table", "StartReshard", hot_rows(9), INVALID, ("table 9", "does not exist")),
    Case("hot twice", "StartReshard", hot_rows(0, 0), INVALID, ("table 0", "twice")),
    # StartReshard: planners, nodes, operations, groups, budgets
    Case(
        "unknown planner",
        "StartReshard",
        reshard(planner="best"),
        NOT_FOUND,
        ("'best'", "use one of", "greedy"),
    ),
    Case("long name", "StartReshard", reshard(planner="x" * 65), INVALID, ("65 bytes", "1 to 64")),
    Case(
        "planner fails",
        "StartReshard",
        reshard(planner="failing"),
        "INTERNAL",
        ("'failing' failed", "nothing has changed", "use another"),
    ),
    Case(
        "planner dies",
        "StartReshard",
        reshard(planner="dying"),
        "INTERNAL",
        ("'dying' failed", "nothing has changed", "use another"),
    ),
    Case(
        "planner too slow",
        "StartReshard",
        reshard(planner="slow"),
        "DEADLINE_EXCEEDED",
        ("'slow' found no answer within 1 s", "use another planner"),
    ),
    Case(
        "half-life",
        "StartReshard",
        reshard(planner="greedy", half_life_s=7),
        INVALID,
        ("half_life_s is 7", "use one of 60"),
    ),
    Case("unknown", "StartReshard", reshard(drain_node="node-9"), NOT_FOUND, ("'node-9'", "has")),
    Case(
        "drain all",
        "StartReshard",
        reshard(drain_node="other"),
        PRECONDITION,
        ("only one", "start"),
    ),
    Case("undo", "StartReshard", reshard(undo_operation="r0"), NOT_FOUND, ("'r0'", "list")),
    Case("no such group", "StartReshard", reshard(remove_group=7), NOT_FOUND, ("7", "has [0, 1]")),
    Case("nobody", "StartReshard", reshard(add_group=7), NOT_FOUND, ("group 7", "start its nodes")),
    Case("whole", "StartReshard", reshard(add_group=1), PRECONDITION, ("group 1 owns every",)),
    Case(
        "budget",
        "StartReshard",
        reshard(planner="greedy", budget=control_pb2.ReshardBudget(buckets_at_once=5000)),
        INVALID,
        ("buckets_at_once is 5000", "at most 4096"),
    ),
    Case(
        "reason",
        "StartReshard",
        reshard(planner="greedy", reason="x" * 257),
        INVALID,
        ("257 bytes", "at most 256"),
    ),
    Case(
        "id of another",
        "StartReshard",
        reshard("r1", planner="greedy"),
        IN_USE,
        ("'r1'", "other content", "make a new id"),
    ),
    # Operations
    Case(
        "unknown",
        "GetOperation",
        given(control_pb2.GetOperationRequest(id="r0")),
        NOT_FOUND,
        ("'r0'", "list operations"),
    ),
    Case(
        "unknown",
        "WatchOperation",
        given(control_pb2.WatchOperationRequest(id="r0")),
        NOT_FOUND,
        ("'r0'", "list operations"),
    ),
    Case("unknown", "SteerOperation", steer("r0", PAUSE), NOT_FOUND, ("'r0'", "list operations")),
    Case("over", "SteerOperation", steer("r1", ABORT), PRECONDITION, ("'r1' is over", "SUCCEEDED")),
    Case(
        "how",
        "SteerOperation",
        steer("r1", control_pb2.STEERING_UNSPECIFIED),
        INVALID,
        ("not said", "use PAUSE"),
    ),
    Case(
        "page",
        "ListOperations",
        given(control_pb2.ListOperationsRequest(page_token="mine")),
        INVALID,
        ("'mine'", "start again"),
    ),
    Case(
        "long page",
        "ListOperations",
        given(control_pb2.ListOperationsRequest(page_size=501)),
        INVALID,
        ("501", "at most 500"),
    ),
    # Drift
    Case("mode", "SetDriftSettings", drift(), INVALID, ("mode is not said", "use OFF")),
    Case(
        "reason",
        "SetDriftSettings",
        drift(mode=control_pb2.DRIFT_MODE_OFF, reason="x" * 257),
        INVALID,
        ("257 bytes", "at most 256"),
    ),
    Case(
        "frozen",
        "SetDriftSettings",
        drift(mode=control_pb2.DRIFT_MODE_OFF, frozen_until_ms=-1),
        INVALID,
        ("is -1", "use 0"),
    ),
    Case(
        "page",
        "ListDecisions",
        given(control_pb2.ListDecisionsRequest(page_token="mine")),
        INVALID,
        ("'mine'", "start again"),
    ),
    # A message that is too long
    Case(
        "size",
        "GetOperation",
        given(control_pb2.GetOperationRequest(id="x" * (5 << 20))),
        INVALID,
        ("bytes", "at most 4194304"),
    ),
]

AT_WORK = [
    Case("undo", "StartReshard", reshard(undo_operation="r2"), PRECONDITION, ("'r2'", "or wait")),
    Case(
        "it may own", "RemoveNode", removal("node-1"), PRECONDITION, ("'node-1'", "drain it first")
    ),
]

A_NODE_IS_DEAD = [
    Case("target", "StartReshard", target((0, 4, 1, [1, 3])), PRECONDITION, ("'node-1'", "wait")),
    Case("load", "StartReshard", reshard(planner="greedy"), PRECONDITION, ("'node-1'", "drain it")),
]


def refuse(world: World, cases: list[Case]) -> tuple[list[str], int]:
    """Send each; return what was wrong with answers, and how many changed anything."""
    faults: list[str] = []
    changes = 0
    before = world.content()
    for case in cases:
        name = f"{case.rpc}, {case.name}"
        try:
            code, words = world.client.refused(case.rpc, case.request(world), 10.0)
        except pytest.fail.Exception:
            faults.append(f"{name}: it was not refused")
            continue
        if code != case.code:
            faults.append(f"{name}: {code}, not {case.code}: {words}")
        faults += [f"{name}: {words!r} lacks {each!r}" for each in case.says if each not in words]
        if world.content() != before:
            changes += 1
            faults.append(f"{name}: it changed the store")
            before = world.content()
    time.sleep(0.2)  # four ticks: nor does anything come of them later
    if world.content() != before:
        changes += 1
        faults.append(f"after {len(cases)} refusals the store changes")
    return faults, changes


def test_bad_input_is_refused_by_its_own_status_and_changes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {"failing": Failing, "dying": Dying, "slow": lambda: Slow(60.0, Path("/dev/null"))}
    monkeypatch.setattr(planners, "PLANNERS", {**planners.PLANNERS, **odd})
    control = bench.control(expect=4, heartbeat_ms=200, planner_limit_s=LIMIT_S)
    world = World(bench.client(control.address), bench.url)
    faults, changes = refuse(world, WITHOUT_A_PLAN)

    nodes = {
        "node-0": bench.node("node-0", control.address),
        "node-1": bench.node("node-1", control.address),
        "other": bench.node("other", control.address, group=1),
        "small": bench.node("small", control.address, budget=9000),
    }

    def acted() -> bool:
        status = world.client.call("GetStatus", STATUS)
        return status.plan_epoch > 0 and all(
            node.plan_epoch == status.plan_epoch for node in status.nodes
        )

    wait_until(acted)
    assert [node.name for node in world.plan.topology.nodes] == NAMES
    first = target((0, 0, 1, [1, 3]))(world)
    first.operation_id = "r1"
    world.client.call("StartReshard", first)
    wait_until(lambda: world.client.operation("r1").ended_ms > 0 and acted())
    more, further = refuse(world, SERVING)
    faults, changes = faults + more, changes + further

    nodes["node-1"].loading.clear()
    second = target((0, 1, 1, [1, 3]))(world)
    second.operation_id = "r2"
    world.client.call("StartReshard", second)
    wait_until(lambda: world.client.operation("r2").base_epoch > 0 and acted())
    more, further = refuse(world, AT_WORK)
    faults, changes = faults + more, changes + further

    nodes["node-1"].beating.clear()
    wait_until(lambda: world.client.operation("r2").ended_ms > 0)
    more, further = refuse(world, A_NODE_IS_DEAD)
    faults, changes = faults + more, changes + further
    tried = sum(map(len, (WITHOUT_A_PLAN, SERVING, AT_WORK, A_NODE_IS_DEAD)))
    print(f"{tried} refusals, {changes} changed anything")
    assert not faults, "\n".join(faults)
