"""The bytes that devices hold while buckets move, and may hold.

A copy comes before another one leaves. A device that is full can take no version any more,
and then its peers can ask its node for nothing; so moves fill a device to a part of its budget
only, or to what it holds before them or after them, if that is more.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from embertide.server.core.plan.names import Device, NamedMove

# Share of a budget, in bytes of buckets as nodes report them. Versions, rows that they changed
# and pages that are not full come to a tenth more, and a node keeps an eighth free
# (bucket_mover.cc).
MOVING = 0.75


At = TypeVar("At", bound=Hashable)


class Room(Generic[At]):
    """Bytes that devices hold, by place or by name, as moves are made."""

    def __init__(self, held: Mapping[At, int], max_held: Mapping[At, int]) -> None:
        """Begin with what is held; `max_held` is what may be, of the same devices."""
        self._held = dict(held)
        self._max = max_held

    def fits(self, at: At, size: int) -> bool:
        """Whether a device may take so many bytes more. One that is not known takes any."""
        return at not in self._max or self._held[at] + size <= self._max[at]

    def take(self, at: At, size: int) -> None:
        """Note that a device holds more, or less if `size` is negative."""
        if at in self._held:
            self._held[at] += size


def join(room: Room[Device], move: NamedMove) -> None:
    """Note that a bucket joins its target."""
    if move.target is not None:
        room.take(move.target, move.bytes)


def leave(room: Room[Device], move: NamedMove, *, moved: bool) -> None:
    """Note that a bucket that has joined has left its source, or its target if not `moved`."""
    if moved and move.source is not None:
        room.take(move.source, -move.freed_bytes)
    if not moved and move.target is not None:
        room.take(move.target, -move.bytes)


def room_of(budgets: Mapping[At, int], loads: Iterable[tuple[At, int, int]]) -> Room[At]:
    """Return the room before the first of some moves.

    Args:
        budgets: Bytes of each device's budgets.
        loads: The bytes that each device holds before the moves, and after them.
    """
    listed = list(loads)
    max_held = {
        at: max(int(MOVING * budgets[at]), before, after)
        for at, before, after in listed
        if at in budgets
    }
    return Room({at: before for at, before, _ in listed}, max_held)
