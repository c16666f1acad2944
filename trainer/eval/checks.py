"""Checks: a few events that were scored, asked again beside a replay, each compared with the copy.

A replay waits for versions, so it may ask little while buckets move. Checks go on meanwhile, and so
prove more: small questions, one at a time in each of two threads, at most so many a second. Nobody
learns from their answers.

Shapes: B events.
"""

import collections
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from embertide.trainer.data.base import Batch
from embertide.trainer.data.limit import take
from embertide.trainer.eval.compare import Copy
from embertide.trainer.eval.served import Answer

EVENTS = 8
"""Events of a check."""
MOST = 20_000
"""Checks of one replay."""

_THREADS = 2
_RECENT = 16  # batches that checks are cut from
_IDLE_S = 0.05


class Scorer(Protocol):
    """Scores requests; used by several threads."""

    def score(self, batch: Batch) -> Answer:
        """Score events, all of them by one version."""


class Check(NamedTuple):
    """An answer, and how far it is from the copy's; None: the copy does not hold the version."""

    first: int
    events: int
    ts_ms: int
    answer: Answer
    difference: float | None


class Checks:
    """Asks while the copy is loaded. A context manager, whose end ends the threads.

    Args:
        model: The model whose answers are checked.
        copy: The copy that they are compared with.
        per_s: Checks a second at most.
    """

    def __init__(self, model: Scorer, copy: Copy, per_s: float) -> None:
        """Ask nothing yet."""
        self._model, self._copy = model, copy
        self._every_s = _THREADS / per_s  # of one thread
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._recent: collections.deque[Batch] = collections.deque(maxlen=_RECENT)
        self._turn = self._begun = 0
        self._made: list[Check] = []
        self._pool = ThreadPoolExecutor(_THREADS, "checks")
        self._running: list[Future[None]] = []

    def __enter__(self) -> Self:
        """Start the threads."""
        self._running = [self._pool.submit(self._run) for _ in range(_THREADS)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """End the threads."""
        self.stop()

    def stop(self) -> None:
        """End the threads, once their last checks are made; their errors are `taken`'s."""
        self._stop.set()
        self._pool.shutdown()

    def see(self, batch: Batch) -> None:
        """Let checks be cut from a batch that was scored."""
        with self._lock:
            self._recent.append(batch)

    def taken(self) -> list[Check]:
        """Return the checks that are new.

        Raises:
            ServingError: The model or the copy refuses one, or is gone.
        """
        for each in self._running:
            if each.done():
                each.result()
        with self._lock:
            made, self._made = self._made, []
        return made

    def _next(self) -> Batch | None:
        """Return the events of the next check; None: there are none yet, or there were enough."""
        with self._lock:
            if not self._recent or self._begun >= MOST:
                return None
            self._begun += 1
            self._turn += 1
            batch = self._recent[self._turn % len(self._recent)]
            parts = max(1, len(batch) // EVENTS)
            begin = self._turn // len(self._recent) % parts * EVENTS
        return take(batch, begin, min(begin + EVENTS, len(batch)))

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            part = self._next() if self._copy.loaded() else None
            if part is None:
                due_s = time.monotonic() + _IDLE_S
                continue
            due_s = max(due_s + self._every_s, time.monotonic())
            answer = self._model.score(part)
            difference = self._copy.difference(part, answer)
            check = Check(part.first, len(part), part.watermark_ms, answer, difference)
            with self._lock:
                self._made.append(check)
