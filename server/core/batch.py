"""One batch of an operation's moves: through the four steps of plan.proto, or back.

    JOINING --> BOTH_OWN --> LEAVING --> DROPPED --> over, its buckets have moved
       |           |            |  (its target died)
       +-----------+------------+--> TAKEN_BACK (twice if a target owned) --> over, none has
       |
       +--> a target has no room, and no other batch is on its way that would make some

Batches of one operation go their ways independently of each other, and have no bucket in common.
"""

from collections.abc import Sequence

from embertide.server.core.plan.moves import Step
from embertide.server.core.plan.names import Device, NamedMove
from embertide.server.core.view import Patience, View
from embertide.v1 import control_pb2

# A target that is full tries again twice a second, as what leaves it makes room.
FULL_MS = 5000


class Batch:
    """Decides on the next step of a batch; the caller writes it.

    Attributes:
        message: Its state, as a part of the OperationRecord.
        moves: Its moves.
        why: Why it waits, or what made it turn back. Empty: nothing special.
    """

    def __init__(
        self,
        message: control_pb2.MovingBatch,
        moves: Sequence[NamedMove],
        *,
        base_epoch: int,
        longest_deadline_ms: int,
    ) -> None:
        """Go on with a batch from any step.

        Args:
            message: Its state.
            moves: Its moves.
            base_epoch: Epoch of a plan in which all sources own what they give away.
            longest_deadline_ms: A source that left holds on for as long.
        """
        self.message = message
        self.moves = list(moves)
        self.why = ""
        self._sources = sorted({move.source.node for move in moves if move.source})
        self._targets = sorted({move.target.node for move in moves if move.target})
        self._added = [move for move in moves if move.source is None]
        self._removed = [move for move in moves if move.target is None]
        self._base_epoch = base_epoch
        self._deadline_ms = longest_deadline_ms
        # Since when all live nodes act by the step's plan, and which have lived since.
        self._acted_ms: int | None = None
        self._acted: frozenset[str] = frozenset()
        self._full_ms: int | None = None  # since when a target has been full
        self._patience = Patience()

    @property
    def step(self) -> Step:
        """The step that is written, or about to be."""
        return Step(self.message.step)

    def take(self, step: Step, epoch: int) -> None:
        """Take a step, which the plan of that epoch makes."""
        self.message.step, self.message.step_epoch = step, epoch
        if step is Step.JOINING:
            self.message.joined_epoch = epoch
        self._acted_ms, self._acted = None, frozenset()
        self._patience.end()

    def next(self, view: View, *, ending: bool, alone: bool) -> Step | None:
        """Return the step that the beats allow; None: it waits. NONE: it is over.

        Args:
            view: Plan, fleet and time.
            ending: The operation is to end as soon as it can.
            alone: No other batch of the operation is on its way.
        """
        self.why = ""
        step = self.step
        if step in (Step.JOINING, Step.BOTH_OWN, Step.LEAVING):
            if dead := self._dead_target(view):
                return self._without_target(dead, view)
            # A batch that only its target owns goes on.
            if ending and step is not Step.LEAVING and not self._missing_source(view):
                return Step.TAKEN_BACK
            # After the first step too: a node that was started again has to load again.
            if not self._held(view) or not self._others_hold(view):
                if not self.why and self._patience.lasts(view.now_ms):
                    self.why = f"waits: {self._late_target(view)}"
                return self._without_room(view, alone=alone)
            if step is Step.JOINING:
                self._patience.end()
        if step is Step.JOINING:
            return Step.BOTH_OWN
        if not view.all_act_by(self.message.step_epoch):
            self._acted_ms = None
            if self._patience.lasts(view.now_ms):
                self.why = f"waits: {view.who_does_not_act_by(self.message.step_epoch)}"
            return None
        self._patience.end()
        return self._after_all_act(step, view)

    def _after_all_act(self, step: Step, view: View) -> Step | None:
        if step is Step.BOTH_OWN:
            return Step.LEAVING
        if step is Step.DROPPED:
            return Step.NONE
        if any(_is_leaving(move, view) for move in self.moves):
            # One that was counted as dead, and is heard again, may have asked by an older plan.
            if self._acted_ms is None or not view.live_names <= self._acted:
                self._acted_ms, self._acted = view.now_ms, self._acted | view.live_names
            if view.now_ms - self._acted_ms < self._deadline_ms:
                return None  # requests that began by the plan before may still come
            return Step.DROPPED if step is Step.LEAVING else step
        return Step.DROPPED if step is Step.LEAVING else Step.NONE

    def _dead_target(self, view: View) -> str:
        return next((node for node in self._targets if not view.alive(node)), "")

    def _without_target(self, dead: str, view: View) -> Step | None:
        """Turn back, if there is somebody to turn back to."""
        if missing := self._missing_source(view):
            self.why = f"waits: {dead} is dead, and {missing}"
            return None
        self.why = f"node {dead!r} died while buckets moved to it; they are taken back"
        return Step.TAKEN_BACK

    def _without_room(self, view: View, *, alone: bool) -> Step | None:
        """Turn back where a target has been full for a while and nothing will leave it."""
        full = "" if self.step is not Step.JOINING or not alone else self._full_target(view)
        if not full:
            self._full_ms = None
            return None
        if self._full_ms is None:
            self._full_ms = view.now_ms
        if view.now_ms - self._full_ms < FULL_MS:
            return None
        self.why = (
            f"node {full!r} has no room for the buckets that move to it beside what versions need; "
            "they are taken back: raise its DDR budget, or move less to it"
        )
        return Step.TAKEN_BACK

    def _full_target(self, view: View) -> str:
        for node in self._targets:
            member = view.member(node)
            if member and member.beat and member.beat.full and not self._holds_all(node, view):
                return node
        return ""

    def _late_target(self, view: View) -> str:
        """Say which target does not hold the batch. Requires: `_held` is false."""
        late = [node for node in self._targets if not self._holds_all(node, view)]
        if late:
            return f"{late[0]} has not loaded them yet"
        return "a node has not reached the version at which their targets hold them"

    def _holds_all(self, node: str, view: View) -> bool:
        return view.holds(node, self.message.joined_epoch)

    def _missing_source(self, view: View) -> str:
        """Say what is wrong with the sources, which are to own alone again. Empty: nothing."""
        if self.step is Step.JOINING:
            return ""  # they never ceased to
        for node in self._sources:
            if not view.alive(node):
                return "so is a node that it takes over from"
            # One that was started again loads what it owns or leaves, as any node.
            if not view.holds(node, self._base_epoch):
                return f"{node}, which it takes over from, does not hold them yet"
        if not all(self._other_holds(move, move.target, view) for move in self._added):
            return "no other owner holds its buckets"
        return ""

    def _others_hold(self, view: View) -> bool:
        """Whether some other owner holds what a source gives away without a target."""
        if all(self._other_holds(move, move.source, view) for move in self._removed):
            return True
        self.why = "waits: no other owner holds a bucket whose owner is to leave"
        return False

    def _other_holds(self, move: NamedMove, leaving: Device | None, view: View) -> bool:
        return any(
            view.alive(each.node) and view.holds(each.node, self._base_epoch)
            for each in view.holders(move.at).owners
            if each != leaving
        )

    def _held(self, view: View) -> bool:
        """Whether all targets hold the batch, at a version that all live nodes have.

        A target that holds a plan's buckets once holds them until a plan takes them from it, or it
        dies; what joins it later does not count.
        """
        since = 0
        for node in self._targets:
            if not self._holds_all(node, view):
                return False
            member = view.member(node)
            since = max(since, member.beat.held_since if member and member.beat else 0)
        return view.all_have_reached(since)


def _is_leaving(move: NamedMove, view: View) -> bool:
    """Whether a device that a move names is leaving the bucket."""
    leaving = view.holders(move.at).leaving
    return move.source in leaving or move.target in leaving
