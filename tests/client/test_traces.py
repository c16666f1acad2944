"""The trace of a call: on the wire, in answers and errors, and as spans of OpenTelemetry."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from exported_spans import exported_spans
from kserve_node import Node
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from embertide.client import AsyncClient, Client, InputError, RefusedError

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GIVEN = f"00-{TRACE}-00f067aa0ba902b7-01"
UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "the queue is full")
BAD = (grpc.StatusCode.INVALID_ARGUMENT, "KEYS has three columns")

Ask = Callable[..., Any]


def by_threads(url: str, keys: Any, call: dict[str, Any], settings: dict[str, Any]) -> Any:
    with Client(url, **settings) as client:
        return client.rank("m", {"user": keys}, **call)


def by_asyncio(url: str, keys: Any, call: dict[str, Any], settings: dict[str, Any]) -> Any:
    async def run() -> Any:
        async with AsyncClient(url, **settings) as client:
            return await client.rank("m", {"user": keys}, **call)

    return asyncio.run(run())


@pytest.fixture(params=[by_threads, by_asyncio], ids=["threads", "asyncio"])
def ask(request: pytest.FixtureRequest, node: Node) -> Ask:
    def run(keys: Any = (1, 2), how: str | None = None, **call: Any) -> Any:
        return request.param(node.url, keys, call, {} if how is None else {"trace": how})

    return run


@pytest.fixture
def node() -> Iterator[Node]:
    running = Node()
    yield running
    running.stop()


@pytest.fixture
def spans() -> InMemorySpanExporter:
    exporter = exported_spans()
    exporter.clear()
    return exporter


def sent(node: Node) -> list[str | None]:
    return [each.get("traceparent") for each in node.metadata]


def ended(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    found = {each.name: each for each in spans.get_finished_spans()}
    spans.clear()
    return found


def context_of(span: ReadableSpan | None) -> trace.SpanContext:
    found = None if span is None else span.get_span_context()
    assert found is not None
    return found


def on_the_wire(context: trace.SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def test_a_callers_traceparent_goes_with_every_request_of_the_call(ask: Ask, node: Node) -> None:
    node.fails.append(UNAVAILABLE)
    ranked = ask(range(5), traceparent=GIVEN)
    assert ranked.requests == 3  # of two samples each
    assert sent(node) == [GIVEN] * 4
    assert ranked.trace == TRACE


def test_without_one_there_is_none_unless_it_is_asked_for(ask: Ask, node: Node) -> None:
    assert ask().trace is None
    assert sent(node) == [None]
    first, second = ask(how="always"), ask(how="always")
    assert first.trace != second.trace
    assert sent(node)[1:] == [
        f"00-{each.trace}-{str(made)[36:52]}-00"
        for each, made in zip((first, second), sent(node)[1:], strict=True)
    ]
    assert ask(how="always", traceparent=GIVEN).trace == TRACE


def test_an_error_names_the_trace_of_its_requests(ask: Ask, node: Node) -> None:
    node.fails.append(BAD)
    with pytest.raises(RefusedError) as caught:
        ask(traceparent=GIVEN)
    assert caught.value.trace == TRACE


@pytest.mark.parametrize(
    "odd", ["", TRACE, f"{GIVEN}-00", GIVEN.upper(), f"00-{'0' * 32}{GIVEN[35:]}"]
)
def test_what_is_no_traceparent_is_refused(ask: Ask, node: Node, odd: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"traceparent is {odd!r}; give VERSION-TRACE")):
        ask(traceparent=odd)
    assert not node.seen


def test_an_unknown_way_is_refused(ask: Ask) -> None:
    with pytest.raises(ValueError, match="trace is 'never'; give 'given', 'always', 'spans'"):
        ask(how="never")


def test_the_active_span_goes_on(ask: Ask, node: Node, spans: InMemorySpanExporter) -> None:
    with trace.get_tracer("test").start_as_current_span("of the caller"):
        ranked = ask()
    span = context_of(ended(spans)["of the caller"])
    assert sent(node) == [on_the_wire(span)]
    assert ranked.trace == f"{span.trace_id:032x}"


def test_a_call_is_a_span_below_the_active_one(
    ask: Ask, node: Node, spans: InMemorySpanExporter
) -> None:
    with trace.get_tracer("test").start_as_current_span("of the caller"):
        ask(how="spans")
    found = ended(spans)
    span = found["embertide.rank"]
    assert span.parent == context_of(found["of the caller"])
    assert span.kind is trace.SpanKind.CLIENT
    assert span.attributes == {"embertide.model": "m"}
    assert span.status.is_unset
    assert sent(node) == [on_the_wire(context_of(span))]

    node.fails.append(BAD)
    with pytest.raises(RefusedError) as caught:
        ask(how="spans", traceparent=GIVEN)
    failed = ended(spans)["embertide.rank"]
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert "KEYS has three columns" in str(failed.status.description)
    assert failed.parent is not None
    assert f"{failed.parent.trace_id:032x}" == TRACE
    assert caught.value.trace == TRACE


def test_without_its_package_spans_name_the_extra_and_all_else_works(node: Node) -> None:
    code = f"""
import sys

class LeftOut:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, LeftOut())
from embertide.client import Client
with Client({node.url!r}, trace="always") as client:
    print(client.rank("m", {{"user": [1]}}).trace)
with Client({node.url!r}, trace="spans") as client:
    client.rank("m", {{"user": [1]}})
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert re.fullmatch("[0-9a-f]{32}\n", done.stdout)
    assert "needs opentelemetry: pip install 'embertide[otel]'" in done.stderr
