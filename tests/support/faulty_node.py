"""Every task in the background, in turn: an exception, no memory, no thread (claim A.5).

A fleet of two nodes with everything on (SSD tier, seals, hot rows, a control plane, a bus) takes
a version a second. One of them is `embertide_faulty_node`, in whose tasks a file sets off faults:
each round throws an exception, `std::bad_alloc` or something that is no exception, or the task's
thread is refused from the start on. Of each task and fault is asked whether the process lives,
whether its status and its log name the task, whether it still answers, and within how long it is
healed once the fault is gone: the task runs, and a version that came since is held.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
from fault_outcomes import FAULTS, HEALS_S, SAYS_S, STARTS_S, Outcome, Tried
from full_disk import within

from bench import models
from bench.nodes import start_control
from bench.servers import BUILD, BenchError
from bench.shapes import Shape
from bench.versions import Versions
from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.v1 import node_pb2, node_pb2_grpc

_SHAPE = Shape(name="edges-threads", rows=20_000, tables=2, buckets=4)
TASKS = (
    *("follower", "plan-keeper", "peers", "hot-rows", "upkeep", "ssd-writes", "ssd-reads", "seals"),
    *("mending", "readiness", "control-link", "control-replies", "signals"),
)
# A round of these begins when a stream is opened, or a batch is read from the drive, and neither
# happens in a fleet that is well: their exceptions are ControlLinkTest's and BackgroundTaskTest's.
_LONG_ROUNDS = ("control-link", "control-replies", "ssd-reads")


class _Node:
    """The faulty node, which may be started again."""

    def __init__(self, command: list[str], address: str, folder: Path) -> None:
        self._command, self._folder, self._starts = command, folder, 0
        self.faults = folder / "faults"
        self.faults.write_text("")
        self._channel = grpc.insecure_channel(
            address, options=[("grpc.max_reconnect_backoff_ms", 200)]
        )
        self.stub = node_pb2_grpc.NodeServiceStub(self._channel)
        self.child: Child | None = None

    def start(self) -> None:
        """Start it, or start it again; do not wait for it."""
        self.stop()
        self._starts += 1
        log = self._folder / f"faulty-{self._starts}.log"
        self.child = Child(
            self._command, log=log, environment={"EMBERTIDE_FAULTS": str(self.faults)}
        )

    def stop(self) -> None:
        """Stop it."""
        if self.child is not None:
            self.child.stop()

    def status(self) -> node_pb2.NodeServiceGetStatusResponse | None:
        """Return its status; None: it does not answer."""
        with contextlib.suppress(grpc.RpcError):
            answer: node_pb2.NodeServiceGetStatusResponse = self.stub.GetStatus(
                node_pb2.NodeServiceGetStatusRequest(), timeout=1.0
            )
            return answer
        return None

    def state(self, task: str) -> str:
        """Return how a task is; empty: not known."""
        status = self.status()
        states = {each.name: each.state for each in status.tasks} if status else {}
        return states.get(task, "")

    def answers(self) -> bool:
        """Return whether it answers a question for all keys of a table's front."""
        request = node_pb2.ReadRequest(
            keys=np.repeat(np.arange(64, dtype=np.uint64), 2).tolist(), lengths=[1] * 128
        )
        with contextlib.suppress(grpc.RpcError):
            self.stub.Read(request, timeout=5.0)
            return True
        return False

    def version(self) -> int:
        """Return the newest version that it answers at; 0: none."""
        status = self.status()
        return status.newest_pinned.number if status else 0

    def logs(self, text: str) -> bool:
        """Return whether a text is in its log."""
        return self.child is not None and text in self.child.log_text()


def _try(node: _Node, versions: Versions, task: str, fault: str) -> Outcome:
    at_start = fault == "start"
    node.faults.write_text(f"{task} {fault}\n")
    if at_start:
        node.start()
        if within(STARTS_S, lambda: node.status() is not None) is None:
            node.faults.write_text("")
            raise BenchError(f"a node without the thread of {task} does not start")
    assert node.child is not None
    says = "no thread" if at_start else "failing"

    def said() -> bool:
        node.answers()  # what a question sets off has its rounds too
        return node.state(task) == says

    in_status = within(SAYS_S, said) is not None
    in_log = within(SAYS_S, lambda: node.logs(f"task {task} fails")) is not None
    # Without its plan, its rows or its beats a node has nothing to answer with until it is healed.
    answers = None if at_start else node.answers()
    lives = node.child.alive()
    node.faults.write_text("")

    def healed() -> bool:
        return node.state(task) == "running" and node.version() > newest

    newest = versions.log[-1].number if versions.log else 1
    heals_s = within(HEALS_S, healed)
    if heals_s is not None and not node.answers():
        heals_s = None
    return Outcome(
        lives=lives and node.child.alive(),
        answers=answers,
        in_status=in_status,
        in_log=in_log,
        heals_s=heals_s,
    )


@contextlib.contextmanager
def _fleet(base: Path) -> Iterator[tuple[_Node, Versions]]:
    files = models.make(_SHAPE, BUILD)
    one, two = free_ports(2)
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer(RedisOptions(log=base / "redis.log")))
        versions = Versions(base / "publication", redis.url, _SHAPE, files, 1.0)
        control = start_control(stack, base, redis.url, _SHAPE.name, 2)

        def words_of(n: int, port: int) -> list[str]:
            folder = base / f"node-{n}"
            folder.mkdir(parents=True, exist_ok=True)
            return [
                *("--publication", str(versions.publication.path), "--bus", redis.url),
                *("--state", redis.url, "--control", control, "--node", f"node-{n}"),
                *("--peer-address", f"127.0.0.1:{port}", "--plan-file", str(folder / "plan.bin")),
                *("--ddr-bytes", str(8 << 20), "--ssd-bytes", str(64 << 20)),
                *("--ssd-directory", str(folder / "ssd"), "--ssd-engine", "pread"),
                *("--ssd-seal-interval-ms", "500", "--numa-nodes", "none"),
                *("--peer-timeout-ms", "2000", "--max-degraded-share", "1"),
            ]

        peer = [str(BUILD / "cpp" / "embertide_node"), *words_of(1, two)]
        stack.enter_context(Child(peer, log=base / "peer.log"))
        faulty = [str(BUILD / "cpp" / "embertide_faulty_node"), *words_of(0, one)]
        node = _Node(faulty, f"127.0.0.1:{one}", base)
        stack.callback(node.stop)
        node.start()
        if within(STARTS_S, lambda: node.version() > 0) is None:
            raise BenchError("the fleet does not start")
        stack.enter_context(versions)
        yield node, versions


def run(folder: Path) -> Iterator[Tried]:
    """Set off each fault in each task, and yield what became of the node.

    Raises:
        BenchError: A process does not start.
    """
    with _fleet(folder) as (node, versions):
        for fault in FAULTS:
            tasks = [each for each in TASKS if fault == "start" or each not in _LONG_ROUNDS]
            yield "a node", fault, {task: _try(node, versions, task, fault) for task in tasks}
