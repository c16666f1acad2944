"""Figures of a fleet for those who look, made outside the driver's lock and once for all."""

import collections
import threading
import time
from collections.abc import Callable

from embertide.server.core.control import Control
from embertide.server.core.figures import FleetFigures, FleetSnapshot
from embertide.v1 import control_pb2

_KEPT_MAX = 16
_SHARE = 0.01  # of a core that figures may take while nothing changes but loads
_OLDEST_S = 5.0  # nodes report loads as seldom, or more seldom


def snapshot(core: Control, now_ms: int) -> FleetSnapshot:
    """Return what figures are made of, which takes no time."""
    return FleetSnapshot(
        plan=core.plan,
        layout=core.layout,
        no_plan="" if core.plan is not None else f"no plan has been made: {core.why_no_plan}",
        living=frozenset(member.name for member in core.fleet.live(now_ms)),
        loads_version=core.loads.version,
        loads=dict(core.loads.by_node),
        columns=dict(core.loads.columns),
    )


class Figures:
    """Figures by what was asked for, all of one moment. Thread-safe.

    A change of plan or of who lives is told at once. Loads of a large fleet change all the time, so
    the moment is kept until its answers have taken no more than a hundredth of a core, and for 5 s
    at most: a tick of the control plane waits for the interpreter while they are made.
    Bounded: answers to the newest 16 different questions.

    Attributes:
        made: Answers that were made, and not kept ones.
    """

    def __init__(
        self, look: Callable[[], FleetSnapshot], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Make them of what `look` returns."""
        self.made = 0
        self._look = look
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._fleet: FleetFigures | None = None
        self._began_s = 0.0
        self._spent_s = 0.0  # CPU time for answers of this moment
        self._kept: collections.OrderedDict[bytes, control_pb2.GetFleetFiguresResponse] = (
            collections.OrderedDict()
        )

    def answer(
        self, request: control_pb2.GetFleetFiguresRequest
    ) -> control_pb2.GetFleetFiguresResponse:
        """Answer a request.

        Raises:
            RefusedError: It asks for too much, or the state store cannot be reached.
        """
        question = request.SerializeToString(deterministic=True)
        with self._lock:  # who asks meanwhile gets the same answer
            fleet = self._newest()
            answer = self._kept.get(question)
            if answer is None:
                began_s = time.thread_time()
                answer = fleet.answer(request)
                self._spent_s += time.thread_time() - began_s
                self.made += 1
            self._kept[question] = answer
            self._kept.move_to_end(question)
            if len(self._kept) > _KEPT_MAX:
                self._kept.popitem(last=False)
            return answer

    def _newest(self) -> FleetFigures:
        """Return the figures to answer from, which are of another moment once that is due."""
        now, now_s = self._look(), self._clock_s()
        fleet, kept_s = self._fleet, min(_OLDEST_S, self._spent_s / _SHARE)
        if fleet is not None and (
            now.same(fleet.snapshot)
            or (now.same_plan(fleet.snapshot) and now_s < self._began_s + kept_s)
        ):
            return fleet
        self._fleet, self._began_s, self._spent_s = FleetFigures(now), now_s, 0.0
        self._kept.clear()
        return self._fleet
