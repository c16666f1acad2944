"""What devices hold while buckets move, and how much they may.

What comes is there before what goes has left. A device that is full can take no version any more,
and then its peers can ask its node for nothing; so moves fill a device to a part of its budget
only, or to what it holds before them or after them, if that is more.
"""

from collections.abc import Mapping, Sequence

from embertide.server.core.plan.layout import Place, budget_bytes, devices, place
from embertide.v1 import control_pb2, plan_pb2

# Of a budget, in bytes of buckets as nodes report them. Version nodes, rows that versions changed
# and pages that are not full come to a tenth more, and a node keeps an eighth free (fleet.cc).
MOVING = 0.75


class Room:
    """Bytes that devices hold, as moves are made."""

    def __init__(self, held: Mapping[Place, int], most: Mapping[Place, int]) -> None:
        """Begin with what is held; `most` is what may be, of the same devices."""
        self._held = dict(held)
        self._most = most

    def fits(self, at: Place, size: int) -> bool:
        """Whether a device may take so many bytes more. One that is not known takes any."""
        return at not in self._most or self._held[at] + size <= self._most[at]

    def take(self, at: Place, size: int) -> None:
        """Note that a device holds more, or less if `size` is negative."""
        if at in self._held:
            self._held[at] += size

    def join(self, move: control_pb2.BucketMove) -> None:
        """Note that a bucket joins its target."""
        if move.HasField("target"):
            self.take(place(move.target), move.bytes)

    def leave(self, move: control_pb2.BucketMove, *, moved: bool) -> None:
        """Note that a bucket that has joined has left its source, or its target if not `moved`."""
        if moved and move.HasField("source"):
            self.take(place(move.source), -move.freed_bytes)
        if not moved and move.HasField("target"):
            self.take(place(move.target), -move.bytes)


def room_of(topology: plan_pb2.Topology, loads: Sequence[control_pb2.DeviceLoad]) -> Room:
    """Return the room before the first of the moves that lead from `before` to `after` of loads."""
    held = {place(load.device): load.bytes_before for load in loads}
    then = {place(load.device): load.bytes_after for load in loads}
    known = devices(topology)
    most = {
        at: max(int(MOVING * budget_bytes(known[at])), held[at], then[at])
        for at in held
        if at in known
    }
    return Room(held, most)
