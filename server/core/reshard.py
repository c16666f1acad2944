"""From what a caller asks of a reshard to the moves that do it."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from embertide.server.core.demand import HALF_LIVES_S
from embertide.server.core.errors import Code, RefusedError, invalid
from embertide.server.core.idempotency import check_id
from embertide.server.core.plan import shares
from embertide.server.core.plan.explicit import Explicit
from embertide.server.core.plan.figures import Cost
from embertide.server.core.plan.greedy import Greedy
from embertide.server.core.plan.groups import AddGroup, RemoveGroup
from embertide.server.core.plan.hot import HotRows, changed
from embertide.server.core.plan.layout import (
    PackedLayout,
    Place,
    bucket_name,
    budget_bytes,
    devices,
    owner,
    place,
    place_name,
)
from embertide.server.core.plan.moves import Move, moves_to
from embertide.server.core.plan.planner import Planner, Problem, Proposal
from embertide.server.core.plan.planners import planner
from embertide.server.core.plan.prices import Prices
from embertide.server.core.plan.shares import TierShares
from embertide.server.core.plan.undo import Undo
from embertide.server.core.plan.validity import OWNERS_MAX, check_name
from embertide.server.core.plan.workload import (
    Asking,
    Work,
    Workload,
    device_loads,
    device_work,
    predicted,
)
from embertide.server.core.room import Room, room_of
from embertide.v1 import control_pb2, plan_pb2

BUCKETS_AT_ONCE_MAX = 4096
REASON_BYTES_MAX = 256
# Moves that are prepared in a thread of the control plane: some 20 ms.
PREPARED_HERE_MAX = 1000
# Share of budgets that planners fill: versions keep rows that they changed, pages are not full, and
# what comes is there before what goes has left. A device that is full can take no version any more.
FILLED = 0.65
_PASSES_MAX = 64  # over moves that do not fit yet


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The situation that a request is judged by. Only `operations` may change later."""

    plan: plan_pb2.Plan
    layout: PackedLayout
    workload: Workload
    unknown: frozenset[str]  # names of owning nodes that do not say what they read
    live: frozenset[str]
    operations: Mapping[str, control_pb2.OperationRecord]
    prices: Prices
    newest: Asking | None = None  # who asks for what, by the newest reads alone; None: not asked

    def alive(self, name: str) -> bool:
        """Whether a node lives."""
        return name in self.live


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannerTask:
    """The question to a planner that a request comes to.

    Attributes:
        thinks: Whether it may take long: then it is asked elsewhere, while others go on.
        large: Whether its answer has so many moves that preparing them takes long.
    """

    kind: str
    name: str
    planner: Planner
    problem: Problem
    thinks: bool
    large: bool = False

    @property
    def epoch(self) -> int:
        """Epoch of the plan that the answer is for."""
        return self.problem.plan.epoch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MovePlan:
    """The moves and changes that a request comes to."""

    kind: str
    planner: str
    moves: list[control_pb2.BucketMove]
    hot_rows: HotRows
    tier_shares: TierShares
    devices: list[control_pb2.DeviceLoad]
    explanation: str
    costs: tuple[Cost, Cost] | None  # today's and then, where they are known


def check_request(request: control_pb2.StartReshardRequest) -> None:
    """Prove what can be proved of a request without looking at the fleet."""
    check_id("operation_id", request.operation_id)
    goal = request.WhichOneof("goal")
    if goal is None:
        raise invalid(
            "goal is not said; give target, planner, drain_node, undo_operation, add_group or "
            "remove_group"
        )
    if goal == "target" and request.target.base_epoch == 0:
        raise invalid("target.base_epoch is 0; give the epoch of the plan it was made from")
    if goal == "planner":
        check_name("planner", request.planner)
    if goal == "drain_node":
        check_name("drain_node", request.drain_node)
    if goal == "undo_operation":
        check_id("undo_operation", request.undo_operation)
    if request.half_life_s and (goal != "planner" or request.half_life_s not in HALF_LIVES_S):
        raise invalid(
            f"half_life_s is {request.half_life_s}; with a planner, use one of "
            f"{', '.join(map(str, HALF_LIVES_S))}"
        )
    if request.budget.buckets_at_once > BUCKETS_AT_ONCE_MAX:
        raise invalid(
            f"budget.buckets_at_once is {request.budget.buckets_at_once}; at most "
            f"{BUCKETS_AT_ONCE_MAX}"
        )
    check_reason(request.reason)


def check_reason(reason: str) -> None:
    """Prove that a reason is not too long."""
    size = len(reason.encode())
    if size > REASON_BYTES_MAX:
        raise invalid(f"reason is {size} bytes; at most {REASON_BYTES_MAX}")


def build_task(request: control_pb2.StartReshardRequest, now: Situation) -> PlannerTask:
    """Return what a planner is to answer for a request.

    Raises:
        RefusedError: It cannot be done; the message names what is wrong.
    """
    kind, name, chosen = _planner(request, now)
    return PlannerTask(
        kind=kind,
        name=name,
        planner=chosen,
        problem=problem_of(now),
        thinks=not isinstance(chosen, Explicit | Undo),
        large=isinstance(chosen, Explicit | Undo) and chosen.max_moves() > PREPARED_HERE_MAX,
    )


def problem_of(now: Situation) -> Problem:
    """Return the problem that a situation poses to any planner."""
    return Problem(
        plan=now.plan,
        layout=now.layout,
        workload=now.workload,
        shunned=frozenset(
            at for at, node in enumerate(now.plan.topology.nodes) if not now.alive(node.name)
        ),
        prices=now.prices,
        filled=FILLED,
    )


def build_moves(kind: str, name: str, proposal: Proposal, now: Situation) -> MovePlan:
    """Return the moves of a planner's answer, and what they come to. Requires: it is of this plan.

    Args:
        kind: Kind of the operation.
        name: The planner's.
        proposal: Its answer.
        now: The situation.

    Raises:
        RefusedError: It cannot be done; the message names what is wrong.
    """
    moves = moves_to(now.plan, now.layout, proposal.owners)
    before = device_work(now.plan.topology, now.layout, now.workload)
    _check_targets(moves, now)
    after = predicted(before, moves, now.workload)
    _check_room(now.plan.topology, before, after)
    loads = device_loads(before, after)
    moves = _in_order(moves, now, _room(now.plan.topology, loads))
    return MovePlan(
        kind=kind,
        planner=name,
        moves=[_message(move, now.workload) for move in moves],
        hot_rows=changed(now.plan, proposal.hot_rows),
        tier_shares=shares.changed(now.plan, proposal.tier_shares),
        devices=loads,
        explanation=proposal.explanation or "nothing to move",
        costs=(proposal.before, proposal.after) if proposal.before and proposal.after else None,
    )


def _in_order(moves: list[Move], now: Situation, room: Room[Place]) -> list[Move]:
    """Return moves in an order in which devices have room for what comes, most read first.

    Moves without a target go first, where the bucket gains nobody; one that does not fit waits
    until others have left. A bucket's new owners come before others leave alone, so that it never
    has fewer meanwhile. Where no order fits, the rest comes as it is read.
    """
    coming = collections.Counter(move.at for move in moves if move.target is not None)
    pending = sorted(
        moves,
        key=lambda move: (
            move.target is not None or coming[move.at] > 0,
            move.target is None,
            -now.workload.moved(move).reads,
        ),
    )
    ordered: list[Move] = []
    for _ in range(_PASSES_MAX):
        later = []
        for move in pending:
            size = now.workload.moved(move).bytes
            if move.target is None and coming[move.at]:
                later.append(move)
                continue
            if move.target is not None:
                if not room.fits(move.target, size):
                    later.append(move)
                    continue
                room.take(move.target, size)
                coming[move.at] -= 1
            if move.source is not None:
                room.take(move.source, -size)
            ordered.append(move)
        if len(later) == len(pending):
            break
        pending = later
        if not pending:
            return ordered
    return ordered + sorted(pending, key=lambda move: move.target is None)


def _room(topology: plan_pb2.Topology, loads: Sequence[control_pb2.DeviceLoad]) -> Room[Place]:
    budgets = {at: budget_bytes(device) for at, device in devices(topology).items()}
    return room_of(
        budgets, ((place(each.device), each.bytes_before, each.bytes_after) for each in loads)
    )


def _planner(request: control_pb2.StartReshardRequest, now: Situation) -> tuple[str, str, Planner]:
    goal = request.WhichOneof("goal")
    nodes = now.plan.topology.nodes
    if goal == "target":
        return "reshard", "explicit", Explicit(request.target)
    if goal == "drain_node":
        names = [node.name for node in nodes]
        if request.drain_node not in names:
            raise RefusedError(
                Code.NOT_FOUND, f"no such node: {request.drain_node!r}; the plan has {names}"
            )
        return "drain", "drain", Greedy(drained=names.index(request.drain_node))
    if goal == "add_group":
        return "add-group", "add-group", AddGroup(request.add_group)
    if goal == "remove_group":
        return "remove-group", "remove-group", RemoveGroup(request.remove_group)
    if goal == "undo_operation":
        return "reshard", "undo", Undo(_ended(request.undo_operation, now.operations))
    chosen = planner(request.planner)
    owning = {at.node for held in now.layout.in_use() for at in held.owners}
    for at in sorted(owning):
        if not now.alive(nodes[at].name):
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"node {nodes[at].name!r} is dead, so its load is not known; wait for it, or "
                "drain it",
            )
    if now.unknown:
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            f"node {min(now.unknown)!r} does not say what it reads, so its load is not known; wait "
            "for it, or give a target",
        )
    return "reshard", request.planner, chosen


def _ended(
    id: str, operations: Mapping[str, control_pb2.OperationRecord]
) -> control_pb2.OperationRecord:
    if id not in operations:
        raise RefusedError(Code.NOT_FOUND, f"no such operation: {id!r}; list operations")
    if not operations[id].operation.ended_ms:
        raise RefusedError(
            Code.FAILED_PRECONDITION, f"operation {id!r} has not ended; abort it or wait"
        )
    return operations[id]


def is_dead(node: str) -> RefusedError:
    """Return the refusal of a target that is dead."""
    return RefusedError(Code.FAILED_PRECONDITION, f"node {node!r} is dead; wait for it")


def _check_targets(moves: list[Move], now: Situation) -> None:
    nodes = now.plan.topology.nodes
    for node in sorted({move.target.node for move in moves if move.target}):
        if not now.alive(nodes[node].name):
            raise is_dead(nodes[node].name)
    # Not with `stepped`: a layout shares its palette with the plan's, which others may be changing.
    coming = collections.Counter(
        move.at for move in moves if move.target is not None and not move.inside_node
    )
    for at, count in coming.items():
        owners = len(now.layout[at].owners) + count
        if owners > OWNERS_MAX:
            raise invalid(
                f"{bucket_name(now.plan.tables, at)} would have {owners} owners while "
                f"it moves; at most {OWNERS_MAX}"
            )


def _check_room(
    topology: plan_pb2.Topology, before: Mapping[Place, Work], after: Mapping[Place, Work]
) -> None:
    for at, device in devices(topology).items():
        if after[at].bytes > max(budget_bytes(device), before[at].bytes):
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED,
                f"device {place_name(topology, at)} has no room: {after[at].bytes:,} bytes of "
                f"buckets in a budget of {budget_bytes(device):,}; raise it, or move less",
            )


def _message(move: Move, workload: Workload) -> control_pb2.BucketMove:
    taken = workload.moved(move)
    return control_pb2.BucketMove(
        table_id=move.at.table,
        bucket=move.at.bucket,
        source=owner(move.source) if move.source else None,
        target=owner(move.target) if move.target else None,
        bytes=taken.bytes if move.target else 0,
        freed_bytes=taken.bytes if move.source else 0,
        reads=taken.reads,
    )
