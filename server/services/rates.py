"""The rate of one caller: a bucket of tokens that fills with time."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from embertide.server.core.errors import Code, RefusedError
from embertide.server.services.identity import Identity

# Calls a second, and at once. A person's tools ask a few times a second; a node beats five times,
# and all nodes may be one identity.
_LIMITS = {"reader": (50.0, 200.0), "operator": (50.0, 200.0), "node": (5000.0, 20000.0)}
_CALLERS_MAX = 4096


class Rates:
    """Bounds the calls of each identity. Thread-safe.

    Where nobody is asked who he is, nobody can be told from others: those calls are not bounded.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Take a clock in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._left: OrderedDict[Identity, tuple[float, float]] = OrderedDict()

    def take(self, caller: Identity) -> None:
        """Count a call.

        Raises:
            RefusedError: The caller has called too often.
        """
        limit = _LIMITS.get(caller.role)
        if limit is None:
            return
        per_s, most = limit
        with self._lock:
            now = self._clock()
            left, then = self._left.pop(caller, (most, now))
            left = min(most, left + (now - then) * per_s)
            self._left[caller] = (max(left - 1, 0.0), now)
            # The ones not heard of for longest, whose buckets are full again by now.
            while len(self._left) > _CALLERS_MAX:
                self._left.popitem(last=False)
        if left < 1:
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED,
                f"{caller} calls more than {per_s:.0f} times a second; call less often",
            )
