"""Hostile callers of every listener of ours: who else calls is served, and memory is bounded.

Each attack of bench.edges.attack, from a process of its own, by somebody without credentials and by
a reader, while somebody who may calls asks now and then. Triton's own ports are not among these.
"""

import contextlib
import dataclasses
import datetime
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench import report
from bench.authority import Authority
from bench.edges.attack import ATTACKS, Door
from bench.frames import DATA, begun, call_headers, frame
from bench.models import make
from bench.nodes import make_plan, publication_of, publish_plan
from bench.servers import BUILD, ROOT, BenchError
from bench.shapes import Shape
from bench.thrown import listeners, resident_bytes
from embertide._common.errors import OperatingError
from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.adapters.tls import TlsFolder, dial
from embertide.v1 import node_pb2, node_pb2_grpc

CLAIM = "A.3"
_SECONDS = 1.5
_ASK_EVERY_S = 0.025  # the control plane takes 50 a second of one caller
_LIMIT_S = 60.0  # of one attack, its end included
_NODES_TOKEN = "a-nodes-token-of-nobody"
_MIB = 1 << 20
# Bound on the growth of a listener's memory beside a tenth. The control plane: 2,048 connections
# of 18 KiB, and of a reader 4 messages of 16 MiB on their way, twice. A node: the ten thousand
# connections that come, as its gRPC has no bound of them, of 64 KiB in TLS' handshake, and 16
# messages of 4 MiB.
BOUND_BYTES = {"control plane": 192 * _MIB, "node": (625 + 64) * _MIB, "trainer": 64 * _MIB}
_UNKNOWN, _UNKNOWN_BYTES = 20, 64 << 10  # connections, and what each sends
_P99_TIMES, _RSS_TIMES = 1.5, 1.1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A listener, who attacks it, and who else asks.

    Attributes:
        who: That attacks: nobody, or a reader.
        ask: Asks as somebody who may; raises where he is not answered.
        bound_bytes: Bound on the growth of the process's memory beside a tenth of it.
    """

    name: str
    who: str
    process: Child
    door: Door
    ask: Callable[[], object]
    bound_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of an attack."""

    target: Target
    attack: str
    alive: bool
    before_ms: Sequence[float]
    during_ms: Sequence[float]
    failed: int
    first_failure: str
    rss_before: int
    rss_most: int
    seconds: float

    @property
    def p99_times(self) -> float:
        """Return how many times as long the 99th percentile took."""
        return float(np.percentile(self.during_ms or [np.inf], 99)) / float(
            np.percentile(self.before_ms, 99)
        )

    @property
    def memory(self) -> float:
        """The most memory, as a share of what it may be."""
        allowed = _RSS_TIMES * self.rss_before + self.target.bound_bytes
        return self.rss_most / allowed


class _Asker:
    """Asks until it is closed, and measures."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._ended = threading.Event()
        self.took_ms: list[float] = []
        self.failures: list[str] = []
        self.rss_most = 0
        self._threads = [threading.Thread(target=each) for each in (self._ask, self._look)]
        for each in self._threads:
            each.start()

    def _ask(self) -> None:
        while not self._ended.wait(_ASK_EVERY_S):
            began = time.perf_counter()
            try:
                self._target.ask()
            except (OSError, OperatingError, AssertionError, grpc.RpcError) as error:
                self.failures.append(repr(error)[:200])
            else:
                self.took_ms.append(1e3 * (time.perf_counter() - began))

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            with contextlib.suppress(OSError, IndexError, ValueError):
                self.rss_most = max(self.rss_most, resident_bytes(self._target.process))

    def close(self) -> None:
        self._ended.set()
        for each in self._threads:
            each.join()


def attacked(target: Target, attack: str, seconds: float = _SECONDS) -> Outcome:
    """Attack, and return what came of it."""
    quiet = _Asker(target)
    time.sleep(seconds)
    quiet.close()
    rss_before = resident_bytes(target.process)
    began = time.monotonic()
    door = dataclasses.replace(target.door, seconds=seconds)
    words = [
        sys.executable,
        "-m",
        "bench.edges.attack",
        attack,
        json.dumps(dataclasses.asdict(door)),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT, text=True) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()
        asker = _Asker(target)
        try:
            attacker.wait(_LIMIT_S)
        finally:
            attacker.kill()
            asker.close()
    return Outcome(
        target=target,
        attack=attack,
        alive=target.process.alive(),
        before_ms=quiet.took_ms,
        during_ms=asker.took_ms,
        failed=len(asker.failures),
        first_failure=asker.failures[0] if asker.failures else "",
        rss_before=rss_before,
        rss_most=asker.rss_most,
        seconds=time.monotonic() - began,
    )


# --- listeners ------------------------------------------------------------------------------------

_STATUS = "/embertide.v1.ControlService/GetStatus"
_NODE_STATUS = "/embertide.v1.NodeService/GetStatus"
_CHECK = "/grpc.health.v1.Health/Check"


def _asks_node(address: str, tls: Path | None) -> Callable[[], object]:
    channel = dial(address, TlsFolder(tls)) if tls else grpc.insecure_channel(address)
    stub: Any = node_pb2_grpc.NodeServiceStub(channel)
    metadata = None if tls else (("authorization", f"Bearer {_NODES_TOKEN}"),)
    return lambda: stub.GetStatus(
        node_pb2.NodeServiceGetStatusRequest(), timeout=10, metadata=metadata
    )


def _asks_health(port: int) -> Callable[[], object]:
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    check: Any = channel.unary_unary(_CHECK)
    return lambda: check(b"", timeout=10)


@contextlib.contextmanager
def _nodes(folder: Path) -> Iterator[list[Target]]:
    """Two nodes, one by TLS, the other in plain text with a token; each with its health port."""
    folder.mkdir()
    files = make(Shape(name="callers", rows=20_000), BUILD)
    publication = publication_of(files.snapshot, folder / "publication")
    model = json.loads((files.snapshot / "manifest.json").read_text())["model"]
    authority = Authority()
    day = datetime.timedelta(days=1)
    for role in ("node", "reader"):
        authority.issue(folder / role, role, valid=day)
    (folder / "token").write_text(_NODES_TOKEN + "\n")
    ports = free_ports(4)
    targets = []
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(RedisServer(RedisOptions(log=folder / "redis.log")))
        for tls, port, health in ((True, *ports[:2]), (False, *ports[2:])):
            name = "tls" if tls else "plain"
            address = f"127.0.0.1:{port}"
            publish_plan(state.url, model, make_plan(files.snapshot, [address]))
            command = [str(BUILD / "cpp" / "embertide_node"), "--publication", str(publication)]
            command += ["--state", state.url, "--node", "node-0", "--peer-address", address]
            command += ["--health-listen", f"127.0.0.1:{health}", "--ddr-bytes", str(256 << 20)]
            secret = ["--tls", str(folder / "node")] if tls else []
            secret += [] if tls else ["--token-file", str(folder / "token")]
            node = stack.enter_context(Child([*command, *secret], log=folder / f"{name}.log"))
            ask = _asks_node(address, folder / "node" if tls else None)
            _await(node, ask)
            certificate = str(folder / "reader") if tls else ""
            doors = [
                ("nobody", Door(port=port, path=_NODE_STATUS, tls=certificate, nameless=True)),
                ("a reader", Door(port=port, path=_NODE_STATUS, tls=certificate)),
            ]
            shown = f"node, peers, {'TLS' if tls else 'plain text'}"
            targets += [
                Target(
                    name=shown,
                    who=who,
                    process=node,
                    door=door,
                    ask=ask,
                    bound_bytes=BOUND_BYTES["node"],
                )
                for who, door in doors[: 2 if tls else 1]
            ]
            if not tls:
                targets.append(
                    Target(
                        name="node, health",
                        who="nobody",
                        process=node,
                        door=Door(port=health, path=_CHECK),
                        ask=_asks_health(health),
                        bound_bytes=BOUND_BYTES["node"],
                    )
                )
        yield targets


def _await(process: Child, ask: Callable[[], object]) -> None:
    until = time.monotonic() + _LIMIT_S
    while True:
        try:
            ask()
            return
        except grpc.RpcError as error:
            if not process.alive() or time.monotonic() > until:
                raise BenchError(f"it does not answer: {error}: {process.log_text()}") from error
            time.sleep(0.1)


_PATHS = {
    "control plane": _STATUS,
    "control plane, TLS": _STATUS,
    "control plane, health": _CHECK,
    "control plane, standby": _STATUS,
    "trainer, metrics": "",
}


@contextlib.contextmanager
def all_targets(folder: Path) -> Iterator[list[Target]]:
    """Start every listener of ours."""
    (folder / "python").mkdir()
    with listeners(folder / "python") as ours, _nodes(folder / "nodes") as nodes:
        targets = []
        # Those of the front end are attacked by bench.front's part `hostile`.
        for each in (each for each in ours if each.name in _PATHS):
            tls = str(folder / "python" / "reader") if each.name.endswith("TLS") else ""
            door = Door(port=each.port, path=_PATHS[each.name], tls=tls, nameless=bool(tls))
            doors = [("nobody", door)]
            if each.name == "control plane":
                doors.append(("a reader", dataclasses.replace(door, token=each.readers_token)))
            if tls:
                doors.append(("a reader", dataclasses.replace(door, nameless=False)))
            kind = each.name.partition(",")[0]
            targets += [
                Target(
                    name=each.name,
                    who=who,
                    process=each.process,
                    door=door,
                    ask=each.ask,
                    bound_bytes=BOUND_BYTES[kind],
                )
                for who, door in doors
            ]
        yield nodes + targets


# --- report ---------------------------------------------------------------------------------------


def say(outcome: Outcome) -> None:
    """Tell what came of an attack as it has ended."""
    target = outcome.target
    print(
        f"{target.name}, {target.who}, {outcome.attack}: alive {outcome.alive}, "
        f"{outcome.failed} of {outcome.failed + len(outcome.during_ms)} failed "
        f"{outcome.first_failure}, p99 {outcome.p99_times:.2f}x of "
        f"{np.percentile(outcome.before_ms, 99):.1f} ms, "
        f"+{(outcome.rss_most - outcome.rss_before) / _MIB:.0f} MiB",
        file=sys.stderr,
        flush=True,
    )


def rows_of(outcomes: Sequence[Outcome], claim: str = CLAIM) -> Iterator[report.Row]:
    """Give the rows of the attacks on one target."""
    case = f"{outcomes[0].target.name}, by {outcomes[0].target.who}: {len(outcomes)} attacks"

    def row(
        metric: str, unit: str, values: Sequence[float], target: float, better: Any
    ) -> report.Row:
        return report.measure(
            (case, metric, unit), values, better=better, target=target, claim=claim
        )

    alive = float(all(each.alive for each in outcomes))
    failed = float(sum(each.failed for each in outcomes))
    yield row("alive after all", "1: yes", [alive], 1, "higher")
    yield row("calls of others that failed", "1", [failed], 0, "lower")
    yield row(
        "p99 of others, the median attack",
        "times before",
        [statistics.median(each.p99_times for each in outcomes)],
        _P99_TIMES,
        "lower",
    )
    yield row(
        "p99 of others, the worst attack",
        "times before",
        [max(each.p99_times for each in outcomes)],
        _P99_TIMES,
        "lower",
    )
    yield row(
        "most memory",
        f"of 1.1 x before + {outcomes[0].target.bound_bytes // _MIB} MiB",
        [max(each.memory for each in outcomes)],
        1,
        "lower",
    )
    grown = max(each.rss_most - each.rss_before for each in outcomes) / _MIB
    yield row("most memory taken", "MiB", [grown], 0, "lower")
    yield row("longest", "s", [max(each.seconds for each in outcomes)], _LIMIT_S, "lower")


def taken_unknown(target: Target) -> float:
    """Return the KiB that a connection takes whose caller has sent 64 KiB and is not known."""
    calls = [
        call_headers(2 * n + 1, target.door.path.encode()) + frame(DATA, 0, 2 * n + 1, bytes(500))
        for n in range(_UNKNOWN_BYTES // 512)
    ]
    with contextlib.ExitStack() as stack:
        before = resident_bytes(target.process)
        for _ in range(_UNKNOWN):
            talk = stack.enter_context(
                socket.create_connection(("127.0.0.1", target.door.port), 10)
            )
            talk.sendall(begun() + b"".join(calls))
        most, until = before, time.monotonic() + 1
        while time.monotonic() < until:
            most = max(most, resident_bytes(target.process))
            time.sleep(0.005)
    return (most - before) / _UNKNOWN / 1024


def run() -> Iterator[report.Row]:
    """Attack every listener in every way.

    Raises:
        BenchError: A listener does not start.
    """
    with tempfile.TemporaryDirectory() as folder, all_targets(Path(folder)) as targets:
        for target in targets:
            outcomes = []
            for attack in ATTACKS:
                outcomes.append(attacked(target, attack))
                say(outcomes[-1])
                if not outcomes[-1].alive:
                    break
            yield from rows_of(outcomes)
            if target.who == "nobody" and not target.door.tls and target.door.path:
                yield report.measure(
                    (f"{target.name}: {_UNKNOWN} connections", "64 KiB before it is known", "KiB"),
                    [taken_unknown(target) for _ in range(report.MIN_REPETITIONS)],
                    better="lower",
                    target=64,
                    claim=CLAIM,
                )
