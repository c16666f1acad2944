"""The fleet on which versions and reshards are measured.

Two tritonservers of two devices that share a model, a control plane, a Redis, a publisher of
several versions a second, and a client process a node.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc

from bench import models
from bench.load import Clients
from bench.nodes import start_control
from bench.servers import BUILD, await_peer
from bench.shapes import Shape
from bench.versions import Versions
from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.cli.control_client import Caller
from embertide.v1 import node_pb2, node_pb2_grpc

MODEL = "lookup"
_LONGEST_DEADLINE_MS = 500
_LOOK_S = 0.01  # between looks at what a node has committed


class Commits(threading.Thread):
    """Notes when a node's newest version rises."""

    def __init__(self, address: str) -> None:
        """Watch the node whose own service is at this address."""
        super().__init__(daemon=True)
        self._address, self._ended = address, threading.Event()
        self.seen: list[tuple[int, float]] = []  # version, wall clock

    def run(self) -> None:
        """Look until told to stop."""
        newest = 0
        with grpc.insecure_channel(self._address) as channel:
            stub = node_pb2_grpc.NodeServiceStub(channel)
            while not self._ended.wait(_LOOK_S):
                with contextlib.suppress(grpc.RpcError):
                    status = stub.GetStatus(node_pb2.NodeServiceGetStatusRequest(), timeout=1.0)
                    if status.versions.newest.number > newest:
                        newest = status.versions.newest.number
                        self.seen.append((newest, time.time()))

    def end(self) -> None:
        """Look no more."""
        self._ended.set()
        self.join()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The running processes."""

    control: str  # host:port of the control plane
    caller: Caller
    clients: Clients
    versions: Versions
    nodes: Sequence[triton.TritonServer]
    peers: Sequence[str]  # host:port of each node's own service


def _start_nodes(
    stack: contextlib.ExitStack, shape: Shape, publication: Path, url: str, control: str
) -> tuple[list[triton.TritonServer], list[str]]:
    folder, ports = publication.parent, iter(free_ports(8))
    starts, peers = [], []
    for n in range(2):
        peers.append(f"127.0.0.1:{next(ports)}")
        options = triton.ModelOptions(
            publication=publication,
            bus=url,
            instances=2,
            max_queue_delay_us=None,
            devices=2,
            ddr_budget_bytes=2 * shape.row_bytes + (1 << 30),
            node=f"node-{n}",
            state=url,
            control=control,
            peer_address=peers[n],
            max_degraded_share=0,
        )
        repository = folder / f"models-{n}"
        triton.write_model(repository, MODEL, options)
        starts.append(
            triton.ServerOptions(
                repository=repository,
                backends=BUILD / "cpp" / "backends",
                log=folder / f"node-{n}.log",
                grpc_port=next(ports),
                metrics_port=next(ports),
                explicit=True,
                models=(MODEL,),
            )
        )
    nodes = triton.start_together(stack, starts)
    for peer in peers:
        await_peer(peer)
    return nodes, peers


@contextlib.contextmanager
def start_fleet(
    folder: Path,
    shape: Shape,
    requests: Sequence[bytes],
    versions_per_s: float,
    metrics_port: int | None = None,
) -> Iterator[Fleet]:
    """Start a fleet that serves a shape and gets versions; its clients send nothing yet.

    With `metrics_port`, the control plane has its /metrics there.

    Raises:
        BenchError: A node finds no peer.
        ProcessError: A process does not start.
    """
    files = models.make(shape, BUILD)
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer(RedisOptions(log=folder / "redis.log")))
        versions = Versions(folder / "publication", redis.url, shape, files, versions_per_s)
        words: list[object] = ["--longest-deadline-ms", _LONGEST_DEADLINE_MS]
        words += [] if metrics_port is None else ["--metrics-port", metrics_port]
        control = start_control(stack, folder, redis.url, shape.name, 2, *words)
        publication = versions.publication.path
        nodes, peers = _start_nodes(stack, shape, publication, redis.url, control)
        clients = stack.enter_context(Clients([node.grpc for node in nodes], requests))
        caller = Caller(control, None)
        stack.callback(caller.close)
        stack.enter_context(versions)
        yield Fleet(
            control=control,
            caller=caller,
            clients=clients,
            versions=versions,
            nodes=nodes,
            peers=peers,
        )
