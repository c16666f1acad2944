"""The operation that a request asks for, and its answer, prepared where nobody waits for them.

Moving 100,000 buckets takes seconds to prepare. All of it follows from the request and from a
situation that does not change, so it is done beside the ticks, and accepted if the plan is still
the one that it was made from.
"""

import dataclasses

from embertide.server.core.plan import hot, shares
from embertide.server.core.plan.cost import costed
from embertide.server.core.plan.names import names_of
from embertide.server.core.plan.planner import Proposal
from embertide.server.core.reshard import MovePlan, PlannerTask, Situation
from embertide.server.core.state import is_large, moves_alone
from embertide.v1 import control_pb2

# Buckets of a plan whose cost is computed while others wait: some 20 ms.
_COSTED_HERE = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreparedOperation:
    """An operation that can be accepted while the plan is that of an epoch.

    Attributes:
        epoch: Epoch of the plan that it was made from.
        targets: Names of the nodes that get buckets.
        record: The operation; only the time of its acceptance is missing.
        answer: The answer to the caller, likewise.
        encoded: The bytes of what `state` keeps apart from a large record; empty: it is not large.
    """

    epoch: int
    targets: tuple[str, ...]
    record: control_pb2.OperationRecord
    answer: control_pb2.StartReshardResponse
    encoded: bytes


def operation_of(
    request: control_pb2.StartReshardRequest, move_plan: MovePlan, now: Situation
) -> PreparedOperation:
    """Return the operation that does what was prepared for a request."""
    costs = move_plan.costs
    operation = control_pb2.Operation(
        id=request.operation_id,
        kind=move_plan.kind,
        state=control_pb2.OPERATION_STATE_PENDING,
        buckets_total=len(move_plan.moves),
        bytes_total=sum(each.bytes for each in move_plan.moves),
        reason=request.reason,
        planner=move_plan.planner,
        before=costs[0].message() if costs else None,
        after=costs[1].message() if costs else None,
    )
    answer = control_pb2.StartReshardResponse(
        operation=operation,
        moves=move_plan.moves,
        devices=move_plan.devices,
        explanation=move_plan.explanation,
        hot_rows=hot.messages_of(move_plan.hot_rows),
        tier_shares=shares.messages_of(move_plan.tier_shares),
        before=operation.before if costs else None,
        after=operation.after if costs else None,
        nodes=names_of(now.plan.topology),
    )
    record = control_pb2.OperationRecord(
        operation=operation,
        request=request,
        moves=move_plan.moves,
        hot_rows=answer.hot_rows,
        tier_shares=answer.tier_shares,
        devices=move_plan.devices,
        nodes=answer.nodes,
    )
    targets = {each.target.node for each in move_plan.moves if each.HasField("target")}
    return PreparedOperation(
        epoch=now.plan.epoch,
        targets=tuple(now.plan.topology.nodes[node].name for node in sorted(targets)),
        record=record,
        answer=answer,
        encoded=moves_alone(record).SerializeToString() if is_large(record) else b"",
    )


def propose_here(planner_task: PlannerTask) -> Proposal:
    """Return the answer of a planner that takes no time, and its cost where that takes none."""
    proposal = planner_task.planner.propose(planner_task.problem)
    few = len(planner_task.problem.layout) <= _COSTED_HERE
    return costed(planner_task.problem, proposal) if few else proposal
