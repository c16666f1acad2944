"""A fleet in one thread and in no time: the core, the store's twin, and nodes that obey plans.

A node reads the newest plan with each beat, loads what it is to hold after a delay, and drops what
a plan that it acts by does not name. `check` proves after every step that no bucket is without an
owner and that whoever is asked by any live node's plan holds what it is asked for.
"""

import dataclasses

from embertide.server.adapters.state import MemoryState
from embertide.server.core.control import Control, ControlOptions, Memory
from embertide.server.core.plan.layout import Bucket, Place, layout_of
from embertide.server.core.plan.validity import check_plan
from embertide.server.core.state import Writes
from embertide.v1 import control_pb2, node_pb2, plan_pb2, update_pb2

TICK_MS = 50
BEAT_MS = 200


def make_node(
    name: str, *, group: int = 0, devices: int = 1, budget: int = 1 << 30, address: str = ""
) -> plan_pb2.Node:
    tier = plan_pb2.TierBudget(tier=plan_pb2.TIER_DDR, budget_bytes=budget)
    return plan_pb2.Node(
        name=name,
        address=address or f"{name}:7000",
        group=group,
        devices=[
            plan_pb2.Device(index=index, kind=plan_pb2.DEVICE_KIND_CPU, budgets=[tier])
            for index in range(devices)
        ],
    )


def make_tables(**bits: int) -> list[plan_pb2.PlannedTable]:
    return [
        plan_pb2.PlannedTable(id=id, name=name, bucket_bits=each, chunks=1)
        for id, (name, each) in enumerate(bits.items())
    ]


def make_registration(
    node: plan_pb2.Node, tables: list[plan_pb2.PlannedTable], *, id: str = "", model: str = "news"
) -> control_pb2.RegisterNodeRequest:
    return control_pb2.RegisterNodeRequest(
        request_id=id or f"{node.name}-1", node=node, model=model, schema_id=7, tables=tables
    )


def first_beat(node: plan_pb2.Node, *, id: str = "") -> control_pb2.HeartbeatRequest:
    """A node's first beat, which acts by no plan: without it no first plan is made."""
    return control_pb2.HeartbeatRequest(
        node=node.name, incarnation=id or f"{node.name}-1", sequence=1
    )


def make_versions(newest: int) -> update_pb2.VersionRange:
    if not newest:
        return update_pb2.VersionRange()
    return update_pb2.VersionRange(
        oldest=update_pb2.Version(lineage=1, number=max(1, newest - 4)),
        newest=update_pb2.Version(lineage=1, number=newest),
    )


@dataclasses.dataclass
class SimulatedNode:
    """Holds (bucket, device) pairs, as the plan that it acts by says."""

    node: plan_pb2.Node
    incarnation: str
    alive: bool = True
    restarted: bool = False
    stuck: bool = False  # reads plans and loads nothing
    deaf: bool = False  # reads no plans
    full: bool = False  # has no room for what joins
    version: int = 5
    p99_us: int = 0
    sequence: int = 0
    plan: plan_pb2.Plan = dataclasses.field(default_factory=plan_pb2.Plan)
    held: set[tuple[Bucket, int]] = dataclasses.field(default_factory=set)
    held_epoch: int = 0

    def position(self) -> int:
        return [each.name for each in self.plan.topology.nodes].index(self.node.name)

    def act(self, plan: plan_pb2.Plan | None) -> None:
        if plan is None or self.deaf:
            return
        if plan.epoch > self.plan.epoch:
            self.plan = plan
        names = [each.name for each in self.plan.topology.nodes]
        if self.node.name not in names:
            return
        me = self.position()
        wanted, kept, joins = set(), set(), set()
        for at, held in layout_of(self.plan.assignments).items():
            given = {(at, p.device) for p in (*held.owners, *held.joining) if p.node == me}
            left = {(at, p.device) for p in held.leaving if p.node == me}
            joins |= {(at, p.device) for p in held.joining if p.node == me}
            wanted |= given or left  # a node that starts loads what leaves it, too
            kept |= left
        self.held &= wanted | kept
        if not self.stuck:
            self.held |= wanted - joins if self.full else wanted
        if wanted <= self.held:
            self.held_epoch = self.plan.epoch

    def load(self) -> node_pb2.NodeServiceGetLoadResponse:
        """Say what it holds."""
        answer = node_pb2.NodeServiceGetLoadResponse(window_ms=5000)
        for at, device in sorted(self.held):
            answer.buckets.add(table_id=at.table, bucket=at.bucket, device=device, held=True)
        return answer

    def beat(self) -> control_pb2.HeartbeatRequest:
        self.sequence += 1
        return control_pb2.HeartbeatRequest(
            node=self.node.name,
            incarnation=self.incarnation,
            sequence=self.sequence,
            versions=make_versions(self.version),
            plan_epoch=self.plan.epoch,
            held_epoch=self.held_epoch,
            held_since=self.version if self.held_epoch else 0,
            p99_us=self.p99_us,
            full=self.full and self.held_epoch < self.plan.epoch,
        )


class Simulation:
    """Time stands still between calls of `step`."""

    def __init__(
        self,
        tables: list[plan_pb2.PlannedTable],
        *,
        expect: int = 2,
        deadline_ms: int = 2000,
        beat_ms: int = BEAT_MS,
    ) -> None:
        self.options = ControlOptions(
            model="news",
            expect_nodes=expect,
            heartbeat_ms=beat_ms,
            longest_deadline_ms=deadline_ms,
        )
        self.tables = tables
        self.store = MemoryState()
        self.nodes: dict[str, SimulatedNode] = {}
        self.now_ms = 1_000_000
        self.starts = 0
        self.restart()

    def restart(self, found_after_ms: int = 0) -> None:
        """Kill the control plane and start another from what is in the store; beats reach it when
        its nodes have found it."""
        self.found_ms = self.now_ms + found_after_ms
        self.term = self.store.take_term()
        self.core = Control(self.options, self.store.load(), self.now_ms, Memory(self.options))

    def settle(self) -> Writes:
        writes = self.core.take()
        if writes:
            self.store.commit(self.term, writes)
        self.core.written()
        return writes

    def add(self, node: plan_pb2.Node) -> control_pb2.RegisterNodeResponse:
        """Start a node, or start it again: a new one holds nothing."""
        self.starts += 1
        id = f"{node.name}-start-{self.starts}"
        answer = self.core.register(make_registration(node, self.tables, id=id), self.now_ms)
        self.settle()
        self.nodes[node.name] = SimulatedNode(node, id, restarted=node.name in self.nodes)
        return answer

    def step(self) -> plan_pb2.Plan | None:
        """Let a tick pass, and beats when they are due; return the plan that was written."""
        self.now_ms += TICK_MS
        if self.now_ms % self.options.heartbeat_ms == 0:
            saved = self.store.load().plan
            plan = saved.whole() if saved is not None else None
            for node in self.nodes.values():
                if node.alive:
                    node.act(plan)
                    if self.now_ms >= self.found_ms:
                        self.core.fleet.beat(node.beat(), self.now_ms)
        self.core.tick(self.now_ms)
        if (task := self.core.tasks.first()) is not None:
            self.core.tasks.finish(task.run())
        written = self.settle().plan
        self.check()
        return written.whole() if written is not None else None

    def plan(self) -> plan_pb2.Plan:
        plan = self.store.load().plan
        assert plan is not None
        return plan.whole()

    def load(self, name: str, loads: dict[Bucket, tuple[int, int]]) -> None:
        answer = node_pb2.NodeServiceGetLoadResponse(window_ms=5000)
        for at, (reads, size) in sorted(loads.items()):
            answer.buckets.add(
                table_id=at.table, bucket=at.bucket, reads=reads, resident_bytes=size
            )
        self.core.load(name, answer, self.now_ms)

    def operation(self, id: str) -> control_pb2.Operation:
        return self.core.operations.find(id).operation

    def check(self) -> None:
        """Prove the plan, and that who is asked holds what is asked for."""
        saved = self.store.load().plan
        if saved is None:
            return
        plan = saved.whole()
        check_plan(plan, previous_epoch=plan.epoch - 1)
        holds = {
            name: {at for at, _ in node.held} if node.alive else set[Bucket]()
            for name, node in self.nodes.items()
        }
        for asker in self.nodes.values():
            if not asker.alive or not asker.plan.epoch:
                continue
            topology = asker.plan.topology
            for at, held in layout_of(asker.plan.assignments).items():
                names = [topology.nodes[owner.node].name for owner in held.owners]
                some = any(at in holds[name] for name in names) or not any(
                    at in each for each in holds.values()
                )
                for name, owner in zip(names, held.owners, strict=True):
                    # One that was started again may lack what left it meanwhile: the owner that
                    # is asked next has it, or all who had it are dead and it loads from files.
                    if not (some and self.nodes[name].restarted) and at not in holds[name]:
                        self._check_lacks(name, at, owner, asker)

    def _check_lacks(self, name: str, at: Bucket, owner: Place, asker: SimulatedNode) -> None:
        """Prove that a node that is asked for what it does not hold has just been started."""
        asked = self.nodes[name]
        # Since its start it has not held its buckets yet, which any move must bear.
        if asked.alive and asked.held_epoch:
            raise AssertionError(
                f"{asker.node.name} by plan {asker.plan.epoch} asks {name} (by {asked.plan.epoch}) "
                f"for {at}, device {owner.device}, which it does not hold"
            )
