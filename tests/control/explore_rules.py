"""Rules that must always hold: for each write, and for what nodes are asked for.

1. A plan is valid, its epoch is one more than the one before, and it never changes.
2. Nobody writes whose term is not the highest.
3. A new owner holds the bucket when the plan that makes it one is written, at versions that every
   live node has reached; an owner leaves only where another live one holds the bucket. Both only as
   far as the writer can know: a node that died or was started again since its last beat is free.
4. An operation that was accepted stays until it ends. It ends once, its state never goes back, and
   only one is at work at a time. Its moves stay the same; only what has not moved is reordered.
5. When it has ended, the owners are those that the moves of all operations so far lead to. If it
   succeeded, every live node that was heard of acts by its last plan.
6. A node that holds a bucket keeps it as long as a plan sends requests there: the plan of a live
   node, or one by which such a node began requests that are still within the longest deadline. A
   node that was cut off may ask by plans that were replaced without it.
7. Who holds a bucket changes by an operation alone, on nodes that it names: a target's, those that
   the undone operation had to do with, the drained one. Nodes are known by their names.
8. A store that lost its keys is written again by who led, or its plan is adopted; then who holds a
   bucket goes on owning it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from explore_fleet import Device, Node, ReadPlan

from embertide.server.core.control import Control
from embertide.server.core.plan.adoption import PLANNER
from embertide.server.core.plan.layout import Bucket
from embertide.server.core.plan.moves import Move, move_of
from embertide.server.core.plan.validity import check_plan
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
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all: the store lost its keys, and nobody who knew them has written them again."""
        self.plans: dict[int, ReadPlan] = {}
        self.written: dict[int, bytes] = {}
        self.records: dict[str, Record] = {}
        self.newest: ReadPlan | None = None
        self._owners: dict[Bucket, frozenset[Device]] = {}
        # Which nodes an operation has had to do with, bucket by bucket.
        self._touched: dict[str, dict[Bucket, set[str]]] = {}

    def committed(
        self,
        plan: plan_pb2.Plan | None,
        operations: Mapping[str, Record | None],
        core: Control,
        nodes: Mapping[str, Node],
        now_ms: int,
        *,
        jumps: bool = False,
    ) -> None:
        """Prove what a write did. Requires: it was done.

        Args:
            plan: The plan, if one was written.
            operations: The writes of operations.
            core: The control plane that wrote.
            nodes: All machines.
            now_ms: The time.
            jumps: The plan was made of what nodes hold, or restored, under an epoch of its own.
        """
        told = {name: node for name, node in nodes.items() if _is_told_of(core, node, now_ms)}
        reading = {name: node for name, node in told.items() if _has_said_it_reads(core, node)}
        if plan is not None:
            requests = {**self.records, **{id: each for id, each in operations.items() if each}}
            self._plan(plan, core, nodes, told, reading, requests, now_ms, jumps=jumps)
        for id, record in operations.items():
            if record is None:
                _prove(self.records.pop(id).operation.ended_ms, f"{id} was let go before its end")
            else:
                heard = any(each.beat is not None for each in core.fleet.live(now_ms))
                self._record(id, record, reading, heard=heard, restored=jumps)
        begun = [
            id
            for id, each in self.records.items()
            if each.operation.base_epoch and not each.operation.ended_ms
        ]
        _prove(len(begun) <= 1, f"{begun} are at work together")

    def _plan(
        self,
        message: plan_pb2.Plan,
        core: Control,
        nodes: Mapping[str, Node],
        told: Mapping[str, Node],
        reading: Mapping[str, Node],
        records: Mapping[str, Record],
        now_ms: int,
        *,
        jumps: bool,
    ) -> None:
        before = self.newest
        last = before.epoch if before else 0
        follows = message.epoch > last if jumps else message.epoch == last + 1
        _prove(follows, f"plan {message.epoch} follows {last}")
        check_plan(message, previous_epoch=last)
        plan = ReadPlan(message)
        self.newest = self.plans[plan.epoch] = plan
        self.written[plan.epoch] = message.SerializeToString()
        for node in nodes.values():
            if not core.fleet.alive(node.name, now_ms):
                node.cut_off_epoch = plan.epoch
        known = before is not None and plan.holders == before.holders
        if before is None or (jumps and message.planner == PLANNER and not known):
            self._owners = dict(plan.owners)
            self._take_back_what_moves(records)
            if message.planner == PLANNER:
                self._adopted(plan, told)
                for name in nodes.keys() - told.keys():
                    nodes[name].ever_held.clear()  # nobody knew what it had
                for node in told.values():
                    node.ever_held &= node.held.keys()  # what nobody holds is loaded again
            return
        if jumps and plan.holders == before.holders:
            plan.operation = ""  # what it says was said before, and followed or not
        unnoticed = {
            name: node
            for name, node in nodes.items()
            if not node.alive and core.fleet.alive(name, now_ms)
        }
        for at, new in plan.owners.items():
            if plan.holders[at] != before.holders[at]:
                self._touch(at, before, plan, records)
            if before.owners[at] != new:
                owners = before.owners[at], new
                self._change_of_owners(at, plan, owners, nodes, told, reading, unnoticed)

    def _take_back_what_moves(self, records: Mapping[str, Record]) -> None:
        """Record who owned before moves that are under way, whose beginning is not known."""
        for record in records.values():
            if record.operation.ended_ms or not record.operation.base_epoch:
                continue
            for each in record.moves[record.operation.buckets_done :]:
                move = move_of(each)
                owners = set(self._owners[move.at])
                if move.target is not None:
                    target = Device(record.nodes[move.target.node], move.target.device)
                    if target not in owners:
                        continue  # it has not begun
                    owners.discard(target)
                if move.source is not None:
                    owners.add(Device(record.nodes[move.source.node], move.source.device))
                self._owners[move.at] = frozenset(owners)

    def _adopted(self, plan: ReadPlan, told: Mapping[str, Node]) -> None:
        """Prove that a plan of what nodes hold is one: who holds a bucket goes on owning it."""
        for at, owners in plan.owners.items():
            holding = {
                Device(each.name, each.held[at]) for each in told.values() if at in each.held
            }
            _prove(
                not holding or holding & owners,
                f"plan {plan.epoch} gives {at} to {sorted(owners)}; {sorted(holding)} hold it",
            )

    def _touch(
        self, at: Bucket, before: ReadPlan, plan: ReadPlan, records: Mapping[str, Record]
    ) -> None:
        """Prove that what a plan changes of a bucket is what its operation asks for, by name."""
        changed = {each.node for _, each in plan.holders[at] ^ before.holders[at]}
        record = records.get(plan.operation)
        if record is None:
            raise BrokenRuleError(f"plan {plan.epoch} changes {at}, and no operation asks for it")
        id, request = record.operation.id, record.request
        self._touched.setdefault(id, {}).setdefault(at, set()).update(changed)
        goal = request.WhichOneof("goal")
        if not {record.operation.base_epoch, request.target.base_epoch} <= {0, *self.plans}:
            return  # its plans were lost with the store
        _prove(
            record.operation.base_epoch in self.plans,
            f"plan {plan.epoch} changes {at} for {id}, whose record says that it has not begun",
        )
        began = self.plans[record.operation.base_epoch]
        owning = {each.node for each in began.owners[at]}
        asked: set[str] | None = None
        if goal == "target":
            asked = owning | self._named_by(request.target, at)
        elif goal == "undo_operation":
            asked = self._touched.get(request.undo_operation, {}).get(at, set())
        elif goal == "drain_node":
            _prove(
                request.drain_node in owning,
                f"{id} drains {request.drain_node}, and moves {at} of {sorted(owning)}",
            )
            loses = all(
                each.node != request.drain_node
                for kind, each in plan.holders[at] - before.holders[at]
                if kind == "joining"
            )
            _prove(loses, f"{id} gives {at} to {request.drain_node}, which it drains")
        _prove(
            asked is None or changed <= asked,
            f"plan {plan.epoch} of {id} changes {at} on {sorted(changed)}; it names "
            f"{sorted(asked or ())}",
        )

    def _named_by(self, target: control_pb2.ReshardTarget, at: Bucket) -> set[str]:
        """Return the names that a target gives a bucket, by the plan that it was made from."""
        names = self.plans[target.base_epoch].names
        return {
            names[owner.node]
            for run in target.assignments
            if run.table_id == at.table
            and run.bucket_begin <= at.bucket < run.bucket_begin + run.bucket_count
            for owner in run.owners
        }

    def _change_of_owners(
        self,
        at: Bucket,
        plan: ReadPlan,
        owners: tuple[frozenset[Device], frozenset[Device]],
        nodes: Mapping[str, Node],
        told: Mapping[str, Node],
        reading: Mapping[str, Node],
        unnoticed: Mapping[str, Node],
    ) -> None:
        old, new = owners

        def holding(places: Iterable[Device], among: Mapping[str, Node]) -> list[Device]:
            return [
                place
                for place in places
                if place.node in among and at in among[place.node].held and among[place.node].alive
            ]

        for place in sorted(new - old):
            node = told.get(place.node)
            if node is None or not holding(old, told):
                continue  # it died since, or nobody is left who could own instead
            _prove(
                at in node.held,
                f"plan {plan.epoch} makes {node.name} an owner of {at}, which it does not hold",
            )
            late = [
                each.name for each in reading.values() if 0 < each.version < node.since.get(at, 0)
            ]
            if late:
                raise BrokenRuleError(
                    f"plan {plan.epoch} makes {node.name} an owner of {at}, which it holds from "
                    f"version {node.since.get(at)} on; {late} have not reached that"
                )
        stay = [place for place in new if place.node in told]
        if holding(old - new, nodes) and stay:
            # Nobody could know of a node that died a moment ago.
            died = [unnoticed[place.node] for place in new if place.node in unnoticed]
            _prove(
                holding(stay, told) or any(at in each.held for each in died),
                f"plan {plan.epoch} takes {at} from {sorted(old - new)}, and no other owner holds "
                "it",
            )

    def _record(
        self, id: str, record: Record, told: Mapping[str, Node], *, heard: bool, restored: bool
    ) -> None:
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
            before.drained_node_left = record.drained_node_left  # the one thing that may change
            _prove(not was.ended_ms or record == before, f"{id} changed after its end")
            _prove(now.buckets_done >= was.buckets_done, f"{id}: what was done is undone")
            if was.base_epoch:
                _prove(now.base_epoch == was.base_epoch, f"{id} began twice")
                _prove(_same_moves(before, record), f"{id}: its moves changed")
        if before is None and restored:
            return  # what it had ended with before the store lost its keys
        if now.ended_ms and not (before and before.operation.ended_ms):
            succeeded = now.state == _SUCCEEDED
            _prove(heard or not succeeded, f"{id} succeeded, and no node has said anything")
            self._ended(kept, told)

    def _ended(self, record: Record, told: Mapping[str, Node]) -> None:
        operation = record.operation
        if operation.state == _SUCCEEDED:
            _prove(
                operation.buckets_done == operation.buckets_total == len(record.moves),
                f"{operation.id} succeeded with {operation.buckets_done} of {len(record.moves)}",
            )
            self._followed(operation, told)
        for each in record.moves[: operation.buckets_done]:
            self._moved(move_of(each), record.nodes)
        if self.newest is None or not operation.base_epoch:
            return
        if "was adopted" in operation.message:
            return  # the plan says who owns what, and not its moves
        _prove(not self.newest.moving, f"{operation.id} ended while buckets moved")
        for at, owners in self.newest.owners.items():
            _prove(
                owners == self._owners[at],
                f"after {operation.id} {at} has owners {sorted(owners)}; its moves lead to "
                f"{sorted(self._owners[at])}",
            )

    def _followed(self, operation: control_pb2.Operation, told: Mapping[str, Node]) -> None:
        """Prove that nodes follow the last plan of an operation that succeeded."""
        assert self.newest is not None
        last = max(
            (each.epoch for each in self.plans.values() if each.operation == operation.id),
            default=operation.base_epoch,
        )
        follow = [node for name, node in told.items() if name in self.newest.names]
        for node in follow:
            epoch = node.plan.epoch if node.plan else 0
            _prove(
                last <= epoch <= self.newest.epoch,
                f"{operation.id} succeeded with plan {last}; {node.name} acts by {epoch}",
            )

    def _moved(self, move: Move, names: Sequence[str]) -> None:
        owners = set(self._owners[move.at])
        if move.source is not None:
            owners.discard(Device(names[move.source.node], move.source.device))
        if move.target is not None:
            owners.add(Device(names[move.target.node], move.target.device))
        self._owners[move.at] = frozenset(owners)

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


def _has_said_it_reads(core: Control, node: Node) -> bool:
    """Whether the last beat heard says a version: before the first, nobody waits for the node.

    Its next beat may be on its way, and say one.
    """
    member = core.fleet.get(node.name)
    return member is not None and member.acted_epoch != math.inf


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
