"""Schedules of a whole fleet by chance: what a seed says happens, and nothing else.

A schedule has a store, control planes, nodes, and an operator, all in one thread under a clock of
its own. In its first part anything may happen at any point: nodes and control planes die, a second
control plane takes over while the first goes on, a write fails before or after it was done, the
store loses all that is in it, beats are lost, late, doubled or out of order, nodes leave and others
come under their names or under new ones, and operations are started, steered and undone. Then the
faults stop, and everything that was accepted has to end. The rules are in explore_rules.py.

    python tests/control/explore.py 100000              # seeds 0 to 99,999, on all cores
    python tests/control/explore.py --seed 17 --trace   # one again, told step by step
"""

import argparse
import collections
import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar
from unittest import mock

from explore_fleet import Node, ReadPlan
from explore_rules import BrokenRuleError, Rules
from simulation import make_node, make_registration, make_tables

from embertide.server.adapters.state import MemoryState
from embertide.server.core import operation
from embertide.server.core.control import Control, ControlOptions, Memory
from embertide.server.core.drift.options import DriftOptions
from embertide.server.core.errors import (
    RefusedError,
    StateLostError,
    StateUnavailableError,
    SupersededError,
)
from embertide.server.core.operation import ENDED
from embertide.server.core.plan.hot import NO_LIMIT
from embertide.server.core.plan.moves import Step
from embertide.server.core.state import Writes
from embertide.server.services.clock import Clock
from embertide.server.services.driver import Driver
from embertide.server.services.planning import Planning
from embertide.v1 import control_pb2, node_pb2, plan_pb2

Answer = TypeVar("Answer")

STEP_MS = 100
BEAT_MS = 200
DEADLINE_MS = 300
CALM_STEPS = 400  # within which everything has ended once the faults have stopped
_OPERATIONS = 4
_NODES = 4
_SAID_LAST = 60  # lines of the trace in a failure
PLANNING = Planning()


class KilledError(Exception):
    """The control plane that writes dies here."""


class WatchedState(MemoryState):
    """The store, with one fault at a time: `fault` says what befalls the next write."""

    def __init__(self, schedule: "Schedule") -> None:
        super().__init__()
        self._schedule = schedule
        self.fault = ""

    def commit(self, term: int, writes: Writes) -> None:
        fault, self.fault = self.fault, ""
        if fault == "lost":
            raise StateUnavailableError("the write was not done")
        if fault == "killed before":
            raise KilledError
        super().commit(term, writes)
        self._schedule.committed(term, writes)
        if fault == "reply lost":
            raise StateUnavailableError("the write was done, and its reply was lost")
        if fault == "killed after":
            raise KilledError

    def holds(self, id: str) -> bool:
        """Whether an operation is kept."""
        return id in self._operations

    def written(self, epoch: int) -> bytes | None:
        """Return a plan as it lies there."""
        return self._plans.get(epoch)

    @property
    def epoch(self) -> int:
        """Epoch of the newest plan."""
        return self._epoch


class ScheduleClock(Clock):
    """The schedule's time."""

    def __init__(self, schedule: "Schedule") -> None:
        self._schedule = schedule

    def now_ms(self) -> int:
        return self._schedule.now_ms


class AskedNodes:
    """The nodes of a schedule, as a control plane asks them."""

    def __init__(self, schedule: "Schedule") -> None:
        self._schedule = schedule

    def _answering(self, addresses: dict[str, str]) -> list[Node]:
        nodes = [self._schedule.nodes[name] for name in addresses if name in self._schedule.nodes]
        lost = 0.0 if self._schedule.calm else 0.1
        return [
            node
            for node in nodes
            if node.alive
            and node.message.address == addresses[node.name]
            and self._schedule.dice.random() >= lost
        ]

    def epochs(self, addresses: dict[str, str]) -> dict[str, int]:
        return {
            node.name: node.plan.epoch if node.plan else 0 for node in self._answering(addresses)
        }

    def loads(self, addresses: dict[str, str]) -> dict[str, node_pb2.NodeServiceGetLoadResponse]:
        answers = {}
        for node in self._answering(addresses):
            answers[node.name] = node_pb2.NodeServiceGetLoadResponse(window_ms=5000)
            for at, device in node.held.items():
                answers[node.name].buckets.add(
                    table_id=at.table, bucket=at.bucket, device=device, held=True
                )
        return answers


class Plane:
    """A control plane: the driver itself, whose threads are not started."""

    def __init__(self, number: int, schedule: "Schedule") -> None:
        self.number = number
        self.killed = False
        self.asked: Control | None = None  # the core that was asked last
        self.asleep_until_ms = 0
        self.driver = Driver(
            schedule.options,
            schedule.store,
            AskedNodes(schedule),
            ScheduleClock(schedule),
            PLANNING,
        )

    @property
    def alive(self) -> bool:
        return not self.killed and not self.driver.superseded.is_set()

    @property
    def term(self) -> int:
        return self.driver._term

    @property
    def core(self) -> Control | None:
        """The knowledge of the control plane; None: it has to read the store again."""
        return self.driver._core

    @property
    def memory(self) -> Memory:
        return self.driver._memory

    def call(self, ask: Callable[[Control], Answer], prove: bool) -> Answer:
        """Ask the core and write what it decided; a RefusedError has changed nothing.

        With `prove`, an answer that needs no write is given only while the term is the highest.
        """
        self.asked = self.driver._core or self.driver._before

        def asked(core: Control, now_ms: int) -> Answer:
            self.asked = core
            return ask(core)

        try:
            return self.driver.call(asked, decides=prove)
        except (StateUnavailableError, StateLostError, SupersededError):
            raise
        except RefusedError as error:
            if self.driver._core is not self.asked:
                raise BrokenRuleError(f"a refusal has changed something: {error}") from error
            raise
        except KilledError:
            self.killed = True
            raise


class Late(NamedTuple):
    """A beat on its way."""

    due_ms: int
    plane: int
    beat: control_pb2.HeartbeatRequest


class Schedule:
    """One seed's."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.seed = seed
        self.dice = dice = random.Random(seed)
        self.trace: collections.deque[tuple[int, str, tuple[object, ...]]] = collections.deque(
            maxlen=None if trace else _SAID_LAST
        )
        self.now_ms = 1_000_000
        self.rules = Rules()
        self.store = WatchedState(self)
        self.tables = make_tables(user=dice.randint(1, 3))
        if dice.random() < 0.2:
            self.tables = make_tables(user=1, item=1)
        # Few buckets a batch, so that several are on their way at once.
        self.batch_buckets = dice.choice([1, 1, 2, 64])
        self.groups = 2 if dice.random() < 0.15 else 1
        self.options = ControlOptions(
            model="news",
            expect_nodes=dice.randint(2, 4) if self.groups == 1 else 4,
            heartbeat_ms=BEAT_MS,
            longest_deadline_ms=DEADLINE_MS,
            drift=DriftOptions(mode="off"),
        )
        self.nodes: dict[str, Node] = {}
        self.planes: list[Plane] = []
        self.network: list[Late] = []
        self.version = 5
        self.calm = False
        self.writer: Plane | None = None
        self.led: Plane | None = None  # since the store lost its keys: who led then
        self.asked: dict[str, control_pb2.StartReshardRequest] = {}  # no answer has come yet
        self.accepted: set[str] = set()
        self.left: list[str] = []  # names that are free again
        self.names = itertools.count()
        self.machines = itertools.count(1)
        self.operations = 0
        self.addresses = itertools.count(7000)
        self.steps = 0

    # --- the whole ---------------------------------------------------------------------------

    def run(self) -> None:
        """Play it to its end.

        Raises:
            BrokenRuleError: A rule does not hold; the message has the seed and the trace's end.
        """
        try:
            with mock.patch.object(operation, "BATCH_BUCKETS", self.batch_buckets):
                self._play()
        except Exception as error:
            raise BrokenRuleError(f"seed {self.seed}: {error}\n{self.told()}") from error

    def _play(self) -> None:
        self._begin()
        for _ in range(self.dice.randint(8, 50)):
            if self.dice.random() < 0.35:
                self._act()
            self._step()
        self._end()

    def _begin(self) -> None:
        for index in range(self.options.expect_nodes):
            self._add_node(index % self.groups)
        self._add_plane()
        for _ in range(6):
            self._step()
            if self.rules.newest is not None and self.dice.random() < 0.7:
                for node in self.nodes.values():
                    self._read(node)
                    node.load(self.version)

    def _end(self) -> None:
        """Stop all faults, and prove that everything comes to rest within a bound."""
        self._say("the faults stop")
        self.calm = True
        self.store.fault = ""
        spared = self.dice.random() < 0.2  # one may stay dead: nothing waits for it alone
        for node in self.nodes.values():
            node.stuck = node.deaf = node.mute = node.full = False
            node.p99_us = 0
            if not node.alive and not spared:
                node.start()
            spared = spared and node.alive
        for plane in self.planes:
            plane.asleep_until_ms = 0
        while len(self.nodes) < self.options.expect_nodes:
            self._add_node(0 if self.groups == 1 else len(self.nodes) % 2)
        if not any(plane.alive for plane in self.planes):
            self._add_plane()
        for step in range(CALM_STEPS):
            if step % 8 == 0:
                self._resume_paused()
                self.adopt()
            self._step()
            if step > CALM_STEPS // 2 or self._wait_for_the_dead():
                for node in self.nodes.values():
                    if not node.alive:
                        node.start()
            if not self.asked and self._is_at_rest():
                self._check_rest()
                return
        active = [id for id, each in self.rules.records.items() if not each.operation.ended_ms]
        kept = sorted(self.store.load().operations)
        raise BrokenRuleError(
            f"it did not come to rest: {active} go on, the store has {kept}; {self._standing()}"
        )

    def _wait_for_the_dead(self) -> bool:
        return any(
            each.operation.message.startswith("waits: ") and not each.operation.ended_ms
            for each in self.rules.records.values()
        )

    def _is_at_rest(self) -> bool:
        plan = self.rules.newest
        if plan is None or plan.moving or self.network:
            return False
        if any(not each.operation.ended_ms for each in self.rules.records.values()):
            return False
        # The leader writes what the store has lost again when it looks there next.
        if set(self.store.load().operations) != set(self.rules.records):
            return False
        live = [node for node in self.nodes.values() if node.alive]
        return all(node.held_epoch == plan.epoch for node in live if node.name in plan.names)

    def _check_rest(self) -> None:
        plan = self.rules.newest
        assert plan is not None
        for node in self.nodes.values():
            wanted = plan.wanted.get(node.name)
            if node.alive and wanted is not None and node.held != wanted:
                raise BrokenRuleError(f"{node.says()} at rest, and the plan says {wanted}")
        for epoch, written in self.rules.written.items():
            if self.store.written(epoch) not in (None, written):
                raise BrokenRuleError(f"plan {epoch} has changed since it was written")

    def _step(self) -> None:
        """Let time pass: all who live do what they do, in any order."""
        self.steps += 1
        self.now_ms += BEAT_MS if self.calm else STEP_MS
        dice = self.dice
        self._deliver()
        members: list[Plane | Node] = [*self.planes[-2:], *self.nodes.values()]
        first = int(dice.random() * len(members))
        for each in members[first:] + members[:first]:
            if isinstance(each, Plane):
                if each.alive and each.asleep_until_ms <= self.now_ms:
                    self._tick(each)
            elif each.alive:
                self._live(each)
        if self.calm or dice.random() < 0.3:
            self._ask_again()
        if not any(plane.alive for plane in self.planes[-2:]) and (
            self.calm or dice.random() < 0.4
        ):
            self._add_plane()
        for id in self.accepted if self.led is None else ():
            if not self.store.holds(id):
                raise BrokenRuleError(f"operation {id} was accepted, and the store lost it")

    # --- the store and the control planes ------------------------------------------------------

    def committed(self, term: int, writes: Writes) -> None:
        """Prove a write that was done."""
        if term != self.store.term():
            raise BrokenRuleError(f"a write of term {term} was done after {self.store.term()}")
        assert self.writer is not None
        assert self.writer.asked is not None
        plan = None
        if writes.plan is not None:
            written = self.store.written(self.store.epoch)
            assert written is not None
            plan = plan_pb2.Plan.FromString(written)
            self._say("plane {} writes plan {}: {}", self.writer.number, plan.epoch, _Moving(plan))
        for id, record in writes.operations.items():
            self._say("plane {} writes {}: {}", self.writer.number, id, _Standing(_copy(record)))
        if self.led is not None and self.led is not self.writer:
            # Who led when the store lost its keys is not who begins in it: what it knew is gone.
            self.rules.begin_anew()
            self.accepted = {id for id in self.accepted if self.store.holds(id)}
        self.led = None
        self.rules.committed(
            plan,
            writes.operations,
            self.writer.asked,
            self.nodes,
            self.now_ms,
            jumps=writes.jumps,
        )

    def _add_plane(self) -> None:
        number = len(self.planes)
        if number > 1:
            self.planes[-2].killed = True
        self.planes.append(Plane(number, self))
        self._say("plane {} starts", number)

    def _call(self, plane: Plane, ask: Callable[[Control], Answer], prove: bool = True) -> Answer:
        """As Plane.call; its death is a refusal to who asked."""
        self.writer = plane
        try:
            return plane.call(ask, prove)
        except KilledError:
            self._say("plane {} was killed", plane.number)
            raise StateUnavailableError("it was killed") from None
        except (SupersededError, StateLostError) as error:
            self._say("plane {} gives way: {}", plane.number, error.message)
            raise SupersededError(error.message) from error

    def _tick(self, plane: Plane) -> None:
        def tick(core: Control) -> None:
            core.tick(self.now_ms)
            task = core.tasks.first()
            if task is not None and self.dice.random() < 0.5:
                try:
                    core.tasks.finish(task.run())
                except RefusedError as error:
                    core.tasks.finish(task.refused(error))

        with contextlib.suppress(StateUnavailableError, SupersededError):
            self._call(plane, tick, prove=self.calm or self.dice.random() < 0.1)

    def _any_plane(self) -> Plane | None:
        live = [
            plane
            for plane in self.planes[-2:]
            if plane.alive and plane.asleep_until_ms <= self.now_ms
        ]
        return self.dice.choice(live) if live else None

    # --- nodes ----------------------------------------------------------------------------------

    def _add_node(self, group: int, name: str = "") -> None:
        name = name or f"n{next(self.names)}"
        # Machines differ, and so does when they look.
        message = make_node(name, group=group, devices=2 if self.dice.random() < 0.4 else 1)
        soon = self.dice.choice([0.95, 0.6, 0.25])
        node = Node(message, self.dice, soon, self.dice.choice([0.95, 0.4]))
        node.machine = next(self.machines)
        node.start()
        self.nodes[name] = node

    def _read(self, node: Node) -> None:
        newest = self.rules.newest
        if newest is not None and node.read(newest, self.now_ms, DEADLINE_MS):
            self._say("{} reads plan {}", node.name, newest.epoch)
            self.rules.check_asked(self.nodes, self.now_ms)

    def _live(self, node: Node) -> None:
        dice = self.dice
        if not node.registered:
            self._register(node)
        if self.calm or (not node.deaf and dice.random() < node.reads_soon):
            self._read(node)
        if self.calm or dice.random() < node.loads_soon:
            node.load(self.version)
        if self.calm or self.now_ms % BEAT_MS == 0 or dice.random() < 0.2:
            self._beat(node)

    def _register(self, node: Node) -> None:
        plane = self._any_plane()
        if plane is None or (not self.calm and self.dice.random() < 0.3):
            return
        request = make_registration(node.message, self.tables, id=node.incarnation)
        node.target = plane.number
        try:
            self._call(plane, lambda core: core.register(request, self.now_ms))
        except RefusedError:
            return
        node.registered = True
        self._say("{} registers at plane {}", node.incarnation, plane.number)

    def _beat(self, node: Node) -> None:
        if not node.registered:
            return
        beat = node.beat()
        if self.calm:
            self._hear(node.target, beat)
            return
        chance = self.dice.random()
        if node.mute or chance < 0.08:
            return
        if chance < 0.2:
            late_ms = self.dice.randint(1, 12) * STEP_MS
            self.network.append(Late(self.now_ms + late_ms, node.target, beat))
        if chance < 0.16:
            return
        self._hear(node.target, beat)

    def _deliver(self) -> None:
        if not self.network:
            return
        due = [each for each in self.network if each.due_ms <= self.now_ms]
        self.network = [each for each in self.network if each.due_ms > self.now_ms]
        for each in due:
            self._hear(each.plane, each.beat)

    def _hear(self, number: int, beat: control_pb2.HeartbeatRequest) -> None:
        """Bring a beat to a control plane; its node looks elsewhere if that does not listen."""
        plane = self.planes[number]
        node = self.nodes.get(beat.node)
        if plane.alive and plane.asleep_until_ms > self.now_ms:
            if self.dice.random() < 0.5:
                self.network.append(Late(plane.asleep_until_ms, number, beat))
            return
        try:
            if plane.alive:
                plane.memory.fleet.beat(beat, self.now_ms)
                return
        except RefusedError:
            if node is not None and node.incarnation == beat.incarnation:
                node.registered = False
            return
        if node is not None and node.target == number:
            other = self._any_plane()
            node.target = other.number if other else number

    # --- the operator ---------------------------------------------------------------------------

    def _act(self) -> None:
        chance = self.dice.random() * _ALL
        for weight, act in _ACTS:
            chance -= weight
            if chance < 0:
                act(self)
                return

    def start_operation(self) -> None:
        plan = self.rules.newest
        if plan is None or self.operations >= _OPERATIONS:
            return
        id = f"r{self.operations}"
        self.operations += 1
        request = control_pb2.StartReshardRequest(operation_id=id)
        dice = self.dice
        chance = dice.random()
        if chance < 0.6:
            self._target(plan, request.target)
        elif chance < 0.8:
            request.drain_node = dice.choice(plan.names)
        elif chance < 0.97 and self.accepted:
            request.undo_operation = dice.choice(sorted(self.accepted))
        else:
            self._measure()
            request.planner = "greedy"
        request.budget.buckets_at_once = dice.choice([0, 0, 0, 1, 2, 3])
        if dice.random() < 0.1:
            request.budget.p99_us = 1000
        if dice.random() < 0.1:
            request.budget.bytes_per_s = 150
        self.asked[id] = request
        self._ask_again()

    def _target(self, plan: ReadPlan, target: control_pb2.ReshardTarget) -> None:
        """Say owners for some buckets: one or two in each group."""
        dice = self.dice
        target.base_epoch = plan.epoch
        for at in plan.layout:
            if dice.random() < 0.4:
                continue
            run = target.assignments.add(table_id=at.table, bucket_begin=at.bucket, bucket_count=1)
            for group in range(self.groups):
                among = [i for i, of in enumerate(plan.groups) if of == group]
                count = 2 if dice.random() < 0.15 else 1
                for position in dice.sample(among, min(count, len(among))):
                    devices = plan.devices[position]
                    run.owners.add(node=position, device=dice.randrange(devices))
        if dice.random() < 0.1:
            target.hot_rows.add(table_id=0, rows=dice.choice([5, NO_LIMIT]))

    def _ask_again(self) -> None:
        """Repeat what got no answer: with the same ids it is done once."""
        for id, request in list(self.asked.items()):
            plane = self._any_plane()
            if plane is None:
                return
            try:
                self._call(plane, functools.partial(_start, request, self.now_ms))
            except (StateUnavailableError, SupersededError):
                continue
            except RefusedError as error:
                if self.store.holds(id):
                    raise BrokenRuleError(f"{id} was accepted; a repeat gets: {error}") from error
                self._say("{} is refused: {}", id, error.message)
                del self.asked[id]
                continue
            self._say("{} is accepted", id)
            self.accepted.add(id)
            del self.asked[id]

    def steer(self) -> None:
        if self.accepted:
            id = self.dice.choice(sorted(self.accepted))
            self._steer(id, self.dice.choice([1, 1, 2, 2, 3]))

    def _steer(self, id: str, how: int) -> None:
        plane = self._any_plane()
        if plane is None:
            return
        request = control_pb2.SteerOperationRequest(id=id)
        request.steering = how  # type: ignore[assignment]
        try:
            answer = self._call(plane, lambda core: core.steer(request, self.now_ms))
        except RefusedError:
            return
        self._say("{} is steered: {}", id, how)
        written = self.rules.records[id].operation
        if written.state != answer.state:
            raise BrokenRuleError(f"{id} was answered to be {answer.state}, written {written}")

    def _resume_paused(self) -> None:
        for id, record in list(self.rules.records.items()):
            if record.operation.state == control_pb2.OPERATION_STATE_PAUSED:
                self._steer(id, control_pb2.STEERING_RESUME)

    def _measure(self) -> None:
        """Let all control planes know loads, so that a planner has an answer."""
        for plane in self.planes[-2:]:
            plan = self.rules.newest
            if not plane.alive or plane.core is None or plan is None:
                continue
            for name, wanted in plan.wanted.items():
                load = node_pb2.NodeServiceGetLoadResponse(window_ms=5000)
                for at in wanted:
                    reads = self.dice.randrange(1000)
                    load.buckets.add(
                        table_id=at.table, bucket=at.bucket, reads=reads, resident_bytes=100
                    )
                plane.core.load(name, load, self.now_ms)

    # --- faults ---------------------------------------------------------------------------------

    def _any_node(self, alive: bool = True) -> Node | None:
        found = [node for node in self.nodes.values() if node.alive == alive]
        return self.dice.choice(found) if found else None

    def kill_node(self) -> None:
        node = self._any_node()
        if node is not None:
            node.alive = False
            self._say("{} dies", node.name)

    def start_node(self) -> None:
        node = self._any_node(alive=False)
        if node is not None:
            self._start(node)

    def restart_node(self) -> None:
        """So fast that nobody misses it."""
        node = self._any_node()
        if node is not None:
            self._start(node)

    def _start(self, node: Node) -> None:
        if self.dice.random() < 0.3:
            node.message = make_node(
                node.name,
                group=node.message.group,
                devices=len(node.message.devices),
                address=f"{node.name}:{next(self.addresses)}",
            )
        node.start()
        self._say("{} starts", node.incarnation)

    def add_node(self) -> None:
        if len(self.nodes) < _NODES:
            self._add_node(self.dice.randrange(self.groups))
            self._say("{} is new", list(self.nodes)[-1])

    def replace_node(self) -> None:
        """Another machine comes by the name of one that has left."""
        if self.left and len(self.nodes) < _NODES:
            name = self.left.pop(self.dice.randrange(len(self.left)))
            self._add_node(self.dice.randrange(self.groups), name)
            self._say("{} is another machine", name)

    def remove_node(self) -> None:
        """Remove a node, most often after its end; one whose removal is not answered stays away."""
        plane, name = self._any_plane(), self.dice.choice(sorted(self.nodes))
        if plane is None or len(self.nodes) < 2:
            return
        if self.dice.random() < 0.8:
            self.nodes[name].alive = False
        request = control_pb2.RemoveNodeRequest(request_id=f"remove-{self.now_ms}", node=name)
        with contextlib.suppress(RefusedError):
            self._call(plane, lambda core: core.remove(request, self.now_ms))
            self._say("{} is removed", name)
            del self.nodes[name]
            self.left.append(name)

    def lose_state(self) -> None:
        """The store loses all keys, as a Redis that is flushed."""
        if self.led is None:
            self.led = max(self.planes, key=lambda each: each.term)
        self.store.lose()
        self._say("the store loses its keys")

    def adopt(self) -> None:
        """The operator lets the control plane go on from what nodes hold."""
        plane = self._any_plane()
        if plane is None:
            return
        request = control_pb2.AdoptPlanRequest(request_id=f"adopt-{self.now_ms}")
        self.writer = plane
        plane.asked = plane.core or plane.driver._before
        with contextlib.suppress(RefusedError):
            try:
                answer = plane.driver.adopt_plan(request)
            except KilledError:
                plane.killed = True
                return
            self._say("plane {} adopts plan {}", plane.number, answer.plan_epoch)

    def toggle(self) -> None:
        node = self.dice.choice(list(self.nodes.values()))
        flag = self.dice.choice(["stuck", "deaf", "mute", "full"])
        setattr(node, flag, not getattr(node, flag))
        self._say("{} is {}{}", node.name, "" if getattr(node, flag) else "not ", flag)

    def toggle_p99(self) -> None:
        node = self.dice.choice(list(self.nodes.values()))
        node.p99_us = 0 if node.p99_us else 2000

    def publish(self) -> None:
        self.version += 1

    def kill_plane(self) -> None:
        plane = self._any_plane()
        if plane is not None:
            plane.killed = True
            self._say("plane {} is killed", plane.number)

    def second_plane(self) -> None:
        """Another takes over; the one before goes on until it is told."""
        self._add_plane()

    def sleep_plane(self) -> None:
        plane = self._any_plane()
        if plane is not None:
            plane.asleep_until_ms = self.now_ms + self.dice.randint(1, 15) * STEP_MS
            self._say("plane {} sleeps until {}", plane.number, plane.asleep_until_ms)

    def fail_write(self) -> None:
        self.store.fault = self.dice.choice(
            ["lost", "reply lost", "reply lost", "killed before", "killed after"]
        )
        self._say("the next write: {}", self.store.fault)

    # --- what is told -----------------------------------------------------------------------------

    def _say(self, text: str, *values: object) -> None:
        self.trace.append((self.now_ms, text, values))

    def told(self) -> str:
        """Return what happened, a line each."""
        return "\n".join(f"{at_ms}: {text.format(*values)}" for at_ms, text, values in self.trace)

    def _standing(self) -> str:
        nodes = "; ".join(node.says() for node in self.nodes.values())
        records = "; ".join(str(_Standing(each)) for each in self.rules.records.values())
        return f"{nodes}; {records}"


class _Moving:
    """A plan's buckets that move, as a line."""

    def __init__(self, plan: plan_pb2.Plan) -> None:
        self._plan = plan

    def __str__(self) -> str:
        def names(owners: Iterable[plan_pb2.Owner]) -> str:
            return ",".join(f"{each.node}/{each.device}" for each in owners)

        return " | ".join(
            f"{each.table_id}.{each.bucket_begin}+{each.bucket_count} {names(each.owners)}"
            f"{' join ' + names(each.joining) if each.joining else ''}"
            f"{' leave ' + names(each.leaving) if each.leaving else ''}"
            for each in self._plan.assignments
        )


class _Standing:
    """A record, as a line."""

    def __init__(self, record: control_pb2.OperationRecord | None) -> None:
        self._record = record

    def __str__(self) -> str:
        if self._record is None:
            return "gone"
        record, told = self._record, self._record.operation
        state = control_pb2.OperationState.Name(told.state).removeprefix("OPERATION_STATE_")
        ending = " (ending)" if told.state in ENDED and not told.ended_ms else ""
        batches = ", ".join(
            f"{each.moves} at {Step(each.step).name} of {each.step_epoch}"
            for each in record.batches
        )
        return (
            f"{state}{ending} {told.buckets_done}/{told.buckets_total} [{batches}]: {told.message}"
        )


def _start(
    request: control_pb2.StartReshardRequest, now_ms: int, core: Control
) -> control_pb2.StartReshardResponse:
    return core.start(request, now_ms)


def _copy(record: control_pb2.OperationRecord | None) -> control_pb2.OperationRecord | None:
    if record is None:
        return None
    copy = control_pb2.OperationRecord()
    copy.CopyFrom(record)
    return copy


_ACTS: list[tuple[float, Callable[[Schedule], None]]] = [
    (6, Schedule.start_operation),
    (3, Schedule.steer),
    (1.2, Schedule.kill_node),
    (2, Schedule.start_node),
    (1.5, Schedule.restart_node),
    (0.7, Schedule.add_node),
    (1, Schedule.remove_node),
    (0.7, Schedule.replace_node),
    (0.3, Schedule.lose_state),
    (0.3, Schedule.adopt),
    (3, Schedule.toggle),
    (0.5, Schedule.toggle_p99),
    (2, Schedule.publish),
    (1, Schedule.kill_plane),
    (1, Schedule.second_plane),
    (0.8, Schedule.sleep_plane),
    (4, Schedule.fail_write),
]
_ALL = sum(weight for weight, _ in _ACTS)


class Counts(NamedTuple):
    """The counts of schedules."""

    schedules: int
    steps: int
    plans: int
    ended: int

    @property
    def line(self) -> str:
        return (
            f"{self.schedules:,} schedules, {self.steps:,} steps, {self.plans:,} plans, "
            f"{self.ended:,} operations ended"
        )


def explore(seeds: range) -> Counts:
    """Play schedules; the first that breaks a rule raises BrokenRuleError."""
    steps = plans = ended = 0
    for seed in seeds:
        schedule = Schedule(seed)
        schedule.run()
        steps += schedule.steps
        plans += schedule.rules.newest.epoch if schedule.rules.newest else 0
        ended += len(schedule.rules.records)
    return Counts(len(seeds), steps, plans, ended)


def _parts(seeds: range, size: int) -> Iterator[range]:
    for begin in range(seeds.start, seeds.stop, size):
        yield range(begin, min(begin + size, seeds.stop))


def explore_on_all_cores(count: int, first: int = 0) -> Counts:
    """Play as many seeds, from `first` on."""
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        parts = list(pool.imap_unordered(explore, _parts(range(first, first + count), 500)))
    return Counts(*(sum(each) for each in zip(*parts, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="explore", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=10_000, help="schedules")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--seed", type=int, help="one schedule alone")
    parser.add_argument("--trace", action="store_true", help="tell all that it did")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        schedule = Schedule(arguments.seed, trace=arguments.trace)
        try:
            schedule.run()
        finally:
            print(schedule.told())
        return 0
    begun = time.monotonic()
    counts = explore_on_all_cores(arguments.count, arguments.first)
    seconds = time.monotonic() - begun
    print(f"{counts.line}: every rule held; {seconds:.0f} s, {counts.schedules / seconds:,.0f}/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
