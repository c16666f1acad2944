"""The planner `join`: nodes that own nothing take their share, and nothing else moves.

A device's fair share of its group's bytes and reads is its share of the byte budgets, as in the
first plan. Each new device gets buckets of devices that have more than their own fair share, until
it has 90 % of both, and never more than 110 %. Stopping at 90 % takes the fewest moves. Letters of
shapes: D devices of the group, C copies of buckets on its devices, W kinds of work: bytes, reads.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from embertide.server.core.plan.groups import whole_groups
from embertide.server.core.plan.layout import Bucket, Place, budget_bytes, devices
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.workload import device_work

# A device may be this far from its fair share.
TOLERANCE = 0.1
# This part of the buckets that a device still needs is chosen at once, so that a large model takes
# hundreds of choices and not one for each bucket.
_AT_ONCE = 1 / 64
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclasses.dataclass(slots=True)
class _Group:
    """Work and owners of one group, as moves change them. Works are shares of the group's whole.

    Attributes:
        copies: The bucket of each copy.
        device_C: The device that has it now.
        work_CW: Its bytes and its reads.
        held_DW: Bytes and reads of each device.
        room_D: Bytes that still fit.
        fair_D: Fair share of each device.
    """

    places: list[Place]
    copies: list[Bucket]
    device_C: NDArray[np.int64]
    work_CW: Floats
    held_DW: Floats
    room_D: Floats
    fair_D: Floats
    owning: set[tuple[Bucket, int]]  # bucket and position of a node
    moved: dict[int, int]  # copies, and the device of which each was

    def fill(self, device: int) -> None:
        """Give a device without buckets its fair share."""
        fair = self.fair_D[device]
        while True:
            missing_W = fair - self.held_DW[device]
            if not (missing_W > TOLERANCE * fair).any():
                return
            chosen = self._choose(device, missing_W)
            if not len(chosen):
                return
            for copy in chosen:
                self._move(int(copy), device)

    def _choose(self, device: int, missing_W: Floats) -> NDArray[np.int64]:
        """Return the copies that suit best what a device misses."""
        slack = TOLERANCE * self.fair_D[device]
        fits_C = (self.work_CW <= missing_W + slack).all(axis=1)
        fits_C &= self.work_CW[:, 0] <= self.room_D[device]
        fits_C &= self._free_C(device)
        # A device that has less than its share gives nothing away, unless nobody else can.
        rich_DW = self.held_DW - (1 - TOLERANCE) * self.fair_D[:, None]
        left_CW = rich_DW[self.device_C] - self.work_CW
        for allowed_C in (left_CW >= -1e-12).all(axis=1), left_CW[:, 0] >= -1e-12:
            at_C = np.flatnonzero(fits_C & allowed_C)
            if len(at_C):
                break
        else:
            return np.zeros(0, np.int64)
        wanted = missing_W / max(missing_W.max(), 1e-300)
        work_CW = self.work_CW[at_C]
        size_C = work_CW.max(axis=1)
        # A copy is worse the further it leads from the missing work, and better the larger it is.
        aside_C = np.abs(work_CW[:, 0] * wanted[1] - work_CW[:, 1] * wanted[0])
        cost_C = aside_C - 0.25 * size_C - 1e-3 * rich_DW[self.device_C[at_C]].min(axis=1)
        count = max(1, int(missing_W.max() / max(size_C.mean(), 1e-300) * _AT_ONCE))
        chosen: NDArray[np.int64] = at_C[np.argsort(cost_C, kind="stable")[:count]]
        return chosen

    def _free_C(self, device: int) -> Bools:
        """Return which copies may go to a device: its node has no other of the bucket."""
        free_C = np.ones(len(self.copies), np.bool_)
        free_C[list(self.moved)] = False
        node = self.places[device].node
        if any(owner == node for _, owner in self.owning):
            free_C &= np.array([(at, node) not in self.owning for at in self.copies])
        return free_C

    def _move(self, copy: int, device: int) -> None:
        source, at = int(self.device_C[copy]), self.copies[copy]
        if (at, self.places[device].node) in self.owning or copy in self.moved:
            return
        work_W = self.work_CW[copy]
        self.held_DW[source] -= work_W
        self.held_DW[device] += work_W
        self.room_D[source] += work_W[0]
        self.room_D[device] -= work_W[0]
        self.owning.discard((at, self.places[source].node))
        self.owning.add((at, self.places[device].node))
        self.device_C[copy] = device
        self.moved[copy] = source


def _group(problem: Problem, places: list[Place]) -> _Group:
    known = devices(problem.plan.topology)
    position = {place: at for at, place in enumerate(places)}
    copies, owners = [], []
    for bucket, held in problem.layout.items():
        for place in held.owners:
            if place in position:
                copies.append(bucket)
                owners.append(place)
    work = [problem.workload.of(at, place.node) for at, place in zip(copies, owners, strict=True)]
    device_C = np.array([position[place] for place in owners], np.int64)
    bytes_C = np.array([each.bytes for each in work], np.float64)
    reads_C = np.array([each.reads for each in work], np.float64)
    measured = bool(bytes_C.sum())
    # Without measurements, buckets count as equally large, and as read as they are large.
    bytes_C = bytes_C if measured else np.ones(len(copies))
    reads_C = reads_C if reads_C.sum() else bytes_C
    work_CW = np.stack([bytes_C / bytes_C.sum(), reads_C / reads_C.sum()], axis=1)
    held_DW = np.zeros((len(places), 2))
    np.add.at(held_DW, device_C, work_CW)
    budget_D = np.array([budget_bytes(known[place]) for place in places], np.float64)
    fair_D = budget_D / budget_D.sum() if budget_D.sum() else np.full(len(places), 1 / len(places))
    room_D = budget_D / bytes_C.sum() - held_DW[:, 0]
    return _Group(
        places=places,
        copies=copies,
        device_C=device_C,
        work_CW=work_CW,
        held_DW=held_DW,
        room_D=room_D if measured else np.full(len(places), np.inf),
        fair_D=fair_D,
        owning={(at, place.node) for at, place in zip(copies, owners, strict=True)},
        moved={},
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """Gives nodes that own nothing their fair share. What it cannot give without harm stays."""

    def propose(self, problem: Problem) -> Proposal:
        """Return the owners of what moves to the new nodes."""
        topology = problem.plan.topology
        work = device_work(topology, problem.layout, problem.workload)
        owning = {at.node for held in problem.layout.values() for at in held.owners}
        owners: dict[Bucket, tuple[Place, ...]] = {}
        stories = []
        for number in sorted(whole_groups(topology)):
            places = [at for at in sorted(work) if topology.nodes[at.node].group == number]
            new = [
                device
                for device, at in enumerate(places)
                if at.node not in owning and at.node not in problem.shunned
            ]
            if not new:
                continue
            group = _group(problem, places)
            for device in new:
                group.fill(device)
            for copy, device in sorted(group.moved.items()):
                at, source = group.copies[copy], places[device]
                target = places[int(group.device_C[copy])]
                now = owners.get(at, problem.layout[at].owners)
                owners[at] = tuple(target if each == source else each for each in now)
            stories.append(_story(problem, group, new))
        return Proposal(
            owners=owners,
            explanation="; ".join(stories)
            or "every node owns buckets already, if few: `--planner auto` evens what they have",
        )


def _story(problem: Problem, group: _Group, new: Iterable[int]) -> str:
    """Say what each new node gets."""
    nodes = problem.plan.topology.nodes
    said = []
    for position in sorted({group.places[device].node for device in new}):
        of_node = [at for at, place in enumerate(group.places) if place.node == position]
        count = sum(int(group.device_C[copy]) in of_node for copy in group.moved)
        held, reads = group.held_DW[of_node].sum(axis=0).tolist()
        said.append(
            f"{nodes[position].name} gets {count} buckets, {held:.1%} of the bytes and {reads:.1%} "
            f"of the reads of its group; its budgets are {group.fair_D[of_node].sum():.1%}"
        )
    return "; ".join(said)
