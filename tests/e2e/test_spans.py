"""Spans of OpenTelemetry that our front end sends to a collector, over gRPC."""

import contextlib
import dataclasses
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from serving import Client, beside
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException
from waiting import wait_until

from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports
from embertide.server.cli.metrics_page import MetricsPage

KEYS = [[7, 3, 14, 101], [0, 1, 21, 102]]
EVERY = 100
STAGES = {f"embertide.stage.{each}_us" for each in ("lookup", "net", "parse", "peers", "queue")} | {
    "embertide.stage.send_us"
}


def said(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans as OTLP over gRPC, parsed by OpenTelemetry's own package."""

    def __init__(self) -> None:
        self.port = free_ports(1)[0]
        self.requests: list[Any] = []
        self._server: Any = None

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def start(self) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        register(self, self._server)
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    def spans(self) -> list[trace_pb2.Span]:
        return [
            span
            for request in [*self.requests]
            for of in request.resource_spans
            for scope in of.scope_spans
            for span in scope.spans
        ]

    def of(self, trace: str) -> list[trace_pb2.Span]:
        return [span for span in self.spans() if span.trace_id.hex() == trace]

    def one(self, trace: str) -> trace_pb2.Span:
        """Wait for the span of a trace that has one."""
        wait_until(lambda: bool(self.of(trace)))
        (span,) = self.of(trace)
        return span


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def server(
    server_options: triton.ServerOptions,
    snapshot: tuple[Path, Any],
    tmp_path_factory: pytest.TempPathFactory,
    collector: Collector,
) -> Iterator[triton.TritonServer]:
    folder = tmp_path_factory.mktemp("spans")
    options = beside(
        server_options,
        folder / "models",
        folder / "triton.log",
        ["lookup"],
        spans_to=f"http://127.0.0.1:{collector.port}",
        spans_every=EVERY,
    )
    options = dataclasses.replace(options, http_port=free_ports(1)[0])
    triton.write_model(options.repository, "lookup", triton.ModelOptions(snapshot=snapshot[0]))
    with triton.TritonServer(options) as running:
        yield running
        assert running.alive(), running.log_text()


@pytest.fixture
def client(server: triton.TritonServer) -> Iterator[Client]:
    made = Client("grpc", server)
    yield made
    made.raw.close()


@dataclasses.dataclass
class Caller:
    """The trace and the span of a caller."""

    trace: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))
    span: str = dataclasses.field(default_factory=lambda: f"{secrets.randbits(63) + 1:016x}")

    def headers(self, flags: str = "01") -> dict[str, str]:
        return {"traceparent": f"00-{self.trace}-{self.span}-{flags}"}


def ask_over_http(server: triton.TritonServer, headers: dict[str, str], model: str) -> int:
    tensor = {"name": "KEYS", "datatype": "INT64", "shape": [2, 4], "data": KEYS}
    body = json.dumps({"inputs": [tensor]}).encode()
    url = f"http://{server.http}/v2/models/{model}/infer"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as got:
            return int(got.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("how", ["grpc", "parameter", "http"])
def test_a_span_stands_below_that_of_the_caller(
    server: triton.TritonServer, client: Client, collector: Collector, how: str
) -> None:
    caller = Caller()
    began = time.time_ns()
    if how == "http":
        assert ask_over_http(server, caller.headers("03"), "lookup") == 200
    elif how == "parameter":
        client.rectangular(KEYS, parameters=caller.headers())
    else:
        client.rectangular(KEYS, headers=caller.headers())
    span = collector.one(caller.trace)
    assert span.parent_span_id.hex() == caller.span
    assert (len(span.span_id), span.name, span.flags) == (8, "embertide.infer", 0x301)
    assert span.kind == trace_pb2.Span.SPAN_KIND_SERVER
    assert span.status.code == trace_pb2.Status.STATUS_CODE_UNSET
    assert began <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
    attributes = said(span.attributes)
    stages = {name: attributes.pop(name) for name in STAGES}
    assert attributes == {
        "rpc.system": "grpc",
        "rpc.grpc.status_code": 0,
        "embertide.model": "lookup",
        "embertide.samples": 2,
        "embertide.version": 41,
    }
    assert 0 < sum(stages.values()) <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e3
    resource = said(collector.requests[-1].resource_spans[0].resource.attributes)
    assert resource["service.name"] == "embertide"
    assert resource["service.instance.id"] == server.grpc
    assert {"service.version", "host.name"} <= {*resource}


def test_whoever_keeps_no_trace_has_no_span_and_of_the_others_a_share(
    client: Client, collector: Collector
) -> None:
    before, kept = len(collector.spans()), Caller()
    for number in range(3 * EVERY):
        client.rectangular(KEYS, headers={} if number % 2 else {"traceparent": "none"})
        client.rectangular(KEYS, headers=Caller().headers("02"))
    client.rectangular(KEYS, headers=kept.headers())
    collector.one(kept.trace)
    wait_until(lambda: len(collector.spans()) >= before + 4)
    made = collector.spans()[before:]
    own = [span for span in made if span.trace_id.hex() != kept.trace]
    assert len(own) == 3
    assert len({span.trace_id for span in own}) == 3
    assert all(not span.parent_span_id and len(span.trace_id) == 16 for span in own)


def raw_ask(server: triton.TritonServer, message: bytes, caller: Caller) -> str:
    """Return the code of what is no request."""
    with grpc.insecure_channel(server.grpc) as channel:
        call: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(message, metadata=[*caller.headers().items()])
        error: Any = caught.value
        return str(error.code().name)


def test_a_refused_request_has_a_span_with_its_code(
    server: triton.TritonServer, client: Client, collector: Collector
) -> None:
    def code_of(caller: Caller) -> Sequence[Any]:
        span = collector.one(caller.trace)
        assert span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
        assert span.parent_span_id.hex() == caller.span
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        attributes = said(span.attributes)
        stages = STAGES & {*attributes}
        assert stages <= {"embertide.stage.parse_us", "embertide.stage.send_us"}
        return (
            span.status.message,
            attributes["rpc.grpc.status_code"],
            attributes.get("embertide.model"),
            len(stages),
        )

    missing, over_http, wrong = Caller(), Caller(), Caller()
    with pytest.raises(InferenceServerException, match="absent"):
        client.rectangular(KEYS, model="absent", headers=missing.headers())
    assert ask_over_http(server, over_http.headers(), "absent") == 404
    with pytest.raises(InferenceServerException):
        client.rectangular([[1, 2, 3]], headers=wrong.headers())
    assert code_of(missing) == ("NOT_FOUND", 5, "absent", 0)
    assert code_of(over_http) == ("NOT_FOUND", 5, "absent", 0)
    assert code_of(wrong)[:3] == ("INVALID_ARGUMENT", 3, "lookup")


def test_whatever_a_caller_names_the_collector_can_read_it(
    server: triton.TritonServer, collector: Collector
) -> None:
    no_message, no_text, long = Caller(), Caller(), Caller()
    assert raw_ask(server, b"\xff" * 9, no_message) == "INVALID_ARGUMENT"
    assert raw_ask(server, b"\x0a\x02\xff\xfe", no_text) == "INVALID_ARGUMENT"
    message: Any = service_pb2.ModelInferRequest(model_name="a" * 127 + "é" * 60)
    assert raw_ask(server, message.SerializeToString(), long) == "NOT_FOUND"
    for caller in (no_message, no_text):
        assert "embertide.model" not in said(collector.one(caller.trace).attributes)
    assert said(collector.one(long.trace).attributes)["embertide.model"] == "a" * 127


def test_a_collector_that_is_away_costs_no_request(
    server: triton.TritonServer, client: Client, collector: Collector
) -> None:
    def counted(what: str) -> float:
        return MetricsPage(server.metrics()).sum("embertide_front_spans_total", what=what)

    sent, failed = counted("sent"), counted("failed")
    callers = [Caller() for _ in range(30)]
    with collector.away():
        for caller in callers:
            client.rectangular(KEYS, headers=caller.headers())
        wait_until(lambda: counted("failed") == failed + len(callers))
        wait_until(lambda: f"the collector at 127.0.0.1:{collector.port}" in server.log_text())
    assert not any(collector.of(caller.trace) for caller in callers)

    def taken() -> bool:
        client.rectangular(KEYS, headers=Caller().headers())
        return counted("sent") > sent

    wait_until(taken, every_s=0.5)
    assert counted("dropped") == 0
