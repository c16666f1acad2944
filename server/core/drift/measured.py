"""What nodes themselves say that a key cost them: the other side of a prediction.

Each load window of a node gives the CPU time of its process and the keys that its requests wanted.
The cost of a window of the fleet is that of cost.Score, by nodes in place of devices, for each key
that is wanted: so it does not depend on how many requests came.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from embertide.server.core.plan.cost import MEAN_WEIGHT
from embertide.v1 import node_pb2

KEPT = 240  # windows of a node: twenty minutes


@dataclasses.dataclass(frozen=True, slots=True)
class _Window:
    heard_ms: int
    number: int
    seconds: float
    busy_us: float
    wanted: int


class Measured:
    """The last windows of each node. Bounded: 240 a node."""

    def __init__(self) -> None:
        """Begin with none."""
        self._windows: dict[str, collections.deque[_Window]] = {}

    def take(self, name: str, load: node_pb2.NodeServiceGetLoadResponse, now_ms: int) -> None:
        """Add a node's last window, once."""
        if not load.window_ms or not load.cpu_us:
            return
        windows = self._windows.setdefault(name, collections.deque(maxlen=KEPT))
        if windows and windows[-1].number == load.window:
            return
        wanted = sum(
            each.reads - each.peer_reads + each.asked + each.hot_reads for each in load.buckets
        )
        windows.append(
            _Window(now_ms, load.window, load.window_ms / 1000, float(load.cpu_us), wanted)
        )

    def forget(self, name: str) -> None:
        """Drop a node."""
        self._windows.pop(name, None)

    def knows(self, name: str) -> bool:
        """Whether a node has reported anything."""
        return name in self._windows

    def busy(self, names: Sequence[str], begin_ms: int, end_ms: int) -> float | None:
        """Return the CPU time a second that nodes spent together over a time; None: not known."""
        found = self._rates(names, begin_ms, end_ms)
        return sum(found[0]) if found else None

    def cost(self, names: Sequence[str], begin_ms: int, end_ms: int) -> float | None:
        """Return the cost of a wanted key, in us, over the windows that lie in a time.

        None if a node has no window in it, or no key was wanted.
        """
        found = self._rates(names, begin_ms, end_ms)
        if found is None or not found[1]:
            return None
        busy_N, wanted = found
        return float((max(busy_N) + MEAN_WEIGHT * np.mean(busy_N)) / wanted)

    def _rates(
        self, names: Sequence[str], begin_ms: int, end_ms: int
    ) -> tuple[list[float], float] | None:
        """Return each node's busy time and all wanted keys, a second, over the whole windows."""
        busy_N, wanted = [], 0.0
        for name in names:
            inside = [
                each
                for each in self._windows.get(name, ())
                if begin_ms <= each.heard_ms - each.seconds * 1000 and each.heard_ms <= end_ms
            ]
            seconds = sum(each.seconds for each in inside)
            if not seconds:
                return None
            busy_N.append(sum(each.busy_us for each in inside) / seconds)
            wanted += sum(each.wanted for each in inside) / seconds
        return (busy_N, wanted) if busy_N else None
