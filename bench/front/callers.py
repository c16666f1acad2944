"""Impatient callers of one server, in a process of their own: `python -m bench.front.callers JSON`.

They draw what each call does from a seed, and say how many calls ended how, as JSON, on their last
line. A call that finds no server is repeated later and is not one of those that were asked for.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import random
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from bench.frames import (
    ACK,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call_headers,
    frame,
)
from bench.front.questions import Question, read
from embertide._common import kserve

# The frequency of each kind of call. A plain one waits for its answer.
PYTHON = {"plain": 0.2, "deadline": 0.45, "cancel": 0.35}
WIRE = {
    "plain": 0.3,
    "reset after headers": 0.1,
    "reset in the message": 0.1,
    "reset while it is answered": 0.2,
    "ended without a message": 0.08,
    "ended in the message": 0.08,
    "never ended": 0.08,
    "connection reset in the message": 0.02,
    "connection reset while it is answered": 0.04,
}
_SHORTEST_S, _LONGEST_S = 0.1e-3, 10e-3
_ANSWER_S = 30.0  # that a plain call may take
_AWAY_S = 0.05  # until a server that is not there is tried again
_THREADS = 3  # of a connection
_TEXT = 90


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The task of a process of callers.

    Attributes:
        kind: One of `KINDS`.
        address: host:port.
        questions: The file.
        calls: All of its callers'.
        seed: Seed of the calls' behaviour.
        connections: At once.
    """

    kind: str
    address: str
    questions: str
    calls: int
    seed: int
    connections: int = 2


class Tally:
    """How calls ended: counts by what they did and what came of it. Thread-safe."""

    def __init__(self, calls: int) -> None:
        """Take how many are asked for."""
        self.ended: collections.Counter[str] = collections.Counter()
        self._left = calls
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take one of the calls to be made; return whether there was one."""
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def note(self, kind: str, ending: str) -> None:
        """Note how a call ended; one that found no server is to be made again."""
        with self._lock:
            self.ended[f"{kind}: {ending}"] += 1
            if ending == "UNAVAILABLE":
                self._left += 1


def moment_s(rng: random.Random) -> float:
    """Return a time from 0.1 to 10 ms, as likely in each part of that range in logarithms."""
    return math.exp(rng.uniform(math.log(_SHORTEST_S), math.log(_LONGEST_S)))


def drawn(rng: random.Random, kinds: Mapping[str, float]) -> str:
    """Return one of the kinds, each as often as it says."""
    return rng.choices(list(kinds), list(kinds.values()))[0]


def ending_of(question: Question, answer: bytes) -> str:
    """Return how an answered call ended."""
    return "right" if question.right(answer) else "wrong"


def failure(code: grpc.StatusCode, details: str | None) -> str:
    """Return how a call ended that failed."""
    if code in (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNAVAILABLE,
    ):
        return str(code.name)
    return f"{code.name} {details}"[:_TEXT]


def _options() -> list[tuple[str, int]]:
    return [*kserve.OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # connections of their own


# --- gRPC in Python -------------------------------------------------------------------------------


def by_threads(job: Job, questions: list[Question], tally: Tally) -> None:
    """Call by threads."""

    def ask(channel: grpc.Channel, rng: random.Random) -> None:
        stubs: dict[str, Any] = {each.path: channel.unary_unary(each.path) for each in questions}
        while tally.take():
            question, kind = rng.choice(questions), drawn(rng, PYTHON)
            after_s = moment_s(rng)
            timeout_s = after_s if kind == "deadline" else None
            future: Any = stubs[question.path].future(question.request, timeout=timeout_s)
            try:
                answer = future.result(after_s if kind == "cancel" else _ANSWER_S)
                tally.note(kind, ending_of(question, answer))
            except grpc.FutureTimeoutError:
                future.cancel()
                tally.note(kind, "CANCELLED" if kind == "cancel" else "no answer")
            except grpc.RpcError:
                ending = failure(future.code(), future.details())
                tally.note(kind, ending)
                if ending == "UNAVAILABLE":
                    time.sleep(_AWAY_S)

    with contextlib.ExitStack() as stack:
        threads = []
        for n in range(job.connections):
            channel = stack.enter_context(grpc.insecure_channel(job.address, _options()))
            for m in range(_THREADS):
                rng = random.Random(f"{job.seed} {n} {m}")
                threads.append(threading.Thread(target=ask, args=(channel, rng)))
        for each in threads:
            each.start()
        for each in threads:
            each.join()


def by_asyncio(job: Job, questions: list[Question], tally: Tally) -> None:
    """Call by tasks."""

    async def ask(channel: Any, rng: random.Random) -> None:
        stubs = {each.path: channel.unary_unary(each.path) for each in questions}
        while tally.take():
            question, kind = rng.choice(questions), drawn(rng, PYTHON)
            after_s = moment_s(rng)
            timeout_s = after_s if kind == "deadline" else None
            call: Any = stubs[question.path](question.request, timeout=timeout_s)
            try:
                within_s = after_s if kind == "cancel" else _ANSWER_S
                answer = await asyncio.wait_for(call, within_s)  # cancels it
                tally.note(kind, ending_of(question, answer))
            except (TimeoutError, asyncio.CancelledError):
                tally.note(kind, "CANCELLED" if kind == "cancel" else "no answer")
            except grpc.RpcError:
                ending = failure(await call.code(), await call.details())
                tally.note(kind, ending)
                if ending == "UNAVAILABLE":
                    await asyncio.sleep(_AWAY_S)

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            asking = []
            for n in range(job.connections):
                channel = await stack.enter_async_context(
                    grpc.aio.insecure_channel(job.address, _options())
                )
                rngs = (random.Random(f"{job.seed} {n} {m}") for m in range(_THREADS))
                asking += [ask(channel, rng) for rng in rngs]
            await asyncio.gather(*asking)

    asyncio.run(run())


# --- frames by hand -------------------------------------------------------------------------------

_WINDOW = 1 << 30
_ERROR = "an error, or none"
_NEVER_ENDED = 64  # streams of a connection, at most
_CANCEL = struct.pack(">I", 8)
_INITIAL_WINDOW_SIZE = 4
_SIZES = bytes(range(0x20, 0x40))


class GoneError(Exception):
    """The connection ended, or is to be."""


class Wire:
    """A connection that speaks HTTP/2 by hand, and calls over it one by one. Not thread-safe."""

    def __init__(self, address: str) -> None:
        """Connect; the server's settings are read later."""
        host, _, port = address.rpartition(":")
        self._talk = socket.create_connection((host, int(port)), 5)
        self._talk.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW)
        self._talk.sendall(
            PREFACE
            + frame(SETTINGS, 0, 0, settings)
            + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW))
        )
        self._stream = -1
        self._room = 65_535  # bytes of data that the server takes
        self._taken = 0  # bytes of data since it was last given room
        self._input = bytearray()
        self._data: dict[int, bytearray] = {}  # of streams that are waited for
        self._ended: set[int] = set()
        self._status: dict[int, bool] = {}  # whether HTTP's own is 200; a proxy has others
        self._open: collections.deque[int] = collections.deque()

    def begin(self, question: Question) -> int:
        """Send the headers of a call; return its stream."""
        self._stream += 2
        self._talk.sendall(call_headers(self._stream, question.path.encode()))
        return self._stream

    def send(self, stream: int, data: bytes, *, end: bool) -> None:
        """Send a part of a message, once there is room for it."""
        began = time.monotonic()
        while self._room < len(data):
            self._read(1.0)
            if time.monotonic() - began > _ANSWER_S:
                raise GoneError("no room")
        self._room -= len(data)
        for at in range(0, len(data), 16_384):
            part = data[at : at + 16_384]
            last = END_STREAM if end and at + 16_384 >= len(data) else 0
            self._talk.sendall(frame(DATA, last, stream, part))
        if not data and end:
            self._talk.sendall(frame(DATA, END_STREAM, stream, b""))

    def reset(self, stream: int) -> None:
        """Reset a stream."""
        self._talk.sendall(frame(RST_STREAM, 0, stream, _CANCEL))

    def leave_open(self, stream: int) -> None:
        """Leave a stream as it is; the oldest of many is reset."""
        self._open.append(stream)
        if len(self._open) > _NEVER_ENDED:
            self.reset(self._open.popleft())

    def answer(self, stream: int) -> bytes | None:
        """Wait for an answer; None: it is an error, or none came in time."""
        self._data[stream] = bytearray()
        until = time.monotonic() + _ANSWER_S
        while stream not in self._ended:
            if time.monotonic() > until:
                return None
            self._read(1.0)
        self._ended.discard(stream)
        data = self._data.pop(stream)
        if not self._status.pop(stream, True):
            raise GoneError("a proxy found no server")
        whole = len(data) >= 5 and int.from_bytes(data[1:5], "big") == len(data) - 5
        return bytes(data[5:]) if whole else None

    def pump(self) -> None:
        """Read what has come."""
        self._read(0)

    def abort(self) -> None:
        """End the connection by a reset of TCP."""
        linger = struct.pack("ii", 1, 0)
        with contextlib.suppress(OSError):
            self._talk.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._talk.close()

    def _read(self, wait_s: float) -> None:
        """Read frames, after a wait for the first."""
        while select.select([self._talk], [], [], wait_s)[0]:
            read = self._talk.recv(1 << 18)
            if not read:
                raise GoneError("ended")
            self._input += read
            self._take_frames()
            wait_s = 0
        if self._taken > _WINDOW // 4:
            self._talk.sendall(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._taken)))
            self._taken = 0

    def _take_frames(self) -> None:
        at = 0
        while len(self._input) - at >= 9:
            size = int.from_bytes(self._input[at : at + 3], "big")
            if len(self._input) - at < 9 + size:
                break
            kind, flags = self._input[at + 3], self._input[at + 4]
            stream = int.from_bytes(self._input[at + 5 : at + 9], "big")
            self._take(kind, flags, stream, bytes(self._input[at + 9 : at + 9 + size]))
            at += 9 + size
        del self._input[:at]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._taken += len(payload)
            if stream in self._data:
                self._data[stream] += payload
        elif kind == SETTINGS and not flags & ACK:
            self._talk.sendall(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._talk.sendall(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE and stream == 0:
            self._room += int.from_bytes(payload, "big")
        elif kind == HEADERS and stream in self._data:
            # HPACK has `:status: 200` as this byte; before it there may be sizes of its table.
            self._status.setdefault(stream, payload.lstrip(_SIZES).startswith(b"\x88"))
        elif kind == GOAWAY:
            raise GoneError("goaway")
        ended = kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM)
        if ended and stream in self._data:
            self._ended.add(stream)


def _one(wire: Wire, rng: random.Random, question: Question, kind: str) -> str:
    """Make one call of a kind; return how it ended."""
    message = b"\0" + struct.pack(">I", len(question.request)) + question.request
    cut = rng.randrange(1, len(message))
    stream = wire.begin(question)
    if kind == "reset after headers":
        time.sleep(rng.choice((0.0, moment_s(rng) / 10)))
        wire.reset(stream)
    elif kind == "reset in the message":
        wire.send(stream, message[:cut], end=False)
        wire.reset(stream)
    elif kind == "reset while it is answered":
        wire.send(stream, message, end=True)
        time.sleep(rng.choice((0.0, moment_s(rng))))
        wire.reset(stream)
    elif kind == "ended without a message":
        wire.send(stream, b"", end=True)
    elif kind == "ended in the message":
        wire.send(stream, message[:cut], end=True)
    elif kind == "never ended":
        wire.send(stream, message[: rng.choice((cut, len(message)))], end=False)
        wire.leave_open(stream)
    elif kind == "connection reset in the message":
        wire.send(stream, message[:cut], end=False)
        wire.abort()
    elif kind == "connection reset while it is answered":
        wire.send(stream, message, end=True)
        time.sleep(rng.choice((0.0, moment_s(rng))))
        wire.abort()
    else:
        wire.send(stream, message, end=True)
        answer = wire.answer(stream)
        return _ERROR if answer is None else ending_of(question, answer)
    if not kind.startswith("connection"):
        wire.pump()
        return "sent"
    return "aborted"


def by_hand(job: Job, questions: list[Question], tally: Tally) -> None:
    """Call by frames of our own."""

    def ask(rng: random.Random) -> None:
        wire: Wire | None = None
        while tally.take():
            question, kind = rng.choice(questions), drawn(rng, WIRE)
            try:
                wire = wire or Wire(job.address)
                ending = _one(wire, rng, question, kind)
            except (OSError, GoneError) as error:
                went = str(error) == "goaway"
                ending = "connection ended by GOAWAY" if went else "UNAVAILABLE"
                if wire is not None:
                    wire.abort()
                wire = None
                if not went:
                    time.sleep(_AWAY_S)
            if ending == "aborted":
                wire = None
            elif ending == _ERROR:
                time.sleep(_AWAY_S)
            tally.note(kind, ending)
        if wire is not None:
            wire.abort()

    rngs = [random.Random(f"{job.seed} {n}") for n in range(job.connections)]
    threads = [threading.Thread(target=ask, args=(rng,)) for rng in rngs]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


KINDS: dict[str, Callable[[Job, list[Question], Tally], None]] = {
    "threads": by_threads,
    "asyncio": by_asyncio,
    "frames": by_hand,
}


def main() -> int:
    """Call as the argument says, and print how the calls ended."""
    job = Job(**json.loads(sys.argv[1]))
    tally = Tally(job.calls)
    KINDS[job.kind](job, read(Path(job.questions)), tally)
    print(json.dumps(tally.ended))
    return 0


if __name__ == "__main__":
    sys.exit(main())
