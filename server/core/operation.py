"""One operation at work: batch after batch of moves, each through the steps of plan.proto.

    NONE --> JOINING --> BOTH_OWN --> LEAVING --> DROPPED --> NONE, the batch is done
     |          |            |           | (its target died)
     |          +------------+-----------+--> TAKEN_BACK (twice if a target owned) --> NONE, ended
     +--> HOT_ROWS, after the last batch: the plan's room for hot rows and its shares of tiers
          change --> NONE

All that decides is in the OperationRecord and the plan; what is kept here beside them is time
alone, which starts again after a restart. An operation that has FAILED or was ABORTED with moves on
their way has that state at once, and `ended_ms` when the plan is clean again.
"""

import dataclasses

from embertide.server.core.errors import RefusedError
from embertide.server.core.fleet import Fleet, Member
from embertide.server.core.plan import hot, shares
from embertide.server.core.plan.layout import LaidPlan, PackedLayout
from embertide.server.core.plan.moves import Move, Step, stepped
from embertide.server.core.reshard import BUCKETS_AT_ONCE, move_of
from embertide.v1 import control_pb2, plan_pb2

ENDED = (
    control_pb2.OPERATION_STATE_SUCCEEDED,
    control_pb2.OPERATION_STATE_FAILED,
    control_pb2.OPERATION_STATE_ABORTED,
)
_MS = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What an operation sees at a tick."""

    plan: plan_pb2.Plan  # without assignments
    layout: PackedLayout
    fleet: Fleet
    now_ms: int

    def alive(self, position: int) -> bool:
        """Whether the node at a position lives."""
        return self.fleet.alive(self.plan.topology.nodes[position].name, self.now_ms)

    def member(self, position: int) -> Member | None:
        """Return the node at a position."""
        return self.fleet.get(self.plan.topology.nodes[position].name)

    def holds(self, position: int, epoch: int) -> bool:
        """Whether the node at a position has said that it holds all that a plan gives it."""
        member = self.member(position)
        return member is not None and member.holds(epoch)

    def name(self, position: int) -> str:
        """Return its name."""
        return self.plan.topology.nodes[position].name

    def live(self) -> list[Member]:
        """Return the live nodes of the topology; any other has no peers to ask."""
        named = {node.name for node in self.plan.topology.nodes}
        return [each for each in self.fleet.live(self.now_ms) if each.name in named]

    def all_act_by(self, epoch: int) -> bool:
        """Whether all live nodes have acknowledged a plan."""
        return all(member.acts_by(epoch) for member in self.live())


class Running:
    """Drives the record of an operation; the caller writes what comes of it."""

    def __init__(
        self, record: control_pb2.OperationRecord, longest_deadline_ms: int, now_ms: int
    ) -> None:
        """Go on with a record, from any state."""
        self.record = record
        self.operation = record.operation
        self._deadline_ms = longest_deadline_ms
        self._moves = [move_of(each) for each in record.moves]
        self._began_ms = now_ms
        self._began_at = self.operation.buckets_done
        self._not_before_ms = 0
        self._acted_ms: int | None = None  # since when all live nodes act by the step's plan

    @property
    def _batch(self) -> list[Move]:
        done = self.operation.buckets_done
        return self._moves[done : done + self.record.moving]

    @property
    def _ending(self) -> bool:
        return self.operation.state in ENDED

    def advance(self, view: View) -> LaidPlan | None:
        """Do what the beats allow: change the record, and return the plan to write, if one."""
        if not self.record.step:
            return self._next_batch(view)
        step = Step(self.record.step)
        if self.record.step_epoch > view.plan.epoch:
            return self._plan(view)  # the record was written, and its plan was not
        if self.operation.state == control_pb2.OPERATION_STATE_PAUSED:
            return None
        if step in (Step.JOINING, Step.BOTH_OWN, Step.LEAVING):
            back = self._should_take_back(step, view)
            if back is not None:
                return self._step(Step.TAKEN_BACK, view) if back else None
            # After the first step too: a target that was started again has to load again.
            if not self._held(view):
                return None
        if step is Step.JOINING:
            return self._step(Step.BOTH_OWN, view)
        if not view.all_act_by(self.record.step_epoch):
            self._acted_ms = None
            return None
        return self._after_all_act(step, view)

    def _after_all_act(self, step: Step, view: View) -> LaidPlan | None:
        if step is Step.BOTH_OWN:
            return self._step(Step.LEAVING, view)
        if step is Step.DROPPED:
            self._batch_done(view)
            return None
        if step is Step.HOT_ROWS:
            self.record.step, self.record.step_epoch = Step.NONE, 0
            return None
        leaving = any(
            place in view.layout[move.at].leaving
            for move in self._batch
            for place in (move.source, move.target)
        )
        if leaving:
            if self._acted_ms is None:
                self._acted_ms = view.now_ms
            if view.now_ms - self._acted_ms < self._deadline_ms:
                return None  # requests that began by the plan before may still come
            return self._step(Step.DROPPED if step is Step.LEAVING else step, view)
        if step is Step.LEAVING:
            return self._step(Step.DROPPED, view)
        self.record.moving, self.record.step, self.record.step_epoch = 0, Step.NONE, 0
        self._end(view)
        return None

    def _should_take_back(self, step: Step, view: View) -> bool | None:
        """True: now. False: neither back nor on while both ends of moves are dead. None: go on."""
        batch = self._batch
        dead = sorted({m.target.node for m in batch if m.target and not view.alive(m.target.node)})
        sources = {move.source.node for move in batch if move.source}
        orphaned = step is not Step.JOINING and not all(map(view.alive, sources))
        if not dead:
            # What only its target owns has moved; a source that was started again may lack it.
            back = step is Step.JOINING or (
                step is Step.BOTH_OWN
                and not orphaned
                and all(view.holds(node, self.record.step_epoch) for node in sources)
            )
            return True if self._ending and back else None
        name = view.name(dead[0])
        if orphaned:
            self._say(f"waits: {name} is dead, and so is a node that it takes over from")
            return False
        if not self._ending:
            self.operation.state = control_pb2.OPERATION_STATE_FAILED
            self._say(f"node {name!r} died while buckets moved to it; they are taken back")
        return True

    def _held(self, view: View) -> bool:
        """Whether all targets hold the batch, at a version that all live nodes have."""
        since = 0
        for node in {move.target.node for move in self._batch if move.target}:
            if not view.holds(node, self.record.step_epoch):
                return False
            member = view.member(node)
            since = max(since, member.beat.held_since if member and member.beat else 0)
        return all(
            member.beat is not None and (not member.newest or member.newest >= since)
            for member in view.live()
        )

    def _next_batch(self, view: View) -> LaidPlan | None:
        if self._ending:
            self._end(view)
            return None
        if self.operation.state == control_pb2.OPERATION_STATE_PAUSED:
            return None
        done = self.operation.buckets_done
        if done == len(self._moves):
            try:
                changes = self._note_room_before(view.plan)
            except RefusedError as error:  # machines have changed meanwhile
                self.operation.state = control_pb2.OPERATION_STATE_FAILED
                self._say(error.message)
                self._end(view)
                return None
            if changes:
                return self._step(Step.HOT_ROWS, view)
            self.operation.state = control_pb2.OPERATION_STATE_SUCCEEDED
            self._say(f"moved {done} buckets")
            self._end(view)
            return None
        if self._must_wait(view):
            return None
        budget = self.record.request.budget
        size = 0
        self.record.moving = 0
        for each in self.record.moves[done : done + (budget.buckets_at_once or BUCKETS_AT_ONCE)]:
            size += each.bytes
            # At most a second's worth at once, but always one.
            if self.record.moving and budget.bytes_per_s and size > budget.bytes_per_s:
                size -= each.bytes
                break
            self.record.moving += 1
        if budget.bytes_per_s:
            self._not_before_ms = view.now_ms + size * _MS // budget.bytes_per_s
        return self._step(Step.JOINING, view)

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

    def _must_wait(self, view: View) -> bool:
        """Whether a budget forbids further buckets now."""
        bound = self.record.request.budget.p99_us
        for member in view.live():
            if bound and member.beat and member.beat.p99_us > bound:
                # No figure: it changes with each beat, and each change is written.
                self._say(f"waits: p99 of {member.name} is above the budget of {bound:,} us")
                return True
        if view.now_ms < self._not_before_ms:
            self._say("waits: the bandwidth budget is spent for now")
            return True
        return False

    def _step(self, step: Step, view: View) -> LaidPlan:
        self.record.step = step
        self.record.step_epoch = view.plan.epoch + 1
        self._acted_ms = None
        if not self._ending:
            moving = f"{len(self._batch)} buckets: " if self._batch else ""
            self._say(moving + _SAID[step])
        return self._plan(view)

    def _plan(self, view: View) -> LaidPlan:
        """Make the plan of the record's step."""
        plan, layout = plan_pb2.Plan(), view.layout
        plan.CopyFrom(view.plan)
        step = Step(self.record.step)
        if step is Step.HOT_ROWS:
            hot.give(plan, hot.hot_rows_of(self.record.hot_rows))
            shares.give(plan, shares.shares_of(self.record.tier_shares))
        else:
            layout = stepped(layout, self._batch, step)
        plan.epoch = view.plan.epoch + 1
        plan.operation_id = self.operation.id
        plan.planner = self.operation.planner
        plan.created_ms = view.now_ms
        return LaidPlan(plan, layout)

    def _batch_done(self, view: View) -> None:
        done = self.operation.buckets_done
        batch = self.record.moves[done : done + self.record.moving]
        self.operation.buckets_done += len(batch)
        self.operation.bytes_done += sum(each.bytes for each in batch)
        self.record.moving, self.record.step, self.record.step_epoch = 0, Step.NONE, 0
        made = self.operation.buckets_done - self._began_at
        left = len(self._moves) - self.operation.buckets_done
        if not self._ending:
            self._say(f"moved {self.operation.buckets_done} of {len(self._moves)} buckets")
        self.operation.eta_ms = (view.now_ms - self._began_ms) * left // made
        if self._ending:
            self._end(view)

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
    Step.HOT_ROWS: "nodes change how many rows of a table they keep at hand",
}
