"""The measured servers: over one repository, by name, each started anew.

They serve KServe v2: `fleet`, whose models have half of their buckets on another node each, too.
Of `peers` and `node`, the service that nodes have for one another is asked: that of such a server,
and of a node without Triton.

A server is what `embertide.server.adapters.triton.TritonServer` is: a process that answers at a
port and can be started again. A target is a server and the address where callers reach it.
"""

import collections
import contextlib
import dataclasses
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc

from bench import models
from bench.nodes import NodeProcess, make_plan, publication_of, publish_plan
from bench.servers import BUILD, BenchError, await_peer
from bench.shapes import Shape
from embertide._common import kserve
from embertide.server.adapters import triton
from embertide.server.adapters.process import (
    Child,
    ProcessError,
    Stopped,
    free_ports,
    how_ended,
)
from embertide.server.adapters.redis import RedisOptions, RedisServer

SHAPE = Shape(name="front", rows=20_000)
LOOKUP, RANKING = "lookup", "ranking"
_DDR_BYTES = 256 << 20
_PEER_TIMEOUT_MS = 5000  # of callers that wait: the machine has more to do than to answer
_POLL_S = 0.02
_START_S = 60.0
LIVE = ("/inference.GRPCInferenceService/ServerLive", b"")
_LOOK_S, _HEAR_S, _TRIES = 4.0, 4.0, 3  # is asked so often, and given up after so long so often


class Server(Protocol):
    """A process that serves over gRPC."""

    process: Child

    @property
    def grpc(self) -> str:
        """host:port."""

    def alive(self) -> bool:
        """Return whether it runs."""

    def answers(self) -> bool:
        """Return whether it is ready."""

    def restart(self) -> None:
        """Start it again, as it has ended; does not wait."""

    def stop(self) -> int:
        """Stop it and return its exit code."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The files that a server is started over.

    Attributes:
        folder: A folder of its own, for logs.
        repository: The folder of models.
        backends: That they need.
        models: That are loaded at the start, of a server that loads by name; None: all there are.
    """

    folder: Path
    repository: Path
    backends: Path = dataclasses.field(default_factory=triton.find_backends)
    models: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A server, where callers reach it, and what else runs for that.

    Attributes:
        name: In words.
        server: That is watched, and started again.
        address: host:port.
        beside: Other processes that answers need.
        peers: Whether it is asked what nodes ask one another.
    """

    name: str
    server: Server
    address: str
    beside: tuple[Child, ...] = ()
    peers: bool = False


def small_repository(folder: Path) -> Path:
    """Write the repository of a lookup and a ranking model over one small snapshot.

    Requests of the ranking model are not put together: a dense net's last bits depend on how many
    samples it is given.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for kind in (LOOKUP, RANKING):
        triton.write_model(folder, kind, _model(kind))
    return folder


def _model(kind: str) -> triton.ModelOptions:
    return triton.ModelOptions(
        snapshot=models.make(SHAPE, BUILD).snapshot,
        kind="ranking" if kind == RANKING else "lookup",
        instances=2,
        threads=1,
        max_queue_delay_us=None if kind == RANKING else 0,
        ddr_budget_bytes=_DDR_BYTES,
    )


# --- by name --------------------------------------------------------------------------------------


def _server(front: triton.Front, site: Site) -> triton.TritonServer:
    grpc, metrics = free_ports(2)
    options = triton.ServerOptions(
        repository=site.repository,
        backends=site.backends,
        log=site.folder / "server.log",
        front=front,
        grpc_port=grpc,
        metrics_port=metrics,
        explicit=site.models is not None,
        models=site.models or (),
    )
    return triton.TritonServer(options)


def _stock(site: Site) -> triton.TritonServer:
    return _server("triton", site)


@contextlib.contextmanager
def _alone(name: str, make: Callable[[Site], Server], site: Site) -> Iterator[Target]:
    server = make(site)
    try:
        yield Target(name, server, server.grpc)
    finally:
        server.stop()


# --- that share a model ---------------------------------------------------------------------------


class _Pair:
    """The surroundings of two nodes that share a model, and the second of them."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        snapshot = models.make(SHAPE, BUILD).snapshot
        state = stack.enter_context(RedisServer(RedisOptions(log=folder / "redis.log")))
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.state, self.publication = state.url, publication_of(snapshot, folder / "publication")
        publish_plan(self.state, SHAPE.name, make_plan(snapshot, self.addresses))
        self._stack, self._folder = stack, folder
        self.second = self.start(1)

    def start(self, n: int) -> NodeProcess:
        """Start a node without Triton."""
        words = ("--ddr-bytes", _DDR_BYTES, "--peer-timeout-ms", _PEER_TIMEOUT_MS)
        name, log = f"node-{n}", self._folder / f"node-{n}.log"
        node = NodeProcess(name, self.addresses[n], self.publication, self.state, log, *words)
        return self._stack.enter_context(node)

    def first(self, kind: str) -> triton.ModelOptions:
        """Return the first node, as a model of a server."""
        return _model(kind).replace(
            snapshot=None,
            publication=self.publication,
            state=self.state,
            peer_address=self.addresses[0],
            peer_timeout_ms=_PEER_TIMEOUT_MS,
            node="node-0",
            max_degraded_share=0,
        )


@contextlib.contextmanager
def _fleet(site: Site, *, peers: bool) -> Iterator[Target]:
    with contextlib.ExitStack() as stack:
        repository, pairs = site.folder / "repository", []
        for kind in (LOOKUP, RANKING):
            pairs.append(_Pair(stack, site.folder / kind))
            triton.write_model(repository, kind, pairs[-1].first(kind))
        server = _server("own", dataclasses.replace(site, repository=repository))
        stack.callback(server.stop)
        for pair in pairs:
            await_peer(pair.addresses[0])
        name = "peers of a serving node" if peers else "fleet of two"
        address = pairs[0].addresses[0] if peers else server.grpc
        beside = tuple(pair.second.process for pair in pairs)
        yield Target(name, server, address, beside, peers)


@contextlib.contextmanager
def _without_triton(site: Site) -> Iterator[Target]:
    with contextlib.ExitStack() as stack:
        pair = _Pair(stack, site.folder)
        first = pair.start(0)
        await_peer(first.grpc)
        beside = (pair.second.process,)
        yield Target("peers of embertide_node", first, first.grpc, beside, peers=True)


Opened = contextlib.AbstractContextManager[Target]
TARGETS: dict[str, Callable[[Site], Opened]] = {
    "stock": lambda site: _alone("stock", _stock, site),
    "own": lambda site: _alone("own", lambda at: _server("own", at), site),
    "fleet": lambda site: _fleet(site, peers=False),
    "peers": lambda site: _fleet(site, peers=True),
    "node": _without_triton,
}


# --- kept -----------------------------------------------------------------------------------------


def heard(address: str, path: str, request: bytes) -> bool:
    """Return whether a server answers who connects now, in a few seconds."""
    with grpc.insecure_channel(address, kserve.OPTIONS) as channel:
        call: Any = channel.unary_unary(path)
        try:
            call.future(request).result(_HEAR_S)
        except (grpc.RpcError, grpc.FutureTimeoutError):
            return False
    return True


class Kept(Stopped):
    """Starts a server again at once as often as it ends, and counts.

    One that runs and answers nobody has ended, too: what handles a crash may itself stand still.

    Attributes:
        ends: By how.
        down_s: Seconds from each end until it answered again.
    """

    def __init__(
        self, server: Server, call: tuple[str, bytes] = LIVE, address: str | None = None
    ) -> None:
        """Watch a server that answers, by a call now and then.

        Args:
            server: That runs.
            call: Path and request.
            address: host:port; None: where the server serves.
        """
        self.ends: collections.Counter[str] = collections.Counter()
        self.down_s: list[float] = []
        self._server, self._call, self._address = server, call, address or server.grpc
        self._ended = threading.Event()
        self._failure = ""
        self._look_s = time.monotonic() + _LOOK_S
        # The kernel ends a process whose starting thread has ended: this one lasts until `stop`.
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            if self._server.alive() and self._hears():
                continue
            if self._server.alive():
                self._server.process.kill()
                self.ends["silence"] += 1
            else:
                self.ends[how_ended(self._server.process.code or 0)] += 1
            began = time.monotonic()
            try:
                self._start()
            except ProcessError as error:
                self._failure = str(error)
                return
            self._look_s = time.monotonic() + _LOOK_S
            self.down_s.append(time.monotonic() - began)
        self._server.stop()

    def _hears(self) -> bool:
        """Ask it now and then; return whether it answers, as far as is known."""
        if time.monotonic() < self._look_s:
            return True
        alive = any(heard(self._address, *self._call) for _ in range(_TRIES))
        self._look_s = time.monotonic() + _LOOK_S
        return alive

    def _start(self) -> None:
        """Start it until it answers; one that ends meanwhile is an end, too."""
        deadline = time.monotonic() + _START_S
        self._server.restart()
        while not self._ended.is_set() and not self._server.answers():
            if not self._server.alive():
                self.ends[f"{how_ended(self._server.process.code or 0)} as it started"] += 1
                self._server.restart()
            if time.monotonic() > deadline:
                raise ProcessError(f"it is not ready after {_START_S:.0f} s")
            time.sleep(_POLL_S)

    def await_answers(self) -> None:
        """Wait until it answers.

        Raises:
            BenchError: It could not be started again, or takes too long.
        """
        deadline = time.monotonic() + _START_S
        while not self._server.answers():
            self.check()
            if time.monotonic() > deadline:
                raise BenchError(f"the server does not answer in {_START_S:.0f} s")
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Prove that it is still watched.

        Raises:
            BenchError: The server could not be started again.
        """
        if self._failure:
            raise BenchError(self._failure)

    def stop(self) -> int:
        """Watch no more, and stop the server."""
        self._ended.set()
        self._thread.join()
        return self._server.process.code or 0
