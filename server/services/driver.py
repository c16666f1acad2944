"""The driver: keeps one core, ticks it, and writes what it decides before anybody is told.

If a write fails, nobody knows whether it was done. The core is then thrown away and made again from
the store, as after a restart; what only lives in memory (beats, loads, first answers) is kept.
"""

import collections
import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

from embertide._common.background import BackgroundTask, Health, Work, describe, healths
from embertide.server.core.control import Control, ControlOptions, Memory
from embertide.server.core.errors import (
    Code,
    MovedOnError,
    RefusedError,
    StateLostError,
    StateNotRestoredError,
    StateUnavailableError,
    SupersededError,
)
from embertide.server.core.news import News
from embertide.server.core.newsroom import Newsroom
from embertide.server.core.plan.bucket_columns import bucket_columns
from embertide.server.core.plan.layout import LaidPlan
from embertide.server.core.plan.validity import PLAN_BYTES_MAX
from embertide.server.core.preparation import PreparedOperation
from embertide.server.core.state import LEASE_MS, PLANS_KEPT, StateStore, Writes
from embertide.server.core.timeline import Timeline
from embertide.server.core.versions import Versions
from embertide.server.services.clock import Clock
from embertide.server.services.journal import Journal
from embertide.server.services.outside import task_health
from embertide.server.services.planning import Planning
from embertide.v1 import control_pb2, node_pb2, plan_pb2

TICK_S = 0.05
_TRIES_MAX = 3  # times that a request is prepared, as the plan moved on meanwhile
LOAD_EVERY_S = 5.0
# Nodes that are asked for their load together; of more, at most so many each second.
_ALL_AT_ONCE = 100
_TAKEN_AT_ONCE = 8  # loads that are taken in while a tick waits
_LOOK_S = 0.5
_NEWS_S = 1.0
_RENEW_S = LEASE_MS / 3000
_TICK_AGAIN_S = 0.5  # at most, from a tick that failed to the next
_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class NodeSource(Protocol):
    """Asks nodes, by name; who does not answer is left out."""

    def loads(self, addresses: dict[str, str]) -> dict[str, node_pb2.NodeServiceGetLoadResponse]:
        """Ask for their load."""

    def epochs(self, addresses: dict[str, str]) -> dict[str, int]:
        """Ask for the epoch of the plan that they act by. 0: none."""


class NewsSource(Protocol):
    """Hears of the world outside the core."""

    def news(self, number: int, lineage: int) -> News:
        """Return what is new after a version; (0, 0): the newest ones."""


def _start(
    request: control_pb2.StartReshardRequest,
    ready: PreparedOperation | None,
    author: str,
    core: Control,
    now_ms: int,
) -> control_pb2.StartReshardResponse:
    return core.start(request, now_ms, ready, author)


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
        why_superseded: Why it gave way. Empty: it has not.
        changed: Notified whenever something was written.
        timeline: The fleet's events.
        versions: The newest ones.
        counts: Faults by name: refusals are counted by who refuses.
    """

    def __init__(
        self,
        options: ControlOptions,
        store: StateStore,
        nodes: NodeSource,
        clock: Clock,
        planning: Planning | None = None,
        holder: str = "",
        outside: NewsSource | None = None,
    ) -> None:
        """Take a term, whoever leads, and carry on from what the store holds.

        Args:
            options: Options of decisions.
            store: Where everything is kept.
            nodes: Asks nodes.
            clock: The time.
            planning: Where planners run.
            holder: Where this control plane can be reached.
            outside: Hears of versions, the trainer and refused nodes; None: nobody does.

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
        self._has_task = threading.Event()
        self.lock = threading.Lock()
        self._memory = Memory(options)
        self._holder = holder
        self.timeline = Timeline()
        self.versions = Versions()
        self._outside, self._newsroom = outside, Newsroom(self.timeline)
        self._has_heard = False
        self._term = store.take_term(holder)
        self._core: Control | None = self._load()
        self._before: Control | None = None  # the last core, while none could be made since
        self.why_superseded = ""
        self._epoch = self._core.epoch  # as it was written last
        self.journal = Journal(options.model)
        self.timeline.lead(holder, self._term, clock.now_ms())
        self._beat_lock = threading.Lock()
        stopping = threading.Event()

        def task(what: str, work: Work, pause_s: float, pause_s_max: float) -> BackgroundTask:
            return BackgroundTask(
                f"control-{what}",
                work,
                stop=stopping,
                expected=(RefusedError,),
                pause_s=pause_s,
                pause_s_max=pause_s_max,
            )

        self._asked_at = 0  # position of the node whose load is asked for next
        self.tasks = [
            task("tick", self._tick, TICK_S, _TICK_AGAIN_S),
            task("lease", self._lead, TICK_S, _RENEW_S),
            task("load", self._poll, LOAD_EVERY_S, LOAD_EVERY_S),
            task("think", self._run_task, _LOOK_S, LOAD_EVERY_S),
            task("news", self._hear, _NEWS_S, LOAD_EVERY_S),
        ]

    def start(self) -> None:
        """Begin to tick and to ask for loads."""
        for task in self.tasks:
            task.start()

    def healths(self) -> list[Health]:
        """Return how its tasks are, and those of the process that are of no driver."""
        own = [task.health() for task in self.tasks]
        names = {health.name for health in own}
        return own + [health for health in healths() if health.name not in names]

    def stop(self) -> None:
        """End both, without finishing anything: a restart goes on from the store."""
        for task in self.tasks:
            task.stop()

    def _load(self) -> Control:
        saved, now_ms = self._store.load(self._term), self._clock.now_ms()
        self.timeline.restore(saved, now_ms)
        return Control(self.options, saved, now_ms, self._memory)

    def call(
        self, ask: Callable[[Control, int], Answer], *, decides: bool = False, author: str = ""
    ) -> Answer:
        """Ask the core, write what it decided, and return its answer.

        Args:
            ask: The question.
            decides: The answer must hold: one that needs no write, and a refusal, are given only
                while no other control plane has taken over.
            author: Who asks, for the timeline. Empty: nobody, or nobody is asked who he is.

        Raises:
            RefusedError: The core refuses, the store cannot be reached, or we were superseded.
        """
        with self.lock:
            if self.superseded.is_set():
                raise SupersededError("this one does not write any more")
            try:
                core = self._loaded()
                answer, writes = self._decide(core, ask, decides, author)
            except StateUnavailableError:
                self.counts["state_unavailable"] += 1
                # Its knowledge is of use if the store comes back without its keys.
                self._core, self._before = None, self._core or self._before
                raise
            except (SupersededError, StateLostError) as error:
                self._give_way(error)
                raise
            except RefusedError:
                if core.take():  # it had decided something before it refused
                    self._core = None
                raise
            except BaseException:
                self._core = None
                raise
            self.journal.wrote(writes.events.values())
        if writes:
            with self.changed:
                self.changed.notify_all()
        return answer

    def _decide(
        self, core: Control, ask: Callable[[Control, int], Answer], decides: bool, author: str
    ) -> tuple[Answer, Writes]:
        now_ms = self._clock.now_ms()
        try:
            answer = ask(core, now_ms)
        except RefusedError:
            if decides:
                self._write(core, Writes(), decides)
            raise
        writes = core.take()
        self.timeline.add_events(writes, author, now_ms)
        self._write(core, writes, decides)
        core.written()
        self.timeline.written(writes)
        self._epoch = core.epoch
        return answer, writes

    def _write(self, core: Control, writes: Writes, decides: bool) -> None:
        """Write what was decided, or prove that the term is still ours if an answer must hold."""
        try:
            if writes:
                self._store.commit(self._term, writes)
            elif decides:
                self._store.check(self._term)
        except StateLostError as error:
            self._restore(core, error, writes)

    def start_reshard(
        self, request: control_pb2.StartReshardRequest, author: str = ""
    ) -> control_pb2.StartReshardResponse:
        """Accept an operation from loads that are asked for now; to prepare it holds nobody up.

        Args:
            request: The request.
            author: The caller. Empty: callers are not asked who they are.

        Raises:
            RefusedError: It cannot be done; nothing has changed.
        """
        self.measure()
        for _ in range(_TRIES_MAX):
            task = self.call(lambda core, now_ms: core.build_task(request, now_ms), decides=True)
            ready = self._planning.run(task).value() if task is not None else None
            try:
                return self.call(
                    functools.partial(_start, request, ready, author), decides=True, author=author
                )
            except MovedOnError as error:
                moved_on = error
        raise moved_on

    def adopt_plan(
        self, request: control_pb2.AdoptPlanRequest, author: str = ""
    ) -> control_pb2.AdoptPlanResponse:
        """Make a plan of what the live nodes hold; they are asked now.

        Raises:
            RefusedError: There is nothing to adopt, or a node does not say what it holds.
        """
        loads = self._nodes.loads(self._addresses(self._live_names()))
        return self.call(
            lambda core, now_ms: core.adopt(request, loads, now_ms), decides=True, author=author
        )

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

    def _addresses(self, names: Collection[str]) -> dict[str, str]:
        """Return where live nodes of these names are."""
        return self.call(
            lambda core, now_ms: {
                member.name: member.registration.node.address
                for member in core.fleet.live(now_ms)
                if member.name in names
            }
        )

    def _measure(self, names: Collection[str]) -> None:
        """Ask live nodes for their load; of one that does not answer it is unknown."""
        addresses = self._addresses(names)
        loads = self._nodes.loads(addresses)
        self.counts["load_not_answered"] += len(addresses) - len(loads)
        # Made here, since nobody waits for this thread.
        columns = {}
        for name, load in loads.items():
            try:
                columns[name] = bucket_columns(load)
            except ValueError as error:
                self.counts["load_not_right"] += 1
                _log.warning("node %s: its load is left out: %s", name, error)

        def take(some: Iterable[str], core: Control, now_ms: int) -> None:
            for name in some:
                if core.fleet.get(name) is not None and name in columns:
                    core.load(name, loads[name], now_ms, columns[name])
                else:
                    core.loads.forget(name)

        asked = list(names)
        for at in range(0, len(asked), _TAKEN_AT_ONCE):
            self.call(functools.partial(take, asked[at : at + _TAKEN_AT_ONCE]))

    def _loaded(self) -> Control:
        """Return the core, made from the store if a write failed."""
        if self._core is None:
            try:
                self._core = self._load()
            except StateLostError as error:
                if self._before is None:
                    raise
                self._restore(self._before, error, Writes())
                self._core = self._before
            self._before = None
        return self._core

    def _restore(self, core: Control, lost: StateLostError, decided: Writes) -> None:
        """Write all that a core knows into a store that lost its keys, and take a term in it.

        The core has `decided` already; of it, its events alone are not known yet.

        It may have been superseded before, and nothing is left there that would say so. So nodes
        are asked: where none of them has a later plan than the core, the core's is followed.

        Raises:
            StateLostError: Another has begun anew in it, or has led before it lost its keys.
            StateUnavailableError: The store cannot be reached.
            StateNotRestoredError: A live node does not answer.
        """
        now_ms = self._clock.now_ms()
        live = {each.name: each.registration.node.address for each in core.fleet.live(now_ms)}
        epochs = self._nodes.epochs(live)
        if silent := sorted(live.keys() - epochs.keys()):
            raise StateNotRestoredError(
                f"node {silent[0]!r} does not say by which plan it acts; it is asked again"
            )
        if later := sorted(name for name, epoch in epochs.items() if epoch > core.epoch):
            raise StateLostError(
                f"node {later[0]!r} acts by plan {epochs[later[0]]}, which another control plane "
                f"made after our {core.epoch}"
            )
        try:
            writes = core.restored(now_ms)
            writes.events = self.timeline.events.as_written() | decided.events
            self._term = self._store.restore(self._term, self._holder, writes)
        except SupersededError:
            raise lost from None
        self.timeline.state_restored(lost.message, core.epoch, now_ms)
        self.counts["state_restored"] += 1
        _log.error("%s; all of it is written again, under plan %d", lost.message, core.epoch)

    def _give_way(self, error: SupersededError | StateLostError) -> None:
        self._core = None
        self.why_superseded = error.message
        self.superseded.set()
        _log.error("%s; this one stops", error.message)

    def _lead(self, stop: threading.Event) -> float | None:
        """Renew the lease, which also says whether the term is still ours; no tick holds it up."""
        if self.superseded.is_set():
            return None
        term = self._term
        try:
            if not self._store.renew(term, self._holder):
                self._give_way(SupersededError(f"a term was taken after {term}"))
        except StateUnavailableError:
            self.counts["lease_not_renewed"] += 1
            raise
        except StateLostError:
            # A decision notices it too, and writes all of it again.
            self.call(lambda core, now_ms: None, decides=True)
        return _RENEW_S

    def release(self) -> None:
        """Let another lead at once. Requires: this one has stopped."""
        with contextlib.suppress(StateUnavailableError):
            self._store.release(self._term)

    def _tick(self, stop: threading.Event) -> float | None:
        def tick(core: Control, now_ms: int) -> None:
            self.timeline.look(core, now_ms)
            core.tick(now_ms)
            if core.tasks:
                self._has_task.set()

        if self.superseded.is_set():
            return None
        try:
            self.call(tick)
        except SupersededError:
            return None
        except RefusedError:
            self.counts["tick_refused"] += 1
            raise
        except Exception:
            self.counts["tick_failed"] += 1
            raise
        return TICK_S

    def _hear(self, stop: threading.Event) -> float | None:
        """Hear what is new outside the core, every second."""
        if self.superseded.is_set() or self._outside is None:
            return None
        try:
            if not self._has_heard:
                # Those before our start are of no news, but people ask for them.
                before = self._outside.news(0, 0)
                self.call(lambda core, now_ms: self.versions.hear(before))
                self._has_heard = True
            newest = self.call(lambda core, now_ms: self._newsroom.newest)
            news = self._outside.news(*newest)._replace(tasks=[*map(task_health, self.healths())])
            self.call(lambda core, now_ms: self._newsroom.hear(news, now_ms))
            self.call(lambda core, now_ms: self.versions.hear(news))
        except SupersededError:
            return None
        if self.timeline.dropped:
            self.counts["events_dropped"] = self.timeline.dropped
        return _NEWS_S

    def _run_task(self, stop: threading.Event) -> float | None:
        """Run the first task of the core, if there is one, and hand its result in.

        A task without a result stays, and the core waits for it. So a failure is a result too.
        """
        if self.superseded.is_set():
            return None
        if not self._has_task.wait(_LOOK_S):
            return 0.0
        self._has_task.clear()
        try:
            task = self.call(lambda core, now_ms: core.tasks.first())
        except RefusedError:
            return 0.0  # the next tick that is not refused says whether there still is one
        if task is None:
            return 0.0
        failure: Exception | None = None
        try:
            result = self._planning.run(task)
        except RefusedError as error:
            result = task.refused(error)
        except Exception as error:
            failure = error
            refusal = f"its moves could not be prepared: {describe(error)}; try again"
            result = task.refused(RefusedError(Code.INTERNAL, refusal))
        with contextlib.suppress(RefusedError):
            self.call(lambda core, now_ms: core.tasks.finish(result))
        if failure is not None:
            raise failure
        return 0.0

    def _poll(self, stop: threading.Event) -> float | None:
        """Ask all nodes every 5 s; of many, some each second, in turn."""
        if self.superseded.is_set():
            return None
        try:
            names = self._live_names()
            if len(names) <= _ALL_AT_ONCE:
                self._asked_at = 0
                self._measure(names)
                return LOAD_EVERY_S
            turn = min(_ALL_AT_ONCE, math.ceil(len(names) / LOAD_EVERY_S))
            at = self._asked_at % len(names)
            self._asked_at = at + turn
            self._measure(names[at : at + turn])
        except SupersededError:
            return None
        except RefusedError:
            self.counts["measure_refused"] += 1
            raise
        return 1.0
