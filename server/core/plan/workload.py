"""The measured work, and every device's reads and bytes by a plan."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embertide.server.core.plan.layout import Bucket, Layout, Place, devices, owner
from embertide.server.core.plan.moves import Move
from embertide.v1 import control_pb2, node_pb2, plan_pb2


class Work(NamedTuple):
    """One node's work for one bucket in the last load window."""

    reads: int = 0
    bytes: int = 0


class TableTraits(NamedTuple):
    """The measurements of a table.

    Attributes:
        row_bytes: Payload bytes of a row, as read.
        wire_bytes: Bytes that a key asked of a peer costs, request and answer together.
        sum_share: Share of the keys asked of peers whose bags the owner pools; 0 for sequences.
        tier_share: Shares of the keys looked up that HBM, DDR and SSD have; the rest have no row.
        sent_share: Share of the keys asked of peers that are sent: one that a request asks for
            twice is sent once.
        bag_keys: Mean keys of a bag of pooled keys; 1: unknown, or bags of one.
        vector_bytes: Bytes of a row or sum that a peer returns, with all that goes with it.
        rows: Rows of the table; 0: not known.
        head_keys: Keys known to be its hottest.
        head_share: Share of its reads that those get.
    """

    row_bytes: float = 64.0
    wire_bytes: float = 80.0
    sum_share: float = 0.0
    tier_share: tuple[float, float, float] = (0.0, 1.0, 0.0)
    sent_share: float = 1.0
    bag_keys: float = 1.0
    vector_bytes: float = 72.0
    rows: float = 0.0
    head_keys: int = 0
    head_share: float = 0.0


class MissCurve(NamedTuple):
    """The share of a table's lookups on a device that its SSD answers, by room in DDR.

    Attributes:
        bytes_P: Bytes of DDR that its rows there may take, ascending; the first is 0.
        missed_P: Share of the keys that is then read from the SSD; never rises.
    """

    bytes_P: tuple[float, ...]
    missed_P: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """The keys that each node's own requests want: N nodes in order, B buckets ascending, T tables.

    Attributes:
        wanted_NB: Keys a second, wherever they are answered.
        copied_NT: Share of the keys of buckets that a node does not hold which its copies answer.
        bytes_B: Resident bytes of one copy of a bucket, the largest that a node reported.
        traits: By table id.
        requests_N: Requests a second of each node's own clients; empty: not known.
        busy_us_N: CPU time a second of each node's process, as measured; empty or 0: not known.
        curves: Miss curves by device and table id; of those that have one.
        row_room: Bytes of DDR that rows may take on each device: its budget without the index and
            what is kept ready; of devices with an SSD tier.
    """

    wanted_NB: NDArray[np.float64]
    copied_NT: NDArray[np.float64]
    bytes_B: NDArray[np.float64]
    traits: Mapping[int, TableTraits]
    requests_N: NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0))
    busy_us_N: NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0))
    curves: Mapping[tuple[Place, int], MissCurve] = dataclasses.field(default_factory=dict)
    row_room: Mapping[Place, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Work by (bucket, position of the node); a bucket that nobody measured has none.

    Attributes:
        asking: The same demand by who asks; None: not known.
    """

    work: Mapping[tuple[Bucket, int], Work]
    asking: Asking | None = None

    def of(self, at: Bucket, node: int) -> Work:
        """Return what a node did for a bucket."""
        return self.work.get((at, node), Work())

    def moved(self, move: Move) -> Work:
        """Return what a move takes along: the source's reads, and the bytes of any copy."""
        if move.source is not None:
            return self.of(move.at, move.source.node)
        return Work(0, self._largest_copy.get(move.at, 0))

    @functools.cached_property
    def _largest_copy(self) -> Mapping[Bucket, int]:
        """Bytes of each bucket's largest copy."""
        largest: dict[Bucket, int] = {}
        for (at, _), work in self.work.items():
            largest[at] = max(largest.get(at, 0), work.bytes)
        return largest


def measured(
    topology: plan_pb2.Topology, loads: Mapping[str, node_pb2.NodeServiceGetLoadResponse]
) -> Workload:
    """Gather the loads that nodes reported, by name."""
    work = {}
    for position, node in enumerate(topology.nodes):
        for each in loads[node.name].buckets if node.name in loads else ():
            at = (Bucket(each.table_id, each.bucket), position)
            work[at] = Work(each.reads, each.resident_bytes)
    return Workload(work=work)


def device_work(
    topology: plan_pb2.Topology, layout: Layout, workload: Workload
) -> dict[Place, Work]:
    """Add up the work of each device under a layout."""
    reads = dict.fromkeys(devices(topology), 0)
    size = dict.fromkeys(reads, 0)
    for (at, node), work in workload.work.items():
        held = layout.get(at)
        for place in held.owners if held is not None else ():
            if place.node == node:
                reads[place] += work.reads
                size[place] += work.bytes
    return {place: Work(reads[place], size[place]) for place in reads}


def predicted(
    before: Mapping[Place, Work], moves: Iterable[Move], workload: Workload
) -> dict[Place, Work]:
    """Return the work of each device once the moves are made, if reads come as they came."""
    after = dict(before)
    for move in moves:
        taken = workload.moved(move)
        if move.target is not None:
            had = after[move.target]
            after[move.target] = Work(had.reads + taken.reads, had.bytes + taken.bytes)
        if move.source is not None:
            had = after[move.source]
            after[move.source] = Work(had.reads - taken.reads, had.bytes - taken.bytes)
    return after


def device_loads(
    before: Mapping[Place, Work], after: Mapping[Place, Work]
) -> list[control_pb2.DeviceLoad]:
    """Say both as messages, by place."""
    return [
        control_pb2.DeviceLoad(
            device=owner(place),
            reads_before=before[place].reads,
            reads_after=after[place].reads,
            bytes_before=before[place].bytes,
            bytes_after=after[place].bytes,
        )
        for place in sorted(before)
    ]


def skew(reads: Iterable[int]) -> float:
    """Return max over mean; 1 if nothing was read."""
    counts = list(reads)
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0
