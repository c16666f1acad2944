"""Reading ahead: one thread reads and prepares the next batches while this one learns."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from embertide.trainer.data.base import Batch

_POLL_S = 0.1
# A stream that is away may take longer to give up; its thread ends with the process.
_LEAVE_S = 10.0


@dataclass(frozen=True, slots=True)
class _End:
    """What the thread puts last: why it stopped."""

    error: BaseException | None = None


@contextlib.contextmanager
def read_ahead(batches: Iterator[Batch], depth: int) -> Iterator[Iterator[Batch]]:
    """Gives the same batches, read in a thread of their own; at the end the thread stops.

    An error of `batches` comes where its batch would have. Leaving waits for the batch that is
    being read, ten seconds at most; those that were read in vain are dropped.

    Args:
        batches: What to read; nobody else may use it.
        depth: Batches that wait at most. 0 reads in the caller's thread.
    """
    if depth == 0:
        yield batches
        return
    waiting: queue.Queue[Batch | _End] = queue.Queue(depth)
    left = threading.Event()

    def put(item: Batch | _End) -> bool:
        while not left.is_set():
            try:
                waiting.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def read() -> None:
        try:
            for batch in batches:
                if not put(batch):
                    return
            put(_End())
        except BaseException as error:
            put(_End(error))

    def given() -> Iterator[Batch]:
        while True:
            item = waiting.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item

    thread = threading.Thread(target=read, name="reader", daemon=True)
    thread.start()
    try:
        yield given()
    finally:
        left.set()
        thread.join(_LEAVE_S)
