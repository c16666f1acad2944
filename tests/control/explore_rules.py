"""What must hold whatever happens: rules for each write, and for what nodes are asked for.

1. A plan is valid, its epoch is one more than the one before, and it never changes.
2. Nobody writes whose term is not the highest.
3. A new owner holds the bucket when the plan that makes it one is written, at versions that every
   live node has reached; an owner leaves only where another live one holds the bucket. Both only as
   far as the writer can know: a node that died or was started again since its last beat is free.
4. An operation that was accepted stays until it ends. It ends once, its state never goes back, and
   only one is at work at a time. Its moves stay the same; only what has not moved is reordered.
5. When it has ended, the owners are those that the moves of all operations so far lead to.
6. A node that holds a bucket keeps it as long as a plan sends requests there: the plan of a live
   node, or one by which such a node began requests that are still within the longest deadline. A
   node that was cut off may ask by plans that were replaced without it.
"""

from collections.abc import Iterable, Mapping

from explore_fleet import Node, ReadPlan

from embertide.server.core.control import Control
from embertide.server.core.plan.layout import Bucket, Place
from embertide.server.core.plan.moves import Move
from embertide.server.core.plan.validity import check_plan
from embertide.server.core.reshard import move_of
from embertide.v1 import control_pb2, plan_pb2

Record = control_pb2.OperationRecord
State = control_pb2.OperationState

_PENDING = control_pb2.OPERATION_STATE_PENDING
_RUNNING = control_pb2.OPERATION_STATE_RUNNING
_PAUSED = control_pb2.OPERATION_STATE_PAUSED
_SUCCEEDED = control_pb2.OPERATION_STATE_SUCCEEDED
_FAILED = control_pb2.OPERATION_STATE_FAILED
_ABORTED = control_pb2.OPERATION_STATE_ABORTED
# One that has nothing to move begins and succeeds in one write.
_NEXT = {
    _PENDING: {_PENDING, _RUNNING, _PAUSED, _SUCCEEDED, _FAILED, _ABORTED},
    _RUNNING: {_RUNNING, _PAUSED, _SUCCEEDED, _FAILED, _ABORTED},
    _PAUSED: {_PAUSED, _PENDING, _RUNNING, _ABORTED},
    _SUCCEEDED: {_SUCCEEDED},
    _FAILED: {_FAILED},
    _ABORTED: {_ABORTED},
}


class BrokenRuleError(AssertionError):
    """A rule does not hold."""


def _prove(holds: object, said: str) -> None:
    if not holds:
        raise BrokenRuleError(said)


class Rules:
    """Watches every write that was done. `plans` has all plans as nodes read them, by epoch."""

    def __init__(self) -> None:
        self.plans: dict[int, ReadPlan] = {}
        self.written: dict[int, bytes] = {}
        self.records: dict[str, Record] = {}
        self.newest: ReadPlan | None = None
        self._owners: dict[Bucket, set[Place]] = {}

    def committed(
        self,
        plan: plan_pb2.Plan | None,
        operations: Mapping[str, Record | None],
        core: Control,
        nodes: Mapping[str, Node],
        now_ms: int,
    ) -> None:
        """Prove what a write did. Requires: it was done."""
        if plan is not None:
            self._plan(plan, core, nodes, now_ms)
        for id, record in operations.items():
            if record is None:
                _prove(self.records.pop(id).operation.ended_ms, f"{id} was let go before its end")
            else:
                self._record(id, record)
        begun = [
            id
            for id, each in self.records.items()
            if each.operation.base_epoch and not each.operation.ended_ms
        ]
        _prove(len(begun) <= 1, f"{begun} are at work together")

    def _plan(
        self, message: plan_pb2.Plan, core: Control, nodes: Mapping[str, Node], now_ms: int
    ) -> None:
        before = self.newest
        last = before.epoch if before else 0
        _prove(message.epoch == last + 1, f"plan {message.epoch} follows {last}")
        check_plan(message, previous_epoch=last)
        plan = ReadPlan(message)
        self.newest = self.plans[plan.epoch] = plan
        self.written[plan.epoch] = message.SerializeToString()
        for node in nodes.values():
            if not core.fleet.alive(node.name, now_ms):
                node.cut_off_epoch = plan.epoch
        if before is None:
            self._owners = {at: set(held.owners) for at, held in plan.layout.items()}
            return
        told = {name: node for name, node in nodes.items() if _is_told_of(core, node, now_ms)}
        for at, held in plan.layout.items():
            old, new = set(before.layout[at].owners), set(held.owners)
            if old != new:
                self._change_of_owners(at, plan, (old, new), nodes, told)

    def _change_of_owners(
        self,
        at: Bucket,
        plan: ReadPlan,
        owners: tuple[set[Place], set[Place]],
        nodes: Mapping[str, Node],
        told: Mapping[str, Node],
    ) -> None:
        old, new = owners

        def holding(places: Iterable[Place], among: Mapping[str, Node]) -> list[Place]:
            return [
                place
                for place in places
                if plan.name(place) in among
                and at in among[plan.name(place)].held
                and among[plan.name(place)].alive
            ]

        for place in sorted(new - old):
            node = told.get(plan.name(place))
            if node is None or not holding(old, told):
                continue  # it died since, or nobody is left who could own instead
            _prove(
                at in node.held,
                f"plan {plan.epoch} makes {node.name} an owner of {at}, which it does not hold",
            )
            late = [each.name for each in told.values() if 0 < each.version < node.since.get(at, 0)]
            if late:
                raise BrokenRuleError(
                    f"plan {plan.epoch} makes {node.name} an owner of {at}, which it holds from "
                    f"version {node.since.get(at)} on; {late} have not reached that"
                )
        stay = [place for place in new if plan.name(place) in told]
        if holding(old - new, nodes) and stay:
            _prove(
                holding(stay, told),
                f"plan {plan.epoch} takes {at} from {sorted(old - new)}, and no other owner holds "
                "it",
            )

    def _record(self, id: str, record: Record) -> None:
        now, before = record.operation, self.records.get(id)
        self.records[id] = kept = Record()
        kept.CopyFrom(record)
        if before is not None:
            was = before.operation
            _prove(record.request == before.request, f"{id}: its request changed")
            _prove(
                now.state in _NEXT[was.state],
                f"{id} was {State.Name(was.state)} and is {State.Name(now.state)}",
            )
            _prove(not was.ended_ms or record == before, f"{id} changed after its end")
            _prove(now.buckets_done >= was.buckets_done, f"{id}: what was done is undone")
            if was.base_epoch:
                _prove(now.base_epoch == was.base_epoch, f"{id} began twice")
                _prove(_same_moves(before, record), f"{id}: its moves changed")
        if now.ended_ms and not (before and before.operation.ended_ms):
            self._ended(kept)

    def _ended(self, record: Record) -> None:
        operation = record.operation
        if operation.state == _SUCCEEDED:
            _prove(
                operation.buckets_done == operation.buckets_total == len(record.moves),
                f"{operation.id} succeeded with {operation.buckets_done} of {len(record.moves)}",
            )
        for each in record.moves[: operation.buckets_done]:
            self._moved(move_of(each))
        if self.newest is None or not operation.base_epoch:
            return
        _prove(not self.newest.moving, f"{operation.id} ended while buckets moved")
        for at, held in self.newest.layout.items():
            _prove(
                set(held.owners) == self._owners[at],
                f"after {operation.id} {at} has owners {sorted(held.owners)}; its moves lead to "
                f"{sorted(self._owners[at])}",
            )

    def _moved(self, move: Move) -> None:
        owners = self._owners[move.at]
        if move.source is not None:
            owners.discard(move.source)
        if move.target is not None:
            owners.add(move.target)

    def check_asked(self, nodes: Mapping[str, Node], now_ms: int) -> None:
        """Prove rule 6."""
        for node in nodes.values():
            if node.alive and len(node.held) < len(node.ever_held):
                self._check_dropped(node, node.ever_held - node.held.keys(), nodes, now_ms)

    @staticmethod
    def _check_dropped(
        node: Node, dropped: set[Bucket], nodes: Mapping[str, Node], now_ms: int
    ) -> None:
        for asker in nodes.values():
            if not asker.alive or not asker.version or asker.plan is None:
                continue
            plans = [asker.plan, *(each.plan for each in asker.asked if each.until_ms > now_ms)]
            for plan in plans:
                if plan.epoch < asker.cut_off_epoch:
                    continue
                asked = dropped & plan.asked.get(node.name, frozenset())
                if asked:
                    raise BrokenRuleError(
                        f"{asker.name} by plan {plan.epoch} (now {asker.plan.epoch}) asks "
                        f"{node.name} for {sorted(asked)}, which it has dropped"
                    )


def _same_moves(before: Record, after: Record) -> bool:
    """Whether two records have the same moves, and what was done stands where it stood."""
    if before.moves == after.moves:
        return True
    done = before.operation.buckets_done
    old, new = ([each.SerializeToString() for each in of.moves] for of in (before, after))
    return old[:done] == new[:done] and sorted(old) == sorted(new)


def _is_told_of(core: Control, node: Node, now_ms: int) -> bool:
    """Whether a control plane has heard this start of a node, and counts it as alive."""
    member = core.fleet.get(node.name)
    return (
        node.alive
        and member is not None
        and member.beat is not None
        and member.incarnation == node.incarnation
        and core.fleet.is_alive(member, now_ms)
    )
