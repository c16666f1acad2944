"""The trace of a call: the W3C traceparent that its requests carry, and a span of OpenTelemetry.

By it nodes name the call's requests in their logs of slow ones, and so do the peers that they ask.
"""

import re
import secrets
import sys
from typing import Any, Literal, Protocol

from embertide._common.extras import needed_by
from embertide.client.errors import InputError

How = Literal["given", "always", "spans"]
HOWS: tuple[How, ...] = ("given", "always", "spans")
HEADER = "traceparent"
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Trace(Protocol):
    """A call's trace.

    Attributes:
        traceparent: Sent with each request; empty: none.
    """

    traceparent: str

    def end(self, error: BaseException | None) -> None:
        """Note how the call ended."""


class Carried:
    """A trace whose spans are somebody else's."""

    def __init__(self, traceparent: str) -> None:
        """Take it, or nothing."""
        self.traceparent = traceparent

    def end(self, error: BaseException | None) -> None:
        """Do nothing."""


class Span:
    """A span of OpenTelemetry, from now until `end`."""

    def __init__(self, name: str, model: str, parent: str) -> None:
        """Begin it, as a child of the span that a traceparent names; empty: of the active one.

        Raises:
            ImportError: opentelemetry-api is missing.
        """
        with needed_by("client", "otel"):
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        self._api: Any = trace
        context = TraceContextTextMapPropagator().extract({HEADER: parent}) if parent else None
        self._span: Any = trace.get_tracer("embertide.client").start_span(
            f"embertide.{name}",
            context,
            trace.SpanKind.CLIENT,
            {"embertide.model": model},
        )
        self.traceparent = _traceparent_of(self._span.get_span_context()) or parent

    def end(self, error: BaseException | None) -> None:
        """Note how the call ended, and end the span."""
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(error)))
        self._span.end()


def begin(how: How, name: str, model: str, given: str | None) -> Trace:
    """Return the trace of a call.

    Args:
        how: "given": that of the caller, else of OpenTelemetry's active span, else none. "always":
            else a new one. "spans": a span, below that of the caller or the active one.
        name: Of the call.
        model: Of the model that is asked.
        given: The caller's traceparent; None: it gives none.

    Raises:
        InputError: The traceparent is none.
        ImportError: "spans", and opentelemetry-api is missing.
    """
    if given is not None and _FORM.fullmatch(given) is None:
        raise InputError(
            f"traceparent is {given[:80]!r}; give VERSION-TRACE-PARENT-FLAGS of W3C, lowercase "
            "hex, as 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        )
    if how == "spans":
        return Span(name, model, given or "")
    carried = given or _active()
    if not carried and how == "always":
        carried = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"  # nobody records spans
    return Carried(carried)


def trace_id_of(traceparent: str) -> str | None:
    """Return the trace-id, 32 digits of hex; None: the text is empty."""
    return traceparent[3:35] or None


def _active() -> str:
    """Return the traceparent of the active span; empty: there is none."""
    api = sys.modules.get("opentelemetry.trace")  # who has not loaded it has no span
    return "" if api is None else _traceparent_of(api.get_current_span().get_span_context())


def _traceparent_of(context: Any) -> str:
    """Return what a context of OpenTelemetry is on the wire; empty: it is none."""
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
