"""Background tasks: whatever goes wrong is counted, said and tried again; none ends the process."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from embertide._common import background
from embertide._common.background import BackgroundTask, State

SOON_S = 10.0


class Token(threading.Event):
    """A stop token whose waits return at once, and say what was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        return self.is_set()


class Script:
    """Work that does as each step says: an error is raised, a number returned."""

    def __init__(self, *steps: BaseException | float | None) -> None:
        self.steps: Iterator[BaseException | float | None] = iter(steps)
        self.rounds = 0

    def __call__(self, stop: threading.Event) -> float | None:
        self.rounds += 1
        step = next(self.steps)
        if isinstance(step, BaseException):
            raise step
        return step


def run(task: BackgroundTask) -> None:
    """Start a task and wait until it has ended."""
    task.start()
    thread = task._thread
    if thread is not None:
        thread.join(SOON_S)
        assert not thread.is_alive()


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Let the system start no thread of a task until told otherwise."""
    refuse = True
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if refuse:
            raise RuntimeError("can't start new thread")
        start(thread)

    def switch(on: bool) -> None:
        nonlocal refuse
        refuse = on

    monkeypatch.setattr(threading.Thread, "start", refusing)
    yield switch
    switch(False)


def test_rounds_come_after_the_pauses_that_they_ask_for() -> None:
    token = Token()
    run(BackgroundTask("a", Script(0.5, 2.0, None), stop=token))
    assert token.pauses == [0.0, 0.5, 2.0]


@pytest.mark.parametrize(
    "error",
    [ValueError("no such thing"), MemoryError(), SystemExit(1), RecursionError(), OSError(28, "x")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_round_raises_is_counted_and_tried_again(error: BaseException) -> None:
    task = BackgroundTask("a", Script(error, error, None), stop=Token())
    run(task)
    health = task.health()
    assert (health.state, health.failures) == (State.ENDED, 2)
    assert health.error


def test_each_failure_in_a_row_doubles_the_pause_up_to_its_bound() -> None:
    token, errors = Token(), [ValueError(str(at)) for at in range(8)]
    run(BackgroundTask("a", Script(*errors, 7.0, ValueError("late"), None), stop=token))
    assert token.pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 7.0, 0.1]


def test_health_says_that_it_fails_and_that_it_works_again() -> None:
    seen: list[Any] = []
    failing = threading.Event()

    def work(stop: threading.Event) -> float | None:
        seen.append(task.health())
        if len(seen) == 1:
            raise ValueError("broken\nover two lines")
        failing.set()
        return 0.0 if len(seen) < 3 else None

    task = BackgroundTask("a", work, stop=Token())
    assert task.health().state is State.NEW
    run(task)
    assert [each.state for each in seen] == [State.RUNNING, State.FAILING, State.RUNNING]
    assert [each.ok for each in seen] == [True, False, True]
    assert seen[1].error == "ValueError: broken over two lines"
    assert background.ill(seen) == [seen[1]]


def test_a_round_that_lasts_says_that_it_works_again() -> None:
    works, end = threading.Event(), threading.Event()
    steps = iter([ValueError("broken")])

    def work(stop: threading.Event) -> None:
        for error in steps:
            raise error
        task.works()
        works.set()
        end.wait(SOON_S)

    task = BackgroundTask("reader", work, pause_s=0.0)
    task.start()
    assert works.wait(SOON_S)
    assert task.health().state is State.RUNNING
    end.set()
    assert task.stop(SOON_S)


def test_the_log_says_a_failure_once_and_that_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=background.__name__):
        same = [ValueError("broken") for _ in range(50)]
        run(BackgroundTask("load", Script(*same, 0.0, None), stop=Token(), expected=(ValueError,)))
    assert caplog.messages == [
        "load: ValueError: broken; it is tried again in 0.1 s",
        "load works again, after 50 failures",
    ]


def test_an_unexpected_failure_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run(BackgroundTask("load", Script(KeyError("x"), None), stop=Token()))
    assert any("Traceback" in each for each in caplog.messages)


def test_a_long_error_is_cut() -> None:
    assert len(background.describe(ValueError("x" * 5000))) == 300


def test_a_stop_ends_a_task_that_waits() -> None:
    began = threading.Event()

    def work(stop: threading.Event) -> float:
        began.set()
        return 3600.0

    task = BackgroundTask("a", work)
    task.start()
    assert began.wait(SOON_S)
    assert task.stop(SOON_S)
    assert task.health().state is State.ENDED


def test_a_stop_does_not_wait_for_work_that_never_looks() -> None:
    began, end = threading.Event(), threading.Event()

    def work(stop: threading.Event) -> None:
        began.set()
        end.wait()

    task = BackgroundTask("a", work)
    task.start()
    assert began.wait(SOON_S)
    assert not task.stop(0.01)
    end.set()
    assert task.stop(SOON_S)


def test_a_task_may_stop_itself() -> None:
    def work(stop: threading.Event) -> float:
        task.stop()
        return 0.0

    task = BackgroundTask("a", work)
    run(task)
    assert task.health().state is State.ENDED


def test_tasks_that_share_a_token_stop_together() -> None:
    token = threading.Event()
    tasks = [BackgroundTask(name, lambda stop: 3600.0, stop=token) for name in "ab"]
    for task in tasks:
        task.start()
    token.set()
    assert all(task.stop(SOON_S) for task in tasks)


def test_a_stopped_task_begins_no_more() -> None:
    task = BackgroundTask("a", Script())
    task.stop()
    task.start()
    assert task.health().state is State.ENDED


def test_a_thread_that_does_not_start_is_tried_again(
    no_threads: Callable[[bool], None],
) -> None:
    now = 100.0
    work = Script(None)
    task = BackgroundTask("a", work, stop=Token(), clock=lambda: now)
    task.start()
    health = task.health()
    assert (health.state, health.failures, health.ok) == (State.NO_THREAD, 1, False)
    assert "can't start new thread" in health.error
    now += 0.05
    background.tend()
    assert task.health().failures == 1, "before its back-off is over it is not tried"
    now += 0.1
    background.tend()
    assert task.health().failures == 2
    no_threads(False)
    now += 0.3
    background.tend()
    thread = task._thread
    if thread is not None:
        thread.join(SOON_S)
    assert work.rounds == 1
    assert task.health().state is State.ENDED


def test_another_task_starts_the_thread_that_did_not_start(
    no_threads: Callable[[bool], None],
) -> None:
    done = threading.Event()

    def work(stop: threading.Event) -> None:
        done.set()

    late = BackgroundTask("late", work, pause_s=0.0)
    late.start()
    assert late.health().state is State.NO_THREAD
    no_threads(False)
    other = BackgroundTask("other", lambda stop: 0.01)
    other.start()
    assert done.wait(SOON_S)
    assert other.stop(SOON_S)


def test_a_task_without_a_thread_stops_at_once(no_threads: Callable[[bool], None]) -> None:
    task = BackgroundTask("a", Script())
    task.start()
    assert task.stop()
    no_threads(False)
    background.tend()
    assert task._thread is None


def test_at_the_system_s_own_limit_the_process_lives_and_heals() -> None:
    """No thread can be started for want of memory, by the system's own word; later one can."""
    script = """
import resource, threading
from embertide._common.background import BackgroundTask, State, tend
done = threading.Event()
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, hard))
task = BackgroundTask("a", lambda stop: done.set(), pause_s=0.0)
task.start()
assert task.health().state is State.NO_THREAD, task.health()
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
tend()
assert done.wait(10)
print("lives")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr


def test_the_process_knows_how_its_tasks_are() -> None:
    token = threading.Event()
    failing, done = threading.Event(), threading.Event()

    def fails(stop: threading.Event) -> float | None:
        if failing.is_set():
            done.set()
        failing.set()
        raise ValueError("broken")

    def states() -> dict[str, str]:
        return {each.name: each.state for each in background.healths() if each.name in "abc"}

    tasks = [BackgroundTask("a", lambda stop: 3600.0, stop=token) for _ in range(2)]
    tasks += [BackgroundTask("b", fails, stop=token, pause_s=0.0)]
    tasks += [BackgroundTask("b", lambda stop: 3600.0, stop=token) for _ in range(2)]
    BackgroundTask("c", lambda stop: None)
    assert states() == {}, "none has begun"
    for task in tasks:
        task.start()
    assert done.wait(SOON_S)
    assert states() == {"a": State.RUNNING, "b": State.FAILING}, "of one name, the worst"
    for task in tasks:
        task.stop(SOON_S)
    assert states() == {}, "all have ended"


def test_it_imports_the_standard_library_alone() -> None:
    script = (
        "import sys; before = set(sys.modules); import embertide._common.background; "
        "print([name for name in set(sys.modules) - before"
        " if name.split('.')[0] not in sys.stdlib_module_names and 'embertide' not in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
