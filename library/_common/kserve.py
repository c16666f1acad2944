"""Calls of a Triton server that cannot end it, and its answers, checked.

Triton 2.51 ends by a signal once some hundred calls have passed their gRPC deadline or were
cancelled. So a call here has neither: it carries KServe's parameter `timeout`, whoever waits for it
waits here, and when he waits no longer the call goes on *unheard*, to its end. Unheard calls are
bounded for each server. A channel is closed once its last call has ended, for a channel that is
closed cancels its calls.

It needs the package `tritonclient[grpc]`, as the extras `client` and `serve` bring it.
"""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

MAX_UNHEARD = 128
"""Calls of one server that nobody waits for any more; further calls are refused here."""
MAX_ANSWER_BYTES = 64 << 20
_CLOSE_S = 1.0  # that `close` waits for calls to end
_NEVER_MS = 2**31 - 2  # 25 days; 2^31 - 1 switches TCP_USER_TIMEOUT off
_SLACK_BYTES = 1 << 20  # of an answer beside its tensors

OPTIONS: tuple[tuple[str, int], ...] = (
    # Tokens are for the server: a proxy that the environment names would read them.
    ("grpc.enable_http_proxy", 0),
    # A server that comes back is found again at once, not after two minutes at most.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2000),  # that making a connection may take
    # A pod that was replaced has another address under its name; 30 s by default.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # No pings; but a machine that takes no more bytes is given up after 10 s, not 15 minutes.
    ("grpc.keepalive_time_ms", _NEVER_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A compressed message would become large before anything looks at it.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
)

_DTYPES = {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4", "UINT8": "|u1"}
_NAMES = {np.dtype(numpy): name for name, numpy in _DTYPES.items()}

Metadata = Sequence[tuple[str, str]]


class CallError(Exception):
    """A call failed, or nobody answered in time.

    Attributes:
        status: Name of gRPC's code, as UNAVAILABLE.
        details: The server's message, or what happened to the call.
    """

    def __init__(self, status: str, details: str) -> None:
        """Say what became of the call."""
        super().__init__(f"{details} ({status})")
        self.status, self.details = status, details


class AnswerError(ValueError):
    """An answer is not what KServe v2 says that it is; the message says how."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a call: a message, or an error."""

    reply: Any = None
    error: CallError | None = None


class Sent:
    """A call that is under way."""

    def __init__(self, line: "Line", rpc: str) -> None:
        """Note when it was sent."""
        self._line, self.rpc = line, rpc
        self.at_s = time.monotonic()
        self.future: Any = None  # held: gRPC cancels a call whose future nobody has
        self.unheard = False

    def forget(self) -> None:
        """Wait for it no longer; it goes on, and is counted as unheard."""
        self._line._forget(self)


class Line:
    """A channel to one Triton server. Thread-safe.

    Args:
        address: host:port of gRPC, or unix:PATH.
        credentials: TLS credentials; None: plain text.
        max_answer_bytes: Largest size of an answer's tensors; a larger one is RESOURCE_EXHAUSTED.
    """

    def __init__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None = None,
        *,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """Make the channel; it connects when first called."""
        options = [
            *OPTIONS,
            ("grpc.max_receive_message_length", max_answer_bytes + _SLACK_BYTES),
        ]
        self.address = address
        self._channel = (
            grpc.insecure_channel(address, options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._changed = threading.Condition()
        self._under_way: dict[Sent, None] = {}  # in the order in which they were sent
        self._unheard = 0
        self._heard_s = 0.0
        self._closed = False

    def start(
        self,
        rpc: str,
        request: Any,
        done: Callable[[Sent, Outcome], None],
        metadata: Metadata = (),
        *,
        connects: bool = False,
    ) -> Sent:
        """Send a request; `done` gets what becomes of it, on a thread of gRPC's, and must be brief.

        With `connects` it waits for a connection, so that UNAVAILABLE is what a server answered.

        Raises:
            CallError: Too many calls are unheard, the line is closed, or the metadata is none.
        """
        sent = Sent(self, rpc)
        with self._changed:
            if self._closed:
                raise CallError("CANCELLED", "the client is closed")
            if self._unheard >= MAX_UNHEARD:
                raise CallError(
                    "RESOURCE_EXHAUSTED",
                    f"{self._unheard} calls that nobody waits for any more are not answered yet",
                )
            self._under_way[sent] = None
        try:
            sent.future = getattr(self._stub, rpc).future(
                request, metadata=tuple(metadata), wait_for_ready=connects
            )
        except ValueError as error:  # of a character that metadata cannot have
            self._end(sent, heard=False)
            raise CallError("INVALID_ARGUMENT", f"it cannot be sent: {error}") from None
        sent.future.add_done_callback(lambda future: self._done(sent, future, done))
        return sent

    def call(self, rpc: str, request: Any, timeout_s: float, metadata: Metadata = ()) -> Any:
        """Return the answer of a call, for which it waits so long.

        Raises:
            CallError: It failed, or there was no answer in time, DEADLINE_EXCEEDED.
        """
        inbox: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        sent = self.start(rpc, request, lambda _, outcome: inbox.put(outcome), metadata)
        try:
            outcome = inbox.get(timeout=timeout_s)
        except queue.Empty:
            sent.forget()
            raise CallError("DEADLINE_EXCEEDED", f"no answer in {timeout_s:g} s") from None
        except BaseException:
            sent.forget()
            raise
        if outcome.error is not None:
            raise outcome.error
        return outcome.reply

    def infer(self, request: Any, timeout_s: float, metadata: Metadata = ()) -> Any:
        """Return the answer of `infer_request`; errors are those of `call`."""
        return self.call("ModelInfer", request, timeout_s, metadata)

    @property
    def unheard(self) -> int:
        """Calls under way that nobody waits for."""
        return self._unheard

    def silent_s(self) -> float:
        """Seconds since a call was sent after which the server has answered none; 0: there is none.

        It says of a server that stands still, whatever each caller's deadline is.
        """
        with self._changed:
            oldest = next(iter(self._under_way), None)
            if oldest is None:
                return 0.0
            return time.monotonic() - max(oldest.at_s, self._heard_s)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Take no more calls, and close the channel once those under way have ended.

        It waits for them so long; those that take longer go on, and the last one closes the
        channel.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            ended = self._changed.wait_for(lambda: not self._under_way, timeout_s)
        if ended:
            self._channel.close()

    def drop(self) -> None:
        """Take no more calls, and cancel those under way: for a server that has ended."""
        with self._changed:
            self._closed = True
        self._channel.close()

    def _done(self, sent: Sent, future: Any, done: Callable[[Sent, Outcome], None]) -> None:
        code = future.code()
        if code is grpc.StatusCode.OK:
            outcome = Outcome(future.result())
        else:
            outcome = Outcome(error=CallError(code.name, future.details() or code.name))
        # To be ready, or to refuse, is not to be at work.
        last = self._end(sent, heard=outcome.error is None and sent.rpc != "ModelReady")
        done(sent, outcome)
        if last:
            # Not on the channel's own thread, which it would wait for.
            threading.Thread(target=self._channel.close, daemon=True).start()

    def _end(self, sent: Sent, *, heard: bool) -> bool:
        """Strike a call off; return whether it was the last one of a line that is closed."""
        with self._changed:
            if heard:
                self._heard_s = time.monotonic()
            self._under_way.pop(sent, None)
            self._unheard -= sent.unheard
            if self._under_way or not self._closed:
                return False
            self._changed.notify_all()
            return True

    def _forget(self, sent: Sent) -> None:
        with self._changed:
            if sent in self._under_way and not sent.unheard:
                sent.unheard = True
                self._unheard += 1

    def __enter__(self) -> "Line":
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()


# --- requests and answers -------------------------------------------------------------------------


def infer_request(
    model: str,
    tensors: Mapping[str, NDArray[Any]],
    outputs: Iterable[str],
    *,
    timeout_s: float | None = None,
    parameters: Mapping[str, int] | None = None,
) -> Any:
    """Return a request of a model.

    Args:
        model: Its name.
        tensors: By name, of int64, int32, fp32 or uint8.
        outputs: Tensors that are asked for.
        timeout_s: After which the server need not answer any more: it drops the request.
        parameters: Further ones, as `version`.

    Raises:
        KeyError: A tensor is of another type.
    """
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in tensors.items():
        request.inputs.add(name=name, datatype=_NAMES[array.dtype], shape=array.shape)
        request.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
    for name in outputs:
        request.outputs.add(name=name)
    for name, value in (parameters or {}).items():
        request.parameters[name].int64_param = value
    if timeout_s is not None:
        set_timeout(request, timeout_s)
    return request


def set_timeout(request: Any, timeout_s: float) -> None:
    """Have the server drop a request that it has not answered in so long."""
    request.parameters["timeout"].int64_param = max(1, round(timeout_s * 1e6))


def arrays_of(response: Any) -> dict[str, NDArray[Any]]:
    """Return the tensors of an answer by name; they share its memory.

    Raises:
        AnswerError: Bytes, types and shapes do not fit each other.
    """
    raw = response.raw_output_contents
    if len(raw) != len(response.outputs):
        raise AnswerError(f"it has {len(response.outputs)} tensors, and the bytes of {len(raw)}")
    arrays: dict[str, NDArray[Any]] = {}
    for output, data in zip(response.outputs, raw, strict=True):
        name, shape = output.name[:80], tuple(output.shape)
        if output.datatype not in _DTYPES:
            raise AnswerError(f"tensor {name!r} has type {output.datatype[:80]!r}")
        dtype = np.dtype(_DTYPES[output.datatype])
        size = 1
        for dim in shape[:9]:
            size *= max(dim, -1)
        if len(shape) > 8 or min(shape, default=0) < 0 or size * dtype.itemsize != len(data):
            raise AnswerError(
                f"tensor {name!r} has {len(data)} bytes for shape {list(shape[:9])} of "
                f"{output.datatype}"
            )
        if name in arrays:
            raise AnswerError(f"tensor {name!r} is there twice")
        arrays[name] = np.frombuffer(data, dtype).reshape(shape)
    return arrays


def parameters_of(response: Any) -> dict[str, Any]:
    """Return the parameters of an answer by name; one without a value is left out."""
    said = {}
    for name, value in response.parameters.items():
        with contextlib.suppress(TypeError):  # no kind of value that is known
            said[name] = getattr(value, value.WhichOneof("parameter_choice"))
    return said
