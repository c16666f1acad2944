"""The driver: keeps one core, ticks it, and writes what it decides before anybody is told.

If a write fails, nobody knows whether it was done. The core is then thrown away and made again from
the store, as after a restart; what only lives in memory (beats, loads, first answers) is kept.
"""

import collections
import contextlib
import functools
import logging
import math
import queue
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

from embertide.server.core.control import Control, ControlOptions, Memory
from embertide.server.core.errors import (
    Code,
    MovedOnError,
    RefusedError,
    StateUnavailableError,
    SupersededError,
)
from embertide.server.core.plan.layout import LaidPlan
from embertide.server.core.plan.planner import Proposal
from embertide.server.core.plan.validity import PLAN_BYTES_MAX
from embertide.server.core.preparation import PreparedOperation
from embertide.server.core.reshard import Asked, Posed
from embertide.server.core.state import LEASE_MS, PLANS_KEPT, StateStore, Writes
from embertide.server.services.clock import Clock
from embertide.server.services.planning import Planning
from embertide.v1 import control_pb2, node_pb2, plan_pb2

TICK_S = 0.05
_POSED_AGAIN = 3  # times that a request is prepared, as the plan moved on meanwhile
LOAD_EVERY_S = 5.0
# Nodes that are asked for their load together; of more, at most so many each second.
_ALL_AT_ONCE = 100
_TAKEN_AT_ONCE = 8  # loads that are taken in while a tick waits
_LOOK_S = 0.5
_RENEW_S = LEASE_MS / 3000
_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class LoadSource(Protocol):
    """Asks nodes for their load."""

    def loads(self, addresses: dict[str, str]) -> dict[str, node_pb2.NodeServiceGetLoadResponse]:
        """Ask nodes by name; who does not answer is left out."""


def _start(
    request: control_pb2.StartReshardRequest,
    ready: PreparedOperation | None,
    core: Control,
    now_ms: int,
) -> control_pb2.StartReshardResponse:
    return core.start(request, now_ms, ready)


def _think(
    id: str,
    task: Posed | Asked,
    outcome: Proposal | PreparedOperation | RefusedError,
    core: Control,
    now_ms: int,
) -> None:
    core.think(id, task, outcome)


def _whole(plan: LaidPlan) -> plan_pb2.Plan:
    """Return a plan as one message.

    Raises:
        RefusedError: It is larger than a message may be.
    """
    whole = plan.whole()
    if (size := whole.ByteSize()) > PLAN_BYTES_MAX:
        raise RefusedError(
            Code.RESOURCE_EXHAUSTED,
            f"plan {plan.epoch} is {size:,} bytes as one message; at most {PLAN_BYTES_MAX:,}: read "
            "it in parts from `state` (docs/formats.md)",
        )
    return whole


class Driver:
    """Runs a core against a store. Safe from many threads.

    Attributes:
        lock: Held while the core is asked or ticked.
        changed: Notified whenever something was written.
        counts: What went wrong by name: refusals are counted by who refuses.
    """

    def __init__(
        self,
        options: ControlOptions,
        store: StateStore,
        nodes: LoadSource,
        clock: Clock,
        planning: Planning | None = None,
        holder: str = "",
    ) -> None:
        """Take a term, whoever leads, and carry on from what the store holds.

        Args:
            options: How to decide.
            store: Where everything is kept.
            nodes: Who asks nodes for their loads.
            clock: The time.
            planning: Where planners run.
            holder: Where this control plane can be reached.

        Raises:
            StateUnavailableError: The store cannot be reached.
        """
        self.options = options
        self.changed = threading.Condition()
        self.counts: collections.Counter[str] = collections.Counter()
        self.superseded = threading.Event()
        self._store = store
        self._nodes = nodes
        self._clock = clock
        self._planning = planning or Planning()
        self._wanted: queue.Queue[tuple[str, Posed | Asked]] = queue.Queue(1)
        self.lock = threading.Lock()
        self._memory = Memory(options)
        self._holder = holder
        self._term = store.take_term(holder)
        self._core: Control | None = self._load()
        self._epoch = self._core.epoch  # as it was written last
        self._beat_lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._tick_on, name="control-tick", daemon=True),
            threading.Thread(target=self._lead_on, name="control-lease", daemon=True),
            threading.Thread(target=self._poll_on, name="control-load", daemon=True),
            threading.Thread(target=self._think_on, name="control-think", daemon=True),
        ]

    def start(self) -> None:
        """Begin to tick and to ask for loads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both, without finishing anything: a restart goes on from the store."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _load(self) -> Control:
        return Control(self.options, self._store.load(), self._clock.now_ms(), self._memory)

    def call(self, ask: Callable[[Control, int], Answer], *, decides: bool = False) -> Answer:
        """Ask the core, write what it decided, and return its answer.

        Args:
            ask: What it is asked.
            decides: The answer must hold: one that needs no write, and a refusal, are given only
                while no other control plane has taken over.

        Raises:
            RefusedError: The core refuses, the store cannot be reached, or we were superseded.
        """
        with self.lock:
            if self.superseded.is_set():
                raise SupersededError("this one does not write any more")
            if self._core is None:
                self._core = self._load()
            core = self._core
            try:
                answer, writes = self._decide(core, ask, decides)
            except StateUnavailableError:
                self.counts["state_unavailable"] += 1
                self._core = None
                raise
            except SupersededError as error:
                self._give_way(error)
                raise
            except RefusedError:
                if core.take():  # it had decided something before it refused
                    self._core = None
                raise
            except BaseException:
                self._core = None
                raise
        if writes:
            with self.changed:
                self.changed.notify_all()
        return answer

    def _decide(
        self, core: Control, ask: Callable[[Control, int], Answer], decides: bool
    ) -> tuple[Answer, Writes]:
        try:
            answer = ask(core, self._clock.now_ms())
        except RefusedError:
            if decides:
                self._check_term()
            raise
        writes = core.take()
        if writes:
            self._store.commit(self._term, writes)
        elif decides:
            self._check_term()
        core.written()
        self._epoch = core.epoch
        return answer, writes

    def start_reshard(
        self, request: control_pb2.StartReshardRequest
    ) -> control_pb2.StartReshardResponse:
        """Accept an operation from loads that are asked for now; to prepare it holds nobody up.

        Raises:
            RefusedError: It cannot be done; nothing has changed.
        """
        self.measure()
        for _ in range(_POSED_AGAIN):
            asked = self.call(lambda core, now_ms: core.pose(request, now_ms), decides=True)
            ready = self._planning.prepare_operation(asked) if asked is not None else None
            try:
                return self.call(functools.partial(_start, request, ready), decides=True)
            except MovedOnError as error:
                moved_on = error
        raise moved_on

    def beat(self, request: control_pb2.HeartbeatRequest) -> control_pb2.HeartbeatResponse:
        """Take a beat, also while the store cannot be reached, and say what is new.

        Raises:
            RefusedError: The node is not known, or we were superseded.
        """
        if self.superseded.is_set():
            raise SupersededError("this one does not listen to beats any more")
        with self._beat_lock:
            fleet = self._memory.fleet
            fleet.beat(request, self._clock.now_ms())
            interval_ms = fleet.tell_interval(request.node)
        return control_pb2.HeartbeatResponse(
            plan_epoch=self._epoch, heartbeat_interval_ms=interval_ms
        )

    def incarnation(self, node: str) -> str | None:
        """Return the incarnation of a node of this fleet; None: it is not of it."""
        with self._beat_lock:
            member = self._memory.fleet.get(node)
            return member.incarnation if member is not None else None

    @property
    def reachable(self) -> bool:
        """Whether the store answered when it was last asked."""
        return self._core is not None

    def plan(self, epoch: int) -> plan_pb2.Plan:
        """Return a plan; 0: the newest.

        Raises:
            RefusedError: There is none, or it is not kept any more.
        """
        newest = self.call(
            lambda core, now_ms: LaidPlan(core.plan, core.layout) if core.plan is not None else None
        )
        if newest is None:
            why = self.call(lambda core, now_ms: core.why_no_plan)
            raise RefusedError(Code.NOT_FOUND, f"no plan has been made: {why}")
        last = newest.head.epoch
        if epoch in (0, last):
            return _whole(newest)
        found = self._store.plan(epoch) if epoch < last else None
        if found is None:
            oldest = max(1, last - PLANS_KEPT + 1)
            raise RefusedError(
                Code.OUT_OF_RANGE, f"plan {epoch} is not kept; ask for {oldest} to {last}"
            )
        return _whole(found)

    def measure(self) -> None:
        """Ask all live nodes for their load now; of many, trust what they said in turn."""
        names = self._live_names()
        if len(names) <= _ALL_AT_ONCE:
            self._measure(names)

    def _live_names(self) -> list[str]:
        return self.call(lambda core, now_ms: [each.name for each in core.fleet.live(now_ms)])

    def _measure(self, names: Collection[str]) -> None:
        """Ask live nodes for their load; of one that does not answer it is unknown."""
        addresses = self.call(
            lambda core, now_ms: {
                member.name: member.registration.node.address
                for member in core.fleet.live(now_ms)
                if member.name in names
            }
        )
        loads = self._nodes.loads(addresses)
        self.counts["load_not_answered"] += len(addresses) - len(loads)

        def take(some: Iterable[str], core: Control, now_ms: int) -> None:
            for name in some:
                if core.fleet.get(name) is not None and name in loads:
                    core.load(name, loads[name], now_ms)
                else:
                    core.loads.forget(name)

        asked = list(names)
        for at in range(0, len(asked), _TAKEN_AT_ONCE):
            self.call(functools.partial(take, asked[at : at + _TAKEN_AT_ONCE]))

    def _give_way(self, error: SupersededError) -> None:
        self._core = None
        self.superseded.set()
        _log.error("%s; this one stops", error.message)

    def _lead_on(self) -> None:
        """Renew the lease, which also says whether the term is still ours; no tick holds it up."""
        while not self.superseded.is_set():
            try:
                if not self._store.renew(self._term, self._holder):
                    self._give_way(SupersededError(f"a term was taken after {self._term}"))
            except StateUnavailableError:
                self.counts["lease_not_renewed"] += 1
            if self._stopping.wait(_RENEW_S):
                return

    def release(self) -> None:
        """Let another lead at once. Requires: this one has stopped."""
        with contextlib.suppress(StateUnavailableError):
            self._store.release(self._term)

    def _check_term(self) -> None:
        if (highest := self._store.term()) != self._term:
            raise SupersededError(f"term {highest} was taken after {self._term}")

    def _tick_on(self) -> None:
        def tick(core: Control, now_ms: int) -> None:
            core.tick(now_ms)
            if core.wanted is not None:
                with contextlib.suppress(queue.Full):
                    self._wanted.put_nowait(core.wanted)

        said = ""
        while not self._stopping.wait(TICK_S) and not self.superseded.is_set():
            try:
                self.call(tick)
                said = ""
            except RefusedError as error:
                self.counts["tick_refused"] += 1
                if error.message != said:
                    said = error.message
                    _log.warning("tick: %s", said)
            except Exception:
                self.counts["tick_failed"] += 1
                _log.exception("tick failed; the core is made again from the store")

    def _think_on(self) -> None:
        """Make operations again whose plan moved on while they waited."""
        while not self._stopping.is_set() and not self.superseded.is_set():
            try:
                wanted = self._wanted.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            with contextlib.suppress(RefusedError):
                if self.call(lambda core, now_ms: core.wanted) is not wanted:
                    continue  # it was answered, or the plan has moved on again
            id, task = wanted
            outcome: Proposal | PreparedOperation | RefusedError
            try:
                outcome = self._planning.do(task)
            except RefusedError as error:
                outcome = error
            with contextlib.suppress(RefusedError):
                self.call(functools.partial(_think, id, task, outcome))

    def _poll_on(self) -> None:
        """Ask all nodes every 5 s; of many, some each second, in turn."""
        at, pause_s = 0, LOAD_EVERY_S
        while not self._stopping.wait(pause_s) and not self.superseded.is_set():
            try:
                names = self._live_names()
                if len(names) <= _ALL_AT_ONCE:
                    at, pause_s = 0, LOAD_EVERY_S
                    self._measure(names)
                    continue
                pause_s = 1.0
                turn = min(_ALL_AT_ONCE, math.ceil(len(names) / LOAD_EVERY_S))
                at = at % len(names)
                self._measure(names[at : at + turn])
                at += turn
            except RefusedError as error:
                self.counts["measure_refused"] += 1
                _log.warning("loads: %s", error.message)
