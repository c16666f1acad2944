"""The gate before every RPC of the service: who calls, limits, audit, and error mapping.

Who calls is known from the headers, before a message is read. Each call has an id, the caller's
`x-request-id` or one made here, which goes back to the caller and into the audit log. Handlers
raise RefusedError; here alone it becomes a gRPC status.
"""

import collections
import contextlib
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError, Message

from embertide.server.core.errors import Code, RefusedError, invalid
from embertide.server.services.audit import Audit
from embertide.server.services.call_pool import CallPool
from embertide.server.services.first_message import FirstMessages
from embertide.server.services.identity import CALLER, MODEL_KEY, Identity
from embertide.server.services.listening import HEALTH
from embertide.server.services.rates import Rates
from embertide.server.services.registrations import RefusedRegistrations
from embertide.server.services.tokens import Guard, check
from embertide.v1 import control_pb2

SERVICE = "embertide.v1.ControlService"
AUTH_KEY = "embertide-auth"
ROLE_KEY = "embertide-role"
LARGE_BYTES_MAX = 16 << 20
_BYTES_MAX = 4 << 20
_READERS_BYTES_MAX = 64 << 10  # what looks is small
_WATCH_S_MAX = 24 * 3600 + 900  # a day, and by how much gRPC rounds one up on its way
_STREAM_S_MAX = 3600 + 900
_STRANGERS_THREADS = 2
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


def _parsed(rpc: str, caller: Identity, sent: bytes, parse: Callable[[bytes], Message]) -> Message:
    """Return the message of a caller that may send it."""
    limit = _READERS_BYTES_MAX if caller.role == "reader" else _BYTES_MAX
    if rpc != "StartReshard" and len(sent) > limit:
        raise invalid(f"{rpc}Request is {len(sent)} bytes; at most {limit}")
    try:
        return parse(sent)
    except DecodeError as error:
        raise invalid(f"the message is no {rpc}Request") from error


class Gate(grpc.ServerInterceptor):
    """Lets calls through, and counts those that it refuses by RPC and code.

    Attributes:
        strangers: Threads for callers who are not known.
    """

    def __init__(self, guard: Guard, audit: Audit) -> None:
        """Take who may call, and where to write it down."""
        self.registrations = RefusedRegistrations()
        self.refused: collections.Counter[str] = collections.Counter()
        self._guard = guard
        self._audit = audit
        self._rates = Rates()
        self._first = FirstMessages()
        self.strangers = CallPool(_STRANGERS_THREADS, "strangers")
        self._lock = threading.Lock()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Put the gate before a handler; health has none.

        All are streams here, whatever they are to the caller: gRPC then calls them as soon as the
        headers are there, and reads no message before it is asked for one.
        """
        handler = continuation(handler_call_details)
        service, _, rpc = handler_call_details.method.lstrip("/").partition("/")
        if handler is None or service == HEALTH:
            return handler
        if service == SERVICE and not handler.request_streaming and not handler.response_streaming:
            run = self._unary(rpc, handler)
        else:
            run = self._stream(rpc, handler, whose=service)
        if self._guard.is_stranger(cast(Any, handler_call_details.invocation_metadata) or ()):
            # Thousands of them at once would be a thousand threads that want the interpreter.
            run.experimental_thread_pool = self.strangers  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(
            run, response_serializer=handler.response_serializer
        )

    def _unary(
        self, rpc: str, handler: "grpc.RpcMethodHandler[Any, Any]"
    ) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[Message]]:
        parse = cast(Callable[[bytes], Message], handler.request_deserializer)
        behaviour = cast(Callable[..., Message], handler.unary_unary)

        def run(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Message]:
            call = _call_id(context)
            caller: Identity | None = None
            request: Message | None = None
            outcome, message = "OK", ""
            try:
                caller = self._know(context, call)
                with self._admit(rpc, caller, context):
                    sent = self._first.take(caller, requests, context)
                    request = _parsed(rpc, caller, sent, parse)
                    answer = behaviour(request, context)
                    if isinstance(request, control_pb2.RegisterNodeRequest):
                        self.registrations.accepted(request.node.name)
            except RefusedError as error:
                outcome, message = error.code.value, error.message
            except Exception:
                outcome, message = "INTERNAL", "the control plane failed; its log says how"
                _log.exception("%s (call %s)", rpc, call)
            finally:
                # A caller who is not known, or calls too often, is only counted: he could fill
                # the disk.
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
            if outcome != "OK":
                if rpc == "RegisterNode":
                    self._note_registration(request, context, f"{outcome}: {message}")
                raise self._refuse(rpc, context, outcome, message)
            yield answer

        return run

    def _note_registration(
        self, request: Message | None, context: grpc.ServicerContext, why: str
    ) -> None:
        """Say that a node was kept out; who may not call at all is known by his address alone."""
        if isinstance(request, control_pb2.RegisterNodeRequest):
            self.registrations.note(request.node.name, request.node.address, why)
        else:
            self.registrations.note("(not known)", context.peer().rpartition(":")[0], why)

    def _stream(
        self, rpc: str, handler: "grpc.RpcMethodHandler[Any, Any]", whose: str
    ) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[Message]]:
        parse = cast(Callable[[bytes], Message], handler.request_deserializer)

        def run(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Message]:
            try:
                caller = self._know(context, _call_id(context))
                with self._admit(rpc if whose == SERVICE else "", caller, context):
                    first = _parsed(rpc, caller, self._first.take(caller, requests, context), parse)
                    if handler.request_streaming:
                        more = (_parsed(rpc, caller, sent, parse) for sent in requests)
                        yield from cast(Any, handler.stream_stream)(chain((first,), more), context)
                    else:
                        yield from cast(Any, handler.unary_stream)(first, context)
            except RefusedError as error:
                raise self._refuse(rpc, context, error.code.value, error.message) from None

        return run

    @contextlib.contextmanager
    def _admit(self, rpc: str, caller: Identity, context: grpc.ServicerContext) -> Iterator[None]:
        """Let a caller do what it may; `rpc` is empty where all who are known may."""
        self._rates.take(caller)
        if rpc:
            check(caller, rpc)
        _check_deadline(rpc, context)
        with self._first.at_work(caller):
            yield

    def _know(self, context: grpc.ServicerContext, call: str) -> Identity:
        """Tell the caller what its call is named and which role it has, and return who it is."""
        told = [("x-request-id", call), (AUTH_KEY, "open" if self._guard.open else "closed")]
        try:
            caller = self._guard.identify(
                cast(Any, context.invocation_metadata()), cast(Any, context.auth_context())
            )
            told.append((ROLE_KEY, caller.role))
        finally:  # a stranger, too, hears the name of its call
            try:
                context.send_initial_metadata(tuple(told))
            except grpc.RpcError as error:
                raise RefusedError(Code.CANCELLED, "the caller has gone") from error
        CALLER.set(caller)
        return caller

    def close(self) -> None:
        """Stop watching calls."""
        self._first.stop()
        self.strangers.shutdown(wait=False)

    def _refuse(
        self, rpc: str, context: grpc.ServicerContext, outcome: str, message: str
    ) -> Exception:
        """Count a refusal and end the call, which never returns."""
        with self._lock:
            self.refused[f"{rpc} {outcome}"] += 1
        context.abort(getattr(grpc.StatusCode, outcome), message)
