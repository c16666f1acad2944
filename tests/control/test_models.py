"""Several models under one control plane: fleets of their own, which callers tell apart by name."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import redis
from commands import embertide
from control_bench import Client
from fake_node import TABLES, FakeNode
from simulation import make_node, make_registration
from typer.testing import Result
from waiting import wait_until

from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.state import RedisState
from embertide.server.core.control import ControlOptions
from embertide.server.core.drift.options import DriftOptions
from embertide.server.services.control_server import ControlServer, ServerOptions
from embertide.server.services.fleets import Fleets
from embertide.server.services.identity import MODEL_KEY
from embertide.v1 import control_pb2, control_pb2_grpc

STATUS = control_pb2.ControlServiceGetStatusRequest()
COMMAND = (sys.executable, "-m", "embertide.server.cli")


class ModelClient(Client):
    """A client that names a model."""

    def __init__(self, address: str, model: str | None) -> None:
        super().__init__(address)
        self.metadata = ((MODEL_KEY, model),) if model else ()


class Site:
    """A control plane of `news` and `shop`, two nodes of each, of the same names."""

    def __init__(self, url: str, stack: contextlib.ExitStack) -> None:
        self.url, self.stack = url, stack
        self.server = self.start()
        self.nodes = {
            (model, name): stack.enter_context(
                FakeNode(name, self.server.address, url, model=model)
            )
            for model in ("news", "shop")
            for name in ("node-0", "node-1")
        }
        for model in ("news", "shop"):
            wait_until(lambda model=model: self.acted(model))  # type: ignore[misc]

    def start(self) -> ControlServer:
        stores = {name: RedisState(self.url, name) for name in ("news", "shop")}
        for store in stores.values():
            self.stack.callback(store.close)
        control = ControlOptions(
            model="news", expect_nodes=2, longest_deadline_ms=100, drift=DriftOptions(mode="off")
        )
        options = ServerOptions(control=control, listen="127.0.0.1:0")
        server = ControlServer(options, stores.pop("news"), stores)
        return self.stack.enter_context(server)

    def client(self, model: str | None) -> ModelClient:
        client = ModelClient(self.server.address, model)
        self.stack.callback(client.channel.close)
        return client

    def acted(self, model: str) -> bool:
        status = self.client(model).call("GetStatus", STATUS)
        return len(status.nodes) == 2 and all(
            node.plan_epoch == status.plan_epoch > 0 for node in status.nodes
        )


@pytest.fixture
def site(redis_url: str) -> Iterator[Site]:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    with contextlib.ExitStack() as stack:
        yield Site(redis_url, stack)


def test_what_moves_in_one_model_leaves_the_other_alone(site: Site) -> None:
    news, shop = site.client("news"), site.client("shop")
    site.nodes["shop", "node-0"].reads = {0: 100, 1: 100, 2: 100, 3: 90}
    answer = shop.reshard("r1", planner="greedy")
    assert answer.moves
    assert not news.call("ListOperations", control_pb2.ListOperationsRequest()).operations
    seen = [
        each.operation
        for each in shop.call(
            "WatchOperation", control_pb2.WatchOperationRequest(id="r1"), timeout_s=30.0
        )
    ]
    assert seen[-1].state == control_pb2.OPERATION_STATE_SUCCEEDED
    assert shop.call("GetPlan", control_pb2.GetPlanRequest()).plan.epoch > 4
    assert news.call("GetPlan", control_pb2.GetPlanRequest()).plan.epoch == 1
    # The same id means another operation there.
    assert news.refused("GetOperation", control_pb2.GetOperationRequest(id="r1"))[0] == "NOT_FOUND"
    # One dies in one model; its namesake lives.
    site.nodes["shop", "node-1"].beating.clear()
    dead = control_pb2.NODE_STATE_DEAD
    wait_until(lambda: shop.call("GetStatus", STATUS).nodes[1].state == dead)
    assert news.call("GetStatus", STATUS).nodes[1].state == control_pb2.NODE_STATE_READY


def test_who_names_no_model_or_a_wrong_one_is_told_which_there_are(site: Site) -> None:
    nobody, wrong = site.client(None), site.client("other")
    assert nobody.refused("GetStatus", STATUS) == (
        "INVALID_ARGUMENT",
        "no model is named, and this control plane has ['news', 'shop']; give --model",
    )
    start = control_pb2.StartReshardRequest(operation_id="r1", planner="greedy")
    assert nobody.refused("StartReshard", start)[0] == "INVALID_ARGUMENT"
    watch = control_pb2.WatchOperationRequest(id="r1")
    assert nobody.refused("WatchOperation", watch)[0] == "INVALID_ARGUMENT"
    assert wrong.refused("GetStatus", STATUS) == (
        "NOT_FOUND",
        "no such model: 'other'; this control plane has ['news', 'shop'], give --model",
    )
    node = make_registration(make_node("x", address="127.0.0.1:1"), TABLES, model="other")
    code, words = nobody.refused("RegisterNode", node)
    assert code == "FAILED_PRECONDITION"
    assert "'x' serves model 'other'; this control plane has ['news', 'shop']" in words
    beat = control_pb2.HeartbeatRequest(node="node-9", incarnation="x", sequence=1)
    assert nobody.refused("Heartbeat", beat)[0] == "NOT_FOUND"
    beat.node = "node-0"
    assert nobody.refused("Heartbeat", beat)[0] == "FAILED_PRECONDITION"


def test_streams_of_beats_find_their_model(site: Site) -> None:
    nobody = site.client(None)
    for model in ("news", "shop"):
        node = make_node("further", address="127.0.0.1:1")
        request = make_registration(node, TABLES, id=f"{model}-further", model=model)
        nobody.call("RegisterNode", request)
        beat = control_pb2.HeartbeatRequest(
            node="further", incarnation=request.request_id, sequence=1
        )
        stream = nobody.stub.StreamBeats(
            iter([control_pb2.StreamBeatsRequest(beat=beat)]), timeout=5
        )
        assert next(iter(stream)).response.plan_epoch > 0
        status = site.client(model).call("GetStatus", STATUS)
        assert [each.node.name for each in status.nodes] == ["further", "node-0", "node-1"]
    beat.incarnation = "nobody's"
    with pytest.raises(grpc.RpcError) as refused:
        list(nobody.stub.StreamBeats(iter([control_pb2.StreamBeatsRequest(beat=beat)]), timeout=5))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_both_models_go_on_with_another_control_plane(site: Site) -> None:
    older = site.server
    site.server = site.start()
    for node in site.nodes.values():
        node.point_at(site.server.address)
    wait_until(lambda: all(driver.superseded.is_set() for driver in older.drivers))
    for model in ("news", "shop"):
        wait_until(lambda model=model: site.acted(model))  # type: ignore[misc]


def test_every_rpc_is_routed() -> None:
    for method in control_pb2.DESCRIPTOR.services_by_name["ControlService"].methods:
        assert method.name in vars(Fleets)


def test_commands_name_the_model(redis_url: str, tmp_path: Path) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    command = [*COMMAND, "control", "--listen", address, "--state", redis_url]
    command += ["--model", "news", "--model", "shop", "--directory", str(tmp_path)]

    def run(*words: str) -> Result:
        return embertide(*words, "--control", address)

    with contextlib.ExitStack() as stack:
        child = stack.enter_context(Child(command, log=tmp_path / "control.log"))
        wait_until(lambda: "control plane of model 'news', 'shop'" in child.log_text(), 30)
        stack.enter_context(FakeNode("node-s", address, redis_url, model="shop"))
        channel = stack.enter_context(grpc.insecure_channel(address))
        stub = control_pb2_grpc.ControlServiceStub(channel)

        def planned() -> bool:
            metadata = ((MODEL_KEY, "shop"),)
            return stub.GetStatus(STATUS, timeout=5, metadata=metadata).plan_epoch > 0

        wait_until(planned)
        done = run("node", "list", "--model", "shop")
        assert done.exit_code == 0, done.output
        assert "node-s" in done.stdout
        done = run("status", "--model", "shop")
        assert done.exit_code == 0, done.output
        assert "node-s" in done.stdout
        done = run("node", "list")
        assert done.exit_code == 1
        assert "['news', 'shop']; give --model" in done.stderr
