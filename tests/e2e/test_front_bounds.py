"""The bounds on one caller of our front end, and that each refusal is counted under its reason."""

import contextlib
import queue
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from serving import beside
from tritonclient.grpc import service_pb2
from waiting import wait_until

from bench.frames import begun, call_headers, header
from embertide._common import kserve
from embertide.server.adapters import triton
from embertide.server.cli.metrics_page import MetricsPage

MODEL = "slow"
INFER = "/inference.GRPCInferenceService/ModelInfer"
CALLS, CALLS_OF_ONE = 4, 2
BYTES, BYTES_OF_ONE, MESSAGE_BYTES = 1 << 20, 800_000, 1_500_000
QUEUED_S = 5.0  # that a request waits for others of its batch
NAMES = ("ada", "bob", "eve")
TOKENS = {name: f"a-token-of-{name}-alone" for name in NAMES}
KEYS = np.array([[0, 1, 14, 100]], np.int64)


@pytest.fixture(scope="module")
def server(
    server_options: triton.ServerOptions,
    snapshot: tuple[Path, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[triton.TritonServer]:
    folder = tmp_path_factory.mktemp("bounds")
    (folder / "tokens").write_text("".join(f"reader/{n}:{t}\n" for n, t in TOKENS.items()))
    options = beside(
        server_options,
        folder / "models",
        folder / "triton.log",
        [MODEL, "lookup"],
        extra=(
            f"--max-calls={CALLS}",
            f"--max-bytes={BYTES}",
            f"--max-request-bytes={MESSAGE_BYTES}",
        ),
        tokens=folder / "tokens",
        caller_calls=CALLS_OF_ONE,
        caller_bytes=BYTES_OF_ONE,
    )
    for name, delay_us in ((MODEL, round(QUEUED_S * 1e6)), ("lookup", 0)):
        model = triton.ModelOptions(
            snapshot=snapshot[0], max_batch_size=64, max_queue_delay_us=delay_us
        )
        triton.write_model(options.repository, name, model)
    with triton.TritonServer(options) as running:
        yield running
        assert running.alive(), running.log_text()


@pytest.fixture
def channel(server: triton.TritonServer) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as made:
        yield made


def of(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {TOKENS[name]}"),) if name else ()


def question(model: str = "lookup", keys: Any = KEYS) -> bytes:
    request = kserve.infer_request(model, {"KEYS": keys}, ["EMBEDDING"])
    data: bytes = request.SerializeToString()
    return data


def page_of(server: triton.TritonServer) -> MetricsPage:
    return MetricsPage(server.metrics())


class Counted:
    """Refusals and ends since it was made."""

    def __init__(self, server: triton.TritonServer) -> None:
        self._server = server
        self._before = page_of(server)

    def _grown(self, name: str, **labels: str) -> float:
        return page_of(self._server).sum(name, **labels) - self._before.sum(name, **labels)

    def refused(self) -> dict[str, float]:
        """By reason, those that there were."""
        name = "embertide_front_refused_total"
        reasons = self._before.labels(name, "reason")
        grown = {reason: self._grown(name, reason=reason) for reason in reasons}
        return {reason: count for reason, count in grown.items() if count}

    def ended(self, code: str) -> float:
        return self._grown("embertide_front_calls_total", method="ModelInfer", code=code)


def is_idle(server: triton.TritonServer) -> bool:
    now = page_of(server)
    return now.sum("embertide_front_inferences") == now.sum("embertide_front_bytes") == 0


def code_of(channel: Any, message: bytes, name: str = "", **more: Any) -> tuple[str, str]:
    """The code of a call, and what it says."""
    try:
        channel.unary_unary(INFER)(message, timeout=20, metadata=of(name), **more)
    except grpc.RpcError as error:
        return str(error.code().name), str(error.details())
    return "OK", ""


class Held(contextlib.ExitStack):
    """Calls, alone at work, that are under way until the block ends: their message has not come."""

    def __init__(self, server: triton.TritonServer, channel: Any) -> None:
        super().__init__()
        self._server, self._channel = server, channel

    def begin(self, names: Sequence[str]) -> None:
        # A call has its answer a moment before it is at work no more.
        wait_until(lambda: is_idle(self._server))
        for name in names:
            messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            call = self._channel.stream_unary(INFER).future(
                iter(messages.get, b""), timeout=20, metadata=of(name)
            )
            self.callback(call.cancel)
            self.callback(messages.put, b"")
        all_come = len(names)
        wait_until(lambda: page_of(self._server).sum("embertide_front_inferences") == all_come)


def test_one_callers_calls_leave_room_for_the_others(
    server: triton.TritonServer, channel: Any
) -> None:
    wait_until(lambda: is_idle(server))
    counted = Counted(server)
    # By name; those without one are of one address.
    for first, second in (("ada", "bob"), ("", "ada"), ("eve", "")):
        with Held(server, channel) as held:
            held.begin([first] * CALLS_OF_ONE)
            code, why = code_of(channel, question(), first)
            assert (code, why.split(";")[0]) == (
                "RESOURCE_EXHAUSTED",
                f"{CALLS_OF_ONE} requests of this caller are at work",
            )
            assert code_of(channel, question(), second) == ("OK", "")
        wait_until(lambda: is_idle(server))
        assert code_of(channel, question(), first) == ("OK", "")
    assert counted.refused().pop("caller_calls") == 3
    wait_until(lambda: counted.ended("RESOURCE_EXHAUSTED") == 3)


def test_all_callers_calls_have_a_bound(server: triton.TritonServer, channel: Any) -> None:
    wait_until(lambda: is_idle(server))
    counted = Counted(server)
    with Held(server, channel) as held:
        held.begin(["ada", "ada", "bob", "bob"])
        code, why = code_of(channel, question(), "eve")
        assert (code, why) == ("RESOURCE_EXHAUSTED", "4 requests are at work; ask again later")
        assert counted.refused() == {"calls": 1}
    wait_until(lambda: is_idle(server))
    assert code_of(channel, question(), "eve") == ("OK", "")


def large(nbytes: int) -> bytes:
    return question(MODEL, np.zeros((1, nbytes // 8), np.int64))


def test_one_callers_bytes_leave_room_for_the_others(
    server: triton.TritonServer, channel: Any
) -> None:
    wait_until(lambda: is_idle(server))
    counted = Counted(server)
    code, why = code_of(channel, large(BYTES_OF_ONE), "ada")
    assert (code, why.split(";")[0]) == (
        "RESOURCE_EXHAUSTED",
        f"requests of this caller would take more than {BYTES_OF_ONE} bytes",
    )
    assert counted.refused() == {"caller_bytes": 1}
    # All calls of a caller count; that of another one is his own.
    waiting = channel.unary_unary(INFER).future(large(600_000), timeout=20, metadata=of("ada"))
    wait_until(lambda: page_of(server).sum("embertide_front_bytes") >= 600_000)
    assert code_of(channel, large(300_000), "ada")[0] == "RESOURCE_EXHAUSTED"
    assert counted.refused() == {"caller_bytes": 2}
    assert code_of(channel, large(300_000), "bob")[0] == "INVALID_ARGUMENT"  # the model's answer
    assert counted.refused() == {"caller_bytes": 2}
    assert waiting.exception().code() is grpc.StatusCode.INVALID_ARGUMENT
    wait_until(lambda: is_idle(server))


def test_all_callers_bytes_have_a_bound(server: triton.TritonServer, channel: Any) -> None:
    wait_until(lambda: is_idle(server))
    counted = Counted(server)
    waiting = channel.unary_unary(INFER).future(large(600_000), timeout=20, metadata=of("ada"))
    wait_until(lambda: page_of(server).sum("embertide_front_bytes") >= 600_000)
    code, why = code_of(channel, large(600_000), "bob")
    assert (code, why.split(";")[0]) == (
        "RESOURCE_EXHAUSTED",
        f"requests at work would take more than {BYTES} bytes",
    )
    assert counted.refused() == {"bytes": 1}
    assert waiting.exception().code() is grpc.StatusCode.INVALID_ARGUMENT
    wait_until(lambda: is_idle(server))
    assert code_of(channel, question(), "bob") == ("OK", "")


def test_a_message_that_may_not_be_read_is_counted(
    server: triton.TritonServer, channel: Any
) -> None:
    counted = Counted(server)
    assert code_of(channel, large(MESSAGE_BYTES))[0] == "RESOURCE_EXHAUSTED"
    assert counted.refused() == {"message": 1}
    packed = code_of(channel, question(), compression=grpc.Compression.Gzip)
    assert packed[0] == "UNIMPLEMENTED"
    wait_until(lambda: counted.refused() == {"message": 2})
    with pytest.raises(grpc.RpcError):
        channel.stream_unary(INFER)(iter(()), timeout=10)  # ends without one
    wait_until(lambda: counted.refused() == {"message": 3})


def test_a_deadline_that_passes_before_any_work_is_counted(server: triton.TritonServer) -> None:
    counted = Counted(server)
    with socket.create_connection(("127.0.0.1", server.options.grpc_port)) as talk:
        # By hand: a client of gRPC would tell the server itself that it waits no longer.
        talk.sendall(begun() + call_headers(1, INFER.encode(), header(b"grpc-timeout", b"50m")))
        wait_until(lambda: counted.refused() == {"expired": 1})
    wait_until(lambda: counted.ended("DEADLINE_EXCEEDED") == 1)


@pytest.mark.long
def test_a_message_that_does_not_come_is_waited_for_so_long(server: triton.TritonServer) -> None:
    counted = Counted(server)
    with socket.create_connection(("127.0.0.1", server.options.grpc_port)) as talk:
        talk.sendall(begun() + call_headers(1, INFER.encode()))
        wait_until(lambda: counted.refused() == {"late": 1}, 15)
    wait_until(lambda: is_idle(server))


def test_calls_other_than_inferences_have_bounds_of_their_own(
    server: triton.TritonServer, channel: Any
) -> None:
    wait_until(lambda: is_idle(server))
    counted = Counted(server)
    path = "/inference.GRPCInferenceService/ServerReady"
    ready = service_pb2.ServerReadyRequest().SerializeToString()

    def ask(name: str) -> str:
        try:
            channel.unary_unary(path)(ready, timeout=10, metadata=of(name))
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    calls = []

    def hold(name: str, count: int) -> None:
        for _ in range(count):
            waits = iter(messages.get, b"")
            calls.append(channel.stream_unary(path).future(waits, timeout=20, metadata=of(name)))

    try:
        hold("ada", 16)
        wait_until(lambda: ask("ada") == "RESOURCE_EXHAUSTED")
        assert set(counted.refused()) == {"caller_looks"}
        assert ask("bob") == "OK"
        hold("bob", 16)
        wait_until(lambda: ask("eve") == "RESOURCE_EXHAUSTED")
        assert counted.refused()["looks"] >= 1
        assert code_of(channel, question(), "ada") == ("OK", "")
    finally:
        for call in calls:
            call.cancel()
            messages.put(b"")
    wait_until(lambda: ask("ada") == "OK")
