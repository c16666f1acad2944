"""Hostile callers of the control plane get bounded service, and others are served meanwhile."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from control_bench import Bench, Client
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import wait_until

from bench.frames import begun, call_headers, header
from embertide.server.adapters.process import free_ports
from embertide.server.core.errors import Code, RefusedError
from embertide.server.services.control_server import ControlServer
from embertide.server.services.first_message import FirstMessages
from embertide.server.services.identity import Identity
from embertide.server.services.tokens import Tokens
from embertide.v1 import control_pb2

STATUS = control_pb2.ControlServiceGetStatusRequest()
PATH = b"/embertide.v1.ControlService/GetStatus"
STREAMS_A_CONNECTION = 120
TOKENS = {"operator": "operators-token-is-long", "reader": "readers-token-is-long"}


def silent(address: str, streams: int, token: str = "", path: bytes = PATH) -> list[socket.socket]:
    """Open calls that have headers and no message."""
    host, _, port = address.rpartition(":")
    more = [header(b"grpc-timeout", b"30S")]
    more += [header(b"authorization", f"Bearer {token}".encode())] if token else []
    talks = []
    for _ in range(0, streams, STREAMS_A_CONNECTION):
        calls = [call_headers(2 * n + 1, path, *more) for n in range(STREAMS_A_CONNECTION)]
        talks.append(socket.create_connection((host, int(port)), 5))
        talks[-1].sendall(begun() + b"".join(calls))
    return talks


@contextlib.contextmanager
def held(*talks: socket.socket) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in talks:
            stack.enter_context(each)
        yield


@pytest.fixture
def closed(bench: Bench, tmp_path: Path) -> ControlServer:
    """A control plane with tokens, and a health port."""
    file = tmp_path / "tokens"
    file.write_text("".join(f"{role}:{token}\n" for role, token in TOKENS.items()))
    health = f"127.0.0.1:{free_ports(1)[0]}"
    return bench.control(expect=1, tokens=Tokens(file), health_listen=health)


@pytest.fixture
def operator(bench: Bench, closed: ControlServer) -> Client:
    client = bench.client(closed.address, TOKENS["operator"])
    client.call("GetStatus", STATUS)
    return client


def refusals(control: ControlServer, code: str) -> int:
    return control.gate.refused[f"GetStatus {code}"]


def test_2400_calls_of_nobody_without_a_message_hold_up_no_operator(
    closed: ControlServer, operator: Client
) -> None:
    with held(*silent(closed.address, 2400)):
        # Some of them are over the bound of all calls before anybody looks who calls.
        wait_until(lambda: refusals(closed, "UNAUTHENTICATED") > 1000, 30)
        for _ in range(20):
            operator.call("GetStatus", STATUS, 2.0)


def test_a_reader_whose_messages_do_not_come_holds_up_no_operator(
    closed: ControlServer, operator: Client
) -> None:
    with held(*silent(closed.address, 240, TOKENS["reader"])):
        wait_until(lambda: refusals(closed, "RESOURCE_EXHAUSTED") > 100, 10)
        for _ in range(20):
            operator.call("GetStatus", STATUS, 2.0)


def test_a_call_whose_message_does_not_come_in_time_is_ended(bench: Bench) -> None:
    with contextlib.ExitStack() as stack:
        watch = FirstMessages(wait_s=0.2)
        stack.callback(watch.stop)
        control = bench.control(expect=1)
        stack.callback(control.gate.close)
        control.gate._first = watch
        client = bench.client(control.address)
        stream: Any = client.channel.stream_unary(PATH.decode())
        over = threading.Event()
        stack.callback(over.set)

        def messages() -> Iterator[bytes]:
            over.wait(60)
            yield b""

        with pytest.raises(grpc.RpcError) as caught:
            stream(messages(), timeout=50)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        wait_until(lambda: refusals(control, "CANCELLED") == 1)


def test_a_late_call_was_cancelled_also_where_grpc_first_says_that_no_message_comes() -> None:
    context: Any = threading.Event()
    context.cancel = context.set

    def no_message() -> Iterator[bytes]:
        assert context.wait(20)
        yield from ()

    watch = FirstMessages(wait_s=0.0)
    with pytest.raises(RefusedError) as caught:
        watch.take(Identity("reader"), no_message(), context)
    watch.stop()
    assert caught.value.code is Code.CANCELLED


def test_the_messages_of_one_caller_that_are_on_their_way_are_few() -> None:
    watch = FirstMessages()
    reader, operator = Identity("reader"), Identity("operator")
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(watch._one_of(reader))
            with pytest.raises(RefusedError) as caught, watch._one_of(reader):
                pass
            assert caught.value.code is Code.RESOURCE_EXHAUSTED
            with watch._one_of(operator), watch._one_of(Identity("reader", name="another")):
                pass
        with watch._one_of(reader):
            pass
    finally:
        watch.stop()


def test_probes_are_answered_while_others_hold_the_health_port(
    closed: ControlServer, operator: Client
) -> None:
    address = closed._options.health_listen
    assert address is not None
    talks = silent(address, 600, path=b"/grpc.health.v1.Health/Check")
    with held(*talks), grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(20):
            said = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
            assert said.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("role", ["", "reader", "operator"])
def test_nothing_compressed_is_taken(bench: Bench, closed: ControlServer, role: str) -> None:
    metadata = (("authorization", f"Bearer {TOKENS[role]}"),) if role else ()
    ask: Any = bench.client(closed.address).channel.unary_unary(PATH.decode())
    for by in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        with pytest.raises(grpc.RpcError) as caught:
            ask(bytes(1 << 20), timeout=5, metadata=metadata, compression=by)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "is disabled" in str(caught.value.details())


def test_at_most_64_kib_of_a_connection_are_taken_before_its_caller_is_known(
    closed: ControlServer,
) -> None:
    """The listener announces its bounds: streams at once, and bytes of each before it asks."""
    host, _, port = closed.address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as talk:
        talk.sendall(begun())
        data = b""
        while len(data) < 9 or len(data) < 9 + int.from_bytes(data[:3], "big"):
            data += talk.recv(4096)
        assert data[3] == 4  # SETTINGS
        payload = data[9 : 9 + int.from_bytes(data[:3], "big")]
        pairs = [payload[n : n + 6] for n in range(0, len(payload), 6)]
        said = {int.from_bytes(p[:2], "big"): int.from_bytes(p[2:], "big") for p in pairs}
        streams, window = said[3], said[4]
        assert streams * window <= 64 << 10
        assert streams >= 100  # that one caller may watch


def test_reflection_is_of_who_is_known(bench: Bench, closed: ControlServer) -> None:
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    ask: Any = bench.client(closed.address).channel.stream_stream(path)
    listing = b"\x3a\x00"  # list_services
    with pytest.raises(grpc.RpcError) as caught:
        list(ask(iter([listing]), timeout=5))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    metadata = (("authorization", f"Bearer {TOKENS['reader']}"),)
    (answer,) = ask(iter([listing]), timeout=5, metadata=metadata)
    assert b"embertide.v1.ControlService" in answer
