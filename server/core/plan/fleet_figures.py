"""Figures of a fleet from its layout and what nodes read, in arrays: buckets may be a million."""

import collections
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from embertide.server.core.plan.bucket_columns import BucketColumns, Counts, FleetColumns
from embertide.server.core.plan.layout import PackedLayout, Place, devices
from embertide.v1 import plan_pb2


class RangeFigures(NamedTuple):
    """Ranges of neighbouring buckets of a table, an entry each.

    Attributes:
        begin: First buckets.
        buckets: How many each has.
        reads: Keys that requests wanted, wherever they were answered.
        max_reads: The most of one bucket.
        asked: Of `reads`, those that peers were asked for.
        ssd_reads: Reads that an SSD answered.
        bytes: Resident, all copies.
    """

    begin: Counts
    buckets: Counts
    reads: Counts
    max_reads: Counts
    asked: Counts
    ssd_reads: Counts
    bytes: Counts


class DeviceFigures(NamedTuple):
    """A device: buckets that it owns, those on their way to or from it, its reads and bytes."""

    buckets: int
    moving: int
    reads: int
    bytes: int


def device_figures(
    topology: plan_pb2.Topology, layout: PackedLayout, fleet: FleetColumns
) -> dict[Place, DeviceFigures]:
    """Return the figures of all devices."""
    held_by_code = layout.codes_in_use()
    owned: collections.Counter[Place] = collections.Counter()
    moving: collections.Counter[Place] = collections.Counter()
    for code, count in layout.buckets_by_code().items():
        held = held_by_code[code]
        for place in held.owners:
            owned[place] += count
        for place in (*held.joining, *held.leaving):
            moving[place] += count
    reads, size = _of_owners(topology, layout, fleet)
    return {
        place: DeviceFigures(owned[place], moving[place], reads[place], size[place])
        for place in devices(topology)
    }


def _of_owners(
    topology: plan_pb2.Topology, layout: PackedLayout, fleet: FleetColumns
) -> Iterable[collections.Counter[Place]]:
    """Add up the reads and bytes that nodes reported of buckets which they own, by place."""
    owners = sorted(
        (code, place) for code, held in layout.codes_in_use().items() for place in held.owners
    )
    places = sorted({place for _, place in owners})
    slots = {place: slot for slot, place in enumerate(places)}
    position = {node.name: at for at, node in enumerate(topology.nodes)}
    nodes = len(position)
    key_O = np.array([code * nodes + place.node for code, place in owners], np.int64)
    slot_O = np.array([slots[place] for _, place in owners], np.int64)
    node_L = np.array([position.get(name, -1) for name in fleet.names], np.int64)[fleet.node]
    code_L = _codes_of(layout, fleet.columns)
    key_L = np.where((node_L >= 0) & (code_L >= 0), code_L * nodes + node_L, -1)
    first, last = (np.searchsorted(key_O, key_L, side) for side in ("left", "right"))
    reads, size = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
    for nth in range(int(np.max(last - first, initial=0))):  # devices of a node that own a bucket
        owns = np.flatnonzero(first + nth < last)
        slot = slot_O[first[owns] + nth]
        np.add.at(reads, slot, fleet.columns.reads[owns])
        np.add.at(size, slot, fleet.columns.bytes[owns])
    return tuple(
        collections.Counter(dict(zip(places, each.tolist(), strict=True))) for each in (reads, size)
    )


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
    for code, count in layout.buckets_by_code().items():
        owners = held_by_code[code].owners
        answering = {group_of[at.node] for at in owners if at.node in alive}
        if not answering:
            unowned += count
        for group in {group_of[at.node] for at in owners} - answering if answering else ():
            by_group[group] += count
    return unowned, dict(sorted(by_group.items()))


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


def range_figures(
    tables: Iterable[plan_pb2.PlannedTable], columns: BucketColumns, ranges: int
) -> dict[int, RangeFigures]:
    """Return the figures of each table by its id, cut into at most so many ranges of one size.

    Buckets that a table does not have are left out.
    """
    buckets = {table.id: 1 << table.bucket_bits for table in tables}
    sums = _by_bucket(buckets, columns, ("wanted", "asked", "in_ssd", "bytes"))
    found = {}
    for table, count in buckets.items():
        begin = np.arange(0, count, -(-count // ranges))
        reads, asked, ssd_reads, resident = sums[table]
        found[table] = RangeFigures(
            begin,
            np.diff(begin, append=count),
            np.add.reduceat(reads, begin),
            np.maximum.reduceat(reads, begin),
            *(np.add.reduceat(each, begin) for each in (asked, ssd_reads, resident)),
        )
    return found


def table_reads(
    tables: Iterable[plan_pb2.PlannedTable], columns: BucketColumns
) -> dict[int, Counts]:
    """Return by table id, for each bucket [2, buckets]: keys looked up, and bytes read for them."""
    buckets = {table.id: 1 << table.bucket_bits for table in tables}
    return _by_bucket(buckets, columns, ("reads", "bytes_read"))


def _by_bucket(
    buckets: Mapping[int, int], columns: BucketColumns, fields: Sequence[str]
) -> dict[int, Counts]:
    """Add up fields over nodes: by table, [fields, buckets]; other buckets are left out."""
    sums = {table: np.zeros((len(fields), count), np.int64) for table, count in buckets.items()}
    values = [getattr(columns, field) for field in fields]
    for table, totals in sums.items():
        at = np.flatnonzero((columns.table == table) & (columns.bucket < buckets[table]))
        for total, value in zip(totals, values, strict=True):
            np.add.at(total, columns.bucket[at], value[at])
    return sums
