"""A server that is started again, by a clock of the test's and a server of its."""

import dataclasses
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from embertide.server.adapters.kept_server import KeptServer, Restarts
from embertide.server.adapters.triton import ServerOptions, TritonError


@dataclasses.dataclass
class _Process:
    code: int | None = None
    sent: list[signal.Signals] = dataclasses.field(default_factory=list)
    heeds_sigterm: bool = True

    def send(self, signum: signal.Signals) -> None:
        self.sent.append(signum)
        if signum is signal.SIGKILL or self.heeds_sigterm:
            self.code = -signum


@dataclasses.dataclass
class _Silence:
    """Hears nothing once a test says so."""

    silent: bool = False
    bound_s: float = 60.0
    begun: int = 0
    polls: int = 0

    def begin(self) -> None:
        self.begun += 1

    def poll(self) -> bool:
        self.polls += 1
        return self.silent


@dataclasses.dataclass
class _Server:
    """Ends and answers when a test says so."""

    name: str = "embertide_server"
    answering: bool = True
    restarts: int = 0
    silences: int = 0
    port_is_free: bool = True
    process: _Process = dataclasses.field(default_factory=_Process)
    former_log: Path = Path("node.log.1")
    options: ServerOptions = dataclasses.field(
        default_factory=lambda: ServerOptions(
            repository=Path("models"), backends=Path("b"), log=Path("node.log")
        )
    )

    @property
    def running(self) -> bool:
        return self.process.code is None

    def alive(self) -> bool:
        return self.running

    def answers(self) -> bool:
        return self.running and self.answering

    def reason(self) -> str:
        return "it says why"

    def end(self, code: int) -> None:
        self.process.code = code

    def restart(self) -> None:
        if not self.port_is_free:
            raise TritonError("grpc port 8001 is in use")
        self.process = _Process()
        self.restarts += 1


class _Kept:
    """A kept server and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.said: list[str] = []
        self.server = _Server()
        self.before = 0
        self.silence = _Silence()
        self.kept = KeptServer(
            cast(Any, self.server),
            self.said.append,
            cast(Any, self.silence),
            self._count,
            lambda: self.now_s,
        )

    def _count(self) -> None:
        self.before += 1

    def after(self, seconds: float) -> bool:
        self.now_s += seconds
        return self.kept.poll()


def test_the_first_end_is_mended_at_once_and_said_with_its_signal() -> None:
    case = _Kept()
    assert case.after(300)
    case.server.end(-11)
    assert not case.after(0.5)
    assert case.server.running
    assert (case.server.restarts, case.before) == (1, 1)
    assert case.after(0.7)
    assert case.said == [
        "embertide_server ended by signal 11 (SIGSEGV) after 300 s of serving: starts again now "
        "(restart 1; its log: node.log.1)",
        "embertide_server serves again, 0.7 s after it ended (0.7 s of these to start and load)",
    ]


def test_one_that_ends_at_once_again_waits_longer_each_time_and_is_given_up() -> None:
    case = _Kept()
    case.after(5)
    waits = []
    for _ in range(9):
        case.server.end(1)
        case.after(0)
        ended_s = case.now_s
        while not case.server.running:
            case.after(0.5)
        waits.append(case.now_s - ended_s)
    assert waits == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    case.server.end(1)
    with pytest.raises(
        TritonError, match=r"10 times in 10 minutes, last by code 1[^$]*it says why"
    ):
        case.after(0)
    assert case.server.restarts == 9


def test_ends_far_apart_are_each_mended_at_once() -> None:
    case = _Kept()
    for _ in range(20):
        case.after(100)
        case.server.end(-9)
        assert not case.after(0)
        assert case.server.running
        assert case.after(1)
    assert case.server.restarts == 20


def test_a_start_that_fails_is_tried_again() -> None:
    case = _Kept()
    case.after(100)
    case.server.port_is_free = False
    case.server.end(-6)
    case.after(0)
    assert not case.server.running
    assert "a failed start: grpc port 8001 is in use" in case.said[-1]
    case.server.port_is_free = True
    case.after(1)
    assert case.server.running


def test_a_load_that_does_not_end_is_an_end() -> None:
    case = _Kept()
    case.after(1)
    case.server.answering = False
    case.server.end(-9)
    case.after(0)
    case.after(case.server.options.start_timeout_s)
    assert case.server.process.sent == []  # it may still be loading
    case.after(1)
    assert "is not ready after 120 s; it is ended" in case.said[-1]
    assert case.server.restarts == 1
    case.after(0)
    assert "ended by signal 15 (SIGTERM) after 0 s of serving" in case.said[-1]
    case.after(1)
    assert case.server.restarts == 2


def test_one_that_stands_still_is_told_to_end_then_killed_and_started_again() -> None:
    case = _Kept()
    case.after(300)
    case.silence.silent = True
    process = case.server.process
    process.heeds_sigterm = False
    assert not case.after(1)
    assert process.sent == [signal.SIGTERM]
    assert not case.after(4.9)
    assert process.sent == [signal.SIGTERM]
    case.after(0.1)
    assert process.sent == [signal.SIGTERM, signal.SIGKILL]
    case.silence.silent = False
    case.after(0.5)
    assert (case.server.silences, case.server.restarts, case.silence.begun) == (1, 1, 0)
    assert case.after(0.5)
    assert case.silence.begun == 1
    assert case.said[:2] == [
        "embertide_server stands still: it runs, and answered none of 3 inferences in 60 s; it is "
        "ended, by SIGKILL if need be after 5 s",
        "embertide_server ended by signal 9 (SIGKILL) after 306 s of serving: starts again now "
        "(restart 1; its log: node.log.1)",
    ]
    assert "serves again" in case.said[2]


def test_one_that_is_loading_is_not_asked() -> None:
    """A model may take longer to load than a server may be silent."""
    case = _Kept()
    case.after(1)
    case.server.answering = False
    case.server.end(-11)
    case.after(0)
    polls = case.silence.polls
    case.silence.silent = True
    for _ in range(100):
        case.after(1)
    assert case.silence.polls == polls
    assert (case.server.restarts, case.server.process.sent) == (1, [])


def test_ends_of_long_ago_do_not_count() -> None:
    now = [0.0]
    restarts = Restarts(lambda: now[0])
    for _ in range(100):
        assert restarts.pause_s(70) == 0
        now[0] += 70
