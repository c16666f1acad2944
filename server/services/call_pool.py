"""Threads of a gRPC server, which the system may refuse.

gRPC's own loop ends, for ever, with what `submit` raises: a server that was refused one thread
would live on and answer nobody.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from embertide._common.background import describe
from embertide._common.errors import OperatingError

_REFUSED = "can't start new thread"  # as CPython says it


class NoThreadError(OperatingError):
    """The system started no thread for calls that wait."""


class CallPool(ThreadPoolExecutor):
    """A pool whose calls wait where no thread can be started. Safe from many threads.

    Threads that are there do them; else the next call, or `tend`, tries again to start one.
    """

    def __init__(self, most: int, name: str) -> None:
        """Start none yet; `most` at a time."""
        super().__init__(most, thread_name_prefix=name)
        self._why = ""  # the last could not be started

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Have a call answered, as soon as there is a thread.

        Raises:
            RuntimeError: The pool, or the interpreter, is ending.
        """
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        try:
            super().submit(run)
        except MemoryError as error:
            self._why = describe(error)
            future.cancel()  # whether it waits is not known
        except RuntimeError as error:
            if _REFUSED not in str(error):
                raise
            self._why = describe(error)  # it waits
        else:
            self._why = ""
        return future

    def tend(self) -> None:
        """Try again to start a thread, if the last could not be.

        Raises:
            NoThreadError: It cannot be started now.
        """
        if self._why:
            self.submit(bool)
        if self._why:
            raise NoThreadError(
                f"calls wait for a thread ({self._why}): raise the limit of threads (`ulimit -u`, "
                "or the container's pids limit)"
            )
