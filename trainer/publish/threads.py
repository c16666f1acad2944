"""Threads that do jobs for one owner, and what becomes of a job where the system starts none.

A limit of processes or of memory may refuse a thread at any time. Then the threads that are there
do the job, or whoever gave it does: it takes longer, and nothing is lost.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from embertide._common.background import describe
from embertide.trainer.errors import TrainerError

T = TypeVar("T")

log = logging.getLogger(__name__)


class NoThreadError(TrainerError):
    """The system started no thread for what cannot be done without one."""


class Workers:
    """Some threads of one name, each started when it is first needed. Safe from many threads.

    Attributes:
        refused: Threads that the system did not start.
    """

    def __init__(self, name: str, most: int = 1) -> None:
        """Start none yet; `most` at a time."""
        self.refused = 0
        self._name = name
        self._pool = ThreadPoolExecutor(most, thread_name_prefix=name)
        self._was_refused = False

    def submit(self, job: Callable[[], T], *, here: bool = True) -> "Future[T]":
        """Have a job done, and return what it comes to.

        Args:
            job: Done once.
            here: Whether the caller's thread does it where no other can; else the result is a
                NoThreadError.
        """
        future: Future[T] = Future()
        taken = threading.Lock()

        def run() -> None:
            if not taken.acquire(blocking=False):
                return  # the caller has done it
            try:
                found = job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(found)

        try:
            self._pool.submit(run)
        except (RuntimeError, MemoryError) as error:  # it waits in the queue nevertheless
            self._note(error)
            if here:
                run()
            elif taken.acquire(blocking=False):
                future.set_exception(
                    NoThreadError(
                        f"no thread could be started ({describe(error)}): raise the limit of "
                        "processes (`ulimit -u`, or the container's pids limit)"
                    )
                )
        else:
            if self._was_refused:
                self._was_refused = False
                log.warning("%s: threads are started again", self._name)
        return future

    def _note(self, error: BaseException) -> None:
        self.refused += 1
        if not self._was_refused:
            self._was_refused = True
            log.error("%s: %s; it is tried again", self._name, describe(error))
