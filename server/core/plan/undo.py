"""The planner `undo`: back to where an operation found the buckets that it moved.

It goes by the names of nodes, which the operation's record keeps. What cannot go back stays, and
is told by reason and by node; if nothing can, it is refused.
"""

import collections
import dataclasses

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan import hot, shares
from embertide.server.core.plan.layout import Bucket, Place
from embertide.server.core.plan.moves import Move, arrived
from embertide.server.core.plan.named_operation import NamedOperation
from embertide.server.core.plan.names import NamedMove, Roster
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.v1 import control_pb2

_MOVED_ON = "a later operation moved them again; undo that one first"


@dataclasses.dataclass(frozen=True, slots=True)
class Undo:
    """Back to where an operation found its buckets."""

    record: control_pb2.OperationRecord

    def max_moves(self) -> int:
        """Return how many moves it comes to at most."""
        return self.record.operation.buckets_done

    def propose(self, problem: Problem) -> Proposal:
        """Return the owners, and say who gets what back and what stays.

        Raises:
            RefusedError: Nothing can go back.
        """
        id, done = self.record.operation.id, self.record.operation.buckets_done
        if done and not self.record.nodes:
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"operation {id!r} is of a build whose records do not name nodes, and the plan "
                "that it began from is not kept: move its buckets by a target",
            )
        operation = NamedOperation(self.record)
        roster = Roster(problem.plan.topology)
        stay: collections.Counter[str] = collections.Counter()
        back: list[Move] = []
        for each in reversed(operation.moves(0, done)):
            move, why = self._reversed(each, roster, problem)
            if move is not None:
                back.append(move)
            else:
                stay[why] += 1
        bad = self._impossible(problem, back)
        stay.update(bad[move.at] for move in back if move.at in bad)
        back = [move for move in back if move.at not in bad]
        hot_rows = hot.changed(problem.plan, hot.hot_rows_of(self.record.hot_rows_before))
        tier_shares, missing = operation.find_shares(self.record.tier_shares_before, roster)
        lost = sorted({device.node for device in missing})
        tier_shares = shares.changed(problem.plan, tier_shares)
        if (stay or lost) and not back and not hot_rows and not tier_shares:
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"nothing of {id} can be undone: {_counted(stay) or _left(lost)}; move buckets by "
                "a target or a planner instead",
            )
        said = f"{len(back)} moves of {id} back{_receivers(problem, back)}"
        if stay:
            said += f"; {_counted(stay)}"
        if lost:
            said += f"; {_left(lost)}"
        return Proposal(
            owners=arrived(problem.layout, back),
            explanation=said,
            hot_rows=hot_rows,
            tier_shares=tier_shares,
        )

    @staticmethod
    def _reversed(move: NamedMove, roster: Roster, problem: Problem) -> tuple[Move | None, str]:
        """Return the move that undoes one, or why there is none."""
        if move.at not in problem.layout:
            return None, "their table is no longer served"
        owners = problem.layout[move.at].owners
        here = roster.find(move.target) if move.target is not None else None
        if move.target is not None and here not in owners:
            return None, _MOVED_ON
        if move.source is None:
            return Move(move.at, here, None), ""
        back, name = roster.find(move.source), move.source.node
        if not roster.has(name):
            return None, f"{name}, which had them, has left the fleet"
        if back is None:
            return None, f"{name} has no device {move.source.device} any more"
        if back in owners:
            return None, _MOVED_ON
        if back.node in problem.shunned:
            return None, f"{name} is dead; start it, then undo again"
        return Move(move.at, here, back), ""

    def _impossible(self, problem: Problem, back: list[Move]) -> dict[Bucket, str]:
        """Return the buckets whose owners have changed so much that they cannot go back, and why.

        A group would lose them, because what was added is all that it has by now, or a node would
        own them twice, because it owns them on another device by now.
        """
        nodes = problem.plan.topology.nodes
        may_lose = self.record.request.WhichOneof("goal") == "add_group"
        bad = {}
        for at, owners in arrived(problem.layout, back).items():
            groups = {nodes[owner.node].group for owner in owners}
            had = {nodes[owner.node].group for owner in problem.layout[at].owners}
            twice = [node for node, count in _owning(owners).items() if count > 1]
            if twice:
                bad[at] = f"{nodes[twice[0]].name} owns them on another device by now"
            elif had - groups and not may_lose:
                bad[at] = "no other node of their group owns them by now"
        return bad


def _owning(owners: tuple[Place, ...]) -> collections.Counter[int]:
    return collections.Counter(owner.node for owner in owners)


def _left(names: list[str]) -> str:
    return f"shares of {', '.join(names)} are not given back, as it has left the fleet"


def _counted(stay: collections.Counter[str]) -> str:
    """Say how many stay for which reason, most first."""
    return "; ".join(
        f"{count} {'stays' if count == 1 else 'stay'}: {why}" for why, count in stay.most_common()
    )


def _receivers(problem: Problem, back: list[Move]) -> str:
    """Say which nodes get buckets back."""
    nodes = problem.plan.topology.nodes
    to = collections.Counter(nodes[move.target.node].name for move in back if move.target)
    away = sum(move.target is None for move in back)
    said = [f"{count} to {name}" for name, count in sorted(to.items())]
    said += [f"{away} removed again"] if away else []
    return f" ({', '.join(said)})" if said else ""
