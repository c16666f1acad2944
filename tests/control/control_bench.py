"""Control planes over a real Redis, nodes for them, and a client whose calls are short."""

import contextlib
from typing import Any

import grpc
import pytest
from fake_node import FakeNode

from embertide.server.adapters.state import RedisState
from embertide.server.core.control import ControlOptions
from embertide.server.core.drift.options import DriftOptions
from embertide.server.services.control_server import ControlServer, ServerOptions
from embertide.v1 import control_pb2, control_pb2_grpc


class Client:
    """Calls a control plane; `refused` returns the code and words of a call that must fail."""

    def __init__(self, address: str, token: str = "") -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub = control_pb2_grpc.ControlServiceStub(self.channel)
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def call(self, rpc: str, request: Any, timeout_s: float | None = 20.0) -> Any:
        return getattr(self.stub, rpc)(request, timeout=timeout_s, metadata=self.metadata)

    def refused(self, rpc: str, request: Any, timeout_s: float | None = 20.0) -> tuple[str, str]:
        def run() -> None:
            answer = self.call(rpc, request, timeout_s)
            if rpc == "WatchOperation":
                list(answer)

        with pytest.raises(grpc.RpcError) as caught:
            run()
        return caught.value.code().name, caught.value.details() or ""

    def reshard(self, id: str, **goal: Any) -> control_pb2.StartReshardResponse:
        request = control_pb2.StartReshardRequest(operation_id=id, **goal)
        answer: control_pb2.StartReshardResponse = self.call("StartReshard", request)
        return answer

    def operation(self, id: str) -> control_pb2.Operation:
        request = control_pb2.GetOperationRequest(id=id)
        operation: control_pb2.Operation = self.call("GetOperation", request).operation
        return operation


class Bench:
    """Starts control planes, nodes and clients, and ends them all."""

    def __init__(self, url: str, stack: contextlib.ExitStack) -> None:
        self.url = url
        self.stack = stack

    def control(
        self, *, expect: int = 2, heartbeat_ms: int = 10_000, **options: Any
    ) -> ControlServer:
        """Start one; a node that misses five beats is dead, even if the machine was too busy."""
        store = RedisState(self.url, "news")
        self.stack.callback(store.close)
        control = ControlOptions(
            model="news",
            expect_nodes=expect,
            heartbeat_ms=heartbeat_ms,
            longest_deadline_ms=100,
            drift=DriftOptions(mode="off"),
        )
        server_options = ServerOptions(control=control, listen="127.0.0.1:0", **options)
        return self.stack.enter_context(ControlServer(server_options, store))

    def node(self, name: str, control: str, **options: Any) -> FakeNode:
        return self.stack.enter_context(FakeNode(name, control, self.url, **options))

    def client(self, address: str, token: str = "") -> Client:
        client = Client(address, token)
        self.stack.callback(client.channel.close)
        return client
