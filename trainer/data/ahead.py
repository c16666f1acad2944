"""Reading ahead: one thread reads and prepares the next batches while this one learns.

A reader makes hundreds of batches at once out of a chunk, and then takes as long as many steps for
the next chunk. So what waits is bounded by bytes, which hold a few chunks, and not by batches.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

from embertide._common.background import BackgroundTask, tend
from embertide.trainer.data.base import Batch

# A stream that is away may take longer to give up; its thread ends with the process.
_LEAVE_S = 10.0
_ASK_S = 0.5


class _Ahead:
    """The batches that the thread has read and nobody took; `changed` guards all of it."""

    def __init__(self, batches: Iterator[Batch], max_bytes: int) -> None:
        self._batches = batches
        self._max_bytes = max_bytes
        self._waiting: deque[Batch] = deque()
        self._bytes = 0
        self._ended = self._left = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.task = BackgroundTask("reader", self.read)

    def read(self, _stop: threading.Event) -> None:
        """Read until the end, an error, or `leave`: a task of one round."""
        try:
            for batch in self._batches:
                self.task.works()
                with self._changed:
                    self._changed.wait_for(lambda: self._left or self._bytes < self._max_bytes)
                    if self._left:
                        break
                    self._waiting.append(batch)
                    self._bytes += batch.nbytes
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            close = getattr(self._batches, "close", None)
            if close is not None:
                close()  # in this thread, whose the input is
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def given(self, ends: Callable[[], bool], meanwhile: Callable[[], bool]) -> Iterator[Batch]:
        """Yield what was read; the reader's error comes after the batches before it."""
        while True:
            tend()  # should the reader's thread not have started
            with self._changed:
                nothing = not self._ended and not self._waiting
            if nothing and meanwhile():
                continue
            with self._changed:
                there = self._changed.wait_for(lambda: self._ended or bool(self._waiting), _ASK_S)
                if there and not self._waiting:
                    break
                if there:
                    batch = self._waiting.popleft()
                    self._bytes -= batch.nbytes
                    self._changed.notify_all()
            if not there:
                if ends():
                    return
                continue
            yield batch
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        """Let the thread end at its next batch."""
        with self._changed:
            self._left = True
            self._changed.notify_all()


@contextlib.contextmanager
def read_ahead(
    batches: Iterator[Batch],
    max_bytes: int,
    ends: Callable[[], bool] = lambda: False,
    meanwhile: Callable[[], bool] = lambda: False,
) -> Iterator[Iterator[Batch]]:
    """Gives the same batches, read in a thread of their own; at the end the thread stops.

    An error of `batches` comes where its batch would have. Leaving waits for the batch that is
    being read, ten seconds at most; those that were read in vain are dropped.

    Args:
        batches: The batches to read; nobody else may use it.
        max_bytes: Bound on the waiting batches, but for one batch. 0 reads in the caller's thread.
        ends: Asked now and then while there is nothing to read, in the caller's thread: whether to
            wait no longer.
        meanwhile: Called in the caller's thread when there is nothing to read yet: does a piece of
            work that waits for more, and returns whether there was one.
    """
    if max_bytes == 0:
        yield batches
        return
    ahead = _Ahead(batches, max_bytes)
    ahead.task.start()
    try:
        yield ahead.given(ends, meanwhile)
    finally:
        ahead.leave()
        ahead.task.stop(_LEAVE_S)
