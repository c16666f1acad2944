"""Figures of a fleet from its layout and what nodes read, in arrays: buckets may be a million."""

import collections
import operator
from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embertide.server.core.plan.layout import PackedLayout, Place, devices
from embertide.v1 import node_pb2, plan_pb2

Counts = NDArray[np.int64]


class BucketColumns(NamedTuple):
    """The columns that a node said of buckets, an entry each.

    Attributes:
        table: Table ids.
        bucket: Buckets of the tables.
        reads: Keys looked up there.
        bytes: Resident.
        peer_reads: Of `reads`, those that peers asked for.
        asked: Keys of own requests that peers were asked for.
        hot_reads: Keys of own requests that copies answered.
    """

    table: Counts
    bucket: Counts
    reads: Counts
    bytes: Counts
    peer_reads: Counts
    asked: Counts
    hot_reads: Counts

    @property
    def wanted(self) -> Counts:
        """Reads that own requests wanted of each bucket, wherever it was answered."""
        wanted: Counts = self.reads - self.peer_reads + self.asked + self.hot_reads
        return wanted


_FIELDS = ("table_id", "bucket", "reads", "resident_bytes", "peer_reads", "asked", "hot_reads")


def bucket_columns(load: node_pb2.NodeServiceGetLoadResponse) -> BucketColumns:
    """Return what a node said of its buckets."""
    buckets, count = load.buckets, len(load.buckets)
    return BucketColumns(
        *(np.fromiter(map(operator.attrgetter(f), buckets), np.int64, count) for f in _FIELDS)
    )


class DeviceFigures(NamedTuple):
    """A device: buckets that it owns, those on their way to or from it, its reads and bytes."""

    buckets: int
    moving: int
    reads: int
    bytes: int


def device_figures(
    topology: plan_pb2.Topology, layout: PackedLayout, columns: Mapping[str, BucketColumns]
) -> dict[Place, DeviceFigures]:
    """Return the figures of all devices; `columns` are those of nodes by name."""
    held_by_code = layout.codes_in_use()
    owned: collections.Counter[Place] = collections.Counter()
    moving: collections.Counter[Place] = collections.Counter()
    for code, count in buckets_by_code(layout).items():
        held = held_by_code[code]
        for place in held.owners:
            owned[place] += count
        for place in (*held.joining, *held.leaving):
            moving[place] += count
    reads: collections.Counter[Place] = collections.Counter()
    size: collections.Counter[Place] = collections.Counter()
    for position, node in enumerate(topology.nodes):
        said = columns.get(node.name)
        if said is None:
            continue
        codes = _codes_of(layout, said)
        laid = codes >= 0
        reads_C = np.bincount(codes[laid], weights=said.reads[laid])
        bytes_C = np.bincount(codes[laid], weights=said.bytes[laid])
        for code in np.unique(codes[laid]).tolist():
            for place in held_by_code[code].owners:
                if place.node == position:
                    reads[place] += round(reads_C[code])
                    size[place] += round(bytes_C[code])
    return {
        place: DeviceFigures(owned[place], moving[place], reads[place], size[place])
        for place in devices(topology)
    }


def unowned_buckets(
    topology: plan_pb2.Topology, layout: PackedLayout, living: Set[str]
) -> tuple[int, dict[int, int]]:
    """Count buckets without a live owner, and by group those that only other groups answer.

    Args:
        topology: Of the plan.
        layout: Who owns what.
        living: Names of the nodes that live.
    """
    group_of = {at: node.group for at, node in enumerate(topology.nodes)}
    alive = {at for at, node in enumerate(topology.nodes) if node.name in living}
    held_by_code = layout.codes_in_use()
    unowned, by_group = 0, collections.Counter[int]()
    for code, count in buckets_by_code(layout).items():
        owners = held_by_code[code].owners
        answering = {group_of[at.node] for at in owners if at.node in alive}
        if not answering:
            unowned += count
        for group in {group_of[at.node] for at in owners} - answering if answering else ():
            by_group[group] += count
    return unowned, dict(sorted(by_group.items()))


def buckets_by_code(layout: PackedLayout) -> dict[int, int]:
    """Count the buckets of each distinct set of holders."""
    total = np.zeros(0, np.int64)
    for codes in layout.codes.values():
        counts = np.bincount(codes[codes >= 0])
        if len(counts) > len(total):
            total = np.concatenate([total, np.zeros(len(counts) - len(total), np.int64)])
        total[: len(counts)] += counts
    return {code: int(total[code]) for code in np.flatnonzero(total).tolist()}


def _codes_of(layout: PackedLayout, said: BucketColumns) -> Counts:
    """Return the code of each bucket that a node spoke of; -1: the layout does not have it."""
    found = np.full(len(said.table), -1, np.int64)
    for table in np.unique(said.table).tolist():
        codes = layout.codes.get(table)
        if codes is None:
            continue
        at = np.flatnonzero((said.table == table) & (said.bucket < len(codes)))
        found[at] = codes[said.bucket[at]]
    return found
