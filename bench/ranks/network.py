"""A network of ranks in virtual time: full-duplex links into one switch that is never the limit.

A rank's link sends one segment at a time. Flows, which are connections of their own, take turns
segment by segment; messages of one flow go in order. A segment arrives a latency later, and takes
the receiving link for as long as it took the sending one, so that many senders to one receiver
queue there. A message costs its sender some time beside its bytes.
"""

import collections
import dataclasses
from collections.abc import Generator
from typing import Any

import simpy

_SEGMENT = 64 << 10


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What joins a rank to the others.

    Attributes:
        gbit_per_s: In each direction.
        latency_s: From the last byte sent to the last byte received.
        message_s: What a message takes the sender beside its bytes: system calls, headers.
    """

    gbit_per_s: float
    latency_s: float = 20e-6
    message_s: float = 5e-6

    @property
    def bytes_per_s(self) -> float:
        """In each direction."""
        return self.gbit_per_s * 1e9 / 8


class Inbox:
    """Messages that one exchange brings to a rank; `ready` happens when all have come."""

    def __init__(self, clock: simpy.Environment, expected: int) -> None:
        """Expect so many."""
        self.ready = clock.event()
        self._missing = expected
        if not expected:
            self.ready.succeed()

    def take(self) -> None:
        """Count one in."""
        self._missing -= 1
        if not self._missing:
            self.ready.succeed()


@dataclasses.dataclass(slots=True)
class _Message:
    to: int
    left: float
    inbox: Inbox
    begun: bool = False


class Network:
    """The links of some ranks."""

    def __init__(self, clock: simpy.Environment, ranks: int, link: Link) -> None:
        """Start with all links idle."""
        self._clock = clock
        self._link = link
        self._flows: list[dict[str, collections.deque[_Message]]] = [{} for _ in range(ranks)]
        self._wake = [clock.event() for _ in range(ranks)]
        self._receiving_until = [0.0] * ranks
        for rank in range(ranks):
            clock.process(self._transmit(rank))

    def send(self, sender: int, to: int, size: float, flow: str, inbox: Inbox) -> None:
        """Send a message; it is in the inbox when its last byte has come."""
        flows = self._flows[sender]
        flows.setdefault(flow, collections.deque()).append(_Message(to, size, inbox))
        if not self._wake[sender].triggered:
            self._wake[sender].succeed()

    def _transmit(self, rank: int) -> Generator[simpy.Event, Any, None]:
        """Let the flows of a link take turns, for ever."""
        flows = self._flows[rank]
        while True:
            waiting = [queue for queue in flows.values() if queue]
            if not waiting:
                self._wake[rank] = self._clock.event()
                yield self._wake[rank]
            for queue in waiting:
                message = queue[0]
                size = min(message.left, _SEGMENT)
                seconds = size / self._link.bytes_per_s
                yield self._clock.timeout(seconds + (0 if message.begun else self._link.message_s))
                message.begun = True
                message.left -= size
                last = message.left <= 0
                if last:
                    queue.popleft()
                self._receive(message, seconds, last=last)

    def _receive(self, message: _Message, seconds: float, *, last: bool) -> None:
        """Bring a segment over the receiver's link."""

        def arrive(_: simpy.Event) -> None:
            until = max(self._clock.now, self._receiving_until[message.to] + seconds)
            self._receiving_until[message.to] = until
            if last:
                delivered = self._clock.timeout(until - self._clock.now)
                delivered.callbacks.append(lambda _: message.inbox.take())

        self._clock.timeout(self._link.latency_s).callbacks.append(arrive)
