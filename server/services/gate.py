"""The gate before every RPC of the service: who calls, limits, audit, and error mapping.

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
from google.protobuf.message import DecodeError, Message

from embertide.server.core.errors import Code, RefusedError, invalid
from embertide.server.services.audit import Audit
from embertide.server.services.identity import CALLER, Identity
from embertide.server.services.rates import Rates
from embertide.server.services.tokens import Guard, check

SERVICE = "embertide.v1.ControlService"
AUTH_KEY = "embertide-auth"
MODEL_KEY = "embertide-model"
LARGE_BYTES_MAX = 16 << 20
_BYTES_MAX = 4 << 20
_READERS_BYTES_MAX = 64 << 10  # what looks is small
_WATCH_S_MAX = 24 * 3600 + 900  # a day, and by how much gRPC rounds one up on its way
_STREAM_S_MAX = 3600 + 900
_CALL_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger(__name__)


def _call_id(context: grpc.ServicerContext) -> str:
    given = [value for key, value in context.invocation_metadata() if key == "x-request-id"]
    if given and isinstance(given[0], str) and _CALL_ID.fullmatch(given[0]):
        return given[0]
    return str(uuid.uuid4())


def named_model(context: grpc.ServicerContext) -> str | None:
    """Return the model that a call names; None: it names none."""
    found = [value for key, value in context.invocation_metadata() if key == MODEL_KEY]
    if not found:
        return None
    return found[0].decode(errors="replace") if isinstance(found[0], bytes) else found[0]


def _check_deadline(rpc: str, context: grpc.ServicerContext) -> None:
    remaining_s = context.time_remaining()
    # gRPC says either nothing or "hundreds of years" where the caller set no deadline.
    if remaining_s is None or remaining_s > 365 * 24 * 3600:
        raise invalid("no deadline: every call needs one")
    if rpc == "WatchOperation" and remaining_s > _WATCH_S_MAX:
        raise invalid(f"deadline is {remaining_s:.0f} s away; watch for at most a day")
    if rpc == "StreamBeats" and remaining_s > _STREAM_S_MAX:
        raise invalid(f"deadline is {remaining_s:.0f} s away; stream beats for an hour at most")


def _check_size(rpc: str, caller: Identity, size: int) -> None:
    limit = _READERS_BYTES_MAX if caller.role == "reader" else _BYTES_MAX
    if rpc != "StartReshard" and size > limit:
        raise invalid(f"{rpc}Request is {size} bytes; at most {limit}")


class Gate(grpc.ServerInterceptor):
    """Lets calls through, and counts those that it refuses by RPC and code."""

    def __init__(self, guard: Guard, audit: Audit) -> None:
        """Take who may call, and where to write it down."""
        self.refused: collections.Counter[str] = collections.Counter()
        self._guard = guard
        self._audit = audit
        self._rates = Rates()
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
        parse = cast(Callable[[bytes], Message], handler.request_deserializer)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._streams(rpc, cast(Callable[..., Iterator[Message]], handler.stream_stream)),
                request_deserializer=parse,
                response_serializer=handler.response_serializer,
            )
        # A message is parsed once its sender is known and may call.
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(
                    rpc, parse, cast(Callable[..., Iterator[Message]], handler.unary_stream)
                ),
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(rpc, parse, cast(Callable[..., Message], handler.unary_unary)),
            response_serializer=handler.response_serializer,
        )

    def _unary(
        self, rpc: str, parse: Callable[[bytes], Message], behaviour: Callable[..., Message]
    ) -> Callable[[bytes, grpc.ServicerContext], Message]:
        def run(sent: bytes, context: grpc.ServicerContext) -> Message:
            call = _call_id(context)
            caller: Identity | None = None
            request: Message | None = None
            outcome, message = "OK", ""
            try:
                caller = self._know(context, call)
                request = self._admit(rpc, caller, sent, parse, context)
                return behaviour(request, context)
            except RefusedError as error:
                outcome, message = error.code.value, error.message
            except Exception:
                outcome, message = "INTERNAL", "the control plane failed; its log says how"
                _log.exception("%s (call %s)", rpc, call)
            finally:
                # Of who is not known, or calls too often, nothing is kept but a count: he could
                # fill the disk.
                if caller is not None and outcome != Code.RESOURCE_EXHAUSTED.value:
                    self._audit.write(
                        rpc=rpc,
                        request=request,
                        call=call,
                        peer=context.peer(),
                        caller=caller,
                        model=named_model(context) or caller.model,
                        outcome=outcome,
                        message=message,
                    )
            raise self._refuse(rpc, context, outcome, message)

        return run

    def _stream(
        self,
        rpc: str,
        parse: Callable[[bytes], Message],
        behaviour: Callable[..., Iterator[Message]],
    ) -> Callable[[bytes, grpc.ServicerContext], Iterator[Message]]:
        def run(sent: bytes, context: grpc.ServicerContext) -> Iterator[Message]:
            try:
                caller = self._know(context, _call_id(context))
                yield from behaviour(self._admit(rpc, caller, sent, parse, context), context)
            except RefusedError as error:
                raise self._refuse(rpc, context, error.code.value, error.message) from None

        return run

    def _streams(
        self, rpc: str, behaviour: Callable[..., Iterator[Message]]
    ) -> Callable[[Iterator[Message], grpc.ServicerContext], Iterator[Message]]:
        def run(requests: Iterator[Message], context: grpc.ServicerContext) -> Iterator[Message]:
            try:
                caller = self._know(context, _call_id(context))
                self._rates.take(caller)
                check(caller, rpc)
                _check_deadline(rpc, context)
                yield from behaviour(requests, context)
            except RefusedError as error:
                raise self._refuse(rpc, context, error.code.value, error.message) from None

        return run

    def _admit(
        self,
        rpc: str,
        caller: Identity,
        sent: bytes,
        parse: Callable[[bytes], Message],
        context: grpc.ServicerContext,
    ) -> Message:
        """Return the message of a caller that may send it."""
        self._rates.take(caller)
        check(caller, rpc)
        _check_deadline(rpc, context)
        _check_size(rpc, caller, len(sent))
        try:
            return parse(sent)
        except DecodeError as error:
            raise invalid(f"the message is no {rpc}Request") from error

    def _know(self, context: grpc.ServicerContext, call: str) -> Identity:
        """Tell the caller what its call is named, and return who it is."""
        try:
            context.send_initial_metadata(
                (("x-request-id", call), (AUTH_KEY, "open" if self._guard.open else "closed"))
            )
        except grpc.RpcError as error:
            raise RefusedError(Code.CANCELLED, "the caller has gone") from error
        caller = self._guard.identify(
            cast(Any, context.invocation_metadata()), cast(Any, context.auth_context())
        )
        CALLER.set(caller)
        return caller

    def _refuse(
        self, rpc: str, context: grpc.ServicerContext, outcome: str, message: str
    ) -> Exception:
        """Count a refusal and end the call, which never returns."""
        with self._lock:
            self.refused[f"{rpc} {outcome}"] += 1
        context.abort(getattr(grpc.StatusCode, outcome), message)
