"""The journal: what happens to a fleet, as lines of the log, each of which has its time.

Nodes that come, die and return, operations with who asked and why, plans that are not followed. It
is told of the core after each decision, and says what differs from the last time.
"""

import collections
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from embertide._common.quoting import shown
from embertide.server.core.control import Control
from embertide.v1 import control_pb2

_log = logging.getLogger(__name__)
State = control_pb2.OperationState


class _Seen(NamedTuple):
    """A node as it was looked at last."""

    incarnation: str
    alive: bool
    since_ms: int


class Journal:
    """Says what has changed. Used by one thread at a time.

    Attributes:
        counts: Events by name: node_died, node_returned, operation_succeeded, ...
    """

    def __init__(self, model: str, say: Callable[..., None] = _log.info) -> None:
        """Begin with what is known at the first look, which is no news."""
        self.counts: collections.Counter[str] = collections.Counter()
        self._model = model
        self._say = say
        self._nodes: dict[str, _Seen] | None = None
        self._operations: dict[str, int] | None = None
        self._problem = ""

    def look(self, core: Control, now_ms: int) -> None:
        """Say what has become of nodes, and whether plans are followed."""
        now: dict[str, _Seen] = {}
        before = self._nodes
        for member in core.fleet:
            alive = core.fleet.is_alive(member, now_ms)
            seen = (before or {}).get(member.name)
            same = seen is not None and (seen.incarnation, seen.alive) == (
                member.incarnation,
                alive,
            )
            now[member.name] = (
                seen if same and seen is not None else _Seen(member.incarnation, alive, now_ms)
            )
            if before is not None and not same:
                address = member.registration.node.address
                self._changed(core, member.name, address, seen, now[member.name], now_ms)
        for name in sorted((before or {}).keys() - now.keys()):
            self._count("node_removed", "node %s was removed", name)
        self._nodes = now
        problem = core.problem(now_ms)
        if problem != self._problem:
            self._problem = problem
            self._count("not_followed", "%s", problem or "nodes follow the plans of `state` again")

    def _changed(
        self, core: Control, name: str, address: str, seen: _Seen | None, now: _Seen, now_ms: int
    ) -> None:
        if seen is None:
            self._count("node_registered", "node %s at %s registered", name, shown(address))
        elif not now.alive:
            lost = core.buckets_without_owner(now_ms)
            text = f"; {lost:,} buckets have no live owner" if lost else ""
            self._count("node_died", "node %s is dead: it missed five beats%s", name, text)
        elif not seen.alive:
            away_s = (now.since_ms - seen.since_ms) / 1000
            self._count("node_returned", "node %s is back after %.1f s", name, away_s)
        else:
            self._count("node_restarted", "node %s at %s was started again", name, shown(address))

    def wrote(self, records: Iterable[control_pb2.OperationRecord | None]) -> None:
        """Say what has become of operations that were written."""
        known = self._operations if self._operations is not None else {}
        for record in records:
            if record is None:
                continue
            operation = record.operation
            before = known.get(operation.id)
            if operation.ended_ms:
                known.pop(operation.id, None)
            else:
                known[operation.id] = operation.state
            if before == operation.state and not operation.ended_ms:
                continue
            self._told(operation, is_new=before is None)
        self._operations = known

    def restored(self, records: Iterable[control_pb2.OperationRecord]) -> None:
        """Take in the operations that are at work, as after a start: they are no news."""
        self._operations = {
            each.operation.id: each.operation.state
            for each in records
            if not each.operation.ended_ms
        }

    def _told(self, operation: control_pb2.Operation, *, is_new: bool) -> None:
        state = State.Name(operation.state).removeprefix("OPERATION_STATE_")
        said = f"{operation.buckets_done:,} of {operation.buckets_total:,} buckets"
        if operation.message:
            said += f"; {operation.message}"
        if is_new and not operation.ended_ms:
            self._count(
                "operation_accepted",
                "operation %s (%s) of %s was accepted: %d buckets, %d bytes; reason: %s",
                operation.id,
                operation.kind,
                operation.author or "a caller who was not asked",
                operation.buckets_total,
                operation.bytes_total,
                shown(operation.reason) if operation.reason else "none given",
            )
        else:
            self._count(
                f"operation_{state.lower()}", "operation %s is %s: %s", operation.id, state, said
            )

    def _count(self, what: str, text: str, *values: object) -> None:
        self.counts[what] += 1
        self._say("%s: " + text, self._model, *values)
