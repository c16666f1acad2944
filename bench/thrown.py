"""Any bytes thrown at listeners of real processes: connections by a seed.

The control plane by gRPC in plain text and by TLS, its health port, one that stands by, a
trainer's metrics, and a server's door for inferences and its page of metrics. What nodes serve one
another is thrown at by `backend_cpp/fuzz/frames_fuzz.cc`; a guard's page is a trainer's.
"""

import collections
import contextlib
import dataclasses
import datetime
import random
import socket
import ssl
import struct
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2

from bench.authority import Authority
from bench.frames import DATA, END_STREAM, PREFACE, begun, call_headers, frame, header
from embertide._common.errors import OperatingError
from embertide.server.adapters import triton
from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.adapters.tls import TlsFolder
from embertide.server.cli.control_client import Caller
from embertide.v1 import control_pb2

# Connections that may still send, and as many that have hung up and were not looked at since.
_OPEN = 128
# From one look at what must hold to the next.
LOOK_EVERY = 512
_END_S = 10.0  # from hanging up until the listener has ended a connection
_ANSWER_BYTES_MAX = 1 << 20
_BYTES_MAX = 8192
# Above what a process had in memory once all connections were open for the first time. The control
# plane frees cycles of objects after some 90,000 connections (services/heap.py), 50 MiB later.
GROWTH_BYTES_MAX = 128 << 20
_TOKEN = "a-token-that-is-in-no-seed"
_READERS_TOKEN = "a-readers-token-that-is-in-no-seed"
_PAGE = """
import pathlib, threading
from embertide.trainer.commands.reports import metrics_page
from embertide.trainer.data.generator import NewsConfig, NewsSource
with metrics_page({port}, NewsSource(NewsConfig(hours=1)), pathlib.Path()):
    print("ready", flush=True)
    threading.Event().wait()
"""


class BrokenError(AssertionError):
    """A listener did not hold what it must; the message names the inputs to throw again."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """A port of a process.

    Attributes:
        readers_token: A token of role reader, where tokens are asked for.
        seeds: Bytes that a caller would send; strangers begin with them.
        ask: Asks as somebody who may, and raises where he is not answered.
    """

    name: str
    process: Child
    port: int
    seeds: Sequence[bytes]
    ask: Callable[[], None]
    readers_token: str = _READERS_TOKEN


# --- what is thrown -------------------------------------------------------------------------------


def _call(path: bytes, *more: bytes) -> bytes:
    return begun() + call_headers(1, path, *more) + frame(DATA, END_STREAM, 1, bytes(5))


def _server_seeds() -> list[bytes]:
    service = b"/inference.GRPCInferenceService/"
    infer = service_pb2.ModelInferRequest(model_name="absent", raw_input_contents=[bytes(16)])
    infer.inputs.add(name="KEYS", datatype="INT64", shape=[1, 2])
    message = infer.SerializeToString()
    asked = begun() + call_headers(1, service + b"ModelInfer")
    asked += frame(DATA, END_STREAM, 1, b"\0" + struct.pack(">I", len(message)) + message)
    cancelled = frame(3, 0, 1, b"\0\0\0\x08")
    of_operators = header(b"triton-grpc-protocol-embertide-admin", b"guess")
    return [
        asked,
        asked + cancelled,
        begun() + call_headers(1, service + b"ModelInfer", header(b"grpc-timeout", b"1m")),
        _call(service + b"ModelStreamInfer"),
        _call(service + b"ServerMetadata"),
        _call(service + b"RepositoryModelUnload", of_operators),
        *_any_seeds(),
    ]


def _grpc_seeds() -> list[bytes]:
    guess = header(b"authorization", b"Bearer guess")
    service = b"/embertide.v1.ControlService/"
    return [
        _call(service + b"GetStatus"),
        _call(service + b"RegisterNode", guess),
        _call(service + b"StreamBeats", guess),
        _call(service + b"GetStatus") + frame(3, 0, 1, b"\0\0\0\x08"),  # gone at once
        _call(service + b"StreamBeats") + frame(3, 0, 1, b"\0\0\0\x08"),
        _call(b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
        *_any_seeds(),
    ]


def _any_seeds() -> list[bytes]:
    return [
        _call(b"/grpc.health.v1.Health/Check"),
        PREFACE + frame(4, 0, 0, b"\0\3\0\0\0\5") + frame(6, 0, 0, b"12345678"),
        PREFACE + frame(8, 0, 0, b"\0\0\1\0") + frame(3, 0, 1, b"\0\0\0\x08"),
        b"GET / HTTP/1.1\r\n\r\n",
    ]


def _tls_seeds() -> list[bytes]:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):  # it comes no further than its first words
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="localhost").do_handshake()
    return [said.read(), b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03", b"GET / HTTP/1.1\r\n\r\n"]


def _page_seeds() -> list[bytes]:
    return [
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain\r\n\r\n",
        b"GET /metrics?name[]=a&name[]=b HTTP/1.0\r\nAccept-Encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nx",
        b"OPTIONS * HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n",
        b"GET /favicon.ico HTTP/1.1\r\n" + b"X: y\r\n" * 120 + b"\r\n",
    ]


def thrown(seeds: Sequence[bytes], seed: int, number: int) -> bytes:
    """Return input `number` of a seed: one of the seeds, changed by chance in a few places."""
    chance = random.Random(seed << 40 | number)
    made = bytearray(chance.choice(seeds))
    for _ in range(chance.randrange(8)):
        at = chance.randrange(len(made) + 1)
        upto = min(len(made), at + (1 << chance.randrange(8)))
        match chance.randrange(6):
            case 0 if at < len(made):
                made[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(made):
                made[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                made[at:at] = chance.randbytes(1 << chance.randrange(8))
            case 3:
                del made[at:upto]
            case 4:
                made[at:at] = made[at:upto] * chance.randrange(1, 4)
            case _:
                made[at:] = chance.choice(seeds)[at:]
    return bytes(made[:_BYTES_MAX])


# --- throwing -------------------------------------------------------------------------------------


def resident_bytes(process: Child) -> int:
    """Return what a process has in memory."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


class Thrower:
    """Throws at one listener, over some hundred connections at once.

    Attributes:
        number: Inputs thrown.
        most_bytes: The most that the process had in memory when it was looked at.
        bound_bytes: The memory that it must stay under; 0 before the first look.
    """

    def __init__(self, listener: Listener, seed: int) -> None:
        """Take a listener that is up."""
        self.number = 0
        self.most_bytes = 0
        self.bound_bytes = 0
        self._listener = listener
        self._seed = seed
        self._talking = collections.deque[socket.socket]()
        self._leaving = collections.deque[socket.socket]()

    def throw(self, count: int) -> None:
        """Throw the next inputs, and look at what must hold.

        Raises:
            BrokenError: It does not.
        """
        try:
            for _ in range(count):
                self._send(thrown(self._listener.seeds, self._seed, self.number))
                self.number += 1
                if self.number % LOOK_EVERY == 0:
                    self._look()
            self._look()
        except (OSError, OperatingError, grpc.RpcError, RuntimeError, AssertionError) as error:
            first = max(0, self.number - 2 * _OPEN)
            raise BrokenError(
                f"{self._listener.name}: {error!r} after inputs {first} to {self.number} of seed "
                f"{self._seed} (bench.thrown.thrown); {self._listener.process.log_text()[-2000:]}"
            ) from error

    def close(self) -> None:
        """End all connections, each of which the listener must end too."""
        while self._talking:
            self._hang_up()
        while self._leaving:
            self._await_end()

    def _look(self) -> None:
        assert self._listener.process.alive(), "the process ended"
        self._listener.ask()
        resident = resident_bytes(self._listener.process)
        self.most_bytes = max(self.most_bytes, resident)
        self.bound_bytes = self.bound_bytes or resident + GROWTH_BYTES_MAX
        assert resident <= self.bound_bytes, f"{resident:,} bytes in memory"

    def _send(self, data: bytes) -> None:
        # From many addresses of this machine: the kernel keeps those of a closed connection for a
        # minute, and one address has 28,000 ports. REUSEADDR lets servers listen on them meanwhile.
        near = socket.inet_ntoa(struct.pack(">I", 0x7F010001 + self.number % (1 << 16)))
        talk = socket.socket()
        talk.settimeout(_END_S)
        talk.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        talk.bind((near, 0))
        talk.connect(("127.0.0.1", self._listener.port))
        with contextlib.suppress(ConnectionError):  # it may have read enough before it got all
            talk.sendall(data)
        self._talking.append(talk)
        if len(self._talking) > _OPEN:
            self._hang_up()
        if len(self._leaving) > _OPEN:
            self._await_end()

    def _hang_up(self) -> None:
        talk = self._talking.popleft()
        with contextlib.suppress(OSError):  # it is over already
            talk.shutdown(socket.SHUT_WR)
        self._leaving.append(talk)

    def _await_end(self) -> None:
        """Wait until the listener has read all, and ended the connection."""
        answered = 0
        with self._leaving.popleft() as talk, contextlib.suppress(ConnectionError):
            while data := talk.recv(65536):
                answered += len(data)
                assert answered <= _ANSWER_BYTES_MAX, "an answer without end"


# --- listeners ------------------------------------------------------------------------------------


def _ready(process: Child, ask: Callable[[], None]) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            ask()
            return
        except (OSError, OperatingError, RuntimeError, grpc.RpcError) as error:
            if not process.alive() or time.monotonic() > until:
                raise BrokenError(f"it does not answer: {error}: {process.log_text()}") from error
            time.sleep(0.1)


def _asks_control(caller: Caller) -> Callable[[], None]:
    return lambda: caller.call("GetStatus", control_pb2.ControlServiceGetStatusRequest())


def _asks_health(port: int) -> Callable[[], None]:
    stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(f"127.0.0.1:{port}"))

    def ask() -> None:
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    return ask


def _asks_standby(port: int) -> Callable[[], None]:
    """Ask one that stands by, which says who leads."""
    channel: Any = grpc.insecure_channel(f"127.0.0.1:{port}")
    ask_status = channel.unary_unary("/embertide.v1.ControlService/GetStatus")

    def ask() -> None:
        try:
            ask_status(b"", timeout=20)
        except grpc.RpcError as error:
            if "which leads" not in str(error):
                raise

    return ask


def _asks_server(server: triton.TritonServer) -> Callable[[], None]:
    def ask() -> None:
        assert server.ready(), "the server is not ready"

    return ask


def _asks_page(port: int, says: bytes) -> Callable[[], None]:
    def ask() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
            assert says in page.read()

    return ask


def _server(folder: Path) -> triton.TritonServer:
    """Start a server of no model."""
    (folder / "repository").mkdir()
    grpc_port, metrics_port = free_ports(2)
    return triton.TritonServer(
        triton.ServerOptions(
            repository=folder / "repository",
            backends=triton.find_backends(),
            log=folder / "server.log",
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            explicit=True,
        )
    )


@contextlib.contextmanager
def listeners(folder: Path) -> Iterator[list[Listener]]:
    """Start all of them, with files in `folder`; they end with the context."""
    plain, tls, health, page, waiting = free_ports(5)
    authority = Authority()
    day = datetime.timedelta(days=1)
    for role in ("control", "operator", "reader"):
        authority.issue(folder / role, role, valid=day)
    (folder / "tokens").write_text(f"operator:{_TOKEN}\nreader:{_READERS_TOKEN}\n")
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer(RedisOptions(log=folder / "redis.log")))

        def start(name: str, words: Sequence[str]) -> Child:
            return stack.enter_context(Child([sys.executable, *words], log=folder / f"{name}.log"))

        def control(name: str, port: int, *words: str, model: str = "") -> Child:
            return start(
                name,
                [
                    *("-m", "embertide.server.cli", "control", "--state", redis.url),
                    *("--model", model or name, "--listen", f"127.0.0.1:{port}"),
                    *("--tokens", str(folder / "tokens"), "--directory", str(folder / name)),
                    *words,
                ],
            )

        in_plain = control("plain", plain)
        by_tls = control(
            *("tls", tls, "--tls", str(folder / "control")),
            *("--health-listen", f"127.0.0.1:{health}"),
        )
        trainer = start("page", ["-c", _PAGE.format(port=page)])
        callers = [
            Caller(f"127.0.0.1:{plain}", _TOKEN),
            Caller(f"127.0.0.1:{tls}", None, tls=TlsFolder(folder / "operator")),
        ]
        for each in callers:
            stack.callback(each.close)
        _ready(in_plain, _asks_control(callers[0]))
        # A standby for the model that the first one leads.
        standby = control("standby", waiting, "--standby", model="plain")
        made = [
            ("control plane", in_plain, plain, _grpc_seeds(), _asks_control(callers[0])),
            ("control plane, TLS", by_tls, tls, _tls_seeds(), _asks_control(callers[1])),
            ("control plane, health", by_tls, health, _grpc_seeds(), _asks_health(health)),
            ("control plane, standby", standby, waiting, _grpc_seeds(), _asks_standby(waiting)),
            (
                "trainer, metrics",
                trainer,
                page,
                _page_seeds(),
                _asks_page(page, b"embertide_trainer"),
            ),
        ]
        server = stack.enter_context(_server(folder))
        of_server = server.options.grpc_port, server.options.metrics_port
        page_asks = _asks_page(of_server[1], b"embertide_front_connections")
        made += [
            ("server", server.process, of_server[0], _server_seeds(), _asks_server(server)),
            ("server, metrics", server.process, of_server[1], _page_seeds(), page_asks),
        ]
        for _, process, _, _, ask in made:
            _ready(process, ask)
        yield [
            Listener(name=name, process=process, port=port, seeds=seeds, ask=ask)
            for name, process, port, seeds, ask in made
        ]
