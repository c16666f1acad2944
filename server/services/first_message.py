"""The first message of a call: awaited for so long, by so many calls of one caller at once.

A call of gRPC takes a thread as soon as its headers are there. Who it is has been found out from
these; until its message has come as a whole, it is one of a bounded number, and after that time it
is cancelled.
"""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from embertide._common.background import BackgroundTask
from embertide.server.core.errors import Code, RefusedError, invalid
from embertide.server.services.identity import Identity

WAIT_S = 10.0
_LOOK_S = 0.5
# Calls of one identity whose message is on its way: each may take memory of the largest message
# that there is. Nodes may all be one identity, and each begins a stream of beats.
_ARRIVING_MAX = {"reader": 4, "operator": 8, "node": 64, "open": 256}
_OTHERS_ARRIVING_MAX = 4
_TURN_S = 1.0
# Calls of all readers that are at work at once, watchers among them, and of one: the server has a
# thousand threads, and nodes and operators shall find one.
_READERS_MAX, _ONE_READER_MAX = 256, 128


class FirstMessages:
    """Awaits the first message of each call. Thread-safe."""

    def __init__(self, wait_s: float = WAIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to watch; `stop` ends it."""
        self._wait_s, self._clock = wait_s, clock
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        # In the order in which they began.
        self._waiting: dict[grpc.ServicerContext, float] = {}
        self._arriving: collections.Counter[Identity] = collections.Counter()
        self._readers: collections.Counter[Identity] = collections.Counter()
        self._task = BackgroundTask("first-messages", self._cancel_late)
        self._task.start()

    def take(
        self, caller: Identity, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> bytes:
        """Return the first message of a call.

        Raises:
            RefusedError: It did not come in time, there is none, or too many of the caller's are
                on their way.
        """
        with self._one_of(caller):
            with self._lock:
                self._waiting[context] = self._clock() + self._wait_s
            try:
                return next(requests)
            except (StopIteration, grpc.RpcError) as error:
                # gRPC may tell that there are no more messages before it tells of the cancel.
                if isinstance(error, StopIteration) and self._is_waiting(context):
                    raise invalid("the call ended without a message") from None
                raise RefusedError(
                    Code.CANCELLED, f"no whole message in {self._wait_s:.0f} s, or the caller left"
                ) from error
            finally:
                with self._lock:
                    self._waiting.pop(context, None)

    def _is_waiting(self, context: grpc.ServicerContext) -> bool:
        """Whether a call that waits for its message was not cancelled."""
        with self._lock:
            return context in self._waiting

    @contextlib.contextmanager
    def at_work(self, caller: Identity) -> Iterator[None]:
        """Count a call for as long as it lasts.

        Raises:
            RefusedError: The caller has too many at once.
        """
        if caller.role != "reader":
            yield
            return
        with self._lock:
            if self._readers[caller] >= _ONE_READER_MAX or self._readers.total() >= _READERS_MAX:
                raise RefusedError(
                    Code.RESOURCE_EXHAUSTED,
                    f"{self._readers.total()} calls of readers are at work; call again later",
                )
            self._readers[caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self._leave(self._readers, caller)

    @staticmethod
    def _leave(counts: "collections.Counter[Identity]", caller: Identity) -> None:
        counts[caller] -= 1
        if not counts[caller]:
            del counts[caller]

    @contextlib.contextmanager
    def _one_of(self, caller: Identity) -> Iterator[None]:
        most = _ARRIVING_MAX.get(caller.role, _OTHERS_ARRIVING_MAX)
        with self._lock:
            if not self._arrived.wait_for(lambda: self._arriving[caller] < most, _TURN_S):
                raise RefusedError(
                    Code.RESOURCE_EXHAUSTED,
                    f"{most} messages of {caller} are on their way; send each call as a whole",
                )
            self._arriving[caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self._leave(self._arriving, caller)
                self._arrived.notify_all()

    def _cancel_late(self, stopping: threading.Event) -> float:
        with self._lock:
            now = self._clock()
            late = []
            for context, due_s in self._waiting.items():
                if due_s > now:
                    break
                late.append(context)
            for context in late:
                del self._waiting[context]
        for context in late:
            context.cancel()
        return _LOOK_S

    def stop(self) -> None:
        """Watch no more."""
        self._task.stop()
