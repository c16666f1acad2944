"""A span of OpenTelemetry for each unary call of the control plane that the gate lets through.

Where spans go is set up by whoever starts the process, as `opentelemetry-instrument` does.
"""

from collections.abc import Callable
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from embertide._common.extras import needed_by
from embertide.server.core.errors import RefusedError
from embertide.server.services.gate import SERVICE


class Spans(grpc.ServerInterceptor):
    """Begins a span below that of the caller's `traceparent`, and ends it with the answer.

    It stands behind the gate: who is refused there makes no span.

    Raises:
        ImportError: opentelemetry-api is missing.
    """

    def __init__(self) -> None:
        """Take the process's provider of spans."""
        with needed_by("server", "otel"):
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        self._api: Any = trace
        self._tracer: Any = trace.get_tracer("embertide.control")
        self._propagator: Any = TraceContextTextMapPropagator()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Put a span around a handler; streams have none, as they last for hours."""
        handler = continuation(handler_call_details)
        service, _, rpc = handler_call_details.method.lstrip("/").partition("/")
        if handler is None or service != SERVICE or handler.unary_unary is None:
            return handler
        metadata: Any = handler_call_details.invocation_metadata or ()
        carried = {name: value for name, value in metadata if name == "traceparent"}
        behaviour = cast(Callable[..., Message], handler.unary_unary)

        def run(request: Message, context: grpc.ServicerContext) -> Message:
            with self._tracer.start_as_current_span(
                f"{SERVICE}/{rpc}",
                self._propagator.extract(carried),
                self._api.SpanKind.SERVER,
                {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": rpc},
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                try:
                    return behaviour(request, context)
                except RefusedError as error:
                    span.set_attribute("embertide.refused", error.code.value)
                    span.set_status(self._api.Status(self._api.StatusCode.ERROR, error.message))
                    raise
                except Exception as error:
                    span.record_exception(error)
                    span.set_status(self._api.Status(self._api.StatusCode.ERROR))
                    raise

        return grpc.unary_unary_rpc_method_handler(
            run,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
