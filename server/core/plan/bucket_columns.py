"""Columns of what a node reported of its buckets: a fleet may have a million of them.

Read out of the message once, when it comes; all that adds up buckets works on the arrays.
"""

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from embertide.v1 import node_pb2

Counts = NDArray[np.int64]


class BucketColumns(NamedTuple):
    """The columns that a node reported of buckets, an entry each.

    Attributes:
        table: Table ids.
        bucket: Buckets of the tables.
        reads: Keys looked up there.
        bytes: Resident.
        peer_reads: Of `reads`, those that peers asked for.
        asked: Keys of own requests that peers were asked for.
        hot_reads: Keys of own requests that copies answered.
        bytes_read: Payload bytes read for `reads`.
        rows: Stored, of buckets that are held.
        held: 1 for buckets that the node holds; else 0.
        in_tier: Of `reads`, those found in HBM, DDR and SSD: a row each.
    """

    table: Counts
    bucket: Counts
    reads: Counts
    bytes: Counts
    peer_reads: Counts
    asked: Counts
    hot_reads: Counts
    bytes_read: Counts
    rows: Counts
    held: Counts
    in_tier: Counts

    @property
    def wanted(self) -> Counts:
        """Reads that own requests wanted of each bucket, wherever it was answered."""
        wanted: Counts = self.reads - self.peer_reads + self.asked + self.hot_reads
        return wanted

    @property
    def in_ssd(self) -> Counts:
        """Reads that were found in the SSD."""
        found: Counts = self.in_tier[-1]
        return found


_FIELDS = (
    *("table_id", "bucket", "reads", "resident_bytes", "peer_reads", "asked", "hot_reads"),
    *("bytes_read", "rows", "held"),
)
_TIERS = 3
_SIMPLE = len(_FIELDS)  # fields of one number; `in_tier` has three
MAX_TOTAL = 1 << 52  # of one node's buckets; 2,000 nodes fit 63 bits


def bucket_columns(load: node_pb2.NodeServiceGetLoadResponse) -> BucketColumns:
    """Return what a node reported of its buckets.

    Raises:
        ValueError: A count is beyond any that can be right, so sums over a fleet would wrap around.
    """
    buckets = list(load.buckets)  # each time that the message is asked, it makes them again
    columns = [
        _checked(
            field, np.fromiter(map(operator.attrgetter(field), buckets), np.uint64, len(buckets))
        )
        for field in _FIELDS
    ]
    return BucketColumns._make((*columns, _in_tier(buckets)))


class FleetColumns(NamedTuple):
    """The columns of all nodes in one, so that nothing is done node by node.

    Attributes:
        names: The nodes.
        node: Of each entry its node, a place in `names`.
        columns: The entries, node by node.
    """

    names: Sequence[str]
    node: Counts
    columns: BucketColumns

    @classmethod
    def of(cls, columns: Mapping[str, BucketColumns]) -> Self:
        """Join the columns of nodes by name."""
        lengths = [len(each.table) for each in columns.values()]
        simple = [np.zeros(0, np.int64)] * _SIMPLE
        none = BucketColumns._make((*simple, np.zeros((_TIERS, 0), np.int64)))
        fields = zip(none, *columns.values(), strict=True)
        return cls(
            tuple(columns),
            np.repeat(np.arange(len(lengths)), lengths),
            BucketColumns._make(np.concatenate(each, axis=-1) for each in fields),
        )

    def by_node(self, counts: Counts) -> list[int]:
        """Add up entries by node."""
        total = np.zeros(len(self.names), np.int64)
        np.add.at(total, self.node, counts)
        return list(map(int, total))


def _checked(field: str, counts: NDArray[np.uint64]) -> Counts:
    total = float(counts.sum(dtype=np.float64))
    if total > MAX_TOTAL:
        raise ValueError(f"{field} of its buckets add up to {total:.4g}, beyond {MAX_TOTAL}")
    return counts.astype(np.int64)


def _in_tier(buckets: Sequence[node_pb2.BucketLoad]) -> Counts:
    """Return the first three of `reads_by_source`, which may have fewer entries."""
    sources = [each.reads_by_source[:_TIERS] for each in buckets]
    lengths = np.fromiter(map(len, sources), np.int64, len(sources))
    listed = itertools.chain.from_iterable(sources)
    flat = _checked("reads_by_source", np.fromiter(listed, np.uint64))
    firsts = np.cumsum(lengths) - lengths
    found = np.zeros((_TIERS, len(lengths)), np.int64)
    for tier in range(_TIERS):
        has = lengths > tier
        found[tier, has] = flat[firsts[has] + tier]
    return found
