"""How tests wait for what other threads and processes bring about."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], bool], timeout_s: float = 60.0, every_s: float = 0.05
) -> None:
    """Look until it is so; the limit is for what hangs. With `every_s` 0 it looks again at once."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(every_s)
