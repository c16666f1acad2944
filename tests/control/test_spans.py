"""Calls of the control plane as spans of OpenTelemetry."""

import pytest
from control_bench import Bench
from exported_spans import exported_spans
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from waiting import wait_until

from embertide.v1 import control_pb2

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SERVICE = "embertide.v1.ControlService"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    exporter = exported_spans()
    exporter.clear()
    return exporter


def test_a_call_is_a_span_below_that_of_its_caller(
    bench: Bench, spans: InMemorySpanExporter
) -> None:
    client = bench.client(bench.control(spans=True).address)
    client.metadata = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)
    client.call("GetStatus", control_pb2.ControlServiceGetStatusRequest())
    code, message = client.refused("GetOperation", control_pb2.GetOperationRequest(id="none"))
    wait_until(lambda: len(spans.get_finished_spans()) >= 2)
    answered, refused = spans.get_finished_spans()
    assert (answered.name, answered.kind) == (f"{SERVICE}/GetStatus", trace.SpanKind.SERVER)
    assert answered.parent is not None
    assert f"{answered.parent.trace_id:032x}" == TRACE
    assert answered.status.is_unset
    assert refused.name == f"{SERVICE}/GetOperation"
    assert refused.attributes is not None
    assert refused.attributes["embertide.refused"] == code == "NOT_FOUND"
    assert refused.status.description == message.partition(" (call ")[0]


def test_there_are_none_unless_they_are_asked_for(
    bench: Bench, spans: InMemorySpanExporter
) -> None:
    client = bench.client(bench.control().address)
    client.call("GetStatus", control_pb2.ControlServiceGetStatusRequest())
    assert not spans.get_finished_spans()
