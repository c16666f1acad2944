"""Background work: one class for every task that a process does beside what it is asked.

A task is a thread that does rounds until it is told to stop. Whatever a round raises is counted,
logged and tried again after a back-off, and so is a thread that the system does not start; neither
ends the process. Standard library alone: every extra has it.
"""

import contextlib
import dataclasses
import enum
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable

STOP_S = 2.0
_ERROR_CHARACTERS_MAX = 300
_log = logging.getLogger(__name__)

Work = Callable[[threading.Event], float | None]


class State(enum.StrEnum):
    """The state of a task."""

    NEW = "new"  # nobody has started it
    RUNNING = "running"
    FAILING = "failing"  # its last round raised; it is tried again
    NO_THREAD = "no thread"  # the system started none; that is tried again
    ENDED = "ended"  # it was stopped, or has nothing left to do


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """How a task is.

    Attributes:
        name: The task's.
        state: The task's state.
        failures: Rounds that raised and threads that did not start, since it was made.
        error: The last error, one line. Empty: there has never been one.
        since_s: Wall clock in seconds since the Unix epoch, from when on it is in this state.
    """

    name: str
    state: State
    failures: int
    error: str
    since_s: float

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with it now."""
        return self.state not in (State.FAILING, State.NO_THREAD)


class BackgroundTask:
    """A thread that does rounds of work. Safe from many threads.

    Example: `BackgroundTask("lease", renew).start()`, where `renew` returns the seconds until its
    next round.
    """

    def __init__(
        self,
        name: str,
        work: Work,
        *,
        stop: threading.Event | None = None,
        expected: tuple[type[BaseException], ...] = (),
        pause_s: float = 0.1,
        pause_s_max: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a task; `start` begins it.

        Args:
            name: For people, in the log, in metrics and as the thread's name.
            work: One round. It gets the stop token, at which it looks in each of its own loops and
                by which it waits, so that it returns within two seconds of a stop. It returns the
                seconds until its next round, or None if there is nothing left to do.
            stop: The stop token, if several tasks share one; `stop()` of one then stops them all.
            expected: Errors that say all in one line; any other is logged with its traceback.
            pause_s: Seconds from the first failure to the next try; it doubles with each.
            pause_s_max: Its bound.
            clock: Steady seconds, for when a thread that did not start is tried again.
        """
        self.name = name
        self._work = work
        self._stop = stop or threading.Event()
        self._expected = expected
        self._pause_s, self._pause_s_max = pause_s, pause_s_max
        self._clock = clock
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._in_a_row = 0
        self._again_s = 0.0  # when a thread that did not start is tried again
        self._health = Health(name=name, state=State.NEW, failures=0, error="", since_s=time.time())

    # --- the owner's side -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin, unless it has begun or was stopped.

        It does not raise: if the system starts no thread, `tend` tries again.
        """
        with _known_lock:
            _known.add(self)
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._start_thread()

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Tell it to stop, and wait for that; False: it has not ended in time.

        Such a thread is left to itself: it is a daemon, and holds up no exit.
        """
        self._stop.set()
        with _known_lock:
            _known.discard(self)
            _unstarted.discard(self)
        with self._lock:
            thread = self._thread
            if thread is None:
                self._note(State.ENDED)
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        if thread.is_alive():
            _log.warning("%s has not stopped within %g s; it is left behind", self.name, timeout_s)
        return not thread.is_alive()

    def health(self) -> Health:
        """Return how it is."""
        return self._health

    # --- the work's side ------------------------------------------------------------------------

    def works(self) -> None:
        """Say, from within a round that lasts, that it does what it is for."""
        if self._in_a_row:
            _log.warning("%s works again, after %d failures", self.name, self._in_a_row)
            self._in_a_row = 0
            self._note(State.RUNNING)

    # --- threads --------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread = thread
        try:
            thread.start()
        except (RuntimeError, MemoryError, OSError) as error:  # a limit of processes or of memory
            self._thread = None
            self._again_s = self._clock() + self._failed(State.NO_THREAD, error)
            with _known_lock:
                _unstarted.add(self)
        else:
            with _known_lock:
                _unstarted.discard(self)

    def _try_again(self) -> None:
        with self._lock:
            if (
                self._thread is None
                and self._clock() >= self._again_s
                and not self._stop.is_set()
                and self._health.state is State.NO_THREAD
            ):
                self._start_thread()

    # --- rounds ---------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s: float | None = 0.0
        self._note(State.RUNNING)
        while pause_s is not None and not self._stop.wait(pause_s):
            tend()
            try:
                pause_s = self._work(self._stop)
            except BaseException as error:  # the barrier: a thread has nobody to raise to
                pause_s = self._failed(State.FAILING, error)
            else:
                self.works()
        with self._lock:
            self._thread = None
            self._note(State.ENDED)

    def _failed(self, state: State, error: BaseException) -> float:
        """Count and log a failure; return the seconds until the next try.

        Memory may be out: then saying so fails too, and the count alone is kept.
        """
        self._in_a_row += 1
        pause_s: float = min(self._pause_s * 2 ** min(self._in_a_row - 1, 30), self._pause_s_max)
        with contextlib.suppress(MemoryError):
            text = describe(error)
            before = self._health
            self._note(state, failures=before.failures + 1, error=text)
            if text != before.error or before.state is not state:
                _log.error("%s: %s; it is tried again in %g s", self.name, text, pause_s)
                if not isinstance(error, (*self._expected, MemoryError)) and state is State.FAILING:
                    _log.error("%s", "".join(traceback.format_exception(error)))
        return pause_s

    def _note(self, state: State, *, failures: int | None = None, error: str | None = None) -> None:
        before = self._health
        self._health = Health(
            name=self.name,
            state=state,
            failures=before.failures if failures is None else failures,
            error=before.error if error is None else error,
            since_s=before.since_s if state is before.state else time.time(),
        )


def tend() -> None:
    """Start the threads that the system did not start, as far as their time has come.

    Every round of every task does this. A process whose only task has no thread calls it in its own
    loop, or with each look at its health.
    """
    with _known_lock:
        waiting = list(_unstarted)
    for task in waiting:
        task._try_again()


def healths() -> list[Health]:
    """Return how the tasks of this process are that have begun and not ended, by name.

    Of several of one name it is the one that is worst.
    """
    with _known_lock:
        tasks = list(_known)
    found: dict[str, Health] = {}
    for health in (task.health() for task in tasks):
        if health.state is State.ENDED:
            continue
        if health.name not in found or found[health.name].ok:
            found[health.name] = health
    return [found[name] for name in sorted(found)]


def ill(healths: Iterable[Health]) -> list[Health]:
    """Return those of tasks with which something is wrong now."""
    return [each for each in healths if not each.ok]


def describe(error: BaseException) -> str:
    """Return an error as one line: its text, or what it is if it has none."""
    text = " ".join(str(error).split()) or "no reason given"
    if not isinstance(error, OSError) and type(error).__module__ == "builtins":
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _ERROR_CHARACTERS_MAX else text[: _ERROR_CHARACTERS_MAX - 1] + "…"


# Process-wide: the tasks started and not stopped, and those without a thread.
_known: "weakref.WeakSet[BackgroundTask]" = weakref.WeakSet()
_unstarted: "weakref.WeakSet[BackgroundTask]" = weakref.WeakSet()
_known_lock = threading.Lock()
