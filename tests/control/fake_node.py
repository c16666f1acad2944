"""A node without a store: registers, beats, reads plans from `state`, and says what it read.

It holds what the plan gives it a moment after it has read it. Run alone it is a process:
`python fake_node.py NAME CONTROL STATE_URL DEVICES`.
"""

import sys
import threading
import time
from concurrent import futures
from typing import Self

import grpc
from simulation import SimulatedNode, make_node, make_registration, make_tables, make_versions

from embertide.server.adapters.state import RedisState
from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.layout import layout_of
from embertide.v1 import (
    control_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    plan_pb2,
)

TABLES = make_tables(user=4, item=2)
_DEADLINE_S = 2.0


class FakeNode(node_pb2_grpc.NodeServiceServicer):
    """One node in threads. A context manager.

    Attributes:
        reads: Reads of a bucket of the first table; all others have 10.
        slow: Its slowest requests.
        beating: Cleared: it says nothing any more, as if it were dead.
        loading: Cleared: it loads nothing that is new in a plan.
    """

    def __init__(
        self,
        name: str,
        control: str,
        state_url: str,
        *,
        devices: int = 2,
        token: str = "",
        model: str = "news",
        budget: int = 1 << 30,
        group: int = 0,
    ) -> None:
        self.reads: dict[int, int] = {}
        self.slow: list[node_pb2.SlowRequest] = []
        self.slow_lookups: list[node_pb2.SlowLookup] = []
        self.beating = threading.Event()
        self.beating.set()
        self.loading = threading.Event()
        self.loading.set()
        self.refusals: list[str] = []
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        port = self._server.add_insecure_port("127.0.0.1:0")
        node_pb2_grpc.add_NodeServiceServicer_to_server(self, self._server)
        self._server.start()
        self._model = model
        self._starts = 0
        self._node = make_node(
            name, group=group, devices=devices, budget=budget, address=f"127.0.0.1:{port}"
        )
        self._state = RedisState(state_url, model)
        self._held = SimulatedNode(self._node, "")
        self._control = control
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def point_at(self, control: str) -> None:
        """Beat to another control plane from now on."""
        self._control = control

    def GetStatus(
        self, request: node_pb2.NodeServiceGetStatusRequest, context: grpc.ServicerContext
    ) -> node_pb2.NodeServiceGetStatusResponse:
        return node_pb2.NodeServiceGetStatusResponse(
            node=self._node,
            versions=make_versions(self._held.version),
            plan_epoch=self._held.plan.epoch,
        )

    def GetLoad(
        self, request: node_pb2.NodeServiceGetLoadRequest, context: grpc.ServicerContext
    ) -> node_pb2.NodeServiceGetLoadResponse:
        answer = node_pb2.NodeServiceGetLoadResponse(window_ms=1000)
        plan = self._held.plan
        names = [node.name for node in plan.topology.nodes]
        for at, held in layout_of(plan.assignments).items():
            for owner in held.owners:
                if names[owner.node] == self._node.name:
                    reads = self.reads.get(at.bucket, 10) if at.table == 0 else 10
                    answer.buckets.add(
                        table_id=at.table,
                        bucket=at.bucket,
                        device=owner.device,
                        reads=reads,
                        resident_bytes=1000,
                        held=True,
                    )
        answer.hot_keys.add(table_id=0, key=7, reads=40, error=1)
        answer.slow.extend(self.slow)
        answer.slow_lookups.extend(self.slow_lookups)
        return answer

    def Lookup(
        self, request: node_pb2.LookupRequest, context: grpc.ServicerContext
    ) -> node_pb2.LookupResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "it has no rows")

    def Read(
        self, request: node_pb2.ReadRequest, context: grpc.ServicerContext
    ) -> node_pb2.ReadResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "it has no rows")

    def Explain(
        self, request: node_pb2.ExplainRequest, context: grpc.ServicerContext
    ) -> node_pb2.ExplainResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "it has no rows")

    def _live(self) -> None:
        address, channel = "", None
        while not self._stopping.is_set():
            interval_s = 0.05
            try:
                if channel is None or address != self._control:
                    if channel is not None:
                        channel.close()
                    address, channel = self._control, grpc.insecure_channel(self._control)
                stub = control_pb2_grpc.ControlServiceStub(channel)
                if not self._held.incarnation:
                    self._register(stub)
                if self.beating.is_set():
                    self._held.stuck = not self.loading.is_set()
                    plan = self._state.load().plan
                    self._held.act(plan.whole() if plan is not None else None)
                    stub.Heartbeat(self._held.beat(), timeout=_DEADLINE_S, metadata=self._metadata)
            except grpc.RpcError as error:
                self.refusals.append(error.code().name)
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    self._held.incarnation = ""
            except RefusedError as error:
                self.refusals.append(error.code.value)
            self._stopping.wait(interval_s)
        if channel is not None:
            channel.close()

    def _register(self, stub: control_pb2_grpc.ControlServiceStub) -> None:
        self._starts += 1
        id = f"{self._node.name}-start-{self._starts}-{time.monotonic_ns()}"
        stub.RegisterNode(
            make_registration(self._node, TABLES, id=id, model=self._model),
            timeout=_DEADLINE_S,
            metadata=self._metadata,
        )
        self._held.incarnation = id
        self._held.sequence = 0

    def held(self) -> plan_pb2.Plan:
        """Return the plan that it acts by."""
        return self._held.plan

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._server.stop(None).wait()
        self._state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


if __name__ == "__main__":
    with FakeNode(sys.argv[1], sys.argv[2], sys.argv[3], devices=int(sys.argv[4])):
        while True:
            time.sleep(1)
