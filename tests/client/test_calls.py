"""Repeats, endpoints, deadlines and versions, against a KServe server that fails on order.

tests/e2e/test_client.py asks a real Triton.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from kserve_node import SCHEMA, Node

from embertide.client import (
    AsyncClient,
    Client,
    ClientError,
    DeadlineError,
    DegradedError,
    InputError,
    RefusedError,
    UnavailableError,
    VersionGoneError,
)

UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "the queue is full")
DEGRADED = (
    grpc.StatusCode.UNAVAILABLE,
    "no owner answers for 13 of 26 keys (13 dead), more than max_degraded_share = 0.05 allows",
)
BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests")
BAD = (grpc.StatusCode.INVALID_ARGUMENT, "KEYS has three columns")
GONE = (grpc.StatusCode.NOT_FOUND, "version 5 is not held; versions 7 to 9 are")


class Moving(Node):
    """One whose first version leaves as soon as it has answered by it."""

    def ModelInfer(self, request: Any, context: Any) -> Any:
        pinned = "version" in request.parameters
        asked = request.parameters["version"].int64_param if pinned else self.version
        if self.version == 5 and pinned:
            self.version = 6
        if asked != self.version:
            context.abort(*GONE)
        return super().ModelInfer(request, context)


@pytest.fixture
def node() -> Iterator[Node]:
    running = Node()
    yield running
    running.stop()


@pytest.fixture
def other() -> Iterator[Node]:
    running = Node()
    yield running
    running.stop()


Ask = Callable[..., tuple[Any, dict[str, int]]]


def by_threads(endpoints: Any, keys: Any, call: dict[str, Any], settings: dict[str, Any]) -> Any:
    with Client(endpoints, **settings) as client:
        try:
            return client.rank("m", {"user": keys}, **call), client.counters()
        except ClientError as error:
            error.counters = client.counters()  # type: ignore[attr-defined]
            raise


def by_asyncio(endpoints: Any, keys: Any, call: dict[str, Any], settings: dict[str, Any]) -> Any:
    async def run() -> Any:
        async with AsyncClient(endpoints, **settings) as client:
            try:
                return await client.rank("m", {"user": keys}, **call), client.counters()
            except ClientError as error:
                error.counters = client.counters()  # type: ignore[attr-defined]
                raise

    return asyncio.run(run())


@pytest.fixture(params=[by_threads, by_asyncio], ids=["threads", "asyncio"])
def ask(request: pytest.FixtureRequest) -> Ask:
    def run(endpoints: Any, keys: Any = (1, 2), settings: Any = None, **call: Any) -> Any:
        return request.param(endpoints, keys, call, settings or {})

    return run


def test_what_may_help_is_tried_again(ask: Ask, node: Node) -> None:
    node.fails.extend([UNAVAILABLE, BUSY])
    ranked, counters = ask(node.url)
    assert ranked.scores.tolist() == [1, 2]
    assert (ranked.version, ranked.watermark_ms, ranked.tries) == (5, 77, 4)  # schema included
    assert (ranked.degraded, ranked.sources, ranked.nodes) == (None, None, (node.url,))
    assert counters["failed_unavailable"] == 1
    assert counters["failed_resource_exhausted"] == 1


def test_what_cannot_help_is_not(ask: Ask, node: Node) -> None:
    node.fails.append(BAD)
    with pytest.raises(RefusedError, match=f"model 'm' at {node.url}: .*KEYS has three columns"):
        ask(node.url)
    assert len(node.seen) == 1


def test_tries_are_bounded_and_the_failure_says_how_many(ask: Ask, node: Node) -> None:
    node.fails.extend([UNAVAILABLE] * 9)
    with pytest.raises(UnavailableError, match=r"the queue is full.*tried 3 times") as failure:
        ask(node.url, settings={"tries": 3})
    assert failure.value.tries == 3
    assert len(node.seen) == 3
    assert failure.value.counters["given_up"] == 1  # type: ignore[attr-defined]


def test_too_many_degraded_keys_are_an_error_of_their_own(ask: Ask, node: Node) -> None:
    node.fails.extend([DEGRADED] * 9)
    with pytest.raises(DegradedError, match="13 of 26 keys"):
        ask(node.url, settings={"tries": 2})


def test_a_degraded_answer_says_how_many_keys(ask: Ask, node: Node) -> None:
    node.degraded_keys = 1
    ranked, counters = ask(node.url, (1, 2, 3))
    assert (ranked.degraded.keys, ranked.degraded.of) == (2, 3)  # of two requests
    assert counters["degraded_keys"] == 2


def test_the_next_endpoint_is_asked_and_kept(ask: Ask, node: Node, other: Node) -> None:
    node.fails.append(UNAVAILABLE)
    ranked, counters = ask([node.url, other.url], list(range(10)))
    assert ranked.nodes == (other.url,)
    assert counters["endpoints_left"] == 1
    assert len(node.seen) == 1
    absent = "127.0.0.1:1"
    ranked, _ = ask([absent, other.url])
    assert ranked.nodes == (other.url,)


def test_the_deadline_holds_for_the_whole_call(ask: Ask, node: Node) -> None:
    node.slow_s = 0.5
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"the call's 0.2 s are over"):
        ask(node.url, timeout_s=0.2)
    node.slow_s = 0
    node.fails.extend([UNAVAILABLE] * 99)
    with pytest.raises(UnavailableError):
        ask(node.url, settings={"tries": 99, "wait_s": 0.05}, timeout_s=0.3)
    assert time.monotonic() - began < 2


def test_a_wait_that_outlasts_the_deadline_does_not_hide_the_failure(
    ask: Ask, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.fails.extend([UNAVAILABLE] * 99)
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    with pytest.raises(UnavailableError, match=r"the queue is full \(tried \d times in 0.2 s\)"):
        ask(node.url, settings={"tries": 99, "wait_s": 0.05}, timeout_s=0.2)


def test_a_slow_endpoint_is_left_before_the_deadline(ask: Ask, node: Node, other: Node) -> None:
    node.slow_s = 1.0
    ranked, counters = ask([node.url, other.url], settings={"try_s": 0.2}, timeout_s=5)
    assert ranked.nodes == (other.url,)
    assert counters["asked_another_too"] == 1


def test_large_inputs_are_cut_and_answered_by_one_version(ask: Ask, node: Node) -> None:
    ranked, _ = ask(node.url, list(range(101)))
    assert ranked.scores.tolist() == list(range(101))
    assert ranked.requests == len(node.seen) == 51
    asked = [dict(request.parameters) for request in node.seen]
    assert sum("version" in each for each in asked) == 50
    assert all(each["version"].int64_param == 5 for each in asked if "version" in each)


def test_the_heads_that_are_wanted_are_asked_for(ask: Ask, node: Node) -> None:
    node.told = {**SCHEMA, "heads": ["click", "buy"]}
    wanted = {"click": [1, 2, 3], "buy": [2, 4, 6]}
    for heads in (None, ["click", "buy"], ("buy",), "buy", ["buy", "click"]):
        node.seen.clear()
        ranked, _ = ask(node.url, (1, 2, 3), heads=heads)  # two requests
        names = ["click", "buy"] if heads is None else ["buy"] if heads == "buy" else list(heads)
        assert list(ranked.heads) == names
        assert {name: each.tolist() for name, each in ranked.heads.items()} == {
            name: wanted[name] for name in names
        }
        assert ranked.scores is ranked.heads[names[0]]
        outputs = ["SCORE" if name == "click" else "SCORE_buy" for name in names]
        assert [[each.name for each in seen.outputs] for seen in node.seen] == [outputs] * 2
    node.seen.clear()
    for wrong, message in (("sell", "head 'sell' is unknown"), ([], "no head is named")):
        with pytest.raises(InputError, match=f"{message}; model 'm' has click, buy"):
            ask(node.url, heads=wrong)
    assert not node.seen


def test_a_call_whose_version_left_is_started_over_once(ask: Ask) -> None:
    moved = Moving()
    try:
        ranked, counters = ask(moved.url, list(range(6)))
        assert ranked.scores.tolist() == list(range(6))
        assert ranked.version == 6
        assert counters["started_over"] == 1
    finally:
        moved.stop()


def test_a_version_that_is_asked_for_is_not_replaced(ask: Ask, node: Node) -> None:
    node.fails.append(GONE)
    with pytest.raises(VersionGoneError, match="versions 7 to 9"):
        ask(node.url, version=5)
    assert len(node.seen) == 1


def test_a_token_is_sent_and_never_in_plain_text_to_others(ask: Ask, node: Node) -> None:
    tokens = iter("abcd")
    node.fails.append(UNAVAILABLE)
    ask(node.url, settings={"token": lambda: next(tokens)})
    # "a" went with the question for the schema.
    assert [each["authorization"] for each in node.metadata] == ["Bearer b", "Bearer c"]
    with pytest.raises(ValueError, match=r"would travel to 10\.0\.0\.1:8001"):
        Client("10.0.0.1:8001", token="secret")


def test_bad_input_is_refused_before_anything_is_sent(ask: Ask, node: Node) -> None:
    with pytest.raises(InputError, match="feature 'user', row 1: 'x' is no integer"):
        ask(node.url, [1, "x"])
    assert not node.seen


def test_a_model_that_tells_no_schema_can_be_given_one(ask: Ask, node: Node) -> None:
    node.told = {}
    with pytest.raises(ClientError, match="does not tell its features"):
        ask(node.url)
    ranked, _ = ask(node.url, settings={"schemas": {"m": SCHEMA}})
    assert ranked.scores.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("endpoints", "settings", "says"),
    [
        ([], {}, "there is no endpoint"),
        ("http://a:1", {}, "is not host:port"),
        ("a:1", {"tries": 0}, "tries is 0"),
        ("a:1", {"try_s": -1}, "try_s is -1"),
    ],
)
def test_settings_that_cannot_be_called_with_are_refused(
    endpoints: Any, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Client(endpoints, **settings)
