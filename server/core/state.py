"""State that outlives the control plane, and the store that keeps it (docs/formats.md)."""

import dataclasses
from typing import Protocol

from embertide.server.core.plan.layout import LaidPlan
from embertide.v1 import control_pb2

PLANS_KEPT = 16
# Moves and assignments of an operation that its record holds itself, some 40 KB.
MOVES_INSIDE_MAX = 1000
OPERATIONS_KEPT = 1000
# A leader that says nothing keeps others away for this long. It renews every third of it.
LEASE_MS = 3000
DECISIONS_KEPT = 1000
EVENTS_KEPT = 500  # of each kind; an event has some 250 bytes
# With their moves, which for a large model are some megabytes an operation.
OPERATIONS_KEPT_BYTES = 64 << 20


@dataclasses.dataclass(kw_only=True, slots=True)
class SavedState:
    """All that a control plane carries on from."""

    plan: LaidPlan | None = None
    nodes: dict[str, control_pb2.RegisterNodeRequest] = dataclasses.field(default_factory=dict)
    operations: dict[str, control_pb2.OperationRecord] = dataclasses.field(default_factory=dict)
    decisions: dict[str, control_pb2.Decision] = dataclasses.field(default_factory=dict)
    settings: control_pb2.DriftSettings | None = None
    events: dict[str, control_pb2.FleetEvent] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True, slots=True)
class Writes:
    """The changes of one decision; they are written as a whole or not at all.

    Attributes:
        plan: The plan that follows the newest one.
        nodes: By name; None: forgotten.
        operations: By id; None: not kept any more.
        made: Ids of those of `operations` whose request and moves are new. Of large ones these are
            written then, and not at each step.
        encoded: The bytes that `moves_alone` makes of some of `made`, where that was done before.
        decisions: About drift, by id; None: not kept any more.
        settings: The treatment of drift from now on.
        events: The fleet's events, by number; None: not kept any more.
        jumps: The plan's epoch need not follow the newest one: it was made of what nodes hold.
    """

    plan: LaidPlan | None = None
    nodes: dict[str, control_pb2.RegisterNodeRequest | None] = dataclasses.field(
        default_factory=dict
    )
    operations: dict[str, control_pb2.OperationRecord | None] = dataclasses.field(
        default_factory=dict
    )
    made: set[str] = dataclasses.field(default_factory=set)
    encoded: dict[str, bytes] = dataclasses.field(default_factory=dict)
    decisions: dict[str, control_pb2.Decision | None] = dataclasses.field(default_factory=dict)
    settings: control_pb2.DriftSettings | None = None
    events: dict[str, control_pb2.FleetEvent | None] = dataclasses.field(default_factory=dict)
    jumps: bool = False

    def __bool__(self) -> bool:
        """Whether there is something to write."""
        return (
            self.plan is not None
            or self.settings is not None
            or any((self.nodes, self.operations, self.decisions, self.events))
        )


def is_large(record: control_pb2.OperationRecord) -> bool:
    """Whether a record's request and moves are kept apart from it."""
    return len(record.moves) + len(record.request.target.assignments) > MOVES_INSIDE_MAX


def without_moves(record: control_pb2.OperationRecord) -> control_pb2.OperationRecord:
    """Return a copy of what changes from step to step."""
    copy = control_pb2.OperationRecord()
    for field, value in record.ListFields():
        if field.name in ("request", "moves"):
            continue
        if field.is_repeated:
            getattr(copy, field.name).extend(value)
        elif field.message_type is not None:
            getattr(copy, field.name).CopyFrom(value)
        else:
            setattr(copy, field.name, value)
    return copy


def moves_alone(record: control_pb2.OperationRecord) -> control_pb2.OperationRecord:
    """Return a copy of what stays the same."""
    return control_pb2.OperationRecord(request=record.request, moves=record.moves)


class StateStore(Protocol):
    """Keeps the state of one model. Every call may raise StateUnavailableError."""

    def take_term(self, holder: str = "") -> int:
        """Take a term above all others and its lease; who wrote before is shut out.

        Args:
            holder: Where the one that takes it can be reached.
        """

    def try_term(self, holder: str) -> tuple[int, str]:
        """Take a term if nobody has a lease: return it, or 0 and where the leader is."""

    def renew(self, term: int, holder: str) -> bool:
        """Keep the lease of a term for LEASE_MS from now; False: another term was taken.

        Raises:
            StateLostError: The store lost its keys.
        """

    def release(self, term: int) -> None:
        """End the lease of a term, if it is the highest."""

    def term(self) -> int:
        """Return the highest term taken. 0: none."""

    def check(self, term: int) -> None:
        """Prove that a term is still the highest, of the store in which it was taken.

        Raises:
            SupersededError: Another was taken.
            StateLostError: The store lost its keys.
        """

    def restore(self, term: int, holder: str, writes: Writes) -> int:
        """Write all that there is into a store that lost its keys; return a new term.

        Raises:
            SupersededError: Another has taken a term in it since.
        """

    def load(self, term: int = 0) -> SavedState:
        """Return what was written last.

        Args:
            term: The caller's term, which was taken in this store. 0: none.

        Raises:
            StateLostError: The store lost its keys since that term was taken.
        """

    def commit(self, term: int, writes: Writes) -> None:
        """Write all of it.

        Raises:
            SupersededError: The term is not the highest.
            StateLostError: The store lost its keys, or the plan does not follow its newest.
        """

    def plan(self, epoch: int) -> LaidPlan | None:
        """Return the plan of an epoch, or None if it is not kept."""
