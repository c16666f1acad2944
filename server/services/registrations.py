"""Registrations that were refused: whoever operates a fleet hears of a node that is kept out."""

import collections
import logging
import threading
import time
from collections.abc import Callable

from embertide._common.quoting import shown
from embertide.v1 import control_pb2

_KEPT = 16
# Pause between lines about one node, which tries again every second or so.
_LOG_AGAIN_S = 60.0
# Pause between lines about any node: strangers may come from many addresses.
_LOG_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class RefusedRegistrations:
    """The newest of them by node and address, each with how often it came. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with none."""
        self._clock = clock
        self._lock = threading.Lock()
        self._last: collections.OrderedDict[tuple[str, str], control_pb2.RefusedRegistration] = (
            collections.OrderedDict()
        )
        self._logged_s: dict[tuple[str, str], float] = {}
        self._logged_last_s = -_LOG_EVERY_S
        self.count = 0

    def note(self, node: str, address: str, message: str) -> None:
        """Keep a refusal. Texts are a caller's, and may be anything."""
        key = node[:64], address[:255]
        now_s = self._clock()
        with self._lock:
            self.count += 1
            before = self._last.pop(key, None)
            refused = control_pb2.RefusedRegistration(
                node=key[0],
                address=key[1],
                message=message,
                count=(before.count if before is not None else 0) + 1,
                last_ms=round(time.time() * 1000),
            )
            self._last[key] = refused
            while len(self._last) > _KEPT:
                gone, _ = self._last.popitem(last=False)
                self._logged_s.pop(gone, None)
            same = before is not None and before.message == message
            due_s = self._logged_s.get(key, -_LOG_AGAIN_S) + _LOG_AGAIN_S if same else now_s
            if now_s < max(due_s, self._logged_last_s + _LOG_EVERY_S):
                return
            self._logged_s[key] = self._logged_last_s = now_s
        _log.warning(
            "node %s at %s may not register (%d times): %s",
            *(shown(each) for each in key),
            refused.count,
            message,
        )

    def accepted(self, node: str) -> None:
        """Forget what a node was refused for: it is one of the fleet now."""
        with self._lock:
            for key in [each for each in self._last if each[0] == node]:
                del self._last[key]
                self._logged_s.pop(key, None)

    def newest(self) -> list[control_pb2.RefusedRegistration]:
        """Return them, newest first."""
        with self._lock:
            return list(reversed(self._last.values()))
