"""Figures of a fleet for those who look, made outside the driver's lock and once for all."""

import collections
import threading
from collections.abc import Callable

from embertide.server.core.control import Control
from embertide.server.core.figures import FleetSnapshot, figures_of
from embertide.v1 import control_pb2

_KEPT_MAX = 16


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
    """Figures by what was asked for, as long as the fleet is the same. Thread-safe.

    Bounded: answers to the newest 16 different questions.

    Attributes:
        made: Answers that were made, and not kept ones.
    """

    def __init__(self, look: Callable[[], FleetSnapshot]) -> None:
        """Make them of what `look` returns."""
        self.made = 0
        self._look = look
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[
            bytes, tuple[FleetSnapshot, control_pb2.GetFleetFiguresResponse]
        ] = collections.OrderedDict()

    def answer(
        self, request: control_pb2.GetFleetFiguresRequest
    ) -> control_pb2.GetFleetFiguresResponse:
        """Answer a request.

        Raises:
            RefusedError: It asks for too much, or the state store cannot be reached.
        """
        question = request.SerializeToString(deterministic=True)
        with self._lock:  # who asks meanwhile gets the same answer
            now = self._look()
            before, answer = self._kept.get(question, (None, None))
            if before is None or answer is None or not now.same(before):
                answer = figures_of(now, request)
                self.made += 1
            self._kept[question] = now, answer
            self._kept.move_to_end(question)
            if len(self._kept) > _KEPT_MAX:
                self._kept.popitem(last=False)
            return answer
