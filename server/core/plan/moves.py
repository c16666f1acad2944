"""Moves: what leads from one layout to another, and the plans that carry a move out.

A move is four plans (the table in plan.proto); taking it back is two, one if it was only joining.
Between two devices of one node, owners may not name the node twice: there the target owns and the
source leaves already in the second plan, and the third repeats it.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from embertide.server.core.plan.layout import (
    Bucket,
    Holders,
    Layout,
    PackedLayout,
    Place,
    packed,
    place,
)
from embertide.v1 import control_pb2, plan_pb2


class Step(enum.IntEnum):
    """Where the moves on their way stand; the numbers are those of OperationRecord.step."""

    NONE = 0
    JOINING = 1
    BOTH_OWN = 2
    LEAVING = 3
    DROPPED = 4
    TAKEN_BACK = 5
    HOT_ROWS = 6


class Move(NamedTuple):
    """A bucket whose owner changes; without a source one is added, without a target removed."""

    at: Bucket
    source: Place | None
    target: Place | None

    @property
    def inside_node(self) -> bool:
        """Whether it goes from one device of a node to another."""
        return bool(self.source and self.target and self.source.node == self.target.node)

    def reversed(self) -> "Move":
        """Return the move that undoes it."""
        return Move(self.at, self.target, self.source)


def move_of(message: control_pb2.BucketMove) -> Move:
    """Read a BucketMove."""
    return Move(
        Bucket(message.table_id, message.bucket),
        place(message.source) if message.HasField("source") else None,
        place(message.target) if message.HasField("target") else None,
    )


def _without(places: tuple[Place, ...], *gone: Place | None) -> tuple[Place, ...]:
    return tuple(each for each in places if each not in gone)


def _replaced(
    places: tuple[Place, ...], old: Place | None, *new: Place | None
) -> tuple[Place, ...]:
    """Put `new` where `old` stands, at the end if it does not."""
    entering = tuple(each for each in new if each is not None)
    kept = _without(places, *(each for each in entering if each != old))
    if old not in kept:
        return (*kept, *entering)
    at = kept.index(old)
    return (*kept[:at], *entering, *kept[at + 1 :])


def _joined(held: Holders, move: Move) -> Holders:
    if move.target is None or move.target in held.owners:
        return held
    return held._replace(joining=_replaced(held.joining, None, move.target))


def _both_own(held: Holders, move: Move) -> Holders:
    if move.target is None:
        return held
    if move.inside_node:
        return _left(held, move)
    owners = _replaced(held.owners, move.source, move.source, move.target)
    return held._replace(owners=owners, joining=_without(held.joining, move.target))


def _left(held: Holders, move: Move) -> Holders:
    return Holders(
        owners=_replaced(held.owners, move.source, move.target),
        joining=_without(held.joining, move.target),
        leaving=_replaced(held.leaving, None, move.source),
    )


def _dropped(held: Holders, move: Move) -> Holders:
    return held._replace(leaving=_without(held.leaving, move.source))


def _taken_back(held: Holders, move: Move) -> Holders:
    """Undo a move at any step but the last; a target that owned leaves, as a source would."""
    if move.target is not None and move.target in held.leaving:
        return held._replace(leaving=_without(held.leaving, move.target))
    joining = _without(held.joining, move.target)
    if move.target is None or move.target not in held.owners:
        if move.source is not None and move.source in held.leaving:
            return Holders(
                (*held.owners, move.source), joining, _without(held.leaving, move.source)
            )
        return held._replace(joining=joining)
    leaving = (*_without(held.leaving, move.source), move.target)
    return Holders(_replaced(held.owners, move.target, move.source), joining, leaving)


_STEPS = {
    Step.JOINING: _joined,
    Step.BOTH_OWN: _both_own,
    Step.LEAVING: _left,
    Step.DROPPED: _dropped,
    Step.TAKEN_BACK: _taken_back,
}


def stepped(layout: Layout, moves: Iterable[Move], step: Step) -> PackedLayout:
    """Return the layout after `step` of the moves."""
    before = packed(layout)
    after: dict[Bucket, Holders] = {}
    for move in moves:
        held = after.get(move.at)
        after[move.at] = _STEPS[step](before[move.at] if held is None else held, move)
    return before.changed(after)


def arrived(layout: Layout, moves: Iterable[Move]) -> dict[Bucket, tuple[Place, ...]]:
    """Return the owners of the moved buckets after all moves."""
    owners: dict[Bucket, tuple[Place, ...]] = {}
    for move in moves:
        before = owners.get(move.at, layout[move.at].owners)
        owners[move.at] = _replaced(before, move.source, move.target)
    return owners


def still_to_make(layout: Layout, moves: Iterable[Move]) -> list[Move]:
    """Return what is left of moves that are on their way: a target may own, a source have left."""
    left = []
    for move in moves:
        owners = layout[move.at].owners
        source = move.source if move.source in owners else None
        target = move.target if move.target not in owners else None
        if source is not None or target is not None:
            left.append(Move(move.at, source, target))
    return left


def moves_to(
    plan: plan_pb2.Plan, layout: Layout, owners: Mapping[Bucket, tuple[Place, ...]]
) -> list[Move]:
    """Return the moves that give buckets these owners; an order that changes alone moves nothing.

    A bucket stays inside a node where it can, then inside a group.
    """
    moves: list[Move] = []
    group_of = [node.group for node in plan.topology.nodes]
    for at, wanted in owners.items():
        owned = layout[at].owners
        lost = [each for each in owned if each not in wanted]
        gained = [each for each in wanted if each not in owned]
        pairs = [(_distance(group_of, old, new), old, new) for old in lost for new in gained]
        for distance, old, new in sorted(pairs):
            if distance < 2 and old in lost and new in gained:
                moves.append(Move(at, old, new))
                lost.remove(old)
                gained.remove(new)
        moves += [Move(at, None, new) for new in gained]
        moves += [Move(at, old, None) for old in lost]
    # Owners are added before others are removed alone: a bucket never has fewer owners meanwhile.
    return sorted(moves, key=lambda move: move.target is None)


def _distance(group_of: Sequence[int], a: Place, b: Place) -> int:
    """0 inside a node, 1 inside a group, 2 across groups."""
    if a.node == b.node:
        return 0
    return 1 if group_of[a.node] == group_of[b.node] else 2
