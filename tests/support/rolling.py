"""Nodes that end, stand still and come back under traffic, and callers that wait no longer.

Nodes as `embertide serve` runs them, each with the whole of a small lookup model, and clients with
all their addresses, by threads and by asyncio:

* `roll`: each node in turn is told to end, and started again once it has; with `leave_s` in
  Kubernetes' order, where a node goes on for a while;
* `stand_still`: one is stopped (SIGSTOP) for a while, and goes on;
* `come_back`: one is killed, is away, and comes back: how long until the client uses it again;
* `impatient`: calls that end early, by their time and by cancelled tasks: the node lives.
"""

import asyncio
import collections
import contextlib
import dataclasses
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from bench.models import bucket_records
from bench.servers import BenchError
from bench.shapes import SEED, Shape
from embertide.client import AsyncClient, Client, ClientError, DeadlineError
from embertide.server.adapters.process import Child, free_ports
from embertide.trainer.embedding.store import store_table
from embertide.trainer.publish.snapshot import SnapshotInfo, write_snapshot

Kind = Literal["threads", "asyncio"]
KINDS: tuple[Kind, ...] = ("threads", "asyncio")
MODEL = "lookup"
_SHAPE = Shape(name="restart", rows=5_000, tables=4)
_ROWS = 8  # of a call
AT_ONCE = 4  # calls under way
TIMEOUT_S = 2.0
_START_S = 120.0
_LOOK_S = 0.005


def write_model(folder: Path) -> Path:
    """Write the snapshot of the model, random rows, and return its folder."""
    config = _SHAPE.config()
    rng = np.random.default_rng(SEED)
    tables = [store_table(table, i, SEED) for i, table in enumerate(config.tables)]
    rows_Rd: NDArray[np.float32] = rng.random((_SHAPE.rows, _SHAPE.dim), np.float32)
    buckets = (each for table in tables for each in bucket_records(table, rows_Rd))
    info = SnapshotInfo.of(config, lineage=1, version=1, watermark_ms=1)
    write_snapshot(folder / "snapshot", info, tables, buckets)
    return folder / "snapshot"


class Node:
    """One `embertide serve`, at the same ports each time it is started. A context manager.

    Attributes:
        ends_s: How long each `restart` took from SIGTERM to the end of the process.
    """

    def __init__(self, name: str, snapshot: Path, folder: Path, leave_s: float = 0.0) -> None:
        """Choose ports; `start` starts it."""
        self.name, self._folder = name, folder / name
        grpc, metrics = free_ports(2)
        self.address = f"127.0.0.1:{grpc}"
        command = [sys.executable, "-m", "embertide.server.cli", "serve", str(snapshot)]
        command += ["--kind", "lookup", "--name", MODEL, "--node", name]
        command += ["--grpc-port", str(grpc), "--metrics-port", str(metrics)]
        command += ["--directory", str(self._folder)]
        self._command = [*command, "--leave-s", str(leave_s), "--ddr-mib", "64"]
        self._child: Child | None = None
        self.ends_s: list[float] = []

    @property
    def child(self) -> Child:
        """Its process."""
        if self._child is None:
            raise BenchError(f"{self.name} was not started")
        return self._child

    def start(self) -> None:
        """Start it; it is ready later."""
        self._child = Child(self._command, log=self._folder / "serve.log")

    def await_ready(self) -> None:
        """Wait until it says that it is ready.

        Raises:
            BenchError: It ended, or takes too long.
        """
        deadline = time.monotonic() + _START_S
        while "is ready" not in self.child.log_text():
            if not self.child.alive() or time.monotonic() > deadline:
                raise BenchError(f"{self.name} does not start:\n{self.child.log_text()}")
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """Return its process, and that of its tritonserver."""
        found = [self.child.pid]
        for path in Path(f"/proc/{self.child.pid}/task").glob("*/children"):
            found += [int(pid) for pid in path.read_text().split()]
        return found

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        for pid in self.pids():
            os.kill(pid, number)

    def restart(self) -> None:
        """Have it end as an operator does, and start it again; `ends_s` has how long it took."""
        began = time.monotonic()
        self.child.stop()
        self.ends_s.append(time.monotonic() - began)
        self.start()
        self.await_ready()

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End it, if need be as it stands still."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        self.child.stop()


@contextlib.contextmanager
def serving(
    snapshot: Path, folder: Path, *, nodes: int, leave_s: float = 0.0
) -> Iterator[list[Node]]:
    """Run so many nodes until the block ends."""
    with contextlib.ExitStack() as stack:
        made = [Node(f"node-{n}", snapshot, folder, leave_s) for n in range(nodes)]
        running = [stack.enter_context(node) for node in made]
        for node in running:
            node.await_ready()
        yield running


def call(rng: random.Random) -> dict[str, list[int]]:
    """Return the keys of a call."""
    return {
        feature.name: [rng.randrange(2 * _SHAPE.rows) for _ in range(_ROWS)]
        for feature in _SHAPE.config().features
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """A call; `node` is empty where it failed. Times are of the monotonic clock."""

    at_s: float
    took_s: float
    node: str
    failure: str = ""


class Traffic:
    """Calls all the time, a few at once, of clients with all endpoints. A context manager."""

    def __init__(
        self, kind: Kind, endpoints: Sequence[str], *, spread: bool = False, **settings: Any
    ) -> None:
        """Prepare; entering it begins to ask. `spread`: each endpoint is the first of a client."""
        turns = range(len(endpoints) if spread else 1)
        self._orders = [[*endpoints[n:], *endpoints[:n]] for n in turns]
        self._settings = {"timeout_s": TIMEOUT_S, **settings}
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._asked: list[Answered] = []
        run = self._by_threads if kind == "threads" else self._by_asyncio
        self._threads = [threading.Thread(target=each) for each in (run, self._notice)]
        self.longest_pause_s = 0.0  # of this process: nobody is answered in one
        self.counters: collections.Counter[str] = collections.Counter()

    def _note(self, began: float, node: str, failure: str = "") -> None:
        asked = Answered(began, time.monotonic() - began, node, failure)
        with self._lock:
            self._asked.append(asked)

    def _notice(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            time.sleep(_LOOK_S)
            pause_s = time.monotonic() - began - _LOOK_S
            self.longest_pause_s = max(self.longest_pause_s, pause_s)

    def _by_threads(self) -> None:
        with contextlib.ExitStack() as stack:
            made = [Client(each, **self._settings) for each in self._orders]
            clients = [stack.enter_context(client) for client in made]

            def ask(n: int) -> None:
                rng, client = random.Random(n), clients[n % len(clients)]
                while not self._ended.is_set():
                    keys, began = call(rng), time.monotonic()
                    try:
                        self._note(began, client.lookup(MODEL, keys).nodes[0])
                    except ClientError as error:
                        self._note(began, "", f"{type(error).__name__}: {error}")

            threads = [threading.Thread(target=ask, args=(n,)) for n in range(AT_ONCE)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for client in clients:
                self.counters.update(client.counters())

    def _by_asyncio(self) -> None:
        async def run() -> None:
            async with contextlib.AsyncExitStack() as stack:
                made = [AsyncClient(each, **self._settings) for each in self._orders]
                clients = [await stack.enter_async_context(client) for client in made]

                async def ask(n: int) -> None:
                    rng, client = random.Random(n), clients[n % len(clients)]
                    while not self._ended.is_set():
                        keys, began = call(rng), time.monotonic()
                        try:
                            self._note(began, (await client.lookup(MODEL, keys)).nodes[0])
                        except ClientError as error:
                            self._note(began, "", f"{type(error).__name__}: {error}")

                await asyncio.gather(*(ask(n) for n in range(AT_ONCE)))
                for client in clients:
                    self.counters.update(client.counters())

        asyncio.run(run())

    def asked(self) -> list[Answered]:
        """Return all calls that have ended."""
        with self._lock:
            return list(self._asked)

    def failures(self) -> collections.Counter[str]:
        """Count the failed ones by what they say."""
        return collections.Counter(each.failure for each in self.asked() if each.failure)

    def await_(self, what: str, holds: Callable[[list[Answered]], bool], most_s: float) -> None:
        """Wait until something holds of the calls.

        Raises:
            BenchError: It does not in that time.
        """
        deadline = time.monotonic() + most_s
        while not holds(self.asked()):
            if time.monotonic() > deadline:
                raise BenchError(f"{what} did not come in {most_s:.0f} s: {self.failures()}")
            time.sleep(0.01)

    def used_after_s(self, node: str, since_s: float, most_s: float = 30.0) -> float:
        """Return when the node answered a call that began after a time, in seconds since then."""

        def first(asked: list[Answered]) -> list[Answered]:
            return [each for each in asked if each.at_s >= since_s and each.node == node]

        self.await_(f"an answer of {node}", lambda asked: bool(first(asked)), most_s)
        found = first(self.asked())[0]
        return found.at_s + found.took_s - since_s

    def __enter__(self) -> Self:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ask no more."""
        self._ended.set()
        for thread in self._threads:
            thread.join()


def roll(nodes: Sequence[Node], kind: Kind, calls: int) -> Traffic:
    """Restart each node in turn under traffic, and ask on until there were so many calls."""
    with Traffic(kind, [node.address for node in nodes], spread=True) as traffic:
        traffic.await_("calls", lambda asked: len(asked) > 100, 30)
        for node in nodes:
            node.restart()
        traffic.await_(f"{calls} calls", lambda asked: len(asked) >= calls, 300)
    return traffic


def stand_still(nodes: Sequence[Node], kind: Kind, for_s: float) -> tuple[Traffic, list[Answered]]:
    """Stop the first node for a while under traffic; return what was asked in that time, too."""
    with Traffic(kind, [node.address for node in nodes]) as traffic:
        traffic.await_("calls", lambda asked: len(asked) > 100, 30)
        nodes[0].signal(signal.SIGSTOP)
        began = time.monotonic()
        time.sleep(for_s)  # the fault itself
        nodes[0].signal(signal.SIGCONT)
        ended = time.monotonic()
        traffic.used_after_s(nodes[0].name, ended)
    inside = [each for each in traffic.asked() if each.at_s + each.took_s > began]
    return traffic, [each for each in inside if each.at_s < ended]


def come_back(nodes: Sequence[Node], kind: Kind, away_s: float, times: int) -> list[float]:
    """Kill the first node, start it after a while; return when it was used again once ready."""
    took_s = []
    with Traffic(kind, [node.address for node in nodes]) as traffic:
        for _ in range(times):
            traffic.used_after_s(nodes[0].name, time.monotonic())
            nodes[0].signal(signal.SIGKILL)
            nodes[0].child.wait()
            time.sleep(away_s)  # the fault itself
            nodes[0].start()
            nodes[0].await_ready()
            took_s.append(traffic.used_after_s(nodes[0].name, time.monotonic()))
        if traffic.failures():
            raise BenchError(f"calls failed: {traffic.failures()}")
    return took_s


def usual_s(node: Node, calls: int = 50) -> float:
    """Return the median time of so many calls, one after another."""
    rng, took_s = random.Random(5), []
    with Client(node.address, timeout_s=TIMEOUT_S) as client:
        for _ in range(calls):
            keys, began = call(rng), time.monotonic()
            client.lookup(MODEL, keys)
            took_s.append(time.monotonic() - began)
    return float(np.median(took_s))


def impatient(
    node: Node, kind: Kind, calls: int, wait_s: tuple[float, float] = (0.0015, 0.003)
) -> dict[str, int]:
    """Make calls that wait so long, from and to; return the counters, and how many were late."""
    rng, late = random.Random(7), 0
    if kind == "threads":
        with Client(node.address, timeout_s=TIMEOUT_S) as client:
            client.schema(MODEL)
            for _ in range(calls):
                try:
                    client.lookup(MODEL, call(rng), timeout_s=rng.uniform(*wait_s))
                except (DeadlineError, ClientError):
                    late += 1
            return {**client.counters(), "late_calls": late}

    async def run() -> dict[str, int]:
        late = 0

        async def ask(client: AsyncClient, seed: int, share: int) -> None:
            nonlocal late
            rng = random.Random(seed)
            for _ in range(share):
                asking = client.lookup(MODEL, call(rng))
                try:
                    await asyncio.wait_for(asking, rng.uniform(*wait_s))
                except (TimeoutError, ClientError):
                    late += 1

        async with AsyncClient(node.address, timeout_s=TIMEOUT_S) as client:
            await client.schema(MODEL)
            share = calls // AT_ONCE
            await asyncio.gather(*(ask(client, n, share) for n in range(AT_ONCE)))
            return {**client.counters(), "late_calls": late}

    return asyncio.run(run())
