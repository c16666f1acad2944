"""Rows of tables as nodes report them in a window: their number, the hottest, and miss curves."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from embertide.server.core.plan.bucket_columns import BucketColumns
from embertide.server.core.plan.layout import Place
from embertide.server.core.plan.workload import MissCurve, TableTraits
from embertide.v1 import node_pb2

# Hot keys of a table; more are read too seldom to be told apart in a window.
_HEAD_KEYS_MAX = 64
# With fewer reads of the hottest keys, their share says little.
_HEAD_READS_MIN = 100


@dataclasses.dataclass(slots=True)
class _Table:
    """A table on one node."""

    rows: int = 0
    buckets: int = 0  # held
    reads: int = 0  # here, of peers and of copies
    hot: dict[int, int] = dataclasses.field(default_factory=dict)  # reads by key, at least


@dataclasses.dataclass(slots=True)
class _Node:
    tables: dict[int, _Table]
    curves: dict[tuple[int, int], MissCurve]  # by device and table
    rooms: dict[int, int]


class RowDemand:
    """The last load of each node, by name; bounded by what a load holds."""

    def __init__(self) -> None:
        """Begin with none."""
        self._nodes: dict[str, _Node] = {}

    def take(
        self, name: str, load: node_pb2.NodeServiceGetLoadResponse, columns: BucketColumns
    ) -> None:
        """Replace what a node said before; `columns` are what its load says of buckets."""
        reads = columns.reads + columns.asked + columns.hot_reads
        rows = np.where(columns.held, columns.rows, 0)
        tables: dict[int, _Table] = {}
        for table in np.unique(columns.table).tolist():
            at = columns.table == table
            tables[table] = _Table(
                rows=int(rows[at].sum()),
                buckets=int(columns.held[at].sum()),
                reads=int(reads[at].sum()),
            )
        for key in load.hot_keys:
            if key.table_id in tables:
                tables[key.table_id].hot[key.key] = key.reads - key.error
        curves = {
            (each.device, each.table_id): MissCurve(
                tuple(map(float, each.bytes)), tuple(map(float, each.missed))
            )
            for each in load.miss_curves
            if len(each.bytes) == len(each.missed) and each.bytes
        }
        rooms = {each.device: each.bytes for each in load.row_rooms}
        self._nodes[name] = _Node(tables, curves, rooms)

    def forget(self, name: str) -> None:
        """Drop a node."""
        self._nodes.pop(name, None)

    def traits(self, table: int, buckets: int, usual: TableTraits) -> TableTraits:
        """Add to a table's traits how many rows it has, and how often the hottest are read.

        Args:
            table: Its id.
            buckets: It has so many.
            usual: Its other traits.
        """
        of_nodes = [node.tables[table] for node in self._nodes.values() if table in node.tables]
        held = sum(each.buckets for each in of_nodes)
        if not held:
            return usual
        reads: dict[int, int] = {}
        for each in of_nodes:
            for key, count in each.hot.items():
                reads[key] = reads.get(key, 0) + count
        head = sorted(reads.values(), reverse=True)[:_HEAD_KEYS_MAX]
        usual = usual._replace(rows=sum(each.rows for each in of_nodes) / held * buckets)
        if sum(head) < _HEAD_READS_MIN:
            return usual
        total = sum(each.reads for each in of_nodes)
        return usual._replace(head_keys=len(head), head_share=min(1.0, sum(head) / total))

    def curves(self, names: Sequence[str]) -> Mapping[tuple[Place, int], MissCurve]:
        """Return the curves by place and table, for nodes by their positions."""
        return {
            (Place(position, device), table): curve
            for position, name in enumerate(names)
            if name in self._nodes
            for (device, table), curve in self._nodes[name].curves.items()
        }

    def rooms(self, names: Sequence[str]) -> Mapping[Place, float]:
        """Return the bytes that rows may take in DDR, by place."""
        return {
            Place(position, device): float(room)
            for position, name in enumerate(names)
            if name in self._nodes
            for device, room in self._nodes[name].rooms.items()
        }
