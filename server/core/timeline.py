"""The timeline: what happened to a fleet, when, who did it and why.

    a tick looks at the core, the bus and the process --> facts --+
    the core decides --> writes --> events of these writes -------+--> written with them, or later

A fact is true whether it is written or not: it waits until a write succeeds. What was decided has
happened only if it was written, so its event goes with it in one transaction and is made anew if
that fails. One object lives as long as the process and outlives each Control in it.
"""

import datetime
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from embertide.server.core.control import Control
from embertide.server.core.events import Events, FleetEvent
from embertide.server.core.plan.layout import LaidPlan
from embertide.server.core.state import SavedState, Writes
from embertide.v1 import control_pb2

Kind = control_pb2.EventKind
State = control_pb2.OperationState
FACTS_MAX = 1000
_NODE_LIFE = ("node_died", "node_returned", "node_restarted", "node_registered")


class _Seen(NamedTuple):
    """A node as it was looked at last."""

    incarnation: str
    alive: bool
    since_ms: int


class Timeline:
    """Notes what changes. Used by one thread at a time.

    Attributes:
        events: Those that are written.
        dropped: Facts that were lost, as too many waited for a store that took no write.
    """

    def __init__(self) -> None:
        """Begin without knowledge; `restore` comes first."""
        self.events = Events()
        self.dropped = 0
        self._facts: dict[int, tuple[FleetEvent, int]] = {}  # with the number that each replaces
        self._next = 1
        self._nodes: dict[str, _Seen] | None = None
        self._operations: dict[str, int] = {}
        self._decided = 0  # number of the newest decision that was told
        self._problem = ""

    def restore(self, saved: SavedState, now_ms: int) -> None:
        """Go on from what was written. Facts go on waiting; to write one twice changes nothing."""
        self.events.restore(saved.events)
        self._next = max(self._next, self.events.last_number + 1)
        self._operations = {
            id: each.operation.state
            for id, each in saved.operations.items()
            if not each.operation.ended_ms
        }
        self._decided = max((_number(id) for id in saved.decisions), default=0)
        if self._nodes is None:
            self._nodes = {
                name: _Seen(each.request_id, *self._life(name, now_ms))
                for name, each in saved.nodes.items()
            }

    def _life(self, name: str, now_ms: int) -> tuple[bool, int]:
        """Return whether a node lived when that was written last, and since when."""
        for each in self.events.of(Kind.EVENT_KIND_NODE):
            if each.subject == name and each.name in _NODE_LIFE:
                return each.name != "node_died", each.at_ms
        return True, now_ms

    # Facts.

    def note(self, event: FleetEvent, replaces: int = 0) -> None:
        """Take in a fact, in place of the event of a number if one is given."""
        event.number, self._next = self._next, self._next + 1
        event.times = event.times or 1
        self._facts[event.number] = event, replaces
        while len(self._facts) > FACTS_MAX:
            del self._facts[next(iter(self._facts))]
            self.dropped += 1

    def known(self, kind: int) -> Iterator[FleetEvent]:
        """Yield the events of a kind, newest first, those not written yet among them."""
        gone = {replaced for _, replaced in self._facts.values()}
        for event, _ in reversed(list(self._facts.values())):
            if event.kind == kind and event.number not in gone:
                yield event
        yield from (each for each in self.events.of(kind) if each.number not in gone)

    def lead(self, holder: str, term: int, now_ms: int) -> None:
        """Note that this control plane leads from now on."""
        leaders = self.known(Kind.EVENT_KIND_LEADER)
        before = next((each for each in leaders if each.name == "leader_began"), None)
        who = before.subject or "another one" if before is not None else ""
        self.note(
            FleetEvent(
                at_ms=now_ms,
                kind=Kind.EVENT_KIND_LEADER,
                name="leader_began",
                text=f"the control plane at {holder or 'this process'} leads, with term {term}",
                why=f"{who} led before" if who else "it is the first",
                subject=holder,
            )
        )

    def state_restored(self, why: str, epoch: int, now_ms: int) -> None:
        """Note that a store which lost its keys was written anew."""
        text = f"the state store lost its keys; all of it was written again, under plan {epoch}"
        self.note(
            FleetEvent(
                at_ms=now_ms,
                kind=Kind.EVENT_KIND_LEADER,
                name="state_restored",
                text=text,
                why=why,
            )
        )

    def look(self, core: Control, now_ms: int) -> None:
        """Note what has become of nodes, and whether plans are followed."""
        nodes = self._nodes if self._nodes is not None else {}
        for member, alive in core.fleet.lives(now_ms):
            seen = nodes.get(member.name)
            same_start = seen is not None and seen.incarnation == member.incarnation
            if same_start and seen is not None and seen.alive == alive:
                continue
            if same_start and alive and member.beat is None:
                continue  # it has time to find us: nobody has heard it yet
            nodes[member.name] = _Seen(member.incarnation, alive, now_ms)
            event = FleetEvent(at_ms=now_ms, kind=Kind.EVENT_KIND_NODE, subject=member.name)
            _tell_node(event, core, seen, nodes[member.name], now_ms)
            self.note(event)
        for name in nodes.keys() - core.fleet.registrations.keys():
            del nodes[name]
        self._nodes = nodes
        problem = core.problem(now_ms)
        if problem != self._problem:
            self._problem = problem
            self.note(
                FleetEvent(
                    at_ms=now_ms,
                    kind=Kind.EVENT_KIND_PLAN,
                    name="not_followed" if problem else "followed_again",
                    text="nodes do not follow the plans of the state store"
                    if problem
                    else "nodes follow the plans of the state store again",
                    why=problem,
                )
            )

    # Events of decisions.

    def add_events(self, writes: Writes, author: str, now_ms: int) -> None:
        """Add to writes the facts that wait, and the events of what they write.

        Args:
            writes: The changes that are about to be written.
            author: Who asked for it. Empty: nobody, or callers are not asked who they are.
            now_ms: Wall clock.
        """
        new = [event for event, _ in self._facts.values()]
        for event in self._events_of(writes, author):
            event.number, self._next = self._next, self._next + 1
            event.at_ms, event.times = event.at_ms or now_ms, 1
            new.append(event)
        if not new:
            return
        gone = {replaced for _, replaced in self._facts.values() if replaced}
        gone |= set(self.events.too_many(new))
        writes.events |= {str(each.number): each for each in new if each.number not in gone}
        writes.events |= {str(number): None for number in gone}

    def written(self, writes: Writes) -> None:
        """Take in that it was written."""
        self.events.take(writes.events)
        for number in writes.events:
            self._facts.pop(int(number), None)
        for record in writes.operations.values():
            if record is not None:
                if record.operation.ended_ms:
                    self._operations.pop(record.operation.id, None)
                else:
                    self._operations[record.operation.id] = record.operation.state
        numbers = [_number(id) for id, each in writes.decisions.items() if each is not None]
        self._decided = max([self._decided, *numbers])

    def _events_of(self, writes: Writes, author: str) -> Iterator[FleetEvent]:
        for name, registration in writes.nodes.items():
            if registration is None:
                yield FleetEvent(
                    kind=Kind.EVENT_KIND_NODE,
                    name="node_removed",
                    text=f"node {name} was removed",
                    author=author,
                    subject=name,
                )
        if writes.plan is not None and not writes.plan.head.operation_id:
            yield _plan_event(writes.plan, author, jumps=writes.jumps)
        for record in writes.operations.values():
            if record is not None:
                yield from self._operation_events(record.operation, author)
        yield from self._decision_events(writes.decisions)
        if writes.settings is not None:
            yield _settings_event(writes.settings, author)

    def _operation_events(
        self, operation: control_pb2.Operation, author: str
    ) -> Iterator[FleetEvent]:
        before = self._operations.get(operation.id)
        if before == operation.state and not operation.ended_ms:
            return
        event = FleetEvent(
            kind=Kind.EVENT_KIND_OPERATION,
            author=author if before is not None and author else operation.author,
            subject=operation.id,
        )
        if before is None and not operation.ended_ms:
            event.name = "operation_accepted"
            event.text = (
                f"{operation.kind} {operation.id} was accepted: {operation.buckets_total:,} "
                f"buckets, {operation.bytes_total:,} bytes"
            )
            event.why = operation.reason
        else:
            state = State.Name(operation.state).removeprefix("OPERATION_STATE_").lower()
            event.name = f"operation_{state}"
            event.text = (
                f"{operation.kind} {operation.id} is {state}: {operation.buckets_done:,} of "
                f"{operation.buckets_total:,} buckets moved"
            )
            event.why = operation.message or operation.reason
        yield event

    def _decision_events(
        self, decisions: Mapping[str, control_pb2.Decision | None]
    ) -> Iterator[FleetEvent]:
        for id, each in decisions.items():
            if each is None:
                continue
            event = FleetEvent(
                kind=Kind.EVENT_KIND_DRIFT, author="drift", subject=each.operation_id or id
            )
            if _number(id) > self._decided:
                outcome = control_pb2.DecisionOutcome.Name(each.outcome)
                words = outcome.removeprefix("DECISION_OUTCOME_").lower().replace("_", " ")
                event.name, event.text, event.why = "drift_decided", f"{id}: {words}", each.why
                yield event
            elif each.measured_ms:
                event.name = "gain_measured"
                event.text = (
                    f"{id} has gained {each.measured_gain:.1%}; {each.predicted_gain:.1%} had "
                    "been predicted"
                )
                yield event


def _number(id: str) -> int:
    """Return the number of a decision, whose id ends with it."""
    number = id.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _tell_node(
    event: FleetEvent, core: Control, seen: _Seen | None, now: _Seen, now_ms: int
) -> None:
    """Say what has become of a node."""
    member = core.fleet.get(event.subject)
    address = member.registration.node.address if member is not None else ""
    name = f"node {event.subject}"
    if seen is None:
        event.name, event.text = "node_registered", f"{name} at {address} registered"
    elif not now.alive:
        lost = core.buckets_without_owner(now_ms)
        text = f"; {lost:,} buckets have no live owner" if lost else ""
        event.name, event.text = "node_died", f"{name} is dead{text}"
        silent_s = (now_ms - member.heard_ms) / 1000 if member is not None else 0.0
        event.why = f"it missed five beats: the last came {silent_s:.1f} s before"
        if member is not None and member.beat is None:
            event.why = "it has not beaten since this control plane leads"
    elif not seen.alive:
        away_s = (now_ms - seen.since_ms) / 1000
        event.name, event.text = "node_returned", f"{name} is back after {away_s:,.1f} s"
        if seen.incarnation != now.incarnation:
            event.why = f"it was started again, at {address}"
    else:
        event.name, event.text = "node_restarted", f"{name} at {address} was started again"


def _plan_event(plan: LaidPlan, author: str, *, jumps: bool) -> FleetEvent:
    count = len(plan.head.topology.nodes)
    why = f"it has {count} nodes" if plan.epoch == 1 else f"nodes came or left: it has {count} now"
    return FleetEvent(
        kind=Kind.EVENT_KIND_PLAN,
        name="plan_made",
        text=f"plan {plan.epoch} was made"
        + (" of what nodes hold" if jumps else " first" if plan.epoch == 1 else ""),
        why="the state store had lost its keys" if jumps else why,
        author=author,
    )


def _settings_event(settings: control_pb2.DriftSettings, author: str) -> FleetEvent:
    mode = control_pb2.DriftMode.Name(settings.mode).removeprefix("DRIFT_MODE_").lower()
    frozen = ""
    if settings.frozen_until_ms:
        until = datetime.datetime.fromtimestamp(settings.frozen_until_ms / 1000, datetime.UTC)
        frozen = f", frozen until {until:%Y-%m-%d %H:%M:%S} UTC"
    return FleetEvent(
        kind=Kind.EVENT_KIND_DRIFT,
        name="drift_set",
        text=f"the drift monitor's mode is {mode}{frozen}",
        why=settings.reason,
        author=author,
    )
