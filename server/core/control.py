"""The control plane as a whole: requests and ticks in, answers and writes out.

It is driven from one thread at a time. Each call decides on what is in memory and leaves in `take`
what must be written before anybody is told; if that fails, this object is thrown away and another
is made from what is in the store.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from google.protobuf.message import Message

from embertide.server.core.demand import PLANNED_BY_S, Clock, Demand
from embertide.server.core.drift.autopilot import Autopilot, DriftMemory
from embertide.server.core.drift.diagnosis import Outcome, Reason
from embertide.server.core.drift.follower import DriftFollower
from embertide.server.core.drift.options import DriftOptions
from embertide.server.core.errors import Code, MovedOnError, RefusedError, invalid
from embertide.server.core.fleet import Fleet, check_registration
from embertide.server.core.idempotency import Answers, check_id, content, in_use
from embertide.server.core.loads import Loads
from embertide.server.core.lost_state import check_adoption, epoch_above, plan_ahead
from embertide.server.core.operations import Operations
from embertide.server.core.plan import shares
from embertide.server.core.plan.adoption import adopted_plan
from embertide.server.core.plan.bootstrap import first_plan, table_bytes
from embertide.server.core.plan.bucket_columns import BucketColumns
from embertide.server.core.plan.fleet_figures import unowned_buckets
from embertide.server.core.plan.groups import (
    Wish,
    followed,
    is_announced,
    whole_groups,
    wish_of,
)
from embertide.server.core.plan.layout import LaidPlan, PackedLayout
from embertide.server.core.plan.moves import still_to_make
from embertide.server.core.plan.named_operation import NamedOperation
from embertide.server.core.plan.names import Roster, names_of, without_gone
from embertide.server.core.plan.validity import check_laid
from embertide.server.core.plan.workload import device_loads, device_work, predicted
from embertide.server.core.preparation import PreparedOperation
from embertide.server.core.price_fit import CostFit
from embertide.server.core.reshard import (
    Situation,
    build_task,
    check_reason,
    check_request,
    is_dead,
)
from embertide.server.core.state import SavedState, Writes
from embertide.server.core.status import FleetStatus, NodeStatus
from embertide.server.core.tasks import OperationPrepared, PrepareOperation, TaskQueue
from embertide.server.core.view import View
from embertide.v1 import control_pb2, node_pb2, plan_pb2

_READY, _LOADING = control_pb2.NODE_STATE_READY, control_pb2.NODE_STATE_LOADING


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlOptions:
    """Options of a control plane's decisions.

    Attributes:
        model: The model whose fleet it is.
        expect_nodes: Nodes that must live before the first plan is made.
        heartbeat_ms: From one beat to the next; five missed make a node dead.
        longest_deadline_ms: No lookup takes longer; a source that left holds on for as long.
        clock: Time that load windows count in: "event" where a stream is replayed.
        drift: Options of its decisions about drift.
    """

    model: str
    expect_nodes: int = 1
    heartbeat_ms: int = 200
    longest_deadline_ms: int = 2000
    clock: Clock = "wall"
    drift: DriftOptions = dataclasses.field(default_factory=DriftOptions)

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        for name in ("expect_nodes", "heartbeat_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; use at least 1")


class _Followed(NamedTuple):
    """Machines and operation that a plan follows. It and its layout are replaced together."""

    plan: plan_pb2.Plan
    registrations: Mapping[str, control_pb2.RegisterNodeRequest]
    wish: Wish | None
    is_moving: bool

    def same(self, other: "_Followed") -> bool:
        """Whether it is the very same. To compare a thousand messages would take too long."""
        return (
            self.plan is other.plan
            and self.registrations is other.registrations
            and (self.wish, self.is_moving) == (other.wish, other.is_moving)
        )


class Memory:
    """State that outlives one Control inside the process, and no process."""

    def __init__(self, options: ControlOptions) -> None:
        """Begin with nothing."""
        self.fleet = Fleet(options.model, options.heartbeat_ms)
        self.loads = Loads()
        self.demand = Demand(options.clock)
        self.fit = CostFit()
        self.drift = DriftMemory()
        self.answers: Answers[Message] = Answers()
        self.began_ms: int | None = None  # when the first Control was made


class Control:
    """The members of the fleet, the plan that holds, and the operations."""

    def __init__(
        self, options: ControlOptions, saved: SavedState, now_ms: int, memory: Memory | None = None
    ) -> None:
        """Go on from what was written, killed wherever the one before was."""
        self.options = options
        self.memory = memory or Memory(options)
        if self.memory.began_ms is None:
            self.memory.began_ms = now_ms
        self.fleet = self.memory.fleet
        self.fleet.restore(saved.nodes, now_ms)
        self.loads = self.memory.loads
        self.demand = self.memory.demand
        self.fit = self.memory.fit
        # Without assignments: `layout` has them.
        self.plan: plan_pb2.Plan | None = None
        self.layout = PackedLayout({}, ())
        if saved.plan is not None:
            check_laid(saved.plan, None)
            self.plan, self.layout = saved.plan
        self.operations = Operations(saved.operations, options.longest_deadline_ms, now_ms)
        self._writes = Writes()
        self._answered: list[tuple[str, Message, Message, int]] = []
        self._ticked_ms: int | None = None
        self._no_plan = ""  # why the first plan was refused
        self._settled: _Followed | None = None  # today's plan was found to follow it
        # Operations whose moves were made from the plan of this epoch.
        self._made_at: dict[str, int] = {}
        self.tasks = TaskQueue()
        self.autopilot = Autopilot(
            options.drift, self.memory.drift, saved.decisions, saved.settings, options.clock
        )
        self._follower = DriftFollower(
            options.drift, self.autopilot, self.tasks, self.operations, self.loads, self.fit
        )

    def take(self) -> Writes:
        """Return what must be written now, once."""
        writes = self._writes
        writes.operations.update(self.operations.changed)
        writes.made |= self.operations.made
        self.operations.changed, self.operations.made = {}, set()
        writes.decisions.update(self.autopilot.decisions.changed)
        self.autopilot.decisions.changed = {}
        self._writes = Writes()
        return writes

    def written(self) -> None:
        """Remember the answers given since, now that what they say is written."""
        for answered in self._answered:
            self.memory.answers.keep(*answered)
        self._answered.clear()

    @property
    def epoch(self) -> int:
        """Epoch of the newest plan. 0: none."""
        return self.plan.epoch if self.plan else 0

    @property
    def why_no_plan(self) -> str:
        """The reason why there is no first plan, and the remedy."""
        return self._no_plan or (
            f"{len(self.fleet)} of {self.options.expect_nodes} nodes have registered; wait for them"
        )

    def register(
        self, request: control_pb2.RegisterNodeRequest, now_ms: int
    ) -> control_pb2.RegisterNodeResponse:
        """Make a node known, or known again."""
        check_registration(request)
        first = self._first_answer(request.request_id, request)
        if isinstance(first, control_pb2.RegisterNodeResponse):
            return first
        for member in self.fleet:
            if member.incarnation == request.request_id:  # registered before our start
                if content(member.registration) != content(request):
                    raise in_use(request.request_id)
                return self._registered(request, now_ms)
        self.fleet.check(request, self.plan.tables if self.plan else None, now_ms)
        self._check_devices(request.node)
        self.fleet.register(request, now_ms)
        self._writes.nodes[request.node.name] = request
        return self._registered(request, now_ms)

    def _registered(
        self, request: control_pb2.RegisterNodeRequest, now_ms: int
    ) -> control_pb2.RegisterNodeResponse:
        answer = control_pb2.RegisterNodeResponse(
            incarnation=request.request_id,
            plan_epoch=self.epoch,
            heartbeat_interval_ms=self.fleet.tell_interval(request.node.name),
        )
        self._answered.append((request.request_id, request, answer, now_ms))
        return answer

    def _first_answer(self, id: str, request: Message) -> Message | None:
        return self.memory.answers.find(id, request)

    def _check_devices(self, node: plan_pb2.Node) -> None:
        """Prove that a planned node has kept its group and the devices that hold buckets."""
        if self.plan is None:
            return
        for position, planned in enumerate(self.plan.topology.nodes):
            if planned.name != node.name:
                continue
            if planned.group != node.group and self._is_named(node.name):
                raise invalid(
                    f"node {node.name!r} is of group {planned.group} in plan {self.epoch}, not of "
                    f"{node.group}; drain it first, or keep its group"
                )
            used = {
                each.device
                for held in self.layout.in_use()
                for places in held
                for each in places
                if each.node == position
            }
            if used and max(used) >= len(node.devices):
                raise invalid(
                    f"node {node.name!r}: plan {self.epoch} gives buckets to its device "
                    f"{max(used)}; start it with as many devices, or drain it first"
                )

    def load(
        self,
        node: str,
        load: node_pb2.NodeServiceGetLoadResponse,
        now_ms: int,
        columns: BucketColumns | None = None,
    ) -> None:
        """Take what a node said that it read, and its columns if they are made already."""
        columns = self.loads.take(node, load, columns)
        self.fit.take(node, load, now_ms)
        if self.plan is not None:
            self.demand.take(node, load, self.plan.tables, now_ms, columns)

    def remove(
        self, request: control_pb2.RemoveNodeRequest, now_ms: int
    ) -> control_pb2.RemoveNodeResponse:
        """Forget a node that holds nothing."""
        check_id("request_id", request.request_id)
        first = self._first_answer(request.request_id, request)
        if isinstance(first, control_pb2.RemoveNodeResponse):
            return first
        if self.fleet.get(request.node) is None:
            raise RefusedError(
                Code.NOT_FOUND, f"no such node: {request.node[:80]!r}; look at status"
            )
        if self._is_named(request.node):
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"plan {self.epoch} gives buckets to node {request.node!r}; drain it first",
            )
        self.fleet.remove(request.node, now_ms)
        self.loads.forget(request.node)
        self.demand.forget(request.node)
        self.fit.forget(request.node)
        self._writes.nodes[request.node] = None
        self.operations.leave(request.node)
        if (fewer := self._without_gone(now_ms)) is not None:
            self._replace(fewer)
        answer = control_pb2.RemoveNodeResponse()
        self._answered.append((request.request_id, request, answer, now_ms))
        return answer

    def _without_gone(self, now_ms: int) -> LaidPlan | None:
        """Return the plan without the nodes that have left, once no operation is at work."""
        if self.plan is None or self.operations.running is not None:
            return None
        members = self.fleet.registrations.keys()
        if members >= {node.name for node in self.plan.topology.nodes}:
            return None
        fewer = without_gone(LaidPlan(self.plan, self.layout), members)
        if fewer is not None:
            fewer.head.epoch = self.epoch + 1
            fewer.head.operation_id = ""
            fewer.head.created_ms = now_ms
        return fewer

    def _is_named(self, node: str) -> bool:
        """Whether the plan gives a node buckets, or an operation at work may yet."""
        return node in self._named_nodes()

    def _named_nodes(self) -> set[str]:
        """Return the nodes that the plan gives buckets, or an operation may yet."""
        if self.plan is None:
            return set()
        names = names_of(self.plan.topology)
        named = {
            names[at.node] for held in self.layout.in_use() for places in held for at in places
        }
        return named.union(*(NamedOperation(each).targets() for each in self.operations.active()))

    def status(self, now_ms: int) -> FleetStatus:
        """Say how the fleet is, as it last reported."""
        return FleetStatus(
            self.epoch, self.drift_status(now_ms), now_ms, list(self._node_statuses(now_ms))
        )

    def node_states(self, now_ms: int) -> Mapping["control_pb2.NodeState.ValueType", int]:
        """Count the nodes by how they take part."""
        return collections.Counter(each.state for each in self._node_statuses(now_ms))

    def _node_statuses(self, now_ms: int) -> Iterator[NodeStatus]:
        running = self.operations.running
        draining = running.record.request.drain_node if running else None
        wish = wish_of(running.record.request, self.operations.records) if running else None
        whole = whole_groups(self.plan.topology) if self.plan is not None else set()
        for member, alive in self.fleet.lives(now_ms):
            state = member.state(draining or None) if alive else control_pb2.NODE_STATE_DEAD
            group = member.registration.node.group
            if self.plan is not None and group not in whole and state == _READY:
                leaves = wish is not None and not wish.comes and wish.group == group
                state = control_pb2.NODE_STATE_DRAINING if leaves else _LOADING
            yield NodeStatus(member.registration, member.beat, member.heard_ms, state)

    def fleet_load(
        self, request: control_pb2.GetFleetLoadRequest
    ) -> control_pb2.GetFleetLoadResponse:
        """Say what was read in the last window."""
        return self.loads.fleet(request.hot_keys)

    def build_task(
        self, request: control_pb2.StartReshardRequest, now_ms: int
    ) -> PrepareOperation | None:
        """Return the task that prepares a request; None: it was accepted before.

        Raises:
            RefusedError: As `start`.
        """
        check_request(request)
        known = self._first_answer(request.operation_id, request) is not None
        if known or request.operation_id in self.operations.records:
            return None
        return self._task_of_request(request, now_ms)

    def _task_of_request(
        self, request: control_pb2.StartReshardRequest, now_ms: int
    ) -> PrepareOperation:
        situation = self._situation(now_ms, request.half_life_s, request)
        if request.WhichOneof("goal") == "target" and request.target.base_epoch != self.epoch:
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"target.base_epoch is {request.target.base_epoch}; the plan is {self.epoch}: read "
                "it and try again",
            )
        return self._task_of(request, situation)

    def _task_of(
        self, request: control_pb2.StartReshardRequest, now: Situation
    ) -> PrepareOperation:
        return PrepareOperation(
            request=request,
            planner_task=build_task(request, now),
            # Records change, and there may be 64 MiB of them.
            now=dataclasses.replace(now, operations={}),
            nodes_known=len(self.plan.topology.nodes) if self.plan is not None else 0,
        )

    def start(
        self,
        request: control_pb2.StartReshardRequest,
        now_ms: int,
        ready: PreparedOperation | None = None,
        author: str = "",
    ) -> control_pb2.StartReshardResponse:
        """Accept an operation, or say what it would be.

        Args:
            request: The request.
            now_ms: Wall clock.
            ready: The operation by the task of `build_task`; None: it is prepared here and now.
            author: The caller. Empty: callers are not asked who they are.

        Raises:
            RefusedError: It cannot be done.
            MovedOnError: The plan is not that of `build_task` any more.
        """
        check_request(request)
        first = self._first_answer(request.operation_id, request)
        if isinstance(first, control_pb2.StartReshardResponse):
            return first
        if request.operation_id in self.operations.records:
            return self._accepted_before(request)
        if ready is None:
            ready = self._task_of_request(request, now_ms).run().value()
        elif ready.epoch != self.epoch:
            raise MovedOnError(
                f"the plan moved on from {ready.epoch} to {self.epoch} while moves were prepared: "
                "try again"
            )
        if dead := [name for name in ready.targets if not self.fleet.alive(name, now_ms)]:
            raise is_dead(dead[0])
        if not request.dry_run:
            self._accept(ready, author, now_ms)
        if ready.answer.HasField("before"):
            ready.answer.model.CopyFrom(self.fit.message())
        return ready.answer

    def _accept(self, ready: PreparedOperation, author: str, now_ms: int) -> None:
        """Take an operation in as it was answered.

        Raises:
            RefusedError: Too many wait.
        """
        self.operations.check_room()
        record, request = ready.record, ready.record.request
        settings = self.autopilot.take_back(request.undo_operation)
        if settings is not None:
            self._writes.settings = settings
            ready.answer.explanation += "; mode is advise from now on: `embertide drift mode auto`"
        record.operation.created_ms = self.operations.created_ms(now_ms)
        ready.answer.operation.created_ms = record.operation.created_ms
        record.operation.author = ready.answer.operation.author = author
        self.operations.add(record)
        if ready.encoded:
            self._writes.encoded[request.operation_id] = ready.encoded
        active = {each.operation.id for each in self.operations.active()}
        self._made_at = {id: at for id, at in self._made_at.items() if id in active}
        self._made_at[request.operation_id] = self.epoch
        self._answered.append((request.operation_id, request, ready.answer, now_ms))

    def _accepted_before(
        self, request: control_pb2.StartReshardRequest
    ) -> control_pb2.StartReshardResponse:
        """Answer a repeat whose first answer we have forgotten, from the record."""
        record = self.operations.records[request.operation_id]
        if content(record.request) != content(request):
            raise in_use(request.operation_id)
        answer = control_pb2.StartReshardResponse(
            operation=record.operation,
            moves=record.moves,
            nodes=record.nodes,
            hot_rows=record.hot_rows,
            tier_shares=record.tier_shares,
            explanation="accepted before; device loads are as measured now",
        )
        if self.plan is not None:
            topology = self.plan.topology
            workload = self.demand.workload(topology, self.layout)
            before = device_work(topology, self.layout, workload)
            done, ended = record.operation.buckets_done, record.operation.ended_ms
            moves = [] if ended else NamedOperation(record).moves(done)
            left = filter(None, map(Roster(topology).find_move, moves))
            after = predicted(before, still_to_make(self.layout, left), workload)
            position = {name: at for at, name in enumerate(record.nodes)}
            for each in device_loads(before, after):
                name = topology.nodes[each.device.node].name
                each.device.node = position.setdefault(name, len(position))
                answer.devices.append(each)
            answer.nodes[:] = position
        return answer

    def _situation(
        self,
        now_ms: int,
        half_life_s: int,
        request: control_pb2.StartReshardRequest | None = None,
        *,
        with_newest: bool = False,
    ) -> Situation:
        """Return what a request is judged by: with the nodes of a group that it adds."""
        if ahead := self.problem(now_ms):
            raise RefusedError(Code.FAILED_PRECONDITION, ahead)
        if self.plan is None:
            raise RefusedError(Code.FAILED_PRECONDITION, f"no plan yet: {self.why_no_plan}")
        plan = self.plan
        wish = wish_of(request, self.operations.records) if request is not None else None
        if wish is not None and (topology := self._followed(plan, wish)) is not None:
            plan = plan_pb2.Plan(epoch=plan.epoch)
            plan.MergeFrom(self.plan)
            plan.topology.CopyFrom(topology)
        return Situation(
            plan=plan,
            layout=self.layout,
            workload=self.demand.workload(plan.topology, self.layout, half_life_s or PLANNED_BY_S),
            unknown=frozenset(self.demand.unknown(self._owning(), now_ms)),
            live=frozenset(member.name for member in self.fleet.live(now_ms)),
            operations=self.operations.records,
            prices=self.fit.prices,
            newest=self.demand.newest(plan.topology) if with_newest else None,
        )

    def _owning(self) -> list[str]:
        """Return the names of the nodes that own buckets."""
        nodes = self.plan.topology.nodes if self.plan else ()
        owning = {at.node for held in self.layout.in_use() for at in held.owners}
        return [nodes[at].name for at in sorted(owning)]

    def steer(
        self, request: control_pb2.SteerOperationRequest, now_ms: int
    ) -> control_pb2.Operation:
        """Halt, resume or end an operation."""
        check_id("id", request.id)
        return self.operations.steer(request, now_ms).operation

    def tick(self, now_ms: int) -> None:
        """Do what time and beats allow: at most one plan."""
        gap_ms = now_ms - self._ticked_ms if self._ticked_ms is not None else 0
        self._ticked_ms = now_ms
        if gap_ms > 2 * self.options.heartbeat_ms:
            self.fleet.forgive(gap_ms)
        if self.autopilot.is_time(now_ms):
            self.autopilot.note_forbidden(self._look_forbidden(now_ms), now_ms)
        if ahead := self.problem(now_ms):
            self._wait_for_adoption(ahead)
            return
        if self.plan is None:
            self._make_first(now_ms)
            return
        running = self.operations.running
        if running is not None:
            self.fit.disturb(now_ms)
        behind = running is not None and running.record.step_epoch > self.epoch
        if not behind and (changed := self._following(self.plan, now_ms)) is not None:
            self._replace(changed)
            return
        self._begin_next(now_ms)
        plan = self.operations.advance(View(self.plan, self.layout, self.fleet, now_ms))
        if plan is not None:
            self._replace(plan)
            return
        self._follower.follow(
            self.epoch,
            lambda: self._situation(now_ms, self.options.drift.half_life_s, with_newest=True),
            lambda ready: self._accept(ready, "drift", now_ms),
            now_ms,
        )

    def buckets_without_owner(self, now_ms: int) -> int:
        """Count the buckets of which no owner lives."""
        if self.plan is None:
            return 0
        live = {member.name for member in self.fleet.live(now_ms)}
        return unowned_buckets(self.plan.topology, self.layout, live)[0]

    def problem(self, now_ms: int) -> str:
        """Say why no plan of ours would be followed; empty: it would be."""
        if self.fleet.latest_epoch <= self.epoch:
            return ""  # as at nearly every tick
        return plan_ahead(self.fleet.live(now_ms), self.epoch)

    def _wait_for_adoption(self, why: str) -> None:
        """Write nothing that no node would follow, and say so."""
        self._no_plan = why
        if self.operations.running is not None:
            self.operations.wait(self.operations.running.record, f"waits: {why}")

    def adopt(
        self,
        request: control_pb2.AdoptPlanRequest,
        loads: Mapping[str, node_pb2.NodeServiceGetLoadResponse],
        now_ms: int,
    ) -> control_pb2.AdoptPlanResponse:
        """Make a plan of what nodes hold, where they act by one that the store does not have.

        Args:
            request: The request.
            loads: The buckets that the live nodes hold, asked for now.
            now_ms: Wall clock.

        Raises:
            RefusedError: Nodes act by our plan, or one that lives does not say what it holds.
        """
        check_id("request_id", request.request_id)
        check_reason(request.reason)
        first = self._first_answer(request.request_id, request)
        if isinstance(first, control_pb2.AdoptPlanResponse):
            return first
        live = self.fleet.live(now_ms)
        check_adoption(live, loads, now_ms - (self.memory.began_ms or 0), self.epoch)
        adopted = adopted_plan(
            sorted((each.registration.node for each in self.fleet), key=lambda each: each.name),
            live[0].registration.tables,
            {each.name: loads[each.name] for each in live},
            epoch_above(self.fleet, self.epoch),
        )
        adopted.plan.head.created_ms = now_ms
        answer = control_pb2.AdoptPlanResponse(
            plan_epoch=adopted.plan.epoch,
            buckets_unheld=adopted.unheld,
            operations_ended=[each.operation.id for each in self.operations.active()],
        )
        for each in live:
            acts_by = each.beat.plan_epoch if each.beat is not None else 0
            answer.nodes.add(node=each.name, plan_epoch=acts_by, buckets=adopted.held[each.name])
        if request.dry_run:
            return answer
        for record in self.operations.active():
            self.operations.fail(
                record, "`state` lost its keys; the plan was adopted from what nodes hold", now_ms
            )
        self._replace(adopted.plan)
        self._writes.jumps = True
        self._answered.append((request.request_id, request, answer, now_ms))
        return answer

    def restored(self, now_ms: int) -> Writes:
        """Return all that a store has to hold, for one that lost its keys under us.

        The plan goes on under an epoch that no node can have.
        """
        if self.plan is not None:
            head = plan_pb2.Plan()
            head.CopyFrom(self.plan)
            head.epoch = epoch_above(self.fleet, self.epoch)
            head.created_ms = now_ms
            self._replace(LaidPlan(head, self.layout))
        self.take()
        return Writes(
            plan=LaidPlan(self.plan, self.layout) if self.plan is not None else None,
            nodes={each.name: each.registration for each in self.fleet},
            operations=dict(self.operations.records),
            made=set(self.operations.records),
            decisions={each.id: each for each in self.autopilot.decisions},
            settings=self.autopilot.kept_settings,
            jumps=True,
        )

    def _look_forbidden(self, now_ms: int) -> Reason | None:
        """Return what forbids a look at the drift, whatever the mode; None: nothing does."""
        if ahead := self.problem(now_ms):
            return Reason(Outcome.DECISION_OUTCOME_PLAN_NOT_FOLLOWED, ahead)
        if self.plan is None:
            return Reason(Outcome.DECISION_OUTCOME_NO_PLAN, f"no plan yet: {self.why_no_plan}")
        if active := self.operations.active():
            text = f"operation {active[0].operation.id} has not ended"
            return Reason(Outcome.DECISION_OUTCOME_OPERATION_AT_WORK, text)
        return None

    def drift_status(self, now_ms: int) -> control_pb2.DriftStatus:
        """Say why nothing is done about drift now, or what was done last."""
        return self.autopilot.status(self._look_forbidden(now_ms))

    @property
    def drift_looks(self) -> Mapping["control_pb2.DecisionOutcome.ValueType", int]:
        """Return how many looks that were due came to each outcome; none that is missing did."""
        return self.memory.drift.diagnosis.counts

    def decisions(
        self, request: control_pb2.ListDecisionsRequest, now_ms: int
    ) -> control_pb2.ListDecisionsResponse:
        """Return a page of what was decided about drift."""
        answer = self.autopilot.decisions.page(request, self.autopilot.settings)
        answer.model.CopyFrom(self.fit.message())
        answer.status.CopyFrom(self.drift_status(now_ms))
        corrections = self.autopilot.corrections(now_ms)
        answer.corrections.extend(each.message() for each in corrections.values())
        return answer

    def set_drift(self, wanted: control_pb2.DriftSettings) -> control_pb2.DriftSettings:
        """Change how drift is treated.

        Raises:
            RefusedError: The settings are wrong.
        """
        self._writes.settings = self.autopilot.set(wanted)
        return self.autopilot.settings

    def _make_first(self, now_ms: int) -> None:
        live = self.fleet.live(now_ms)
        self._no_plan = ""
        if len(live) < self.options.expect_nodes:
            return
        # A node's first beat says whether it acts by a plan of a store that lost its keys.
        silent = [member.name for member in live if member.beat is None]
        if silent:
            self._no_plan = f"{silent[0]} has registered and not beaten yet; wait for it"
            return
        tables = live[0].registration.tables
        nodes: Mapping[str, plan_pb2.Node] = {each.name: each.registration.node for each in live}
        try:
            plan = first_plan(
                nodes.values(), tables, table_bytes(each.registration for each in live)
            )
        except RefusedError as error:
            self._no_plan = error.message
            raise
        plan.created_ms = now_ms
        self._replace(LaidPlan.of(plan))

    def _begin_next(self, now_ms: int) -> None:
        record = self.operations.next_waiting()
        if record is None:
            return
        id = record.operation.id
        if not self._is_heard(record, now_ms):
            return
        again = self._made_at.get(id, 0) != self.epoch
        if again:
            # The plan has moved on while it waited: its moves are made again.
            try:
                ready = self._prepared_again(record, now_ms)
            except RefusedError as error:
                self.operations.fail(record, error.message, now_ms)
                return
            if ready is None:
                return
            _take_over(record, ready.record)
            self._writes.encoded[id] = ready.encoded
        self.operations.begin(record, self.epoch, now_ms, made=again)

    def _following(self, plan: plan_pb2.Plan, now_ms: int) -> LaidPlan | None:
        """Return the plan that follows the machines and the operation whose turn it is.

        None: today's does. It is asked at each tick, so that is found once for the same machines.
        """
        running = self.operations.running
        turn = running.record if running is not None else self.operations.next_waiting()
        wish = wish_of(turn.request, self.operations.records) if turn is not None else None
        seen = _Followed(plan, self.fleet.registrations, wish, running is not None)
        if self._settled is not None and seen.same(self._settled):
            return None
        if (fewer := self._without_gone(now_ms)) is not None:
            return fewer
        topology = self._followed(plan, wish)
        if topology is not None:
            return self._with_topology(topology, now_ms)
        self._settled = seen
        return None

    def _followed(self, plan: plan_pb2.Plan, wish: Wish | None) -> plan_pb2.Topology | None:
        """Return the topology that follows the machines, and a wish; None: it is the plan's."""
        return followed(
            plan,
            self.layout,
            {name: each.node for name, each in self.fleet.registrations.items()},
            wish=wish,
            moving=self.operations.running is not None,
        )

    def _is_heard(self, record: control_pb2.OperationRecord, now_ms: int) -> bool:
        """Whether all nodes know of the group that an operation adds or removes, if it does.

        A node of a build that refuses such a plan would hold the operation up once buckets move.
        """
        wish = wish_of(record.request, self.operations.records)
        if self.plan is None or wish is None or not is_announced(self.plan.topology, wish):
            return True
        view = View(self.plan, self.layout, self.fleet, now_ms)
        heard = view.all_act_by(self.epoch)
        if not heard:
            self.operations.wait(record, f"waits: {view.who_does_not_act_by(self.epoch)}")
        return heard

    def _prepared_again(
        self, record: control_pb2.OperationRecord, now_ms: int
    ) -> PreparedOperation | None:
        """Return what a record comes to now; None: a task of the queue makes it.

        Raises:
            RefusedError: It cannot be done any more.
        """
        id = record.operation.id
        for task in self.tasks:
            if isinstance(task, PrepareOperation) and task.is_for(id, self.epoch):
                return None
        result = self.tasks.take(OperationPrepared)
        if result is not None and (result.operation_id, result.epoch) == (id, self.epoch):
            return result.value()
        situation = self._situation(now_ms, record.request.half_life_s, record.request)
        task = self._task_of(NamedOperation(record).request_now(situation.plan.topology), situation)
        if task.is_quick:
            return task.run().value()
        self.tasks.add(task)
        return None

    def _with_topology(self, topology: plan_pb2.Topology, now_ms: int) -> LaidPlan:
        plan = plan_pb2.Plan()
        if self.plan is not None:
            plan.CopyFrom(self.plan)
        plan.topology.CopyFrom(topology)
        plan.operation_id = ""  # it was made by machines that came or went
        shares.drop_impossible(plan)
        plan.epoch = self.epoch + 1
        plan.created_ms = now_ms
        return LaidPlan(plan, self.layout)

    def _replace(self, plan: LaidPlan) -> None:
        check_laid(plan, LaidPlan(self.plan, self.layout) if self.plan is not None else None)
        self.plan, self.layout = plan
        self._writes.plan = plan


def _take_over(record: control_pb2.OperationRecord, ready: control_pb2.OperationRecord) -> None:
    """Bring the record of an operation that waited in line with what it comes to by now."""
    for field in ("moves", "devices", "hot_rows", "tier_shares", "nodes"):
        record.ClearField(field)
        getattr(record, field).extend(getattr(ready, field))
    record.operation.buckets_total = ready.operation.buckets_total
    record.operation.bytes_total = ready.operation.bytes_total
    for field in ("before", "after"):
        record.operation.ClearField(field)  # type: ignore[arg-type]
        if ready.operation.HasField(field):  # type: ignore[arg-type]
            getattr(record.operation, field).CopyFrom(getattr(ready.operation, field))
