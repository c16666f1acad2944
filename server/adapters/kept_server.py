"""A server that is started again when it ends: at once, then later, then no more.

One that runs and answers nobody is ended first ([silence.py](silence.py)).
"""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable

from embertide._common.background import BackgroundTask, tend
from embertide.server.adapters.process import ProcessError, Stopped, how_ended
from embertide.server.adapters.silence import TRIES, SilenceWatch
from embertide.server.adapters.triton import TritonError, TritonServer

_ENDS_MAX, _WITHIN_S = 10, 600.0
"""So many ends in so long are more than restarts can mend."""
_LONG_S = 60.0  # a server that served so long did not end at once
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_POLL_S = 0.2
_GRACE_S = 2.0  # beyond what a server may take to end, for one that stands still


class Restarts:
    """Decides when a server that ended is started again. Not thread-safe.

    The first time at once. If it ends again soon, after a pause that doubles each time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Take a clock in seconds."""
        self._clock = clock
        self._ends = deque[float]()
        self._pause_s = 0.0

    def pause_s(self, served_s: float) -> float | None:
        """Return how long to wait after an end; None: start it no more.

        Args:
            served_s: How long it had served; 0: it never was ready.
        """
        now = self._clock()
        self._ends.append(now)
        while now - self._ends[0] > _WITHIN_S:
            self._ends.popleft()
        if len(self._ends) >= _ENDS_MAX:
            return None
        if len(self._ends) == 1 or served_s >= _LONG_S:
            self._pause_s = 0.0
        else:
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        return self._pause_s


class KeptServer:
    """Watches a server that was started and is ready. Not thread-safe.

    Attributes:
        server: The server; its `process`, `restarts` and `silences` change.
        stopping: Whether it is started no more, as its end is wanted.
    """

    def __init__(
        self,
        server: TritonServer,
        say: Callable[[str], None],
        silence: SilenceWatch,
        before: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch a server.

        Args:
            server: That serves.
            say: Hears what becomes of it, a line each.
            silence: Asks it whether it answers.
            before: Is called before each start.
            clock: In seconds.
        """
        self.server, self._before = server, before
        self.stopping = False
        self._say, self._clock = say, clock
        self._restarts = Restarts(clock)
        self._silence = silence
        self._serves_since: float | None = clock()
        self._ended_s = 0.0
        self._due_s: float | None = None  # of the next start; None: it runs
        self._kill_s: float | None = None  # if it still runs then; None: it is not being ended
        self._began_s = clock()

    def poll(self) -> bool:
        """Look at it, and return whether it serves; called a few times a second.

        Raises:
            TritonError: It ends again and again, and is started no more.
        """
        if self._due_s is not None:
            if self._clock() >= self._due_s:
                self._start()
        elif not self.server.alive():
            self._ended(how_ended(self.server.process.code or 0))
        elif self._kill_s is not None:
            if self._clock() >= self._kill_s:
                self.server.process.send(signal.SIGKILL)
        elif self._serves_since is not None:
            if not self._silence.poll():
                return True
            self.server.silences += 1
            self._end(
                f"stands still: it runs, and answered none of {TRIES} inferences in "
                f"{self._silence.bound_s:g} s"
            )
        elif self.server.answers():
            self._serves()
            return True
        elif self._clock() - self._began_s > self.server.options.start_timeout_s:
            self._end(f"is not ready after {self.server.options.start_timeout_s:.0f} s")
        return False

    def _serves(self) -> None:
        now = self._serves_since = self._clock()
        self._silence.begin()
        self._say(
            f"{self.server.name} serves again, {now - self._ended_s:.1f} s after it ended "
            f"({now - self._began_s:.1f} s of these to start and load)"
        )

    def _end(self, why: str) -> None:
        """End a server that runs; one that stands still may not see to SIGTERM."""
        grace_s = self.server.options.exit_timeout_s + _GRACE_S
        self._kill_s = self._clock() + grace_s
        self._say(
            f"{self.server.name} {why}; it is ended, by SIGKILL if need be after {grace_s:g} s"
        )
        self.server.process.send(signal.SIGTERM)

    def _ended(self, how: str) -> None:
        now = self._clock()
        served_s = now - self._serves_since if self._serves_since is not None else 0.0
        if self._serves_since is not None:
            self._ended_s = now
        self._serves_since = self._kill_s = None
        pause_s = self._restarts.pause_s(served_s)
        if pause_s is None:
            raise TritonError(
                f"{self.server.name} ended {_ENDS_MAX} times in {_WITHIN_S / 60:.0f} minutes, "
                f"last by {how}, and is started no more; see its log:\n{self.server.reason()}"
            )
        self._due_s = now + pause_s
        self._say(
            f"{self.server.name} ended by {how} after {served_s:.0f} s of serving: starts again "
            + (f"in {pause_s:.0f} s" if pause_s else "now")
            + f" (restart {self.server.restarts + 1}; its log: {self.server.former_log})"
        )
        if not pause_s:
            self._start()

    def _start(self) -> None:
        if self.stopping:
            return
        self._due_s = None
        self._began_s = self._clock()
        self._before()
        try:
            self.server.restart()
        except (ProcessError, OSError) as error:
            self._ended(f"a failed start: {error}")


class KeptInBackground(Stopped):
    """A server that a thread watches until `stop`, which stops the server too.

    The kernel ends a server whose starting thread has ended; this one lasts until `stop`.
    """

    def __init__(
        self, server: TritonServer, say: Callable[[str], None], silence: SilenceWatch
    ) -> None:
        """Take a server that serves, who hears of it in that thread, and what asks it."""
        self._server, self._say = server, say
        self._kept = KeptServer(server, say, silence)
        self._task = BackgroundTask("kept-server", self._round)
        self._task.start()

    def unwatched(self) -> str:
        """Return why nobody watches it now, one line; empty: it is watched.

        Where the system started no thread for that, this tries again.
        """
        tend()
        health = self._task.health()
        return "" if health.ok else health.error

    def _round(self, stopping: threading.Event) -> float | None:
        try:
            self._kept.poll()
        except TritonError as error:
            self._say(str(error))
            return None
        return _POLL_S

    def stop(self) -> int:
        """Stop both, and return the server's exit code."""
        self._kept.stopping = True
        self._task.stop()
        return self._server.stop()
