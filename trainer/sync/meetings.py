"""Where ranks meet to take the mean of their nets: the groups of `groups.py`, as ranks ask for one.

The first rank has them. A rank asks once it has taken a step, and waits for its group; members then
exchange their nets with one another (replicas.py) and say that they are done. Whoever waits for a
rank that stands still goes on without it: that one leaves, and takes part again once it asks.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from embertide.trainer.sync.groups import Group, GroupGenerator

_LOOK_S = 0.1  # who waits looks so often whether another stands still


class Meetings:
    """The groups of one run. For any number of threads, one for each rank.

    Args:
        generator: Makes the groups.
        stands_still: Whether a rank takes so long for its step that nobody is to wait for it.
    """

    def __init__(self, generator: GroupGenerator, stands_still: Callable[[int], bool]) -> None:
        """Begin with no groups."""
        self.sizes: Counter[int] = Counter()
        self.waits_s = [0.0] * generator.size
        self.left = 0  # times that a rank was left out, as it stood still
        self._generator = generator
        self._stands_still = stands_still
        self._changed = threading.Condition()
        self._asking: set[int] = set()
        self._away: set[int] = set()
        self._groups: dict[int, Group] = {}  # that has begun, and a rank is to be told of
        self._running: dict[int, tuple[Group, set[int]]] = {}  # by number: who is not done
        self._failed: Exception | None = None

    def ask(self, rank: int) -> None:
        """Ask for a group; `wait` gives it. The group before it has ended then."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or not self._is_in_group(rank))
            if self._failed is not None:
                raise self._failed
            if rank in self._away:
                self._away.remove(rank)
                self._generator.join(rank)
            self._asking.add(rank)
            self._begin(self._generator.request(rank))

    def wait(self, rank: int) -> Group | None:
        """Return the group that a rank is to meet now; None: it is to go on without.

        Raises:
            RankLostError: A rank is gone.
        """
        began = time.monotonic()
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._failed or rank in self._groups or rank not in self._asking, _LOOK_S
            ):
                self._leave_behind()
            self.waits_s[rank] += time.monotonic() - began
            if self._failed is not None:
                raise self._failed
            return self._groups.pop(rank, None)

    def done(self, rank: int, number: int) -> None:
        """Say that a rank has met the group of that number."""
        with self._changed:
            group, rest = self._running[number]
            rest.discard(rank)
            if not rest:
                del self._running[number]
                self._asking -= set(group.serves)
                self._begin(self._generator.done(group))
                self._changed.notify_all()

    def release(self) -> None:
        """Have all who wait go on without a group, for no other rank is to ask now."""
        with self._changed:
            for rank in sorted(self._asking):
                if not self._is_in_group(rank):
                    self._asking.remove(rank)
                    self._begin(self._generator.leave(rank))
                    self._generator.join(rank)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Have all who wait raise an error."""
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def as_json(self) -> dict[str, Any]:
        """Return counters by name."""
        return {
            "groups": {str(size): count for size, count in sorted(self.sizes.items())},
            "waits_s": {str(rank): waits_s for rank, waits_s in enumerate(self.waits_s)},
            "left": self.left,
        }

    def _is_in_group(self, rank: int) -> bool:
        return any(rank in group.members for group, _ in self._running.values())

    def _begin(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.sizes[len(group.members)] += 1
            self._running[group.number] = (group, set(group.members))
            for rank in group.members:
                self._groups[rank] = group
        self._changed.notify_all()

    def _leave_behind(self) -> None:
        for rank in sorted(self._generator.waits_for() - self._away):
            if self._stands_still(rank):
                self.left += 1
                self._away.add(rank)
                self._begin(self._generator.leave(rank))
