"""How fast buckets move between nodes, and what requests feel of it.

Two nodes without Triton share a model of 512 buckets. Each operation moves half of what a node owns
to the other one and back the other half, so that both load the same. Each node is asked at a steady
rate, at which a part of the machine stays idle; latency counts from when a request was due.
"""

import contextlib
import dataclasses
import functools
import multiprocessing
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench import models, report
from bench.drift.local import FOLDER
from bench.nodes import NodeProcess, publication_of, start_control
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError, await_peer
from bench.shapes import SEED, Shape
from embertide.server.adapters.process import free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.cli.control_client import Caller
from embertide.server.core.plan.layout import Bucket, Holders, Place, assignments_of, layout_of
from embertide.v1 import control_pb2, node_pb2, node_pb2_grpc, plan_pb2

_SHAPE = Shape(name="moves", rows=700_000, tables=8, buckets=64)
_SAMPLES = 16
_REQUESTS = 256  # that are sent over again
_PER_S = 60  # to each node
_BEFORE_S = 4.0
_SETTLE_S = 1.0
_START_S = 60.0
_OPERATION_S = 300.0
_MIN_MB_PER_S, _MAX_P99 = 50.0, 1.5


# --- requests -------------------------------------------------------------------------------------


def _ask(pipe: Connection, address: str, seed: int) -> None:
    """Send at a steady rate until told to stop; answer with (due, latency, failed) of each."""
    random = np.random.default_rng(seed)
    keys = _SAMPLES * _SHAPE.tables
    requests = []
    for _ in range(_REQUESTS):
        request = node_pb2.ReadRequest(lengths=[1] * keys)
        request.keys.extend(random.integers(0, _SHAPE.rows, keys, np.uint64).tolist())
        requests.append(request)
    seen: list[tuple[float, float, bool]] = []
    with grpc.insecure_channel(address) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        stub.Read(requests[0], timeout=10)
        pipe.send("ready")
        due, at, waiting = time.time(), 0, threading.Semaphore(0)

        def note(due: float, answer: Any) -> None:
            seen.append((due, time.time() - due, answer.exception() is not None))
            waiting.release()

        while not pipe.poll():
            due += 1 / _PER_S
            time.sleep(max(0.0, due - time.time()))
            sent = stub.Read.future(requests[at % _REQUESTS], timeout=10)
            sent.add_done_callback(functools.partial(note, due))
            at += 1
        for _ in range(at):
            waiting.acquire()
    pipe.send(seen)


class Clients:
    """One process a node that asks it at a steady rate. A context manager."""

    def __init__(self, addresses: list[str]) -> None:
        """Begin to ask."""
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for n, address in enumerate(addresses):
            ours, theirs = context.Pipe()
            process = context.Process(target=_ask, args=(theirs, address, SEED + n), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def stop(self) -> list[tuple[float, float, bool]]:
        """Ask no more, and return what was seen, of all nodes."""
        for pipe in self._pipes:
            pipe.send("stop")
        seen = [each for pipe in self._pipes for each in pipe.recv()]
        for process in self._processes:
            process.join()
        return seen


# --- the fleet ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The running processes."""

    caller: Caller
    addresses: list[str]


@contextlib.contextmanager
def _start(folder: Path) -> Iterator[Site]:
    """Start two nodes and a control plane, and wait until they answer."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    publication = publication_of(models.make(_SHAPE, BUILD).snapshot, folder / "publication")
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer(RedisOptions(log=folder / "redis.log")))
        control = start_control(stack, folder, redis.url, _SHAPE.name, 2, "--mode", "off")
        addresses = [f"127.0.0.1:{each}" for each in free_ports(2)]
        words = ["--control", control, "--ddr-bytes", 4 << 30]
        words += ["--hot-rows-bytes", 0, "--peer-timeout-ms", 5000]
        for n, address in enumerate(addresses):
            name, log = f"node-{n}", folder / f"node-{n}.log"
            stack.enter_context(NodeProcess(name, address, publication, redis.url, log, *words))
        for address in addresses:
            await_peer(address)
        caller = Caller(control, None)
        stack.callback(caller.close)
        yield Site(caller=caller, addresses=addresses)


def _target(plan: plan_pb2.Plan, turn: int) -> control_pb2.ReshardTarget:
    """Return the target in which the nodes exchange half of what they own."""
    moved = {}
    for at, held in layout_of(plan.assignments).items():
        if at.bucket % 2 == turn % 2:
            moved[Bucket(*at)] = Holders((Place(1 - held.owners[0].node, 0),))
    return control_pb2.ReshardTarget(base_epoch=plan.epoch, assignments=assignments_of(moved))


# --- operations -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """One operation and the quiet time before it."""

    seconds: float
    bytes: int
    p99_us: float
    p99_us_before: float
    requests: int
    failed: int

    @property
    def mb_per_s(self) -> float:
        """How fast buckets moved, both nodes together, from begin to end."""
        return self.bytes / 1e6 / self.seconds

    def line(self) -> str:
        """Describe it for people."""
        return (
            f"{self.bytes / 1e6:.0f} MB in {self.seconds:.1f} s: {self.mb_per_s:.1f} MB/s; p99 "
            f"{self.p99_us_before:,.0f} -> {self.p99_us:,.0f} us; {self.failed} of "
            f"{self.requests:,} requests failed"
        )


def _move(site: Site, id: str, turn: int) -> Moved:
    clients = Clients(site.addresses)
    time.sleep(_SETTLE_S)
    quiet = time.time()
    time.sleep(_BEFORE_S)
    request = control_pb2.StartReshardRequest(
        operation_id=id, target=_target(site.caller.plan(), turn)
    )
    operation = site.caller.call("StartReshard", request).operation
    begin = time.time()
    *_, operation = [operation, *site.caller.watch(id, _OPERATION_S)]
    end = time.time()
    seen = clients.stop()
    if operation.state != control_pb2.OPERATION_STATE_SUCCEEDED:
        raise BenchError(f"{id} did not succeed: {operation.message}")
    before = [latency for due, latency, _ in seen if quiet <= due < begin]
    during = [latency for due, latency, _ in seen if begin <= due < end]
    return Moved(
        seconds=end - begin,
        bytes=operation.bytes_done,
        p99_us=float(np.quantile(during, 0.99)) * 1e6,
        p99_us_before=float(np.quantile(before, 0.99)) * 1e6,
        requests=len(seen),
        failed=sum(failed for _, _, failed in seen),
    )


def _run(repetitions: int) -> list[Moved]:
    moved = []
    with _start(FOLDER / "moves") as site:
        _await_sizes(site)
        for turn in range(repetitions):
            moved.append(_move(site, f"move-{turn}", turn))
            CONSOLE.print(f"[dim]{moved[-1].line()}")
    return moved


def _await_sizes(site: Site) -> None:
    """Wait until the control plane knows what buckets take: nodes say it every few seconds."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        request = control_pb2.StartReshardRequest(
            operation_id="sizes", dry_run=True, target=_target(site.caller.plan(), 0)
        )
        with contextlib.suppress(Exception):
            answer = site.caller.call("StartReshard", request)
            if answer.moves and all(move.bytes for move in answer.moves):
                return
        time.sleep(0.5)
    raise BenchError("the control plane does not learn what buckets take")


def measure(repetitions: int) -> list[report.Row]:
    """Return how fast buckets move, and what requests feel of it."""
    now = _run(repetitions)
    failed = sum(each.failed for each in now)
    megabytes = statistics.median(each.bytes for each in now) / 1e6
    case = f"2 nodes, {megabytes:.0f} MB in 256 of 512 buckets, {_PER_S} requests/s each"
    return [
        report.measure(
            (case, "moved", "MB/s"),
            [each.mb_per_s for each in now],
            better="higher",
            target=_MIN_MB_PER_S,
            claim="19.6",
        ),
        report.compare(
            (case, "p99 latency while buckets move", "us"),
            [each.p99_us for each in now],
            [each.p99_us_before for each in now],
            peer_name="before",
            better="lower",
            target=_MAX_P99,
            claim="19.6",
        ),
        report.measure(
            (case, "failed requests", "requests"),
            [float(failed)] * repetitions,
            better="lower",
            target=0,
            claim="19.6",
        ),
    ]
