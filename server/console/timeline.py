"""What happened to a fleet, in one list: when, what, who, why.

It is made of what the control plane keeps: operations, decisions about drift, refused
registrations, failing tasks, the trainer's signs, and the last beats of dead nodes.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from embertide._common.terminal import age_text
from embertide.server.cli.control_client import enum_name
from embertide.server.cli.drift_view import outcome_name
from embertide.server.console.source import Reading
from embertide.v1 import control_pb2

KINDS = ("node", "operation", "drift", "trainer", "plan", "refused", "task")
SHOWN_MAX = 300


class Event(NamedTuple):
    """Something that happened.

    Attributes:
        at_ms: Wall clock.
        kind: One of KINDS.
        what: A sentence.
        who: Who did it; empty: nobody did.
        why: The reason that was given, or the cause.
        operation: Id of the operation that it is about; empty: it is about none.
    """

    at_ms: int
    kind: str
    what: str
    who: str = ""
    why: str = ""
    operation: str = ""

    def matches(self, text: str) -> bool:
        """Return whether any of its words holds a text, in any case."""
        return text.casefold() in " ".join((self.what, self.who, self.why)).casefold()


def events_of(reading: Reading) -> list[Event]:
    """Return what happened, newest first."""
    facts: dict[str, Any] = reading.facts
    found = [
        *_nodes(facts),
        *_operations(reading.operations),
        *_decisions(reading.decisions),
        *_trainer(facts["trainer"]),
        *_plan(reading),
        *_faults(facts),
    ]
    return sorted(found, key=lambda event: event.at_ms, reverse=True)


def _nodes(facts: dict[str, Any]) -> Iterator[Event]:
    for node in facts["nodes"]:
        if node["state"] == "dead" and node["last_beat_ms"] is not None:
            yield Event(
                facts["at_ms"] - node["last_beat_ms"],
                "node",
                f"last beat of node {node['node']}, which is dead",
                why="it missed five beats",
            )


def _operations(answer: control_pb2.ListOperationsResponse) -> Iterator[Event]:
    for each in answer.operations:
        who, why = each.author or "a caller who was not asked", each.reason
        what = f"{each.kind} {each.id}"
        yield Event(
            each.created_ms,
            "operation",
            f"{what} was accepted: {each.buckets_total:,} buckets, {each.bytes_total:,} bytes",
            who,
            why,
            each.id,
        )
        if each.ended_ms:
            state = enum_name(control_pb2.OperationState, each.state).lower()
            took = age_text(each.ended_ms - each.created_ms)
            yield Event(
                each.ended_ms,
                "operation",
                f"{what} {state} after {took}: {each.buckets_done:,} of {each.buckets_total:,} "
                "buckets moved",
                who,
                each.message or why,
                each.id,
            )


def _decisions(answer: control_pb2.ListDecisionsResponse) -> Iterator[Event]:
    for each in answer.decisions:
        outcome = outcome_name(each.outcome).replace("_", " ")
        looks = f", {each.looks:,} looks in a row" if each.looks > 1 else ""
        yield Event(
            each.at_ms,
            "drift",
            f"{each.id}: {outcome}{looks}",
            "drift",
            each.why,
            each.operation_id,
        )


def _trainer(facts: dict[str, Any] | None) -> Iterator[Event]:
    if facts is None:
        return
    where = f"on {facts['host']} (pid {facts['pid']})"
    yield Event(facts["started_ms"], "trainer", f"the trainer {where} started")
    if facts["ended_ms"]:
        yield Event(
            facts["ended_ms"],
            "trainer",
            f"the trainer {where} {facts['state']} with exit status {facts['exit_status']}",
            why=facts["error"] or "",
        )


def _plan(reading: Reading) -> Iterator[Event]:
    plan = reading.answers.plan
    if plan is not None and plan.created_ms:
        yield Event(
            plan.created_ms,
            "plan",
            f"plan {plan.epoch} was written",
            plan.planner,
            operation=plan.operation_id,
        )


def _faults(facts: dict[str, Any]) -> Iterator[Event]:
    for each in facts["refused"]:
        yield Event(
            int(each["last_ms"]),
            "refused",
            f"node {each['node']} at {each['address']} was refused, {int(each['count']):,} times "
            "since the control plane started",
            why=each["message"],
        )
    for task in facts["tasks"]:
        if task["state"] in ("failing", "no thread"):
            yield Event(
                int(task["since_ms"]),
                "task",
                f"the control plane's {task['name']} is {task['state']}",
                why=task["error"],
            )
