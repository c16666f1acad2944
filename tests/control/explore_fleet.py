"""The explorer's nodes, as backend_cpp/node makes them, and their beats.

A node reads the newest plan from the store when it comes to it, which may be late. It drops at
once what its plan does not name, loads the rest in parts, and says in beats which plan it acts by
and up to which it holds everything. A process that dies forgets what it held and keeps the plan
that it had on disk.
"""

import dataclasses
import random
from typing import NamedTuple

from simulation import make_versions

from embertide.server.core.plan.layout import Bucket, Holders, Place, layout_of
from embertide.v1 import control_pb2, plan_pb2


class Device(NamedTuple):
    """A device of a node, by name."""

    node: str
    device: int


class ReadPlan:
    """A plan as nodes read it: names instead of positions, and what each is to hold where."""

    def __init__(self, plan: plan_pb2.Plan) -> None:
        self.epoch = plan.epoch
        self.names = [node.name for node in plan.topology.nodes]
        self.groups = [node.group for node in plan.topology.nodes]
        self.devices = [len(node.devices) for node in plan.topology.nodes]
        self.operation, self.planner = plan.operation_id, plan.planner
        self.layout = layout_of(plan.assignments)
        self.asked: dict[str, set[Bucket]] = {name: set() for name in self.names}
        self.wanted: dict[str, dict[Bucket, int]] = {name: {} for name in self.names}
        self.moving = False
        # Owners, and all who have to do with a bucket, by name: positions change as nodes leave.
        self.owners: dict[Bucket, frozenset[Device]] = {}
        self.holders: dict[Bucket, frozenset[tuple[str, Device]]] = {}
        for at, held in self.layout.items():
            self.owners[at] = frozenset(map(self.device, held.owners))
            self.holders[at] = frozenset(
                (kind, self.device(place))
                for kind, places in zip(Holders._fields, held, strict=True)
                for place in places
            )
            for place in held.owners:
                self.asked[self.names[place.node]].add(at)
            # The last of them counts, as in routing.cc: a bucket that joins goes there.
            for place in (*held.leaving, *held.owners, *held.joining):
                self.wanted[self.names[place.node]][at] = place.device
            self.moving = self.moving or bool(held.joining or held.leaving)

    def name(self, place: Place) -> str:
        return self.names[place.node]

    def device(self, place: Place) -> Device:
        return Device(self.names[place.node], place.device)


class Asked(NamedTuple):
    """Requests that began by a plan that their node does not act by any more."""

    plan: ReadPlan
    until_ms: int


@dataclasses.dataclass(eq=False)
class Node:
    """A node of one start; `start` makes the next one."""

    message: plan_pb2.Node
    dice: random.Random
    reads_soon: float  # chance to read a new plan in a step
    loads_soon: float
    alive: bool = True
    stuck: bool = False  # loads nothing
    deaf: bool = False  # reads no plans
    mute: bool = False  # its beats are lost
    full: bool = False  # has no room for what joins
    machine: int = 0  # several may have a name, one after the other
    starts: int = 0
    incarnation: str = ""
    registered: bool = False
    plan: ReadPlan | None = None
    held: dict[Bucket, int] = dataclasses.field(default_factory=dict)
    ever_held: set[Bucket] = dataclasses.field(default_factory=set)  # since this start
    since: dict[Bucket, int] = dataclasses.field(default_factory=dict)  # version held from
    held_epoch: int = 0
    held_since: int = 0
    version: int = 0
    p99_us: int = 0
    sequence: int = 0
    asked: list[Asked] = dataclasses.field(default_factory=list)
    # Plans before this epoch were replaced without waiting for it, since it counted as dead.
    cut_off_epoch: int = 0
    target: int = 0  # the control plane that it beats to

    @property
    def name(self) -> str:
        return self.message.name

    def start(self) -> None:
        """Begin again with nothing but the plan on disk."""
        self.starts += 1
        self.incarnation = f"{self.name}-{self.machine}-start-{self.starts}"
        self.alive, self.registered = True, False
        self.held, self.ever_held, self.since, self.asked = {}, set(), {}, []
        self.held_epoch = self.held_since = self.version = self.sequence = 0

    def read(self, newest: ReadPlan, now_ms: int, deadline_ms: int) -> bool:
        """Act by the newest plan; whether that is another than before."""
        if self.plan is not None:
            if newest.epoch <= self.plan.epoch:
                return False
            if self.version:
                self.asked.append(Asked(self.plan, now_ms + deadline_ms))
        self.plan = newest
        wanted = newest.wanted.get(self.name)
        if wanted is not None:
            for at in [at for at in self.held if at not in wanted]:
                del self.held[at], self.since[at]
        return True

    def load(self, newest_version: int) -> bool:
        """Take versions in and load a part of what is missing; whether it now holds more."""
        self.version = newest_version
        if self.plan is None or self.plan.epoch == self.held_epoch:
            return False
        wanted = self.plan.wanted.get(self.name)
        if wanted is None:
            return False
        missing = [at for at, device in wanted.items() if self.held.get(at) != device]
        if missing and self.stuck:
            return False
        fitting = [at for at in missing if not self.full or at in self.plan.asked[self.name]]
        part = fitting if self.dice.random() < 0.7 else fitting[:1]
        for at in part:
            self.held[at] = wanted[at]
            self.since[at] = newest_version
            self.ever_held.add(at)
        if len(part) == len(missing):
            self.held_epoch = self.plan.epoch
            self.held_since = max(self.since.values(), default=0)
        return bool(part)

    def left(self) -> int:
        """Count the buckets of its plan that it does not hold yet."""
        wanted = self.plan.wanted.get(self.name, {}) if self.plan else {}
        return sum(self.held.get(at) != device for at, device in wanted.items())

    def beat(self) -> control_pb2.HeartbeatRequest:
        self.sequence += 1
        return control_pb2.HeartbeatRequest(
            node=self.name,
            incarnation=self.incarnation,
            sequence=self.sequence,
            versions=make_versions(self.version),
            plan_epoch=self.plan.epoch if self.plan else 0,
            held_epoch=self.held_epoch,
            held_since=self.held_since,
            buckets_left=self.left(),
            p99_us=self.p99_us,
            full=self.full and self.plan is not None and self.held_epoch < self.plan.epoch,
        )

    def says(self) -> str:
        how = "" if self.alive else " dead"
        for flag in ("stuck", "deaf", "mute", "full"):
            how += f" {flag}" if getattr(self, flag) else ""
        plan = self.plan.epoch if self.plan else 0
        held = " ".join(f"{at.table}.{at.bucket}/{device}" for at, device in self.held.items())
        return f"{self.name} plan {plan} held {self.held_epoch}{how}: {held}"
