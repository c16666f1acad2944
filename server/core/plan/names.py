"""Nodes by name: devices and moves that outlive a plan, and a plan without nodes that have left.

A plan names nodes by their positions in its topology, and positions change as nodes leave. So the
core works with names, and turns them into positions only where it makes a plan: a node of another
name is another node, wherever it stands.
"""

from collections.abc import Iterable, Set
from typing import NamedTuple

from embertide.server.core.plan.layout import Bucket, Holders, LaidPlan, Place, layout_of
from embertide.server.core.plan.moves import Move
from embertide.v1 import plan_pb2


def names_of(topology: plan_pb2.Topology) -> list[str]:
    """Return the names of the nodes by position."""
    return [node.name for node in topology.nodes]


class Device(NamedTuple):
    """A device of a node by the node's name, which means the same in every plan."""

    node: str
    device: int

    def __str__(self) -> str:
        """Return it as people write it."""
        return f"{self.node}/{self.device}"


class NamedHolders(NamedTuple):
    """The holders of a bucket, as Holders."""

    owners: tuple[Device, ...]
    joining: tuple[Device, ...] = ()
    leaving: tuple[Device, ...] = ()


class NamedMove(NamedTuple):
    """A move between devices by name, with the bytes that come and that go (BucketMove)."""

    at: Bucket
    source: Device | None
    target: Device | None
    bytes: int = 0
    freed_bytes: int = 0


class Roster:
    """The nodes of a topology, by name and by position."""

    def __init__(self, topology: plan_pb2.Topology) -> None:
        """Take the topology."""
        self._names = names_of(topology)
        self._positions = {name: position for position, name in enumerate(self._names)}
        self._devices = [len(node.devices) for node in topology.nodes]

    def has(self, node: str) -> bool:
        """Whether a node is of the topology."""
        return node in self._positions

    def device(self, at: Place) -> Device:
        """Return the device at a place of the topology."""
        return Device(self._names[at.node], at.device)

    def devices(self, places: Iterable[Place]) -> tuple[Device, ...]:
        """Return the devices at places of the topology."""
        return tuple(map(self.device, places))

    def holders(self, held: Holders) -> NamedHolders:
        """Return holders by name."""
        return NamedHolders(*map(self.devices, held))

    def find(self, device: Device) -> Place | None:
        """Return where a device is in the topology; None: its node or the device is not there."""
        position = self._positions.get(device.node)
        if position is None or device.device >= self._devices[position]:
            return None
        return Place(position, device.device)

    def find_move(self, move: NamedMove) -> Move | None:
        """Return a move between places of the topology; None: one of its devices is not there."""
        source = self.find(move.source) if move.source is not None else None
        target = self.find(move.target) if move.target is not None else None
        found = (source is None) == (move.source is None) and (target is None) == (
            move.target is None
        )
        return Move(move.at, source, target) if found else None

    def missing(self, moves: Iterable[NamedMove]) -> Device | None:
        """Return a device of some moves that is not in the topology; None: all are."""
        ends = (device for move in moves for device in (move.source, move.target))
        return next((each for each in ends if each is not None and self.find(each) is None), None)


def changes(
    before: plan_pb2.Plan, after: plan_pb2.Plan
) -> dict[Bucket, tuple[NamedHolders, NamedHolders]]:
    """Return the buckets whose holders differ between two plans of the same tables."""
    old, new = (
        {at: roster.holders(held) for at, held in layout_of(plan.assignments).items()}
        for plan in (before, after)
        for roster in (Roster(plan.topology),)
    )
    nobody = NamedHolders(())
    return {
        at: (old.get(at, nobody), new.get(at, nobody))
        for at in sorted(old.keys() | new.keys())
        if old.get(at) != new.get(at)
    }


def without_gone(
    plan: LaidPlan, registered: Set[str], named: Iterable[int] = ()
) -> LaidPlan | None:
    """Return a plan without the nodes that have left, under its epoch; None: all are there.

    The positions of those behind them change. Requires: no operation is at work, since its steps
    go by positions.

    Args:
        plan: Today's.
        registered: Names of the nodes that are members.
        named: Positions that stay whoever is registered.
    """
    head, layout = plan
    held = {at.node for holders in layout.in_use() for places in holders for at in places}
    stay = held.union(named)
    kept = [
        position
        for position, node in enumerate(head.topology.nodes)
        if node.name in registered or position in stay
    ] or [0]
    if len(kept) == len(head.topology.nodes):
        return None
    now = {position: at for at, position in enumerate(kept)}
    fewer = plan_pb2.Plan()
    fewer.CopyFrom(head)
    fewer.topology.Clear()
    fewer.topology.nodes.extend(head.topology.nodes[position] for position in kept)
    groups = {node.group for node in fewer.topology.nodes}
    fewer.topology.partial_groups.extend(
        group for group in head.topology.partial_groups if group in groups
    )
    del fewer.tier_shares[:]
    for share in head.tier_shares:
        if share.device.node in now:
            fewer.tier_shares.add().CopyFrom(share)
            fewer.tier_shares[-1].device.node = now[share.device.node]
    if kept == list(range(len(kept))):
        return LaidPlan(fewer, layout)  # only the last have left: the others keep their positions

    def moved(places: tuple[Place, ...]) -> tuple[Place, ...]:
        return tuple(Place(now[at.node], at.device) for at in places)

    return LaidPlan(fewer, layout.with_holders(lambda each: Holders(*map(moved, each))))
