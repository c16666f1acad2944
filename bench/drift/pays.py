"""Whether following the drift pays: a day of demand that wanders between nodes, served twice.

Four nodes share a model of eight tables. Each node's clients read mostly two of them; every hour
two pairs of nodes exchange what their clients read, to a varying degree. A key of a table that a
node does not hold is asked of another node. One fleet follows by itself, the other keeps its first
plan. Both get the same requests, from clients that wait for an answer before they ask again, so
that throughput is what the fleet can do. In the part `paced`, clients ask at a fixed rate that any
plan can answer: what a key costs a node depends on how busy it is, and gains are of plans alone
there. An hour lasts 38 s, including the time that the control
plane needs to notice and to move; each hour is a repetition.

The control plane predicts what each operation will save, and measures it by the nodes' CPU time
for each key: gains.py compares the two. What it measures is mostly over before the hour is. Its
mode is advise, the default, until its prices have been fitted to this machine, and auto from then
on.

Shapes: N nodes, T tables, S samples of a request.
"""

import contextlib
import dataclasses
import multiprocessing
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from bench import models, plot, report
from bench.drift import gains, noise
from bench.drift.local import FOLDER
from bench.nodes import Node, NodeProcess, start_control
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError
from bench.shapes import SEED, Shape
from bench.versions import Versions
from embertide.server.adapters.process import free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.cli.control_client import Caller, CallError
from embertide.v1 import control_pb2, node_pb2

_NODES, _TABLES = 4, 8
_SHAPE = Shape(name="pays", rows=60_000, tables=_TABLES, buckets=32)
_SAMPLES, _KEYS_A_SAMPLE = 64, 16
_REQUESTS = 48  # of a node and hour, over again
_HOURS, _NOISE_HOURS = 24, 12
_HOUR_S, _LEFT_ALONE_HOUR_S = 38.0, 4.0
_VERSIONS_PER_S = 0.5
_EVENT_MS = 240_000  # from one version to the next: two seconds are four minutes
_SNAPSHOT_EVERY = 2  # hours
_NODE_SHARE = 1.0  # of the model's bytes, that a node has room for
_BYTES_A_ROW = 100
_START_S = 90.0
_FITTED_WINDOWS = 60  # of the four nodes together: a minute and a quarter
_AIM = 1.15
_HORIZON_S, _GAIN = 60, 0.05
_PACED_PER_S = 25.0  # requests of a node's client, in the part `paced`
_PACED_HOUR_S = 60.0  # long enough for an operation and its measurement by the same customs
_PACED_HORIZON_S = 600  # so few requests save little in a minute
_PACED_GAIN = 0.01  # predictions are compared: corrections are not to end operations
_METHOD = "/embertide.v1.NodeService/Read"


def customs(seed: int) -> Iterator[NDArray[np.float64]]:
    """Yield, hour by hour, the share of each node's reads that each table gets: [N,T]."""
    random = np.random.default_rng(seed)
    first_N = np.arange(_NODES) * 2
    while True:
        share_NT = np.zeros((_NODES, _TABLES))
        for n, first in enumerate(first_N):
            main = random.uniform(0.65, 0.95)
            share_NT[n] = (1 - main) / (_TABLES - 2)
            share_NT[n, [first, first + 1]] = main / 2
        yield share_NT
        a, b, c, d = random.permutation(_NODES)
        first_N[[a, b, c, d]] = first_N[[b, a, d, c]]


def encode(share_T: NDArray[np.float64], random: np.random.Generator) -> bytes:
    """Return a request whose samples have so many keys of each table, as gRPC sends it."""
    lengths_ST = random.multinomial(_KEYS_A_SAMPLE, share_T, size=_SAMPLES)
    request = node_pb2.ReadRequest(lengths=lengths_ST.ravel().tolist())
    request.keys.extend(random.integers(0, _SHAPE.rows, int(lengths_ST.sum())).tolist())
    return request.SerializeToString()


class _Threads:
    """A client thread a node, in the clients' process."""

    def __init__(self, addresses: Sequence[str], per_s: float) -> None:
        self._every_s = 1 / per_s if per_s else 0.0
        self._requests: list[list[bytes]] = []
        self._ended = threading.Event()
        self.latencies_s: list[list[float]] = [[] for _ in addresses]
        self.failed, self.failure = 0, ""
        self._threads = [
            threading.Thread(target=self._run, args=(n, address), daemon=True)
            for n, address in enumerate(addresses)
        ]

    def begin(self, requests: list[list[bytes]]) -> None:
        self._requests = requests
        for thread in self._threads:
            if not thread.is_alive() and thread.ident is None:
                thread.start()

    def _run(self, n: int, address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            read: Any = channel.unary_unary(_METHOD)  # bytes in, bytes out
            at, due_s = 0, time.monotonic()
            while not self._ended.is_set():
                due_s += self._every_s
                time.sleep(max(0.0, due_s - time.monotonic()) if self._every_s else 0.0)
                due_s = max(due_s, time.monotonic() - 1)  # never in bursts of more than a second
                request = self._requests[n][at % _REQUESTS]
                at += 1
                began = time.monotonic()
                try:
                    read(request, timeout=10)
                    self.latencies_s[n].append(time.monotonic() - began)
                except grpc.RpcError as error:
                    self.failed += 1
                    self.failure = f"node {n}: {error.code().name}: {error.details()}"

    def take(self) -> tuple[list[float], int, str]:
        """Return the latencies since the last call, the failures, and the last one's reason."""
        taken = []
        for n in range(len(self.latencies_s)):
            taken += self.latencies_s[n]
            self.latencies_s[n] = []
        failed, self.failed = self.failed, 0
        return taken, failed, self.failure


def _clients(pipe: Connection, addresses: Sequence[str], per_s: float) -> None:
    threads = _Threads(addresses, per_s)
    while (order := pipe.recv()) is not None:
        if order == "take":
            pipe.send(threads.take())
        else:
            threads.begin(order)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hour:
    """A fleet's answers in an hour."""

    requests_per_s: float
    p99_ms: float
    failed: int


def _control(stack: contextlib.ExitStack, folder: Path, url: str, mode: str, is_paced: bool) -> str:
    words: list[object] = ["--longest-deadline-ms", 500, "--clock", "event", "--mode", mode]
    # Faster than an operator would have it: an hour lasts 38 s here.
    words += ["--drift-interval-s", 3, "--drift-half-life-s", 600, "--drift-cooldown-s", 1]
    horizon_s, gain = (_PACED_HORIZON_S, _PACED_GAIN) if is_paced else (_HORIZON_S, _GAIN)
    words += ["--drift-horizon-s", horizon_s, "--drift-min-gain", gain]
    # Four nodes and their clients share two cores with it: a planner that searches less.
    words += ["--drift-operations-per-day", 1000, "--drift-planner", "oper"]
    return start_control(stack, folder, url, _SHAPE.name, _NODES, *words)


def _follow(caller: Caller) -> None:
    """Set mode auto once the prices have been fitted, which takes some windows."""
    until = time.monotonic() + _START_S
    request = control_pb2.ListDecisionsRequest(page_size=1)
    while caller.call("ListDecisions", request).model.windows < _FITTED_WINDOWS:
        if time.monotonic() > until:
            raise BenchError(f"prices are not fitted within {_START_S:.0f} s: see control.log")
        time.sleep(1)
    settings = control_pb2.DriftSettings(mode=control_pb2.DRIFT_MODE_AUTO)
    caller.call("SetDriftSettings", control_pb2.SetDriftSettingsRequest(settings=settings))


def _await_plan(caller: Caller) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        with contextlib.suppress(CallError):
            if caller.plan().epoch:
                return
        time.sleep(0.1)
    raise BenchError(f"no plan within {_START_S:.0f} s: see control.log")


@contextlib.contextmanager
def _start(folder: Path, mode: str, is_paced: bool) -> Iterator[tuple[Caller, list[str], Versions]]:
    """Start four nodes and a control plane, and wait until they answer."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = models.make(_SHAPE, BUILD)
    ddr = int(_SHAPE.rows * _TABLES * _BYTES_A_ROW * _NODE_SHARE)
    with contextlib.ExitStack() as stack:
        ports = free_ports(_NODES)
        redis = stack.enter_context(RedisServer(RedisOptions(log=folder / "redis.log")))
        versions = Versions(
            folder / "publication", redis.url, _SHAPE, files, _VERSIONS_PER_S, event_ms=_EVENT_MS
        )
        control = _control(stack, folder, redis.url, mode, is_paced)
        addresses = [f"127.0.0.1:{each}" for each in ports]
        words = ["--bus", redis.url, "--control", control]
        words += ["--ddr-bytes", str(ddr), "--hot-rows-bytes", str(1 << 20)]
        published = versions.publication.path
        for n, address in enumerate(addresses):
            name, log = f"node-{n}", folder / f"node-{n}.log"
            stack.enter_context(NodeProcess(name, address, published, redis.url, log, *words))
        caller = Caller(control, None)
        stack.callback(caller.close)
        _await_plan(caller)
        for n, address in enumerate(addresses):
            channel = stack.enter_context(grpc.insecure_channel(address))
            Node(name=f"node-{n}", channel=channel).await_version(1)
        stack.enter_context(versions)
        yield caller, addresses, versions


def _serve_day(
    mode: str,
    hour_s: float,
    *,
    per_s: float = 0.0,
    watcher: noise.Watcher | None = None,
    hours: int = _HOURS,
) -> tuple[list[Hour], list[control_pb2.Decision]]:
    """Serve a day in mode off or, once prices are fitted, auto.

    Args:
        mode: The mode.
        hour_s: How long an hour lasts.
        per_s: Requests a second of a node's client; 0: as many as are answered.
        hours: How many.
        watcher: Watches the fleet meanwhile, whose plan is not to change.

    Returns:
        Its hours, and the decisions that moved something.
    """
    served = []
    random = np.random.default_rng(SEED)
    context = multiprocessing.get_context("spawn")
    with _start(FOLDER / f"pays-{mode}", mode, per_s > 0) as (caller, addresses, versions):
        pipe, theirs = context.Pipe()
        clients: Any = context.Process(
            target=_clients, args=(theirs, addresses, per_s), daemon=True
        )
        clients.start()
        try:
            for number, share_NT in zip(range(hours), customs(SEED), strict=False):
                pipe.send(
                    [[encode(share_T, random) for _ in range(_REQUESTS)] for share_T in share_NT]
                )
                if number == 0 and mode != "off":
                    _follow(caller)
                if number and number % _SNAPSHOT_EVERY == 0:
                    versions.snapshot()  # who joins does not read all versions since the first
                pipe.send("take")
                pipe.recv()
                began = time.monotonic()
                if watcher is not None:
                    watcher.watch(caller, hour_s)
                else:
                    time.sleep(hour_s)
                pipe.send("take")
                latencies, failed, failure = pipe.recv()
                if not latencies:
                    raise BenchError(f"no request was answered in an hour: {failure}")
                seconds = time.monotonic() - began
                hour = Hour(
                    requests_per_s=len(latencies) / seconds,
                    p99_ms=float(np.percentile(latencies, 99)) * 1000,
                    failed=failed,
                )
                served.append(hour)
                CONSOLE.print(
                    f"[dim]{mode}, hour {number}: {hour.requests_per_s:,.0f} requests/s, p99 "
                    f"{hour.p99_ms:.1f} ms, {hour.failed} failed" + f" ({failure})" * bool(failed)
                )
            pipe.send(None)
        finally:
            clients.kill()
            clients.join()
        request = control_pb2.ListDecisionsRequest(page_size=500)
        decisions = list(caller.call("ListDecisions", request).decisions)[::-1]
    for each in decisions:
        CONSOLE.print(f"[dim]{each.id} ({each.looks} looks): {each.why}")
    acted = control_pb2.DECISION_OUTCOME_ACTED
    return served, [each for each in decisions if each.outcome == acted]


def measure_paced() -> list[report.Row]:
    """Return the rows of E.7 of a day at a fixed rate.

    Raises:
        BenchError: A fleet does not start, or too few operations were made.
    """
    hours, acted = _serve_day("advise", _PACED_HOUR_S, per_s=_PACED_PER_S)
    gains.write(gains.PACED, acted)
    case = f"4 nodes, {_PACED_PER_S:.0f} requests a second each"
    answered = report.measure(
        (case, "requests answered", "1/s"),
        [hour.requests_per_s for hour in hours],
        better="higher",
        target=0.95 * _NODES * _PACED_PER_S,
    )
    return [answered, *gains.rows("operations of a day at a fixed rate", acted)]


def measure_noise() -> list[report.Row]:
    """Return how far measured gains are off by chance, by a day at a fixed rate without operations.

    Raises:
        BenchError: A fleet does not start, or its plan changes.
    """
    watcher = noise.Watcher()
    _serve_day("off", _PACED_HOUR_S, per_s=_PACED_PER_S, watcher=watcher, hours=_NOISE_HOURS)
    return noise.rows(watcher.samples, gains.PACED)


def measure() -> list[report.Row]:
    """Return the rows of 19.4 and E.7.

    Raises:
        BenchError: A fleet does not start, or too few operations were made.
    """
    followed, acted = _serve_day("advise", _HOUR_S)
    gains.write(gains.RECORDED, acted)
    alone, _ = _serve_day("off", _LEFT_ALONE_HOUR_S)
    case = "4 nodes, customs of all exchanged every hour of a day"
    rows = [
        report.compare(
            (case, "requests answered", "1/s"),
            [hour.requests_per_s for hour in followed],
            [hour.requests_per_s for hour in alone],
            peer_name="plan left alone",
            better="higher",
            target=_AIM,
            claim="19.4",
        ),
        report.compare(
            (case, "p99", "ms"),
            [hour.p99_ms for hour in followed],
            [hour.p99_ms for hour in alone],
            peer_name="plan left alone",
            better="lower",
            target=0,
            claim="19.4",
        ),
        report.measure(
            (case, "failed requests, both fleets", "1"),
            [float(hour.failed) for hour in (*followed, *alone)],
            better="lower",
            target=0,
            claim="19.6",
        ),
    ]
    plot.curves(
        "A day of drift",
        ("hour", "requests a second"),
        {
            name: [(float(at), hour.requests_per_s, 0.0) for at, hour in enumerate(hours)]
            for name, hours in (("following the drift", followed), ("plan left alone", alone))
        },
        BUILD / "bench" / "drift_day.png",
        in_time=True,
    )
    return [*rows, *gains.rows("operations of the day", acted)]
