"""The service over real gRPC and a real Redis, with nodes that are twins."""

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from control_bench import Bench, Client
from fake_node import TABLES
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from simulation import make_node, make_registration
from waiting import wait_until

from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.adapters.state import RedisState
from embertide.server.core.control import Control, ControlOptions
from embertide.server.core.plan.layout import layout_of
from embertide.server.services import gate
from embertide.server.services.control_server import ControlServer, ServerOptions
from embertide.server.services.listening import ListenError
from embertide.server.services.tokens import Tokens, TokensError
from embertide.v1 import control_pb2, plan_pb2, update_pb2

SUCCEEDED = control_pb2.OPERATION_STATE_SUCCEEDED
STATUS = control_pb2.ControlServiceGetStatusRequest()

LOOK, ACT, SERVE = "may-look-at-all-of-it", "may-act-on-all-of-it", "may-serve-all-of-it"


def wait_for_plan(client: Client, epoch: int = 1) -> None:
    def acted() -> bool:
        status = client.call("GetStatus", STATUS)
        return status.plan_epoch >= epoch and all(
            node.plan_epoch == status.plan_epoch for node in status.nodes
        )

    wait_until(acted)


def target(client: Client, node: int, buckets: int = 4) -> control_pb2.ReshardTarget:
    wanted = control_pb2.ReshardTarget(base_epoch=client.call("GetStatus", STATUS).plan_epoch)
    wanted.assignments.add(
        table_id=0, bucket_begin=0, bucket_count=buckets, owners=[plan_pb2.Owner(node=node)]
    )
    return wanted


def test_greedy_from_registration_to_the_end(bench: Bench) -> None:
    control = bench.control()
    nodes = [bench.node(f"node-{index}", control.address) for index in range(2)]
    client = bench.client(control.address)
    wait_for_plan(client)
    nodes[0].reads = {0: 100, 1: 100, 2: 100, 3: 90}
    answer = client.reshard("r1", planner="greedy", reason="one device is hot")
    assert answer.operation.state == control_pb2.OPERATION_STATE_PENDING
    assert answer.moves
    assert "max/mean" in answer.explanation
    after = [each.reads_after for each in answer.devices]
    assert max(after) * len(after) / sum(after) <= 1.2
    seen = [each.operation for each in client.call("WatchOperation", _watch("r1"), timeout_s=30.0)]
    assert seen[-1].state == SUCCEEDED
    assert seen[-1].ended_ms
    assert seen[-1].buckets_done == len(answer.moves)
    assert len(seen) > 3
    plan = client.call("GetPlan", control_pb2.GetPlanRequest()).plan
    assert plan.operation_id == "r1"
    assert plan.planner == "greedy"
    assert not any(each.joining or each.leaving for each in plan.assignments)
    hot = client.call("GetFleetLoad", control_pb2.GetFleetLoadRequest(hot_keys=5)).hot_keys
    assert [(each.key, each.reads, each.error) for each in hot] == [(7, 80, 2)]


def _watch(id: str) -> control_pb2.WatchOperationRequest:
    return control_pb2.WatchOperationRequest(id=id)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_control_plane_that_starts_again_in_any_step_goes_on(bench: Bench, step: int) -> None:
    control = bench.control()
    nodes = [bench.node(f"node-{index}", control.address) for index in range(2)]
    client = bench.client(control.address)
    wait_for_plan(client)
    client.reshard("r1", target=target(client, 1))
    store = RedisState(bench.url, "news")
    wait_until(lambda: store.load().operations["r1"].step >= step)
    control.stop()
    again = bench.control()
    for node in nodes:
        node.point_at(again.address)
    client = bench.client(again.address)
    wait_until(lambda: client.operation("r1").ended_ms > 0)
    store.close()
    assert client.operation("r1").state == SUCCEEDED
    layout = layout_of(client.call("GetPlan", control_pb2.GetPlanRequest()).plan.assignments)
    assert all(layout[at].owners[0].node == 1 for at in list(layout)[:4])


def test_of_two_control_planes_the_older_gives_way(bench: Bench) -> None:
    older = bench.control()
    bench.node("node-0", older.address)
    client = bench.client(older.address)
    newer = bench.control()
    request = make_registration(make_node("node-5", address="127.0.0.1:1"), TABLES)
    assert client.refused("RegisterNode", request)[0] == "ABORTED"
    wait_until(older.driver.superseded.is_set)
    assert client.refused("GetStatus", STATUS)[0] == "ABORTED"
    beat = control_pb2.HeartbeatRequest(node="node-0", incarnation="x", sequence=1)
    assert client.refused("Heartbeat", beat)[0] == "ABORTED"
    assert bench.client(newer.address).call("GetStatus", STATUS)


def test_limits_that_hold_for_every_call(bench: Bench) -> None:
    control = bench.control(expect=2)
    client = bench.client(control.address)
    assert client.refused("GetStatus", STATUS, None)[0] == "INVALID_ARGUMENT"
    with control.driver.lock:
        assert client.refused("GetStatus", STATUS, 0.2)[0] == "DEADLINE_EXCEEDED"
    assert client.refused("WatchOperation", _watch("r0"), 90_000.0)[0] == "INVALID_ARGUMENT"


def test_status_says_what_is_committed_and_outlives_the_bus(bench: Bench, redis_url: str) -> None:
    def newest(bus: str | None) -> int | None:
        with bench.control(bus=bus) as server:
            client = bench.client(server.address)
            status = client.call("GetStatus", control_pb2.ControlServiceGetStatusRequest())
        known = status.HasField("newest_committed")
        return int(status.newest_committed.number) if known else None

    log = "e:{news:commit}:log"
    with redis.Redis.from_url(redis_url) as bus:
        assert newest(redis_url) is None
        other = update_pb2.GlobalCommit(version=update_pb2.Version(number=99, lineage=1))
        bus.xadd("e:{shop:commit}:log", {"m": other.SerializeToString()})
        assert newest(redis_url) is None
        for number in (7, 8):
            commit = update_pb2.GlobalCommit(version=update_pb2.Version(number=number, lineage=1))
            bus.xadd(log, {"m": commit.SerializeToString()})
        assert newest(redis_url) == 8
        assert newest(None) is None
        bus.xadd(log, {"m": b"\xff no message"})
        assert newest(redis_url) is None
    assert newest("redis://127.0.0.1:1/0") is None


def test_queues_have_bounds(bench: Bench) -> None:
    control = bench.control()
    bench.node("node-0", control.address)
    bench.node("node-1", control.address).loading.clear()
    client = bench.client(control.address)
    wait_until(lambda: client.call("GetStatus", STATUS).plan_epoch == 1)
    client.reshard("w0", target=target(client, 1, buckets=1))
    wait_until(lambda: client.operation("w0").base_epoch > 0)
    request = control_pb2.StartReshardRequest(target=target(client, 1, buckets=1))
    # Each would ask the nodes for their load; the bound is the core's.
    for index in range(1, 101):
        request.operation_id = f"w{index}"
        request.target.base_epoch = client.call("GetStatus", STATUS).plan_epoch
        control.driver.call(lambda core, now_ms: core.start(request, now_ms))
    request.operation_id = "w101"
    assert client.refused("StartReshard", request)[0] == "RESOURCE_EXHAUSTED"
    with contextlib.ExitStack() as watches:
        for _ in range(100):
            stream = client.call("WatchOperation", _watch("w100"), timeout_s=20.0)
            next(iter(stream))
            watches.callback(stream.cancel)
        assert client.refused("WatchOperation", _watch("w100"))[0] == "RESOURCE_EXHAUSTED"


def test_more_nodes_than_a_plan_may_have(bench: Bench) -> None:
    control = bench.control(expect=2000)
    client = bench.client(control.address)

    def fill(core: Control, now_ms: int) -> None:
        for index in range(1024):
            node = make_node(f"node-{index}")
            core.fleet.register(make_registration(node, TABLES), now_ms)

    control.driver.call(fill)
    request = make_registration(make_node("one-more"), TABLES)
    assert client.refused("RegisterNode", request)[0] == "RESOURCE_EXHAUSTED"


def test_ids_and_pages(bench: Bench) -> None:
    control = bench.control()
    bench.node("node-0", control.address)
    bench.node("node-1", control.address)
    client = bench.client(control.address)
    wait_for_plan(client)
    wanted = target(client, 1)
    first = client.reshard("r1", target=wanted)
    assert client.reshard("r1", target=wanted) == first
    request = control_pb2.StartReshardRequest(operation_id="r1", planner="greedy")
    assert client.refused("StartReshard", request)[0] == "ALREADY_EXISTS"
    wait_until(lambda: client.operation("r1").ended_ms > 0)
    assert client.reshard("r1", target=wanted) == first
    client.reshard("r2", undo_operation="r1")
    wait_until(lambda: client.operation("r2").ended_ms > 0)
    over = control_pb2.SteerOperationRequest(id="r2", steering=control_pb2.STEERING_ABORT)
    assert client.refused("SteerOperation", over)[0] == "FAILED_PRECONDITION"
    page = client.call("ListOperations", control_pb2.ListOperationsRequest(page_size=1))
    assert [each.id for each in page.operations] == ["r2"]
    following = control_pb2.ListOperationsRequest(page_size=1, page_token=page.next_page_token)
    page = client.call("ListOperations", following)
    assert [each.id for each in page.operations] == ["r1"]
    assert not page.next_page_token


@pytest.mark.parametrize("token", ["x", "fifteen-letters"])
def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path, token: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# who\noperator:{token}\n")
    with pytest.raises(
        TokensError, match=r"line 2: the token has \d+ letters, and 16 is the"
    ) as no:
        Tokens(path)
    assert f" {token} " not in str(no.value)
    path.write_text("operator:sixteen-letters-\n")
    Tokens(path)


def test_tokens_roles_and_the_audit_log(bench: Bench, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    tokens = tmp_path / "tokens"
    tokens.write_text(f"reader:{LOOK}\noperator/alice:{ACT}\nnode:{SERVE}\n")
    control = bench.control(expect=1, tokens=Tokens(tokens), audit=audit)
    bench.node("node-0", control.address, token=SERVE)
    nobody, reader, operator = (bench.client(control.address, token) for token in ("", LOOK, ACT))
    wait_for_plan(operator)
    assert nobody.refused("GetStatus", STATUS)[0] == "UNAUTHENTICATED"
    assert bench.client(control.address, "guess").refused("GetStatus", STATUS)[0] == (
        "UNAUTHENTICATED"
    )
    assert reader.call("GetStatus", STATUS).plan_epoch == 1
    start = control_pb2.StartReshardRequest(operation_id="r1", planner="greedy", reason="why not")
    assert reader.refused("StartReshard", start)[0] == "PERMISSION_DENIED"
    operator.call("StartReshard", start)
    assert audit.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert lines[0]["rpc"] == "RegisterNode"
    assert nobody.refused("StartReshard", start)[0] == "UNAUTHENTICATED"
    assert len(audit.read_text().splitlines()) == len(lines)  # nobody fills the disk
    assert lines[0]["node"] == "node-0"
    denied, done = lines[-2:]
    assert (denied["outcome"], denied["role"]) == ("PERMISSION_DENIED", "reader")
    assert (done["outcome"], done["role"], done["reason"]) == ("OK", "operator", "why not")
    assert (done["name"], "name" in denied) == ("alice", False)
    assert done["ids"] == {"operation_id": "r1"}
    assert "may-" not in audit.read_text()
    assert control.gate.refused["StartReshard PERMISSION_DENIED"] == 1
    node = bench.client(control.address, SERVE)
    for rpc, request, needs in (
        ("StartReshard", start, "operator"),
        ("RemoveNode", control_pb2.RemoveNodeRequest(node="node-0"), "operator"),
        ("GetStatus", STATUS, "reader or operator"),
    ):
        code, message = node.refused(rpc, request)
        assert code == "PERMISSION_DENIED"
        assert message.endswith(f"{rpc} needs role {needs}")


def test_a_state_that_cannot_be_reached(bench: Bench, tmp_path: Path) -> None:
    options = RedisOptions(log=tmp_path / "log", append_only=tmp_path / "state")
    with RedisServer(options) as server:
        store = RedisState(server.url, "news")
        control = bench.stack.enter_context(
            ControlServer(
                ServerOptions(control=ControlOptions(model="news"), listen="127.0.0.1:0"), store
            )
        )
        client = bench.client(control.address)
        registration = make_registration(make_node("node-0", address="127.0.0.1:1"), TABLES)
        client.call("RegisterNode", registration)
    other = make_registration(make_node("node-1", address="127.0.0.1:2"), TABLES)
    assert client.refused("RegisterNode", other)[0] == "UNAVAILABLE"
    beat = control_pb2.HeartbeatRequest(
        node="node-0", incarnation=registration.request_id, sequence=1
    )
    client.call("Heartbeat", beat)
    with RedisServer(options):
        wait_until(lambda: control.driver.reachable or _answers(client))
        assert client.call("RegisterNode", other).incarnation == other.request_id
        names = [each.node.name for each in client.call("GetStatus", STATUS).nodes]
        assert names == ["node-0", "node-1"]
    store.close()


def _answers(client: Client) -> bool:
    try:
        client.call("GetStatus", STATUS)
    except grpc.RpcError:
        return False
    return True


def test_health_reflection_and_a_taken_port(bench: Bench) -> None:
    control = bench.control()
    client = bench.client(control.address)
    health = health_pb2_grpc.HealthStub(client.channel)
    request = health_pb2.HealthCheckRequest(service="embertide.v1.ControlService")
    assert health.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(reflection.ServerReflectionInfo(iter([asked]), timeout=5)))
    names = [each.name for each in answer.list_services_response.service]
    assert "embertide.v1.ControlService" in names
    store = RedisState(bench.url, "news")
    with pytest.raises(ListenError, match=control.address):
        ControlServer(
            ServerOptions(control=ControlOptions(model="news"), listen=control.address), store
        )
    store.close()


@pytest.mark.parametrize("rpc", ["GetStatus", "WatchOperation", "StreamBeats"])
def test_a_caller_that_has_gone_is_counted_and_no_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rpc: str
) -> None:
    control = bench.control()
    channel: Any = bench.client(control.address).channel
    call_id, begun = gate._call_id, threading.Event()

    def when_gone(context: grpc.ServicerContext) -> str:
        begun.set()
        wait_until(lambda: not context.is_active())
        return call_id(context)

    monkeypatch.setattr(gate, "_call_id", when_gone)
    path = f"/embertide.v1.ControlService/{rpc}"
    if rpc == "GetStatus":
        call = channel.unary_unary(path).future(b"")
    elif rpc == "WatchOperation":
        call = channel.unary_stream(path)(b"")
    else:
        call = channel.stream_stream(path)(iter([b""]))
    assert begun.wait(10)
    call.cancel()
    wait_until(lambda: control.gate.refused[f"{rpc} CANCELLED"] == 1)
    control.stop()
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []


def test_events_are_listed_by_whoever_leads(bench: Bench, tmp_path: Path) -> None:
    """A drain with its author, a refused node, a version and a rollback: kept for the next one."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"reader/ben:{LOOK}\noperator/anna:{ACT}\nnode:{SERVE}\n")
    options: dict[str, Any] = {"tokens": Tokens(tokens), "bus": bench.url}
    first = bench.control(**options)
    nodes = [bench.node(f"node-{index}", first.address, token=SERVE) for index in range(2)]
    client = bench.client(first.address, ACT)
    wait_for_plan(client)
    client.reshard("d1", drain_node="node-1", reason="a new kernel")
    wait_until(lambda: client.operation("d1").state == SUCCEEDED)
    stranger = make_registration(make_node("node-9", address="127.0.0.1:1"), TABLES, model="shop")
    assert bench.client(first.address, SERVE).refused("RegisterNode", stranger)[0] != "OK"
    commit = update_pb2.GlobalCommit(
        version=update_pb2.Version(number=7, lineage=1),
        committed_ms=1_790_000_000_000,
        schema_id=5,
    )
    record = {"promoted": 7, "undone": [], "withdrawn": []}
    withdrawn = {"first": 6, "last": 6, "reason": "auc", "by": "guard@a:1", "at_ms": 5}
    record["withdrawn"] = [withdrawn | {"detail": "0.71 to 0.69"}]
    with redis.Redis.from_url(bench.url) as bus:
        bus.set("e:{news:commit}:promoted", b"EMPRM001 1 00000000\n" + json.dumps(record).encode())
        bus.xadd("e:{news:commit}:log", {"m": commit.SerializeToString()}, id="7-1")
    reader = bench.client(first.address, LOOK)

    def listed(client: Client, **asked: Any) -> list[control_pb2.FleetEvent]:
        request = control_pb2.ListEventsRequest(page_size=500, **asked)
        return list(client.call("ListEvents", request).events)

    wait_until(
        lambda: {"version_published", "version_withdrawn", "node_refused"}.issubset(
            each.name for each in listed(reader)
        )
    )
    before = [each.SerializeToString() for each in listed(reader)]
    first.stop()
    second = bench.control(**options)
    for node in nodes:
        node.point_at(second.address)
    reader = bench.client(second.address, LOOK)
    wait_until(lambda: listed(reader)[0].name == "leader_began")
    now = listed(reader)
    assert [each.SerializeToString() for each in now if each.number <= len(before)] == before
    accepted, ended = reversed(
        listed(reader, text="D1", kind=control_pb2.EVENT_KIND_OPERATION)[-2:]
    )
    assert (accepted.name, accepted.author, accepted.why) == (
        *("operation_accepted", "operator/anna", "a new kernel"),
    )
    assert ended.name in ("operation_running", "operation_succeeded")
    (refused,) = listed(reader, kind=control_pb2.EVENT_KIND_REFUSED)
    assert "serves model 'shop'" in refused.why
    versions = reader.call("ListVersions", control_pb2.ListVersionsRequest())
    assert [each.version.number for each in versions.versions] == [7]
    assert versions.promoted == 7
    assert (versions.bus.versions, versions.bus.used_bytes > 0) == (1, True)
    (withdrawn_event,) = listed(reader, text="withdrawn")
    assert (withdrawn_event.why, withdrawn_event.at_ms) == ("0.71 to 0.69", 5)
    assert reader.refused("ListEvents", control_pb2.ListEventsRequest(page_token="x")) == (
        "INVALID_ARGUMENT",
        "page_token 'x' is not from this service; start again with an empty one",
    )
    serving = bench.client(second.address, SERVE)
    assert serving.refused("ListEvents", control_pb2.ListEventsRequest())[0] == "PERMISSION_DENIED"
