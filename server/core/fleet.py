"""The fleet: which nodes there are, and what each said in its last beat.

A node registers under a name; each start of it is an incarnation. It is dead once it has missed
five beats, and alive again with the next one. After a start of ours it has 15 s to find us.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from embertide.server.core.errors import Code, RefusedError, invalid
from embertide.server.core.idempotency import check_id
from embertide.server.core.plan.validity import (
    NODES_MAX,
    check_model_name,
    check_node,
    check_tables,
)
from embertide.v1 import control_pb2, plan_pb2

BEATS_MISSED = 5
# With more nodes than the interval has ms, a node beats so many ms a node apart: 1,000 a second.
BEAT_MS_A_NODE = 1
# Nodes look for a control plane that is away every 0.6 s at the latest (control_link.cc). But on
# Kubernetes a new pod is found only once its Service lists it, which took 8 s on a real node.
FOUND_AGAIN_MS = 15_000
# A node that is removed while it lives is on its way out, as a pod is that was scaled away: what it
# says until it has ended makes it no member again.
GOING_MS = 60_000


@dataclasses.dataclass(slots=True)
class Member:
    """A node as it registered last and beat last.

    Attributes:
        beat: Unset until this incarnation's first.
        interval_ms: From one beat to the next, as it was told last.
        name: The node's name, read out of the registration once: each tick asks all for theirs.
        incarnation: The name of its start, likewise.
    """

    registration: control_pb2.RegisterNodeRequest
    heard_ms: int
    interval_ms: int = 0
    beat: control_pb2.HeartbeatRequest | None = None
    name: str = dataclasses.field(init=False)
    incarnation: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Read the names out."""
        self.name = self.registration.node.name
        self.incarnation = self.registration.request_id

    @property
    def newest(self) -> int:
        """Number of the newest version it can answer. 0: none."""
        versions = self.beat.versions if self.beat else self.registration.versions
        return versions.newest.number

    @property
    def acted_epoch(self) -> float:
        """Epoch of the plan that it reads by; infinity: it reads nothing at all yet."""
        if self.beat is None:
            return -1  # it may act by anything until it says
        return self.beat.plan_epoch or (0 if self.newest else math.inf)

    @property
    def reached(self) -> float:
        """The newest version that it answers; infinity: it answers nothing at all yet."""
        return -1 if self.beat is None else self.newest or math.inf

    def state(self, draining: str | None) -> control_pb2.NodeState.ValueType:
        """Return how it takes part, if it lives; `draining` names the node that is drained."""
        if self.name == draining:
            return control_pb2.NODE_STATE_DRAINING
        return control_pb2.NODE_STATE_READY if self.newest else control_pb2.NODE_STATE_LOADING

    def holds(self, epoch: int) -> bool:
        """Whether it holds all that the plan of that epoch gives it."""
        return self.beat is not None and self.beat.held_epoch >= epoch


def check_registration(request: control_pb2.RegisterNodeRequest) -> None:
    """Prove that a registration is well formed."""
    check_id("request_id", request.request_id)
    check_node(request.node)
    check_model_name(request.model)
    check_tables(request.tables)
    if request.table_bytes and len(request.table_bytes) != len(request.tables):
        raise invalid(
            f"table_bytes has {len(request.table_bytes)} entries for {len(request.tables)} tables; "
            "give one each, or none"
        )


class Fleet:
    """All members by name.

    Attributes:
        registrations: Those of all members, by name. Another object whenever one comes, leaves or
            registers again, and never changed.
        interval_ms: From one beat to the next, as nodes are told now.
        latest_epoch: The highest epoch of a plan by which any node has said that it acts.
    """

    def __init__(self, model: str, heartbeat_ms: int) -> None:
        """Begin without members."""
        self.model = model
        self.heartbeat_ms = heartbeat_ms
        self.latest_epoch = 0
        self._take({})
        self._going: dict[str, int] = {}  # until when a name that was removed stays away

    def __iter__(self) -> Iterator[Member]:
        """Yield the members by name."""
        return iter(self._sorted)

    def __len__(self) -> int:
        """Count the members."""
        return len(self._members)

    def get(self, name: str) -> Member | None:
        """Return the member of a name."""
        return self._members.get(name)

    def restore(self, nodes: Mapping[str, control_pb2.RegisterNodeRequest], now_ms: int) -> None:
        """Take the members that were written; one that is not known yet has time to find us."""
        missed_ms = BEATS_MISSED * max(self.heartbeat_ms, BEAT_MS_A_NODE * len(nodes))
        heard_ms = now_ms + max(0, FOUND_AGAIN_MS - missed_ms)
        members = {}
        for name, registration in nodes.items():
            known = self._members.get(name)
            same = known is not None and known.incarnation == registration.request_id
            members[name] = known if known and same else Member(registration, heard_ms)
        self._take(members)

    def _take(self, members: Mapping[str, Member]) -> None:
        """Have these members."""
        self._sorted = [members[name] for name in sorted(members)]
        self._members = {member.name: member for member in self._sorted}
        self.registrations = {member.name: member.registration for member in self._sorted}
        self.interval_ms = max(self.heartbeat_ms, BEAT_MS_A_NODE * len(self))

    def forgive(self, gap_ms: int) -> None:
        """Count no beat as missed in a time in which we ourselves did not run."""
        for member in self:
            member.heard_ms += gap_ms

    def alive(self, name: str, now_ms: int) -> bool:
        """Whether it is known and has not missed five beats."""
        member = self._members.get(name)
        return member is not None and self.is_alive(member, now_ms)

    def is_alive(self, member: Member, now_ms: int) -> bool:
        """Whether a member has not missed five beats."""
        return now_ms - member.heard_ms <= BEATS_MISSED * max(self.interval_ms, member.interval_ms)

    def lives(self, now_ms: int) -> Iterator[tuple[Member, bool]]:
        """Yield the members by name, and whether each of them lives."""
        for each in self._sorted:
            yield each, self.is_alive(each, now_ms)

    def tell_interval(self, name: str) -> int:
        """Return the interval, and remember that a node was told of it."""
        member = self._members.get(name)
        if member is not None:
            member.interval_ms = self.interval_ms
        return self.interval_ms

    def live(self, now_ms: int) -> list[Member]:
        """Return the members that live."""
        return [member for member, alive in self.lives(now_ms) if alive]

    def check(
        self,
        request: control_pb2.RegisterNodeRequest,
        tables: Sequence[plan_pb2.PlannedTable] | None,
        now_ms: int,
    ) -> None:
        """Prove that a node may be of this fleet. `tables` are the plan's, if there is one.

        Raises:
            RefusedError: It cannot be of this fleet.
        """
        node = request.node
        self._going = {name: until for name, until in self._going.items() if until > now_ms}
        if node.name in self._going:
            raise RefusedError(
                Code.UNAVAILABLE,
                f"node {node.name!r} was removed while it lived: its name is free in "
                f"{(self._going[node.name] - now_ms + 999) // 1000} s; try again",
            )
        known = self._members.get(node.name)
        address = known.registration.node.address if known else node.address
        if address != node.address and self.alive(node.name, now_ms):
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"node {node.name!r} is alive at {address}; two nodes have one name",
            )
        self._check_model(request, tables)
        if known is None and len(self) >= NODES_MAX:
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED, f"{len(self)} nodes are registered; remove some first"
            )

    def register(self, request: control_pb2.RegisterNodeRequest, now_ms: int) -> None:
        """Take a member in, or its new incarnation."""
        self._take(self._members | {request.node.name: Member(request, now_ms)})

    def _check_model(
        self,
        request: control_pb2.RegisterNodeRequest,
        tables: Sequence[plan_pb2.PlannedTable] | None,
    ) -> None:
        if request.model != self.model:
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"node {request.node.name!r} serves model {request.model!r}; this fleet serves "
                f"{self.model!r}",
            )
        others = [member for member in self if member.name != request.node.name]
        if others and others[0].registration.schema_id != request.schema_id:
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"node {request.node.name!r} has schema {request.schema_id:#x}; the fleet has "
                f"{others[0].registration.schema_id:#x}",
            )
        wanted = tables if tables is not None else others and others[0].registration.tables
        if wanted and list(request.tables) != list(wanted):
            named = ", ".join(f"{each.name} ({1 << each.bucket_bits} buckets)" for each in wanted)
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"tables of node {request.node.name!r} are not the fleet's: {named}",
            )

    def beat(self, request: control_pb2.HeartbeatRequest, now_ms: int) -> None:
        """Take a beat; one at or below the last seen changes nothing.

        Raises:
            RefusedError: The node is not known, or was replaced.
        """
        if request.sequence == 0:
            raise invalid("sequence is 0; the first beat is 1")
        member = self._members.get(request.node)
        if member is None:
            raise RefusedError(
                Code.NOT_FOUND, f"node {request.node[:80]!r} is not registered; register it"
            )
        if member.incarnation != request.incarnation:
            raise RefusedError(
                Code.FAILED_PRECONDITION,
                f"incarnation {request.incarnation[:80]!r} of node {request.node!r} was replaced "
                f"by {member.incarnation!r}",
            )
        if member.beat is None or request.sequence > member.beat.sequence:
            self.latest_epoch = max(self.latest_epoch, request.plan_epoch)
            member.beat = request
            member.heard_ms = now_ms

    def remove(self, name: str, now_ms: int) -> None:
        """Forget a member; one that lives is not taken in again for GOING_MS."""
        if self.alive(name, now_ms):
            self._going[name] = now_ms + GOING_MS
        self._take({each.name: each for each in self._sorted if each.name != name})
