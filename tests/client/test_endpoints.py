"""Several endpoints, of which one ends, stands still, or comes back; and what servers see of it."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from kserve_node import Node
from proxy import unused_proxy
from waiting import wait_until

from embertide._common import kserve
from embertide.client import (
    AsyncClient,
    Client,
    DeadlineError,
    RefusedError,
    UnavailableError,
    VersionGoneError,
)

# The words of tritonserver 2.51 while it ends, and for a name that it never had.
ENDING = (
    grpc.StatusCode.NOT_FOUND,
    "Request for unknown model: 'm' has no available versions",
)
UNKNOWN = (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'm' is not found")
STOPPING = (grpc.StatusCode.UNAVAILABLE, "Server is stopping, scheduler for model has stopped")
GONE = (grpc.StatusCode.NOT_FOUND, "version 5 is not held; this node holds 7 to 9")


class Threads:
    """A client that asks once at a time, whichever of the two it is."""

    def __init__(self, *endpoints: str, **settings: Any) -> None:
        self._client = Client(endpoints, **settings)

    def rank(self, keys: Any = (1, 2), **call: Any) -> Any:
        return self._client.rank("m", {"user": keys}, **call)

    def counters(self) -> dict[str, int]:
        return self._client.counters()

    def close(self) -> None:
        self._client.close()


class Tasks(Threads):
    def __init__(self, *endpoints: str, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        self._asyncio = AsyncClient(endpoints, **settings)

    def rank(self, keys: Any = (1, 2), **call: Any) -> Any:
        return self._runner.run(self._asyncio.rank("m", {"user": keys}, **call))

    def counters(self) -> dict[str, int]:
        return self._asyncio.counters()

    def close(self) -> None:
        self._runner.run(self._asyncio.close())
        self._runner.close()


Open = Callable[..., Threads]


@pytest.fixture(params=[Threads, Tasks])
def open_client(request: pytest.FixtureRequest) -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def make(*endpoints: str, **settings: Any) -> Threads:
            client: Threads = request.param(*endpoints, **settings)
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made = [Node(), Node(), Node()]
    yield made
    for node in made:
        node.answers.set()
        node.works.set()
        node.stop()


def urls(nodes: list[Node]) -> list[str]:
    return [node.url for node in nodes]


@pytest.mark.parametrize("says", [ENDING, STOPPING, UNKNOWN], ids=lambda says: says[0].name)
def test_a_node_that_ends_fails_no_call_and_is_asked_again_when_it_is_back(
    open_client: Open, nodes: list[Node], says: Any
) -> None:
    client = open_client(*urls(nodes))
    assert client.rank().nodes == (nodes[0].url,)
    nodes[0].always = says
    assert [client.rank().nodes for _ in range(20)] == [(nodes[1].url,)] * 20
    assert client.counters()["endpoints_left"] == 1
    asked = len(nodes[0].deadlines)
    assert asked < 6, "one call and a question now and then, not one a call"
    nodes[0].always = None
    began = time.monotonic()
    wait_until(lambda: client.rank().nodes == (nodes[0].url,), every_s=0.01)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("absent", [None, UNKNOWN], ids=["2.51", "2.72"])
def test_an_endpoint_is_used_once_it_has_the_model(
    open_client: Open, nodes: list[Node], absent: Any
) -> None:
    """For a model that it does not have, 2.51 says that it is not ready, 2.72 an error (twins)."""
    first = nodes[0]
    client = open_client(*urls(nodes))
    client.rank()
    first.ready, first.absent = False, absent
    first.fails.extend([UNKNOWN] * 100)
    end_s = time.monotonic() + 0.5
    while time.monotonic() < end_s:
        assert client.rank().nodes == (nodes[1].url,)
    assert len(first.seen) == 2, "the call that found it without the model was the last one"
    first.fails.clear()
    first.ready, first.absent = True, None
    wait_until(lambda: client.rank().nodes == (first.url,), every_s=0.01)


def test_a_model_that_no_endpoint_has_is_refused_after_one_question_each(
    open_client: Open, nodes: list[Node]
) -> None:
    for node in nodes:
        node.always = UNKNOWN
    client = open_client(*urls(nodes))
    with pytest.raises(RefusedError, match="unknown model"):
        client.rank()
    assert client.counters()["requests"] == 3


def test_a_model_that_was_there_is_waited_for(open_client: Open, nodes: list[Node]) -> None:
    """As where all endpoints end at once, or the only one does."""
    client = open_client(nodes[0].url)
    client.rank()
    nodes[0].fails.extend([ENDING] * 2)
    assert client.rank().nodes == (nodes[0].url,)
    nodes[0].fails.extend([ENDING] * 9)  # more than tries: nobody has worked at it
    assert client.rank().nodes == (nodes[0].url,)
    nodes[0].always = ENDING
    with pytest.raises(UnavailableError, match=r"has no available versions \(tried .* in 0.3 s"):
        client.rank(timeout_s=0.3)


def test_a_version_that_is_named_is_asked_for_everywhere(
    open_client: Open, nodes: list[Node]
) -> None:
    client = open_client(*urls(nodes))
    nodes[0].fails.append(GONE)
    assert client.rank(version=5).nodes == (nodes[1].url,)
    for node in nodes:
        node.fails.append(GONE)
    with pytest.raises(VersionGoneError, match="7 to 9"):
        client.rank(version=5)
    assert client.rank().nodes == (nodes[0].url,), "to lack a version is no illness"


def test_a_node_that_stands_still_costs_a_part_of_one_call(
    open_client: Open, nodes: list[Node]
) -> None:
    client = open_client(*urls(nodes), timeout_s=1.2)  # 0.3 s for each of three, and one more
    client.rank()
    nodes[0].answers.clear()
    took_s = []
    for _ in range(30):
        began = time.monotonic()
        assert client.rank().nodes == (nodes[1].url,)
        took_s.append(time.monotonic() - began)
    assert took_s[0] > 0.25
    assert np.median(took_s[1:]) < 0.25
    assert client.counters()["asked_another_too"] <= 3, "it is not asked first again"
    # The request that it did not answer is answered when it goes on: it is well.
    nodes[0].answers.set()
    wait_until(lambda: client.rank().nodes == (nodes[0].url,), every_s=0.01)
    assert nodes[0].cancelled == 0
    assert nodes[0].deadlines == [None] * len(nodes[0].deadlines)


def test_calls_that_a_node_holds_while_it_refuses_others_go_to_the_next_one(
    nodes: list[Node],
) -> None:
    """As one does that ends: to say something all the time is not to be at work."""
    held: list[tuple[Any, float]] = []
    with Client(urls(nodes[:2]), timeout_s=3) as client:  # patience of a second
        client.rank("m", {"user": [1]})
        nodes[0].works.clear()

        def ask() -> None:
            began = time.monotonic()
            answered = client.rank("m", {"user": [1]})
            held.append((answered.nodes, time.monotonic() - began))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(nodes[0].seen) == 4, every_s=0.001)
        nodes[0].always = ENDING
        while any(thread.is_alive() for thread in threads):
            assert client.rank("m", {"user": [1]}).nodes == (nodes[1].url,)
        nodes[0].works.set()
    assert [each for each, _ in held] == [(nodes[1].url,)] * 3
    assert max(took_s for _, took_s in held) < 2.5


def test_an_answer_that_comes_after_another_was_asked_is_taken(
    open_client: Open, nodes: list[Node]
) -> None:
    client = open_client(nodes[0].url, nodes[1].url, timeout_s=3, try_s=0.1)
    client.rank()
    nodes[0].slow_s, nodes[1].slow_s = 0.3, 2.5
    began = time.monotonic()
    assert client.rank().nodes == (nodes[0].url,)
    assert time.monotonic() - began < 1
    assert len(nodes[1].metadata) == 1


def test_a_busy_node_that_answers_others_is_waited_for(nodes: list[Node]) -> None:
    """Were it not, a fleet that is slow would get each request several times."""
    with Client(urls(nodes[:2]), timeout_s=0.9) as client:  # patience of 0.3 s
        client.rank("m", {"user": [1]})
        nodes[0].slow_s = 0.5
        answers: list[Any] = []

        def ask() -> None:
            answers.append(client.rank("m", {"user": [1]}))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
            time.sleep(0.07)
        for thread in threads:
            thread.join()
        asked_both = client.counters().get("asked_another_too", 0)
    assert len(answers) == 8
    # The first ones come before anybody was answered.
    assert asked_both <= 5


def test_an_endpoint_is_used_again_within_two_seconds_of_its_return(nodes: list[Node]) -> None:
    """Its port was closed so long that gRPC's own pauses would be longer."""
    first = Node()
    client = Threads(first.url, nodes[1].url)
    client.rank()
    port = int(first.url.rpartition(":")[2])
    first.stop()
    ended = time.monotonic() + 6
    while time.monotonic() < ended:
        assert client.rank().nodes == (nodes[1].url,)
        time.sleep(0.02)
    back = Node(port)
    try:
        began = time.monotonic()
        wait_until(lambda: client.rank().nodes == (back.url,), every_s=0.01)
        assert time.monotonic() - began < 2
    finally:
        client.close()
        back.stop()


def test_no_call_has_a_deadline_of_grpc_or_is_cancelled(
    open_client: Open, nodes: list[Node]
) -> None:
    node = nodes[0]
    client = open_client(node.url)
    client.rank()
    node.slow_s = 0.05
    for _ in range(20):
        with pytest.raises(DeadlineError):
            client.rank(timeout_s=0.02)
    sent = client.counters()["requests"] - 1  # but for the question for the schema
    assert sent > 5
    wait_until(lambda: len(node.seen) == sent, every_s=0.01)
    wait_until(lambda: client.counters()["unheard"] == 0, every_s=0.01)
    assert node.cancelled == 0
    assert node.deadlines == [None] * len(node.deadlines)
    # The node is told how long the caller waits, and may drop what is late.
    told = [request.parameters["timeout"].int64_param for request in node.seen]
    assert 1.5e6 < told[0] <= 2e6
    assert all(0 < each <= 20_000 for each in told[1:])


def test_a_task_that_is_cancelled_cancels_no_call(nodes: list[Node]) -> None:
    node = nodes[0]

    async def run() -> None:
        async with AsyncClient(node.url, timeout_s=5) as client:
            await client.rank("m", {"user": [1]})
            node.slow_s = 0.2
            for _ in range(10):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.rank("m", {"user": [1]}), 0.02)
            tasks = [asyncio.create_task(client.rank("m", {"user": [1]})) for _ in range(10)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            assert client.counters()["unheard"] > 0

    asyncio.run(run())
    wait_until(lambda: len(node.ended) == 21, every_s=0.01)
    assert node.cancelled == 0


def test_calls_that_nobody_waits_for_are_bounded(
    open_client: Open, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kserve, "MAX_UNHEARD", 5)
    client = open_client(nodes[0].url, tries=1)
    client.rank()
    nodes[0].answers.clear()
    while client.counters()["unheard"] < 5:
        with pytest.raises(DeadlineError):
            client.rank(timeout_s=0.02)
    with pytest.raises(UnavailableError, match="5 calls that nobody waits for"):
        client.rank()
    assert client.counters()["unheard"] == 5
    nodes[0].answers.set()
    wait_until(lambda: client.counters()["unheard"] == 0, every_s=0.01)
    client.rank()


def test_no_proxy_is_told_a_token(
    open_client: Open, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    with unused_proxy(monkeypatch):
        assert open_client(nodes[0].url, token="secret").rank().nodes == (nodes[0].url,)


@pytest.mark.parametrize(
    "endpoint",
    ["localhost.evil.example:8001", "127.evil.example:8001", "unix:x,10.0.0.1:1", "10.0.0.1:1"],
)
def test_a_token_goes_in_plain_text_to_this_machine_alone(endpoint: str) -> None:
    with pytest.raises(ValueError, match="in plain text"):
        Client(endpoint, token="secret")


def test_a_machine_that_takes_no_more_bytes_is_given_up_after_ten_seconds(
    nodes: list[Node],
) -> None:
    """Else the kernel sends to one without power for a quarter of an hour; it is not tried here."""
    port = int(nodes[0].url.rpartition(":")[2])
    with Client(nodes[0].url) as client:
        client.rank("m", {"user": [1]})
        found = []
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # not connected, or closed meanwhile
                if not str(path.readlink()).startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(path.name))) as each:
                    if each.getpeername()[1:2] == (port,):
                        found.append(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    assert found == [10_000]


def test_what_came_while_the_process_stood_still_is_taken(nodes: list[Node]) -> None:
    """A task that holds the loop beyond the call's time; the answer is there by then."""

    async def run() -> Any:
        async with AsyncClient(nodes[0].url, timeout_s=0.5) as client:
            await client.rank("m", {"user": [1]})
            nodes[0].slow_s = 0.1
            asking = asyncio.create_task(client.rank("m", {"user": [1]}))
            while len(nodes[0].metadata) < 2:  # the node has it
                await asyncio.sleep(0.001)
            time.sleep(0.7)
            return await asking

    assert asyncio.run(run()).nodes == (nodes[0].url,)
