"""A gRPC server to which the system refuses threads."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from waiting import wait_until

from embertide.server.services.call_pool import CallPool, NoThreadError

SOON_S = 15.0


class Answering(grpc.GenericRpcHandler):
    """Answers any call; `hold` keeps each until it is set."""

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.hold.set()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.hold.wait(SOON_S)
            return b"answer"

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """A limit of threads that refuses those of the pool, while it is on."""
    on = False
    start = threading.Thread.start

    def start_or_refuse(thread: threading.Thread) -> None:
        if on and thread.name.startswith("pool"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def switch(to: bool) -> None:
        nonlocal on
        on = to

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    yield switch
    switch(False)


class Server:
    def __init__(self) -> None:
        self.pool, self.handler = CallPool(8, "pool"), Answering()
        self.server = grpc.server(self.pool, handlers=[self.handler])
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def begin(self) -> Any:
        call: Any = self.channel.unary_unary("/a.Service/Call")
        return call.future(b"", timeout=SOON_S)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.handler.hold.set()
    found.channel.close()
    found.server.stop(None).wait()


def test_a_call_without_a_thread_waits_for_the_next_that_gets_one(
    server: Server, limit: Callable[[bool], None]
) -> None:
    """Before, gRPC's own loop ended, and nobody was answered again."""
    limit(True)
    waits = server.begin()
    wait_until(lambda: bool(server.pool._why))
    with pytest.raises(NoThreadError, match="raise the limit of threads"):
        server.pool.tend()
    assert not waits.done()
    limit(False)
    assert server.begin().result() == b"answer"
    assert waits.result() == b"answer"
    server.pool.tend()


def test_threads_that_are_there_answer_for_those_that_are_not(
    server: Server, limit: Callable[[bool], None]
) -> None:
    assert server.begin().result() == b"answer"
    limit(True)
    server.handler.hold.clear()
    calls = [server.begin() for _ in range(3)]
    wait_until(lambda: bool(server.pool._why))
    server.handler.hold.set()
    assert [call.result() for call in calls] == [b"answer"] * 3


def test_the_owner_starts_a_thread_for_what_waits(
    server: Server, limit: Callable[[bool], None]
) -> None:
    limit(True)
    waits = server.begin()
    wait_until(lambda: bool(server.pool._why))
    limit(False)
    server.pool.tend()
    assert waits.result() == b"answer"


def test_a_pool_that_ended_takes_no_call() -> None:
    pool = CallPool(1, "pool")
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(bool)
