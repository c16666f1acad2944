"""Whether a server that runs has answered nobody for too long: it stands still."""

import time
from collections.abc import Callable
from typing import Protocol

from embertide.server.adapters.process import UsageError

TRIES = 3
"""Questions in a row that go unanswered before a server counts as silent."""
DEFAULT_S, MIN_S = 60.0, 4.0


class Question(Protocol):
    """A question under way."""

    @property
    def answered(self) -> bool:
        """Whether there is an answer, whatever it says."""
        ...

    def forget(self) -> None:
        """Wait for it no longer."""
        ...


class Asked(Protocol):
    """The server that is asked; none of these waits for long."""

    def ask(self, model: str) -> Question:
        """Ask it for an inference of a model."""
        ...

    def answered(self) -> int | None:
        """Return how many inferences it has answered or refused; None: it does not say."""
        ...

    def traced_by(self) -> int:
        """Return the process that debugs it; 0: none does."""
        ...


def check_bound(silent_s: float) -> None:
    """Prove that a bound can be told from a busy machine.

    Raises:
        UsageError: It is too short.
    """
    if silent_s and not silent_s >= MIN_S:
        raise UsageError(
            f"silent_s is {silent_s:g}: a busy machine may take so long to answer; give "
            f"{MIN_S:g} or more, or 0 for no bound"
        )


class SilenceWatch:
    """Asks a server that serves, on a schedule. Not thread-safe; no call waits for an answer.

    A question is asked each quarter of the bound. If three in a row have no answer by the time of
    the next, after the bound at most, the server is silent: unless it has answered others
    meanwhile, and is overloaded, or a debugger holds it. Questions are asked one after the other,
    so that a pause of the whole machine costs one of them and no more.

    Attributes:
        bound_s: Seconds that a server may be silent; 0: for ever.
    """

    def __init__(
        self,
        server: Asked,
        model: str,
        bound_s: float = DEFAULT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask nothing yet. Requires: `check_bound(bound_s)`."""
        self.bound_s = bound_s
        self._server, self._model, self._clock = server, model, clock
        self._each_s = bound_s / (TRIES + 1)
        self._open: list[Question] = []  # the last ones asked, all without an answer
        self._count: int | None = None  # of answers to anybody, at the last look
        self._due_s = clock() + self._each_s

    def begin(self) -> None:
        """Forget what was: the server has begun to serve."""
        self._forget()
        self._due_s = self._clock() + self._each_s

    def poll(self) -> bool:
        """Return whether it is silent; called a few times a second while it is to serve."""
        if not self.bound_s:
            return False
        if any(each.answered for each in self._open):
            self._forget()
        now = self._clock()
        if now < self._due_s:
            return False
        if self._open and self._works():
            self._forget()
        if len(self._open) >= TRIES:
            self._forget()
            return True
        self._open.append(self._server.ask(self._model))
        self._due_s = now + self._each_s
        return False

    def _works(self) -> bool:
        """Return whether there is another reason for a question without an answer."""
        before, self._count = self._count, self._server.answered()
        first = len(self._open) == 1  # there is nothing yet to compare with
        others = not first and self._count is not None and self._count != before
        return others or self._server.traced_by() != 0

    def _forget(self) -> None:
        for each in self._open:
            each.forget()
        self._open.clear()
