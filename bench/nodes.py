"""Nodes without Triton: a fleet on a plan that a benchmark writes, or with a control plane."""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import redis

from bench.servers import BUILD, BenchError
from embertide.server.adapters.process import Child, Stopped, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.v1 import node_pb2, node_pb2_grpc, plan_pb2

_START_S = 60.0
_LOOK_S = 0.01
_DEADLINE_S = 10.0


def publication_of(snapshot: Path, folder: Path) -> Path:
    """Return a publication whose one snapshot is this."""
    link = folder / "snapshots" / "000000000001-000001"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(snapshot.resolve())
    return folder


def make_plan(
    snapshot: Path, addresses: Sequence[str], hot_rows: Mapping[str, int] | None = None
) -> plan_pb2.Plan:
    """Return the plan that gives the nodes every bucket in turn, and tables so many hot rows."""
    manifest = json.loads((snapshot / "manifest.json").read_text())
    plan = plan_pb2.Plan(epoch=1)
    for n, address in enumerate(addresses):
        node = plan.topology.nodes.add(name=f"node-{n}", address=address)
        device = node.devices.add(kind=plan_pb2.DEVICE_KIND_CPU)
        device.budgets.add(tier=plan_pb2.TIER_DDR, budget_bytes=1 << 32)
    for table in sorted(manifest["tables"], key=lambda each: each["id"]):
        plan.tables.add(
            id=table["id"],
            name=table["name"],
            bucket_bits=table["bucket_bits"],
            chunks=table["chunks"],
        )
        for bucket in range(1 << table["bucket_bits"]):
            owner = plan_pb2.Owner(node=(bucket + table["id"]) % len(addresses))
            plan.assignments.add(
                table_id=table["id"], bucket_begin=bucket, bucket_count=1, owners=[owner]
            )
        if hot_rows is not None and table["name"] in hot_rows:
            plan.hot_rows.add(table_id=table["id"], rows=hot_rows[table["name"]])
    return plan


def publish_plan(url: str, model: str, plan: plan_pb2.Plan) -> None:
    """Make a plan the first one of a model, in the Redis of plans."""
    with redis.Redis.from_url(url) as client:
        client.set(f"c:{{{model}}}:plan:1", plan.SerializeToString())
        client.set(f"c:{{{model}}}:epoch", 1)


def start_control(
    stack: contextlib.ExitStack, folder: Path, url: str, model: str, nodes: int, *words: object
) -> str:
    """Start a control plane that ends with the stack; return its address, and do not wait.

    Args:
        stack: Ends it.
        folder: Folder of its log and its directory.
        url: URL of the Redis with its state.
        model: That it leads.
        nodes: That it waits for.
        words: Further options.
    """
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "embertide.server.cli", "control", "--state", url]
    command += ["--model", model, "--listen", address, "--expect-nodes", str(nodes)]
    command += ["--directory", str(folder / "control"), *map(str, words)]
    stack.enter_context(Child(command, log=folder / "control.log"))
    return address


class NodeProcess(Stopped):
    """An embertide_node. A context manager: leaving it stops the process.

    Attributes:
        name: In the plan.
        grpc: host:port, where peers and tools ask it.
        process: That runs, or ran last.
    """

    def __init__(
        self, name: str, address: str, publication: Path, state: str, log: Path, *words: object
    ) -> None:
        """Start it; does not wait.

        Args:
            name: In the plan.
            address: In the plan.
            publication: Where it takes the model from, and follows it.
            state: Redis URL of the plan.
            log: The log of the process.
            words: Further options.
        """
        self.name, self.grpc, self._log = name, address, log
        self._command = [str(BUILD / "cpp" / "embertide_node"), "--publication", str(publication)]
        self._command += ["--state", state, "--node", name, "--peer-address", address]
        self._command += map(str, words)
        self.process = Child(self._command, log=log)

    def alive(self) -> bool:
        """Return whether it runs."""
        return self.process.alive()

    def answers(self) -> bool:
        """Return whether it answers at a version."""
        with grpc.insecure_channel(self.grpc) as channel, contextlib.suppress(grpc.RpcError):
            return Node(name=self.name, channel=channel).status().newest_pinned.number > 0
        return False

    def restart(self) -> None:
        """Start it again, as it has ended; does not wait."""
        self.process = Child(self._command, log=self._log)

    def stop(self) -> int:
        """Stop it and return its exit code."""
        return self.process.stop()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node, and how to ask it."""

    name: str
    channel: grpc.Channel

    @property
    def stub(self) -> node_pb2_grpc.NodeServiceStub:
        """Its own service."""
        return node_pb2_grpc.NodeServiceStub(self.channel)

    def status(self) -> node_pb2.NodeServiceGetStatusResponse:
        """Return its status."""
        answer: node_pb2.NodeServiceGetStatusResponse = self.stub.GetStatus(
            node_pb2.NodeServiceGetStatusRequest(), timeout=_DEADLINE_S
        )
        return answer

    def load(self) -> node_pb2.NodeServiceGetLoadResponse:
        """Return what it read."""
        answer: node_pb2.NodeServiceGetLoadResponse = self.stub.GetLoad(
            node_pb2.NodeServiceGetLoadRequest(hot_keys=1000), timeout=_DEADLINE_S
        )
        return answer

    def traffic(self) -> dict[int, node_pb2.TableTraffic]:
        """Return what it asked of all peers since its start, by table."""
        total: dict[int, node_pb2.TableTraffic] = {}
        for peer in self.load().peers:
            for each in peer.tables:
                table = total.setdefault(
                    each.table_id, node_pb2.TableTraffic(table_id=each.table_id)
                )
                table.keys += each.keys
                table.since_keys += each.since_keys
                table.bytes += each.bytes
        return total

    def await_version(self, number: int) -> None:
        """Wait until it answers at a version.

        Raises:
            BenchError: It does not come to it.
        """
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            with contextlib.suppress(grpc.RpcError):
                if self.status().newest_pinned.number >= number:
                    return
            time.sleep(_LOOK_S)
        raise BenchError(f"{self.name} does not come to version {number} within {_START_S:.0f} s")


@contextlib.contextmanager
def start_nodes(
    folder: Path,
    publication: Path,
    count: int,
    *,
    hot_rows: Mapping[str, int] | None = None,
    make: Callable[[Path, Sequence[str]], plan_pb2.Plan] | None = None,
    words: Sequence[str] = (),
    bus: str | None = None,
) -> Iterator[list[Node]]:
    """Start nodes that share a publication's model, and wait until they answer.

    Args:
        folder: Folder of logs.
        publication: Where they take the model from, and follow it.
        count: The number of nodes; each gets every count-th bucket.
        hot_rows: Limits of tables, by name; None: the nodes' own.
        make: Makes the plan of a snapshot and the nodes' addresses; None: `make_plan`.
        words: Further options of each node.
        bus: Redis URL that versions come by; None: files alone.

    Raises:
        BenchError: A node does not start.
        ProcessError: A process does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = sorted((publication / "snapshots").iterdir())[-1]
    model = json.loads((snapshot / "manifest.json").read_text())["model"]
    ports = free_ports(count)
    addresses = [f"127.0.0.1:{each}" for each in ports]
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(RedisServer(RedisOptions(log=folder / "redis.log")))
        plan = make(snapshot, addresses) if make else make_plan(snapshot, addresses, hot_rows)
        publish_plan(state.url, model, plan)
        nodes = []
        more = ["--peer-timeout-ms", "5000", *words, *(["--bus", bus] if bus else [])]
        for n, address in enumerate(addresses):
            name = f"node-{n}"
            log = folder / f"{name}.log"
            stack.enter_context(NodeProcess(name, address, publication, state.url, log, *more))
            channel = stack.enter_context(grpc.insecure_channel(address))
            nodes.append(Node(name=name, channel=channel))
        for node in nodes:
            node.await_version(1)
        until = time.monotonic() + _START_S
        while any(each.status().counters["peers_alive"] < count - 1 for each in nodes):
            if time.monotonic() > until:
                raise BenchError("nodes do not find each other")
            time.sleep(_LOOK_S)
        yield nodes
