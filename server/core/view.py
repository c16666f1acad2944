"""What an operation sees when it decides: plan, fleet and time."""

import dataclasses
import functools
import math

from embertide.server.core.fleet import Fleet, Member
from embertide.server.core.plan.layout import PackedLayout
from embertide.v1 import plan_pb2


@dataclasses.dataclass(frozen=True)
class View:
    """What an operation sees at a tick."""

    plan: plan_pb2.Plan  # without assignments
    layout: PackedLayout
    fleet: Fleet
    now_ms: int

    def alive(self, position: int) -> bool:
        """Whether the node at a position lives."""
        return self.fleet.alive(self.plan.topology.nodes[position].name, self.now_ms)

    def member(self, position: int) -> Member | None:
        """Return the node at a position."""
        return self.fleet.get(self.plan.topology.nodes[position].name)

    def holds(self, position: int, epoch: int) -> bool:
        """Whether the node at a position has said that it holds all that a plan gives it."""
        member = self.member(position)
        return member is not None and member.holds(epoch)

    def name(self, position: int) -> str:
        """Return its name."""
        return self.plan.topology.nodes[position].name

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

    @functools.cached_property
    def _acted_epoch(self) -> float:
        return min((member.acted_epoch for member in self._live), default=math.inf)

    def all_act_by(self, epoch: int) -> bool:
        """Whether all live nodes have acknowledged a plan."""
        return self._acted_epoch >= epoch

    @functools.cached_property
    def _reached(self) -> float:
        return min((member.reached for member in self._live), default=math.inf)

    def all_have_reached(self, version: int) -> bool:
        """Whether all live nodes answer at a version or a later one, or answer nothing yet."""
        return self._reached >= version
