"""The reads that nodes reported, and the keys that are hottest over all of them."""

from collections.abc import Iterable, Mapping

from embertide.server.core.errors import invalid
from embertide.server.core.plan.bucket_columns import BucketColumns, bucket_columns
from embertide.v1 import control_pb2, node_pb2

HOT_KEYS_MAX = 1000
_HOT_KEYS = 100


def hottest(
    loads: Iterable[node_pb2.NodeServiceGetLoadResponse], count: int
) -> list[node_pb2.HotKey]:
    """Return the hottest keys with their reads added up, most read first.

    Raises:
        RefusedError: More are wanted than are kept.
    """
    if count > HOT_KEYS_MAX:
        raise invalid(f"hot_keys is {count}; at most {HOT_KEYS_MAX}")
    total: dict[tuple[int, int], node_pb2.HotKey] = {}
    for load in loads if count else ():
        for each in load.hot_keys:
            hot = total.setdefault(
                (each.table_id, each.key), node_pb2.HotKey(table_id=each.table_id, key=each.key)
            )
            hot.reads += each.reads
            hot.error += each.error
    return sorted(total.values(), key=lambda each: (-each.reads, each.table_id, each.key))[:count]


class Loads:
    """The last load of each node.

    Attributes:
        version: Grows with every change.
        columns: What the loads say of buckets, by node name.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.version = 0
        self.columns: dict[str, BucketColumns] = {}
        self._by_node: dict[str, node_pb2.NodeServiceGetLoadResponse] = {}

    @property
    def by_node(self) -> Mapping[str, node_pb2.NodeServiceGetLoadResponse]:
        """The loads by node name."""
        return self._by_node

    def take(
        self,
        node: str,
        load: node_pb2.NodeServiceGetLoadResponse,
        columns: BucketColumns | None = None,
    ) -> BucketColumns:
        """Replace what a node reported before; return its columns, made here unless given."""
        self._by_node[node] = load
        self.columns[node] = columns if columns is not None else bucket_columns(load)
        self.version += 1
        return self.columns[node]

    def forget(self, node: str) -> None:
        """Drop what a node reported, as when it does not answer any more."""
        if self._by_node.pop(node, None) is not None:
            del self.columns[node]
            self.version += 1

    def fleet(self, hot_keys: int) -> control_pb2.GetFleetLoadResponse:
        """Return all loads, and the hottest keys with their reads added up.

        Raises:
            RefusedError: More hot keys are wanted than are kept.
        """
        return control_pb2.GetFleetLoadResponse(
            nodes=[
                control_pb2.NodeLoad(node=name, load=self._by_node[name])
                for name in sorted(self._by_node)
            ],
            hot_keys=hottest(self._by_node.values(), hot_keys or _HOT_KEYS),
        )
