"""The last hour of a few figures, as the console has seen them while somebody looked."""

import collections
import threading
from typing import Any, NamedTuple

SAMPLES_MAX = 720
"""An hour, at a sample in five seconds."""
EVERY_MS = 5000


class Sample(NamedTuple):
    """The figures at one time; None: no node said.

    Attributes:
        at_ms: Wall clock.
        staleness_worst_ms: The largest staleness of a live node.
        staleness_median_ms: The median staleness of the live nodes.
        behind_worst: Versions behind the newest commit, of the live nodes.
    """

    at_ms: int
    staleness_worst_ms: float | None
    staleness_median_ms: float | None
    behind_worst: int | None


class History:
    """Samples of the last hour. Thread-safe."""

    def __init__(self) -> None:
        """Begin without any."""
        self._lock = threading.Lock()
        self._samples: collections.deque[Sample] = collections.deque(maxlen=SAMPLES_MAX)

    def add(self, facts: dict[str, Any]) -> None:
        """Take the figures of a fleet's facts, once in five seconds."""
        with self._lock:
            if self._samples and facts["at_ms"] - self._samples[-1].at_ms < EVERY_MS:
                return
            self._samples.append(sample_of(facts))

    def columns(self) -> list[list[float | None]]:
        """Return the samples as uPlot takes them: times in seconds, then a list for each figure."""
        with self._lock:
            samples = list(self._samples)
        return [
            [each.at_ms / 1000 for each in samples],
            [_seconds(each.staleness_worst_ms) for each in samples],
            [_seconds(each.staleness_median_ms) for each in samples],
            [each.behind_worst for each in samples],
        ]


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000


def sample_of(facts: dict[str, Any]) -> Sample:
    """Return the figures of a fleet's facts."""
    ages = sorted(n["staleness_ms"] for n in facts["nodes"] if n["staleness_ms"] is not None)
    behind = [n["versions_behind"] for n in facts["nodes"] if n["versions_behind"] is not None]
    return Sample(
        at_ms=facts["at_ms"],
        staleness_worst_ms=ages[-1] if ages else None,
        staleness_median_ms=ages[len(ages) // 2] if ages else None,
        behind_worst=max(behind, default=None),
    )
