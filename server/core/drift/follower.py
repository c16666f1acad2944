"""The follower of the drift: it looks when it is time, and turns a look into an operation.

Looks and measurements of gains run as tasks, where planners run. The autopilot decides when one is
due and judges what came of it.
"""

from collections.abc import Callable, Mapping

from embertide.server.core.drift.autopilot import Autopilot, Trust
from embertide.server.core.drift.look import LookFindings
from embertide.server.core.drift.options import DriftOptions
from embertide.server.core.errors import RefusedError
from embertide.server.core.loads import Loads
from embertide.server.core.operations import Operations
from embertide.server.core.preparation import PreparedOperation, operation_of
from embertide.server.core.price_fit import CostFit
from embertide.server.core.reshard import Situation, build_moves
from embertide.server.core.tasks import DriftSeen, GainMeasured, TaskQueue
from embertide.v1 import control_pb2

_FAILED, _ABORTED = control_pb2.OPERATION_STATE_FAILED, control_pb2.OPERATION_STATE_ABORTED


class DriftFollower:
    """Follows the drift of a fleet while no operation is at work."""

    def __init__(
        self,
        options: DriftOptions,
        autopilot: Autopilot,
        tasks: TaskQueue,
        operations: Operations,
        loads: Loads,
        fit: CostFit,
    ) -> None:
        """Begin; what is given stays its owner's."""
        self._options = options
        self._autopilot = autopilot
        self._tasks = tasks
        self._operations = operations
        self._loads = loads
        self._fit = fit

    def follow(
        self,
        epoch: int,
        situation: Callable[[], Situation],
        accept: Callable[[PreparedOperation], None],
        now_ms: int,
    ) -> None:
        """Look at the drift when it is time, and act on what a look has found.

        Args:
            epoch: The plan's epoch; a look at an earlier plan no longer counts.
            situation: Makes what a look and its operation are judged by.
            accept: Takes the operation that a look comes to.
            now_ms: Wall clock.

        Raises:
            RefusedError: There is no situation, or `accept` raised it.
        """
        if self._operations.active():
            return
        if (measured := self._tasks.take(GainMeasured)) is not None:
            found = measured.outcome
            self._autopilot.compare(None if isinstance(found, RefusedError) else found, now_ms)
        if (seen := self._tasks.take(DriftSeen)) is not None:
            if seen.epoch != epoch:
                self._autopilot.note_moved_on(seen.epoch, epoch, now_ms)
            elif (ready := self._judge(seen.outcome, situation(), now_ms)) is not None:
                accept(ready)
        self._add_tasks(situation, now_ms)

    def _add_tasks(self, situation: Callable[[], Situation], now_ms: int) -> None:
        """Have a gain measured, or the drift looked at, where that is due."""
        records, loads = self._operations.records, self._loads.by_node
        if not self._tasks and self._autopilot.can_compare(records, loads, now_ms):
            comparison = self._autopilot.build_comparison(situation())
            if comparison is not None:
                self._tasks.add(comparison)
        if not self._tasks and self._autopilot.is_due(now_ms):
            look = self._autopilot.build_look(situation(), loads, drained(records), now_ms)
            if look is not None:
                self._tasks.add(look)

    def _judge(
        self, outcome: LookFindings | RefusedError, situation: Situation, now_ms: int
    ) -> PreparedOperation | None:
        """Return the operation that a look comes to, if any."""
        move_plan = None
        if isinstance(outcome, LookFindings) and outcome.triggers:
            try:
                move_plan = build_moves("reshard", self._options.planner, outcome, situation)
            except RefusedError as error:
                outcome = error
        trust = Trust(self._fit.trusted, self._fit.error)
        act = self._autopilot.take(outcome, move_plan, situation, trust, now_ms)
        if act is None:
            return None
        ready = operation_of(act.request, act.move_plan, situation)
        if ready.answer.HasField("before"):
            ready.answer.model.CopyFrom(self._fit.message())
        return ready


def drained(records: Mapping[str, control_pb2.OperationRecord]) -> set[str]:
    """Return the nodes that an operator has drained: they get nothing by themselves.

    A drain counts no more once its node was removed: who comes by that name is another.
    """
    return {
        each.request.drain_node
        for each in records.values()
        if not each.drained_node_left and each.operation.state not in (_FAILED, _ABORTED)
    } - {""}
