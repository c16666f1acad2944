"""One call: its time, and the tries of its requests. The same for threads and for asyncio.

A request changes nothing, so it may be sent again, and to several nodes at once. Where an endpoint
fails, the next one is asked at once, and all of them again after a wait: `tries` times, and where
nodes that were there are away, to the end of the call's time. Where one stands still, another one
is asked after a part of that time, while the first may still answer. No request has a gRPC
deadline, and none is cancelled (embertide._common.kserve says why).
"""

import random
import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Self

from embertide._common import kserve
from embertide._common.quoting import terminal_text
from embertide.client import tracing
from embertide.client.calling import Calling
from embertide.client.errors import (
    ClientError,
    DeadlineError,
    DegradedError,
    RefusedError,
    UnavailableError,
    VersionGoneError,
)

# Errors that another try may cure. CANCELLED is of a server that ends: no call is cancelled here.
_REPEATABLE = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED"}
# gRPC's words of a connection that ended, and of a server that is not there, and Triton's of one
# that ends. Nobody has worked at such a request.
_BROKEN = ("RST_STREAM", "Stream removed", "Socket closed", "GOAWAY", "onnection reset")
_AWAY = (*_BROKEN, "failed to connect", "Server is stopping")
_EXPIRED = ("timeout has passed", "timeout expired")  # the backend's words, and Triton's
_TOO_LARGE = "larger than max"  # gRPC's, of a message
_NOT_HELD = "not held"  # the backend's, of a version
_AWAY_S = 0.1  # at most, before those that were not there are asked again: it costs nobody much
_PAUSE_S, _LOOK_S = 0.05, 0.01
_MAX_TEXT = 500  # of what a server says

Event = tuple[kserve.Sent, kserve.Outcome]
Steps = Generator[float, Event | None, Any]
"""A request under way. It yields how long to wait, and is sent what came; None: nothing did."""


class AgainError(UnavailableError):
    """A try failed, and another one may help."""


class DegradedAgainError(AgainError):
    """... as too many keys were degraded."""


class AwayError(AgainError):
    """... as the endpoint is not there, or ends."""


class UnknownModelError(AwayError):
    """... as the endpoint does not have the model: it begins or ends, or nobody has it."""


class Call:
    """One call of a client: its time, its trace, and how often it sent.

    A context manager, whose end is that of the call's span, where it has one.
    """

    def __init__(
        self,
        calling: Calling,
        model: str,
        timeout_s: float | None,
        name: str = "",
        traceparent: str | None = None,
    ) -> None:
        """Start the clock.

        Args:
            calling: Endpoints and settings.
            model: The model that is asked.
            timeout_s: Deadline of the call; None: that of the settings.
            name: Of the call, for its trace; empty: it has none.
            traceparent: The caller's.

        Raises:
            InputError: The traceparent is none.
        """
        self.calling, self.model = calling, model
        self.timeout_s = calling.settings.timeout_s if timeout_s is None else timeout_s
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be more than 0")
        self._end_s = time.monotonic() + self.timeout_s
        self.tries = 0
        self.known = False  # whether an endpoint has told of the model
        self._trace: tracing.Trace = (
            tracing.begin(calling.settings.trace, name, model, traceparent)
            if name
            else tracing.Carried("")
        )

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """End its trace, and tell an error of it."""
        if isinstance(error, ClientError):
            error.trace = self.trace
        self._trace.end(error)

    @property
    def trace(self) -> str | None:
        """Its trace-id; None: it has none."""
        return tracing.trace_id_of(self._trace.traceparent)

    def metadata(self) -> kserve.Metadata:
        """Return the metadata of a request."""
        traceparent = self._trace.traceparent
        more = ((tracing.HEADER, traceparent),) if traceparent else ()
        return (*self.calling.settings.metadata(), *more)

    def left_s(self) -> float:
        """Seconds that are left."""
        return self._end_s - time.monotonic()

    def failed(self, error: kserve.CallError, at: int) -> ClientError:
        """Return what a try's failure is; a kind of `AgainError` where another one may help."""
        self.calling.count(f"failed_{error.status.lower()}")
        details = terminal_text(error.details[:_MAX_TEXT])
        text = f"model {self.model!r} at {self.calling.endpoints[at]}: {details}"
        if _TOO_LARGE in details:
            return ClientError(f"{text}: the limit is max_answer_bytes, or the node's")
        if error.status == "NOT_FOUND":
            return VersionGoneError(text) if _NOT_HELD in details else UnknownModelError(text)
        if error.status in _REPEATABLE or any(word in details for word in _BROKEN):
            if self.left_s() < 0.1 * self.timeout_s and any(word in details for word in _EXPIRED):
                return self.late()
            if any(word in details for word in _AWAY):
                return AwayError(text)
            return DegradedAgainError(text) if "max_degraded_share" in text else AgainError(text)
        return RefusedError(f"{text} ({error.status})")

    def gave_up(self, failure: ClientError, tries: int) -> ClientError:
        """Return what a caller is told once there are no more tries, or no more time for them."""
        self.calling.count("given_up")
        text = f"{failure} (tried {tries} times in {self.timeout_s:g} s)"
        if isinstance(failure, VersionGoneError):
            return VersionGoneError(text)
        kind = DegradedError if isinstance(failure, DegradedAgainError) else UnavailableError
        return kind(text).after(tries)

    def late(self) -> DeadlineError:
        """Return what a caller is told whose time is up."""
        self.calling.count("late")
        return DeadlineError(
            f"model {self.model!r}: the call's {self.timeout_s:g} s are over; tried {self.tries} "
            "requests"
        )


class Tries:
    """One request of a call, until it is answered."""

    def __init__(
        self,
        call: Call,
        rpc: str,
        request: Any,
        deliver: Callable[[Event], None],
        *,
        everywhere: bool = True,
    ) -> None:
        """Prepare; `steps` sends it.

        Args:
            call: The call that the request belongs to.
            rpc: The name of an RPC of KServe's service.
            request: Its message.
            deliver: Takes what comes, on any thread; the caller sends it into `steps`.
            everywhere: A version that one endpoint lacks is asked for at the others.
        """
        self._call, self._calling, self._rpc = call, call.calling, rpc
        self._request, self._deliver, self._everywhere = request, deliver, everywhere
        self._under_way: dict[kserve.Sent, int] = {}
        self._asked: set[int] = set()  # in this turn
        self._lacking: set[int] = set()  # endpoints without the model, or the version
        self._failure: ClientError | None = None
        self._sent = self._turns = 0
        self._free = 0  # tries that found nobody where a node was: they are bounded by time alone
        settings = self._calling.settings
        self._patience_s = settings.patience_s(call.timeout_s, len(self._calling.lines))
        self._next_s = time.monotonic()  # when another endpoint is asked
        self._looked = False  # after the time was up
        self._patient = False  # whether that is for the silence of one, not after a failure

    def steps(self) -> Steps:
        """Send the request until it is answered, and return the answer.

        Raises:
            ClientError: The request failed for good.
        """
        try:
            while True:
                left_s, wait_s = self._call.left_s(), self._next_s - time.monotonic()
                if left_s <= 0 and not self._overslept(left_s):
                    raise self._end()
                at = self._choose() if left_s > 0 else None
                if at is not None and wait_s <= 0:
                    self._send(at, left_s)
                    continue
                if not self._under_way and (at is None or wait_s >= left_s):
                    raise self._end()
                whole_s = left_s if left_s > 0 else _LOOK_S
                event = yield whole_s if at is None else min(left_s, wait_s)
                if event is None:
                    self._listen()
                elif event[0] in self._under_way:
                    at, outcome = self._under_way.pop(event[0]), event[1]
                    if outcome.error is None:
                        return outcome.reply
                    self._fail(at, outcome.error)
        finally:
            for each in self._under_way:
                each.forget()

    def _overslept(self, left_s: float) -> bool:
        """Whether this process stood still over its deadline: then it looks once what has come."""
        looks = left_s < -_PAUSE_S and bool(self._under_way) and not self._looked
        self._looked = self._looked or looks
        return looks

    def _choose(self) -> int | None:
        if self._sent - self._free >= self._calling.settings.tries:
            return None
        return self._calling.choose(self._call.model, self._asked, self._under_way.values())

    def _send(self, at: int, left_s: float) -> None:
        call, calling = self._call, self._calling
        if self._under_way:
            calling.count("asked_another_too")
        calling.count("requests")
        call.tries += 1
        self._sent += 1
        self._asked.add(at)
        metadata = call.metadata()
        calling.look_after(call.model, metadata)
        if self._rpc == "ModelInfer":
            kserve.set_timeout(self._request, left_s)

        def done(sent: kserve.Sent, outcome: kserve.Outcome) -> None:
            if outcome.error is None:  # whether somebody waits for it or not
                calling.well(at, call.model)
            self._deliver((sent, outcome))

        try:
            sent = calling.lines[at].start(self._rpc, self._request, done, metadata)
        except kserve.CallError as error:
            self._fail(at, error)
            return
        self._under_way[sent] = at
        self._next_s, self._patient = time.monotonic() + self._patience_s, True

    def _listen(self) -> None:
        """Wait on for an endpoint that answers others: it is at work."""
        if not self._patient or self._calling.settings.try_s is not None:
            return
        silent_s = max(self._calling.lines[at].silent_s() for at in self._under_way.values())
        if silent_s < self._patience_s:
            self._next_s = time.monotonic() + self._patience_s - silent_s

    def _fail(self, at: int, error: kserve.CallError) -> None:
        """Note a failure, and when to go on; raise what is final."""
        failure = self._call.failed(error, at)
        lacks = isinstance(failure, (UnknownModelError, VersionGoneError))
        if not (lacks or isinstance(failure, AgainError)):
            raise failure
        if not isinstance(failure, VersionGoneError):
            self._calling.leave(at, self._call.model)
        elif not self._everywhere:
            raise failure
        if lacks:
            self._lacking.add(at)
            if len(self._lacking) == len(self._calling.lines):
                if isinstance(failure, VersionGoneError):
                    raise failure
                # One that was there may be on its way back.
                if not self._call.known:
                    raise RefusedError(f"{failure} (NOT_FOUND)")
        away = isinstance(failure, AwayError) and self._call.known
        self._free += away
        self._failure, self._patient = failure, False
        self._next_s = time.monotonic()
        if len(self._asked) == len(self._calling.lines):
            self._asked.clear()
            settings = self._calling.settings
            most_s = min(settings.wait_s * 2.0 ** min(self._turns, 30), settings.wait_most_s)
            self._next_s += random.uniform(0, min(most_s, _AWAY_S) if away else most_s)
            self._turns += 1

    def _end(self) -> ClientError:
        if self._failure is None:
            return self._call.late()
        return self._call.gave_up(self._failure, self._sent)
