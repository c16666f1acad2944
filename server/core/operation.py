"""One operation at work: batches of its moves on their way, several at once.

    the first batch joins --> as soon as it is held the next one joins, and so on --> all have moved
      --> HOT_ROWS: the plan's room for hot rows and its shares of tiers change --> ended

What a batch does is in batch.py. One batch joins at a time, so that a target which says that it
holds a plan holds the batch; those before it own, leave and drop meanwhile. Steps that batches take
in the same tick are one plan. Loading is what takes long, and no target waits with it for a
deadline of an earlier batch.

All that decides is in the OperationRecord and the plan; what is kept here beside them is time
alone, which starts again after a restart. An operation that has FAILED or was ABORTED with moves on
their way has that state at once, and `ended_ms` when the plan is clean again.
"""

import collections
import itertools
from collections.abc import Sequence

from embertide.server.core.batch import Batch
from embertide.server.core.errors import RefusedError
from embertide.server.core.plan import hot, shares
from embertide.server.core.plan.layout import LaidPlan, Place, budget_bytes, devices
from embertide.server.core.plan.moves import Move, Step, stepped
from embertide.server.core.reshard import BUCKETS_AT_ONCE_MAX, move_of
from embertide.server.core.room import Room, room_of
from embertide.server.core.view import View
from embertide.v1 import control_pb2, plan_pb2

ENDED = (
    control_pb2.OPERATION_STATE_SUCCEEDED,
    control_pb2.OPERATION_STATE_FAILED,
    control_pb2.OPERATION_STATE_ABORTED,
)
# Sources hold on for the longest deadline, two seconds, while later batches load.
BATCHES_MAX = 8
BATCH_BUCKETS = 64
# More buckets than that only as far as they are small: what joins and has not left yet is held
# twice, and a device that is nearly full must be able to take a batch in.
_BATCH_BYTES = 64 << 20
_SHARE_OF_DEVICE = 64
_MS = 1000


class Running:
    """Drives the record of an operation; the caller writes what comes of it.

    Attributes:
        record: The record, which changes.
        batch_over: The last `advance` ended a batch.
        arranged: The last `advance` changed the order of moves.
    """

    def __init__(
        self, record: control_pb2.OperationRecord, longest_deadline_ms: int, now_ms: int
    ) -> None:
        """Go on with a record, from any state."""
        self.record = record
        self.batch_over = False
        self.arranged = False
        self.operation = record.operation
        self._deadline_ms = longest_deadline_ms
        self._began_ms = now_ms
        self._began_at = self.operation.buckets_done
        self._not_before_ms = 0
        if record.moving and not record.batches:  # of a control plane that had one at a time
            record.batches.add(
                moves=record.moving,
                step=record.step,
                step_epoch=record.step_epoch,
                joined_epoch=record.step_epoch,
            )
        at = itertools.accumulate(
            (each.moves for each in record.batches), initial=self.operation.buckets_done
        )
        self._batches = [
            self._batch(message, self._moves(begin, message.moves))
            for message, begin in zip(record.batches, at, strict=False)
        ]
        self._room: Room | None = None  # once the plan's machines are known

    def _batch(self, message: control_pb2.MovingBatch, moves: list[Move]) -> Batch:
        return Batch(
            message,
            moves,
            base_epoch=self.operation.base_epoch,
            longest_deadline_ms=self._deadline_ms,
        )

    def _moves(self, begin: int, count: int) -> list[Move]:
        """Read some of the record's moves; to read 100,000 takes longer than a tick may."""
        return [move_of(each) for each in self.record.moves[begin : begin + count]]

    @property
    def _ending(self) -> bool:
        return self.operation.state in ENDED

    def advance(self, view: View) -> LaidPlan | None:
        """Do what the beats allow: change the record, and return the plan to write, if one."""
        self.batch_over = self.arranged = False
        behind = [each for each in self._batches if each.message.step_epoch > view.plan.epoch]
        if behind or self.record.step_epoch > view.plan.epoch:
            return self._plan(view, behind)  # the record was written, and its plan was not
        if self.operation.state == control_pb2.OPERATION_STATE_PAUSED:
            return None
        if self.record.step == Step.HOT_ROWS:
            if view.all_act_by(self.record.step_epoch):
                self.record.step, self.record.step_epoch = Step.NONE, 0
            return None
        stepping = self._step_batches(view)
        if self._ending:
            if not self._batches:
                self._end(view)
        elif not self.batch_over:
            if not self._batches and self.operation.buckets_done == len(self.record.moves):
                return self._after_moves(view)
            stepping += self._join(view)
        return self._write(view, stepping)

    # --- batches --------------------------------------------------------------------------------

    def _step_batches(self, view: View) -> list[Batch]:
        """Let each batch take the step that it can; return those that took one."""
        stepping = []
        for batch in list(self._batches):
            alone = len(self._batches) == 1
            step = batch.next(view, ending=self._ending, alone=alone)
            if step is Step.TAKEN_BACK and not self._ending:
                self.operation.state = control_pb2.OPERATION_STATE_FAILED
            if batch.why:
                self._say(batch.why)
            if step is Step.NONE:
                self._over(batch, view)
            elif step is not None:
                batch.take(step, view.plan.epoch + 1)
                stepping.append(batch)
        return stepping

    def _over(self, batch: Batch, view: View) -> None:
        """Let go of a batch that has moved, or has been taken back."""
        self.batch_over = True
        others = [each for each in self._batches if each is not batch]
        moved = batch.step is Step.DROPPED
        room = self._room_now(view)
        for each in self._messages(batch):
            room.leave(each, moved=moved)
        self._arrange([batch, *others] if moved else [*others, batch])
        if moved:
            done = self.operation.buckets_done
            made = self.record.moves[done : done + len(batch.moves)]
            self.operation.buckets_done += len(made)
            self.operation.bytes_done += sum(each.bytes for each in made)
            total = len(self.record.moves)
            if not self._ending:
                self._say(f"moved {self.operation.buckets_done} of {total} buckets")
            since_start = self.operation.buckets_done - self._began_at
            left = total - self.operation.buckets_done
            self.operation.eta_ms = (view.now_ms - self._began_ms) * left // since_start
        self._batches = others
        self._note()

    def _arrange(self, order: list[Batch]) -> None:
        """Bring the batches, and with them their moves, into an order."""
        if order == self._batches:
            return
        moves = [each for batch in order for each in self._messages(batch)]
        copies = control_pb2.OperationRecord(moves=moves).moves
        for at, each in enumerate(copies, self.operation.buckets_done):
            self.record.moves[at].CopyFrom(each)
        self._batches = order
        self.arranged = True

    def _messages(self, batch: Batch) -> Sequence[control_pb2.BucketMove]:
        """Return the moves of a batch as they are in the record."""
        begin = self.operation.buckets_done
        for each in self._batches[: self._batches.index(batch)]:
            begin += len(each.moves)
        return self.record.moves[begin : begin + len(batch.moves)]

    def _room_now(self, view: View) -> Room:
        """Return what devices hold and may hold, as far as moves are made."""
        if self._room is None:
            self._room = room_of(view.plan.topology, self.record.devices)
            done = self.operation.buckets_done
            for each in self.record.moves[: done + self.record.moving]:
                self._room.join(each)
            for each in self.record.moves[:done]:
                self._room.leave(each, moved=True)
        return self._room

    # --- further batches ------------------------------------------------------------------------

    def _join(self, view: View) -> list[Batch]:
        """Let the next batch join, if it may; return it, or nothing."""
        joining = any(each.step is Step.JOINING for each in self._batches)
        if joining or len(self._batches) >= BATCHES_MAX or self._must_wait(view):
            return []
        count, size = self._next_size(view)
        if not count:
            return []
        budget = self.record.request.budget
        if budget.bytes_per_s:
            self._not_before_ms = view.now_ms + size * _MS // budget.bytes_per_s
        begin = self.operation.buckets_done + self.record.moving
        for each in self.record.moves[begin : begin + count]:
            self._room_now(view).join(each)
        message = control_pb2.MovingBatch(moves=count)
        batch = self._batch(message, self._moves(begin, count))
        batch.take(Step.JOINING, view.plan.epoch + 1)
        self._batches.append(batch)
        return [batch]

    def _next_size(self, view: View) -> tuple[int, int]:
        """Return how many moves the next batch has, and their bytes. 0: it cannot begin yet."""
        budget = self.record.request.budget
        room = (budget.buckets_at_once or BUCKETS_AT_ONCE_MAX) - self.record.moving
        begin = self.operation.buckets_done + self.record.moving
        busy = {move.at for batch in self._batches for move in batch.moves}
        plenty = budget.buckets_at_once or BATCH_BUCKETS
        most_bytes = self._most_bytes(view)
        coming: collections.Counter[Place] = collections.Counter()
        count = size = 0
        for each in self.record.moves[begin : begin + room]:
            move = move_of(each)
            after = size + each.bytes
            if move.target is not None:
                coming[move.target] += each.bytes
            fits = move.target is None or self._room_now(view).fits(
                move.target, coming[move.target]
            )
            # A bucket's next move waits for the one before. What finds no room waits until others
            # have left, and if none are on their way the target says whether it does. A second's
            # worth at once, but always one; buckets of unknown size count as large.
            if (
                move.at in busy
                or (not fits and (count or self._batches))
                or (count and budget.bytes_per_s and after > budget.bytes_per_s)
                or (count >= plenty and (after > most_bytes or not after))
            ):
                break
            count, size = count + 1, after
        return count, size

    def _most_bytes(self, view: View) -> int:
        """Return what a batch of many small buckets may have."""
        smallest = min(budget_bytes(each) for each in devices(view.plan.topology).values())
        return min(_BATCH_BYTES, smallest // _SHARE_OF_DEVICE)

    def _must_wait(self, view: View) -> bool:
        """Whether a budget forbids further buckets now; said if nothing else is on its way."""
        bound = self.record.request.budget.p99_us
        for member in view.live():
            if bound and member.beat and member.beat.p99_us > bound:
                # No figure: it changes with each beat, and each change is written.
                self._wait(f"p99 of {member.name} is above the budget of {bound:,} us")
                return True
        if view.now_ms < self._not_before_ms:
            self._wait("the bandwidth budget is spent for now")
            return True
        return False

    def _wait(self, why: str) -> None:
        if not self._batches:
            self._say(f"waits: {why}")

    # --- the plan ---------------------------------------------------------------------------------

    def _write(self, view: View, stepping: list[Batch]) -> LaidPlan | None:
        """Return the plan in which batches take their steps, if any does."""
        if not stepping:
            return None
        self._note()
        if not self._ending:
            self._say(
                "; ".join(f"{len(each.moves)} buckets: {_SAID[each.step]}" for each in stepping)
            )
        return self._plan(view, stepping)

    def _note(self) -> None:
        """Bring the record in line with the batches."""
        messages = [batch.message for batch in self._batches]
        record = control_pb2.OperationRecord(batches=messages)
        del self.record.batches[:]
        self.record.batches.extend(record.batches)
        for batch, message in zip(self._batches, self.record.batches, strict=True):
            batch.message = message
        self.record.moving = sum(each.moves for each in messages)
        self.record.step = messages[0].step if messages else Step.NONE
        self.record.step_epoch = max((each.step_epoch for each in messages), default=0)

    def _plan(self, view: View, stepping: list[Batch]) -> LaidPlan:
        """Make the plan of the steps of batches, or of the room for hot rows."""
        plan, layout = plan_pb2.Plan(), view.layout
        plan.CopyFrom(view.plan)
        if self.record.step == Step.HOT_ROWS:
            hot.give(plan, hot.hot_rows_of(self.record.hot_rows))
            shares.give(plan, shares.shares_of(self.record.tier_shares))
        for batch in stepping:
            layout = stepped(layout, batch.moves, batch.step)
        plan.epoch = view.plan.epoch + 1
        plan.operation_id = self.operation.id
        plan.planner = self.operation.planner
        plan.created_ms = view.now_ms
        return LaidPlan(plan, layout)

    # --- the end ----------------------------------------------------------------------------------

    def _after_moves(self, view: View) -> LaidPlan | None:
        """All moves are done: change what else the plan is to say, then end."""
        try:
            changes = self._note_room_before(view.plan)
        except RefusedError as error:  # machines have changed meanwhile
            self.operation.state = control_pb2.OPERATION_STATE_FAILED
            self._say(error.message)
            self._end(view)
            return None
        if changes:
            self.record.step, self.record.step_epoch = Step.HOT_ROWS, view.plan.epoch + 1
            self._say("nodes change how many rows of a table they keep at hand")
            return self._plan(view, [])
        self.operation.state = control_pb2.OPERATION_STATE_SUCCEEDED
        self._say(f"moved {self.operation.buckets_done} buckets")
        self._end(view)
        return None

    def _note_room_before(self, plan: plan_pb2.Plan) -> bool:
        """Remember for an undo what the room of tables was; False: none of it is to change."""
        rows = hot.changed(plan, hot.hot_rows_of(self.record.hot_rows))
        tiers = shares.changed(plan, shares.shares_of(self.record.tier_shares))
        if not rows and not tiers:
            return False
        del self.record.hot_rows_before[:]
        self.record.hot_rows_before.extend(hot.messages_of(hot.before(plan, rows)))
        del self.record.tier_shares_before[:]
        self.record.tier_shares_before.extend(shares.messages_of(shares.before(plan, tiers)))
        return True

    def _end(self, view: View) -> None:
        self.operation.ended_ms = view.now_ms
        self.operation.eta_ms = 0

    def _say(self, message: str) -> None:
        self.operation.message = message


_SAID = {
    Step.JOINING: "their targets load them",
    Step.BOTH_OWN: "sources and targets own them",
    Step.LEAVING: "their sources leave",
    Step.DROPPED: "their sources drop them",
    Step.TAKEN_BACK: "taken back",
}
