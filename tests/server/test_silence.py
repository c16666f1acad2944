"""Whether a server stands still, by a clock of the test's and a server that answers late."""

import ctypes
import dataclasses
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embertide.server.adapters.process import Child, UsageError
from embertide.server.adapters.silence import MIN_S, TRIES, SilenceWatch, check_bound

BOUND_S = 60.0
POLL_S = 0.5
NEVER = float("inf")
_PTRACE_SEIZE = 0x4206


@dataclasses.dataclass
class _Question:
    server: "_Server"
    answered_s: float
    forgotten: bool = False

    @property
    def answered(self) -> bool:
        return self.server.now_s >= self.answered_s

    def forget(self) -> None:
        self.forgotten = True


@dataclasses.dataclass
class _Server:
    """Takes so long for each question."""

    takes_s: list[float]
    now_s: float = 0.0
    others: int | None = 0  # that it has answered
    tracer: int = 0
    asked: list[_Question] = dataclasses.field(default_factory=list)

    def ask(self, model: str) -> _Question:
        assert model == "news"
        took_s = self.takes_s[min(len(self.asked), len(self.takes_s) - 1)]
        self.asked.append(_Question(self, self.now_s + took_s))
        return self.asked[-1]

    def answered(self) -> int | None:
        return self.others

    def traced_by(self) -> int:
        return self.tracer

    def silent_after(self, watch: SilenceWatch, within_s: float) -> float | None:
        """Poll until it is silent; None: it never was."""
        began_s = self.now_s
        while self.now_s < began_s + within_s:
            self.now_s += POLL_S
            self.each_poll()
            if watch.poll():
                return self.now_s - began_s
        return None

    def each_poll(self) -> None:
        pass


def _watched(*takes_s: float, bound_s: float = BOUND_S) -> tuple[_Server, SilenceWatch]:
    server = _Server(list(takes_s))
    return server, SilenceWatch(server, "news", bound_s, lambda: server.now_s)


def test_one_that_answers_nobody_is_silent_within_the_bound() -> None:
    server, watch = _watched(NEVER)
    after_s = server.silent_after(watch, 10 * BOUND_S)
    assert after_s is not None
    assert 0.7 * BOUND_S < after_s <= BOUND_S + POLL_S
    assert len(server.asked) == TRIES
    assert all(each.forgotten for each in server.asked)


def test_without_a_bound_nothing_is_asked() -> None:
    server, watch = _watched(NEVER, bound_s=0)
    assert server.silent_after(watch, 10_000) is None
    assert not server.asked


def test_a_slow_answer_is_one_though_a_later_question_has_none_yet() -> None:
    server, watch = _watched(0.7 * BOUND_S)
    assert server.silent_after(watch, 100 * BOUND_S) is None


def test_one_that_answers_others_is_busy() -> None:
    class _Busy(_Server):
        def each_poll(self) -> None:
            self.others = int(self.now_s)

    server = _Busy([NEVER])
    watch = SilenceWatch(server, "news", BOUND_S, lambda: server.now_s)
    assert server.silent_after(watch, 100 * BOUND_S) is None
    assert len(server.asked) > 100


def test_what_cannot_be_counted_is_no_answer() -> None:
    server, watch = _watched(NEVER)
    server.others = None
    assert server.silent_after(watch, BOUND_S + POLL_S) is not None


def test_one_in_a_debugger_is_left_alone_until_that_has_gone() -> None:
    server, watch = _watched(NEVER)
    server.tracer = 4711
    assert server.silent_after(watch, 100 * BOUND_S) is None
    server.tracer = 0
    assert server.silent_after(watch, 2 * BOUND_S) is not None


def test_a_pause_of_this_process_is_no_silence() -> None:
    """A virtual machine that was stopped for an hour: the clock went on, nobody worked."""
    server, watch = _watched(0.01)
    for _ in range(50):
        assert not watch.poll()
        server.now_s += 3600
        assert not watch.poll()
        assert server.silent_after(watch, 5) is None


@given(st.lists(st.floats(0, 0.74 * BOUND_S), min_size=1, max_size=40), st.integers(0, 400))
def test_whoever_answers_in_time_is_never_silent_and_who_stops_is_soon(
    takes_s: list[float], serves: int
) -> None:
    """However slow each answer was until it stops."""
    server, watch = _watched(*takes_s)
    assert server.silent_after(watch, serves * POLL_S) is None
    for each in server.asked:  # what it has not answered, it never will
        if not each.answered:
            each.answered_s = NEVER
    server.takes_s = [NEVER]
    after_s = server.silent_after(watch, 3 * BOUND_S)
    assert after_s is not None
    assert after_s <= BOUND_S + POLL_S


@pytest.mark.parametrize("bound_s", [0.5, MIN_S / 2, -1, float("nan")])
def test_a_bound_that_a_busy_machine_would_pass_is_refused(bound_s: float) -> None:
    with pytest.raises(UsageError, match=r"silent_s is .*: .*; give 4 or more, or 0"):
        check_bound(bound_s)
    check_bound(MIN_S)
    check_bound(0)


def test_a_debugger_is_seen(tmp_path: Path) -> None:
    with Child(["sleep", "60"], log=tmp_path / "log") as child:
        assert child.traced_by() == 0
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.ptrace(_PTRACE_SEIZE, child.pid, None, None) == 0, os.strerror(
            ctypes.get_errno()
        )
        assert child.traced_by() == os.getpid()
        child.send(signal.SIGKILL)
    assert child.traced_by() == 0
