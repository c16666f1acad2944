"""The view that an operation decides by: plan, fleet and time."""

import dataclasses
import functools
import math

from embertide.server.core.fleet import Fleet, Member
from embertide.server.core.plan.layout import Bucket, PackedLayout
from embertide.server.core.plan.names import NamedHolders, Roster
from embertide.v1 import plan_pb2

# A wait lasts this long before people are told, since each message is written.
TOLD_AFTER_MS = 2000


class Patience:
    """The time that the same has been waited for."""

    def __init__(self) -> None:
        """Begin without a wait."""
        self._since_ms: int | None = None

    def lasts(self, now_ms: int) -> bool:
        """Go on waiting; whether it has lasted so long that people are told."""
        if self._since_ms is None:
            self._since_ms = now_ms
        return now_ms - self._since_ms >= TOLD_AFTER_MS

    def end(self) -> None:
        """Wait no more."""
        self._since_ms = None


@dataclasses.dataclass(frozen=True)
class View:
    """The plan, the fleet and the time at a tick."""

    plan: plan_pb2.Plan  # without assignments
    layout: PackedLayout
    fleet: Fleet
    now_ms: int

    @functools.cached_property
    def roster(self) -> Roster:
        """The nodes of the topology."""
        return Roster(self.plan.topology)

    def alive(self, node: str) -> bool:
        """Whether a node lives."""
        return self.fleet.alive(node, self.now_ms)

    def member(self, node: str) -> Member | None:
        """Return a node."""
        return self.fleet.get(node)

    def holds(self, node: str, epoch: int) -> bool:
        """Whether a node has said that it holds all that a plan gives it."""
        member = self.member(node)
        return member is not None and member.holds(epoch) and not self._is_ahead(member)

    def holders(self, at: Bucket) -> NamedHolders:
        """Return the holders of a bucket."""
        return self.roster.holders(self.layout[at])

    def live(self) -> list[Member]:
        """Return the live nodes of the topology; any other has no peers to ask."""
        return self._live

    @functools.cached_property
    def _live(self) -> list[Member]:
        named = {node.name for node in self.plan.topology.nodes}
        return [each for each in self.fleet.live(self.now_ms) if each.name in named]

    @functools.cached_property
    def live_names(self) -> frozenset[str]:
        """Their names."""
        return frozenset(member.name for member in self._live)

    def _is_ahead(self, member: Member) -> bool:
        """Whether it acts by a plan that follows none of ours."""
        return member.acted_epoch > self.plan.epoch and member.acted_epoch != math.inf

    def _acts(self, member: Member) -> float:
        return -1 if self._is_ahead(member) else member.acted_epoch

    @functools.cached_property
    def _acted_epoch(self) -> float:
        # Without a live node nobody has said anything.
        return min(map(self._acts, self._live), default=-1)

    def all_act_by(self, epoch: int) -> bool:
        """Whether all live nodes have acknowledged a plan, and there is one that lives."""
        return self._acted_epoch >= epoch

    def who_does_not_act_by(self, epoch: int) -> str:
        """Say which live node has not acknowledged a plan. Requires: not all have."""
        late = next((each for each in self._live if self._acts(each) < epoch), None)
        if late is None:
            return "no node lives"
        if self._is_ahead(late):
            return f"{late.name} acts by plan {late.acted_epoch}, which `state` does not have"
        return f"{late.name} has not said that it acts by plan {epoch}"

    @functools.cached_property
    def _reached(self) -> float:
        return min((member.reached for member in self._live), default=math.inf)

    def all_have_reached(self, version: int) -> bool:
        """Whether all live nodes answer at a version or a later one, or answer nothing yet."""
        return self._reached >= version
