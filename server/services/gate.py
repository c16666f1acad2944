"""The gate before every RPC of the service: limits, deadline, token, audit, and error mapping.

Each call has an id, the caller's `x-request-id` or one made here, which goes back to the caller and
into the audit log. Handlers raise RefusedError; here alone it becomes a gRPC status.
"""

import collections
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from embertide.server.core.errors import RefusedError, invalid
from embertide.server.services.audit import Audit
from embertide.server.services.tokens import Guard

SERVICE = "embertide.v1.ControlService"
AUTH_KEY = "embertide-auth"
LARGE_BYTES_MAX = 16 << 20
_BYTES_MAX = 4 << 20
_WATCH_S_MAX = 24 * 3600 + 900  # a day, and by how much gRPC rounds one up on its way
_STREAM_S_MAX = 3600 + 900
_CALL_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger(__name__)


def _call_id(context: grpc.ServicerContext) -> str:
    given = [value for key, value in context.invocation_metadata() if key == "x-request-id"]
    if given and isinstance(given[0], str) and _CALL_ID.fullmatch(given[0]):
        return given[0]
    return str(uuid.uuid4())


def _check_deadline(rpc: str, context: grpc.ServicerContext) -> None:
    remaining_s = context.time_remaining()
    # gRPC says either nothing or "hundreds of years" where the caller set no deadline.
    if remaining_s is None or remaining_s > 365 * 24 * 3600:
        raise invalid("no deadline: every call needs one")
    if rpc == "WatchOperation" and remaining_s > _WATCH_S_MAX:
        raise invalid(f"deadline is {remaining_s:.0f} s away; watch for at most a day")
    if rpc == "StreamBeats" and remaining_s > _STREAM_S_MAX:
        raise invalid(f"deadline is {remaining_s:.0f} s away; stream beats for an hour at most")


def _check_limits(rpc: str, request: Message, context: grpc.ServicerContext) -> None:
    _check_deadline(rpc, context)
    size = request.ByteSize()
    if rpc != "StartReshard" and size > _BYTES_MAX:
        raise invalid(f"{rpc}Request is {size} bytes; at most {_BYTES_MAX}")


class Gate(grpc.ServerInterceptor):
    """Lets calls through, and counts those that it refuses by RPC and code."""

    def __init__(self, guard: Guard, audit: Audit) -> None:
        """Take who may call, and where to write it down."""
        self.refused: collections.Counter[str] = collections.Counter()
        self._guard = guard
        self._audit = audit
        self._lock = threading.Lock()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Put the gate before a handler of the service; health and reflection have none."""
        handler = continuation(handler_call_details)
        service, _, rpc = handler_call_details.method.lstrip("/").partition("/")
        if handler is None or service != SERVICE:
            return handler
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._streams(rpc, cast(Callable[..., Iterator[Message]], handler.stream_stream)),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(rpc, cast(Callable[..., Iterator[Message]], handler.unary_stream)),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(rpc, cast(Callable[..., Message], handler.unary_unary)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _unary(
        self, rpc: str, behaviour: Callable[..., Message]
    ) -> Callable[[Message, grpc.ServicerContext], Message]:
        def run(request: Message, context: grpc.ServicerContext) -> Message:
            call, role = _call_id(context), "none"
            outcome, message = "OK", ""
            try:
                role = self._know(context, call)
                self._guard.check(role, rpc)
                _check_limits(rpc, request, context)
                return behaviour(request, context)
            except RefusedError as error:
                outcome, message = error.code.value, error.message
            except Exception:
                outcome, message = "INTERNAL", "the control plane failed; its log says how"
                _log.exception("%s (call %s)", rpc, call)
            finally:
                self._audit.write(
                    rpc=rpc,
                    request=request,
                    call=call,
                    peer=context.peer(),
                    role=role,
                    outcome=outcome,
                    message=message,
                )
            raise self._refuse(rpc, context, outcome, message)

        return run

    def _stream(
        self, rpc: str, behaviour: Callable[..., Iterator[Message]]
    ) -> Callable[[Message, grpc.ServicerContext], Iterator[Message]]:
        def run(request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
            try:
                self._guard.check(self._know(context, _call_id(context)), rpc)
                _check_limits(rpc, request, context)
                yield from behaviour(request, context)
            except RefusedError as error:
                raise self._refuse(rpc, context, error.code.value, error.message) from None

        return run

    def _streams(
        self, rpc: str, behaviour: Callable[..., Iterator[Message]]
    ) -> Callable[[Iterator[Message], grpc.ServicerContext], Iterator[Message]]:
        def run(requests: Iterator[Message], context: grpc.ServicerContext) -> Iterator[Message]:
            try:
                self._guard.check(self._know(context, _call_id(context)), rpc)
                _check_deadline(rpc, context)
                yield from behaviour(requests, context)
            except RefusedError as error:
                raise self._refuse(rpc, context, error.code.value, error.message) from None

        return run

    def _know(self, context: grpc.ServicerContext, call: str) -> str:
        """Tell the caller what its call is named, and return its role."""
        context.send_initial_metadata(
            (("x-request-id", call), (AUTH_KEY, "open" if self._guard.open else "tokens"))
        )
        return self._guard.role(cast(Any, context.invocation_metadata()))

    def _refuse(
        self, rpc: str, context: grpc.ServicerContext, outcome: str, message: str
    ) -> Exception:
        """Count a refusal and end the call, which never returns."""
        with self._lock:
            self.refused[f"{rpc} {outcome}"] += 1
        context.abort(getattr(grpc.StatusCode, outcome), message)
