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
from collections.abc import Iterable, Iterator, Sequence

from embertide.server.core.batch import Batch
from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan import hot, shares
from embertide.server.core.plan.layout import LaidPlan, budget_bytes, devices
from embertide.server.core.plan.moves import Move, Step, stepped
from embertide.server.core.plan.named_operation import NamedOperation
from embertide.server.core.plan.names import Device, NamedMove
from embertide.server.core.plan.shares import TierShares
from embertide.server.core.reshard import BUCKETS_AT_ONCE_MAX
from embertide.server.core.room import Room, join, leave, room_of
from embertide.server.core.view import Patience, View
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
_WAITS = "waits: "  # how a message of what is awaited begins


class RunningOperation:
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
        self._named = NamedOperation(record)
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
            self._batch(message, self._named.moves(begin, message.moves))
            for message, begin in zip(record.batches, at, strict=False)
        ]
        self._patience = Patience()
        self._room: Room[Device] | None = None  # once the plan's machines are known

    def _batch(self, message: control_pb2.MovingBatch, moves: list[NamedMove]) -> Batch:
        return Batch(
            message,
            moves,
            base_epoch=self.operation.base_epoch,
            longest_deadline_ms=self._deadline_ms,
        )

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
            if self._is_followed(view, self.record.step_epoch):
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
                self._say_why(batch.why)
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
        for each in batch.moves:
            leave(room, each, moved=moved)
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

    def _room_now(self, view: View) -> Room[Device]:
        """Return what devices hold and may hold, as far as moves are made."""
        if self._room is None:
            budgets = {
                view.roster.device(at): budget_bytes(device)
                for at, device in devices(view.plan.topology).items()
            }
            self._room = room_of(budgets, self._named.loads())
            done = self.operation.buckets_done
            for move in self._named.moves(0, done + self.record.moving):
                join(self._room, move)
            for move in self._named.moves(0, done):
                leave(self._room, move, moved=True)
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
        moves = self._named.moves(self.operation.buckets_done + self.record.moving, count)
        if missing := view.roster.missing(moves):
            # A machine came back with fewer devices; what is on its way still ends.
            self.operation.state = control_pb2.OPERATION_STATE_FAILED
            self._say(f"its moves name {missing}, which has left the fleet")
            return []
        for move in moves:
            join(self._room_now(view), move)
        batch = self._batch(control_pb2.MovingBatch(moves=count), moves)
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
        max_batch_bytes = self._max_batch_bytes(view)
        coming: collections.Counter[Device] = collections.Counter()
        count = size = 0
        for each in self.record.moves[begin : begin + room]:
            move = self._named.move(each)
            after = size + move.bytes
            if move.target is not None:
                coming[move.target] += move.bytes
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
                or (count >= plenty and (after > max_batch_bytes or not after))
            ):
                break
            count, size = count + 1, after
        return count, size

    def _max_batch_bytes(self, view: View) -> int:
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
            self._say(f"{_WAITS}{why}")

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
            shares.give(plan, self._shares_now(view))
        for batch in stepping:
            layout = stepped(layout, _placed(batch.moves, view), batch.step)
        plan.epoch = view.plan.epoch + 1
        plan.operation_id = self.operation.id
        plan.planner = self.operation.planner
        plan.created_ms = view.now_ms
        return LaidPlan(plan, layout)

    # --- the end ----------------------------------------------------------------------------------

    def _after_moves(self, view: View) -> LaidPlan | None:
        """All moves are done: change what else the plan is to say, then end."""
        try:
            changes = self._note_room_before(view)
        except RefusedError as error:  # machines have changed meanwhile
            self.operation.state = control_pb2.OPERATION_STATE_FAILED
            self._say(error.message)
            self._end(view)
            return None
        if changes:
            self.record.step, self.record.step_epoch = Step.HOT_ROWS, view.plan.epoch + 1
            self._say("nodes change how many rows of a table they keep at hand")
            return self._plan(view, [])
        # Each batch was followed; an operation that moves nothing is done where its plan is.
        if not self._is_followed(view, self.operation.base_epoch):
            return None
        self.operation.state = control_pb2.OPERATION_STATE_SUCCEEDED
        self._say(f"moved {self.operation.buckets_done} buckets")
        self._end(view)
        return None

    def _is_followed(self, view: View, epoch: int) -> bool:
        """Whether all live nodes act by a plan; said, if that takes long."""
        followed = view.all_act_by(epoch)
        if followed:
            self._patience.end()
        elif self._patience.lasts(view.now_ms):
            self._say(f"{_WAITS}{view.who_does_not_act_by(epoch)}")
        return followed

    def _note_room_before(self, view: View) -> bool:
        """Remember for an undo the room that tables had; False: none of it is to change."""
        rows = hot.changed(view.plan, hot.hot_rows_of(self.record.hot_rows))
        tiers = shares.changed(view.plan, self._shares_now(view))
        if not rows and not tiers:
            return False
        del self.record.hot_rows_before[:]
        self.record.hot_rows_before.extend(hot.messages_of(hot.before(view.plan, rows)))
        del self.record.tier_shares_before[:]
        self.record.tier_shares_before.extend(
            self._named.share_messages(shares.before(view.plan, tiers), view.roster)
        )
        return True

    def _shares_now(self, view: View) -> TierShares:
        """Return the shares of tiers that change, at today's places.

        Raises:
            RefusedError: One is of a device that has left.
        """
        found, missing = self._named.find_shares(self.record.tier_shares, view.roster)
        if missing:
            raise _has_left(missing[0])
        return found

    def _say_why(self, why: str) -> None:
        """Say what a batch waits for, or why it turns back; how the operation ended stays first."""
        waits = why.startswith(_WAITS)
        self._say(f"{self._outcome}; {why}" if self._ending and waits else why)

    @property
    def _outcome(self) -> str:
        """The message of an operation that has ended, without the waits of its last batches."""
        return self.operation.message.partition(f"; {_WAITS}")[0]

    def _end(self, view: View) -> None:
        self._say(self._outcome)
        self.operation.ended_ms = view.now_ms
        self.operation.eta_ms = 0

    def _say(self, message: str) -> None:
        self.operation.message = message


def _placed(moves: Iterable[NamedMove], view: View) -> Iterator[Move]:
    """Yield moves between places of today's plan.

    Raises:
        RefusedError: A device has left, which no node may do whose buckets are on their way.
    """
    for each in moves:
        move = view.roster.find_move(each)
        if move is None:
            raise _has_left(view.roster.missing([each]))
        yield move


def _has_left(device: Device | None) -> RefusedError:
    return RefusedError(Code.FAILED_PRECONDITION, f"{device} has left the fleet")


_SAID = {
    Step.JOINING: "their targets load them",
    Step.BOTH_OWN: "sources and targets own them",
    Step.LEAVING: "their sources leave",
    Step.DROPPED: "their sources drop them",
    Step.TAKEN_BACK: "taken back",
}
