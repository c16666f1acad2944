"""All operations: those that wait, the one at work, those that have ended, and pages of them."""

from collections.abc import Mapping

from embertide.server.core.errors import Code, RefusedError, invalid
from embertide.server.core.operation import ENDED, RunningOperation
from embertide.server.core.pagination import page_of
from embertide.server.core.plan.layout import LaidPlan
from embertide.server.core.state import OPERATIONS_KEPT, OPERATIONS_KEPT_BYTES
from embertide.server.core.view import View
from embertide.v1 import control_pb2

WAITING_MAX = 100

Record = control_pb2.OperationRecord
State = control_pb2.OperationState


class Operations:
    """Records by id. `changed` holds what must be written; None: not kept any more.

    At most 1,000 records and 64 MiB, but for those that have not ended: at most 101.
    """

    def __init__(
        self, records: Mapping[str, Record], longest_deadline_ms: int, now_ms: int
    ) -> None:
        """Go on with what was written."""
        self.records = dict(sorted(records.items(), key=lambda item: item[1].operation.created_ms))
        self.changed: dict[str, Record | None] = {}
        self.made: set[str] = set()  # of `changed`, those with new moves
        self._bytes = {id: each.ByteSize() for id, each in self.records.items()}
        self._longest_deadline_ms = longest_deadline_ms
        begun = [each for each in self.active() if each.operation.base_epoch]
        self.running = RunningOperation(begun[0], longest_deadline_ms, now_ms) if begun else None

    def active(self) -> list[Record]:
        """Return those that have not ended, in the order they were accepted."""
        return [each for each in self.records.values() if not each.operation.ended_ms]

    def find(self, id: str) -> Record:
        """Return an operation.

        Raises:
            RefusedError: There is none.
        """
        if id not in self.records:
            raise RefusedError(Code.NOT_FOUND, f"no such operation: {id[:80]!r}; list operations")
        return self.records[id]

    def check_room(self) -> None:
        """Prove that one more may wait."""
        waiting = len(self.active()) - (self.running is not None)
        if waiting >= WAITING_MAX:
            raise RefusedError(Code.RESOURCE_EXHAUSTED, f"{waiting} operations wait; wait for them")

    def created_ms(self, now_ms: int) -> int:
        """Return a time of acceptance that no other operation has, so that it orders them."""
        last = next(reversed(self.records.values()), None)
        return max(now_ms, last.operation.created_ms + 1 if last else 0)

    def add(self, record: Record) -> None:
        """Take in an operation; the oldest ended ones above the bound are let go."""
        self._keep(record, made=True)
        for id in [id for id, each in self.records.items() if each.operation.ended_ms]:
            if len(self.records) <= OPERATIONS_KEPT and self.bytes <= OPERATIONS_KEPT_BYTES:
                break
            del self.records[id], self._bytes[id]
            self.changed[id] = None

    @property
    def bytes(self) -> int:
        """Bytes of all records."""
        return sum(self._bytes.values())

    def _keep(self, record: Record, *, made: bool = False) -> None:
        id = record.operation.id
        self.records[id] = record
        if made or id not in self._bytes:
            # A walk over all moves; what else changes in a record has few bytes.
            self._bytes[id] = record.ByteSize()
        self.changed[id] = record
        if made:
            self.made.add(id)

    def next_waiting(self) -> Record | None:
        """Return the operation whose turn it is, if none is at work."""
        if self.running is not None:
            return None
        waiting = (
            each
            for each in self.active()
            if each.operation.state == control_pb2.OPERATION_STATE_PENDING
        )
        return next(waiting, None)

    def begin(self, record: Record, epoch: int, now_ms: int, *, made: bool) -> None:
        """Set an operation to work from a plan.

        Args:
            record: The operation.
            epoch: The plan's.
            now_ms: Wall clock.
            made: Its moves are not those that it was added with.
        """
        record.operation.state = control_pb2.OPERATION_STATE_RUNNING
        record.operation.base_epoch = epoch
        self._keep(record, made=made)
        self.running = RunningOperation(record, self._longest_deadline_ms, now_ms)

    def wait(self, record: Record, message: str) -> None:
        """Say why an operation whose turn it is does not begin."""
        if record.operation.message != message:
            record.operation.message = message
            self._keep(record)

    def fail(self, record: Record, message: str, now_ms: int) -> None:
        """End an operation that cannot begin, or go on."""
        record.operation.state = control_pb2.OPERATION_STATE_FAILED
        record.operation.message = message
        record.operation.ended_ms = now_ms
        self._keep(record)
        if self.running is not None and self.running.record is record:
            self.running = None

    def leave(self, node: str) -> list[Record]:
        """Note that a node left in the records of its drains; return those."""
        left = [
            each
            for each in self.records.values()
            if each.request.drain_node == node and not each.drained_node_left
        ]
        for record in left:
            record.drained_node_left = True
            self._keep(record)
        return left

    def advance(self, view: View) -> LaidPlan | None:
        """Let the one at work do what the beats allow; return the plan to write, if one."""
        if self.running is None:
            return None
        record = self.running.record
        before = control_pb2.Operation()
        before.CopyFrom(record.operation)
        plan = self.running.advance(view)
        # Its steps change with a plan alone, with what is told of it, or as a batch is over.
        if plan is not None or record.operation != before or self.running.batch_over:
            self._keep(record, made=self.running.arranged)
        if record.operation.ended_ms:
            self.running = None
        return plan

    def steer(self, request: control_pb2.SteerOperationRequest, now_ms: int) -> Record:
        """Halt, resume or end an operation; repeating it changes nothing.

        Raises:
            RefusedError: There is none, or it has ended otherwise.
        """
        record = self.find(request.id)
        operation = record.operation
        wanted = _STEERED.get(request.steering)
        if wanted is None:
            raise invalid("steering is not said; use PAUSE, RESUME or ABORT")
        if operation.state in ENDED:
            if operation.state == wanted:
                return record
            name = State.Name(operation.state).removeprefix("OPERATION_STATE_")
            raise RefusedError(
                Code.FAILED_PRECONDITION, f"operation {operation.id!r} is over: it is {name}"
            )
        begun = bool(operation.base_epoch)
        if wanted == control_pb2.OPERATION_STATE_RUNNING and not begun:
            wanted = control_pb2.OPERATION_STATE_PENDING
        if operation.state == wanted:
            return record
        operation.state = wanted
        operation.message = _SAID[request.steering]
        if wanted == control_pb2.OPERATION_STATE_ABORTED and record.moving == 0:
            operation.ended_ms = now_ms
            operation.eta_ms = 0
            if self.running is not None and self.running.record is record:
                self.running = None
        self._keep(record)
        return record

    def page(
        self, request: control_pb2.ListOperationsRequest
    ) -> control_pb2.ListOperationsResponse:
        """Return a page, newest first.

        Raises:
            RefusedError: The page is too long, or its token is not of ours.
        """
        asked = (
            each.operation
            for each in reversed(self.records.values())
            if request.state in (control_pb2.OPERATION_STATE_UNSPECIFIED, each.operation.state)
        )
        operations, more = page_of(request).cut(asked, lambda each: each.created_ms)
        return control_pb2.ListOperationsResponse(operations=operations, next_page_token=more)


_STEERED = {
    control_pb2.STEERING_PAUSE: control_pb2.OPERATION_STATE_PAUSED,
    control_pb2.STEERING_RESUME: control_pb2.OPERATION_STATE_RUNNING,
    control_pb2.STEERING_ABORT: control_pb2.OPERATION_STATE_ABORTED,
}
_SAID = {
    control_pb2.STEERING_PAUSE: "paused by an operator",
    control_pb2.STEERING_RESUME: "resumed by an operator",
    control_pb2.STEERING_ABORT: "aborted by an operator",
}
