"""The reads that nodes reported, and the keys that are hottest over all of them."""

from collections.abc import Mapping

from embertide.server.core.errors import invalid
from embertide.v1 import control_pb2, node_pb2

HOT_KEYS_MAX = 1000
_HOT_KEYS = 100


class Loads:
    """The last load of each node."""

    def __init__(self) -> None:
        """Begin with none."""
        self._by_node: dict[str, node_pb2.NodeServiceGetLoadResponse] = {}

    @property
    def by_node(self) -> Mapping[str, node_pb2.NodeServiceGetLoadResponse]:
        """The loads by node name."""
        return self._by_node

    def take(self, node: str, load: node_pb2.NodeServiceGetLoadResponse) -> None:
        """Replace what a node said before."""
        self._by_node[node] = load

    def forget(self, node: str) -> None:
        """Drop what a node said, as when it does not answer any more."""
        self._by_node.pop(node, None)

    def fleet(self, hot_keys: int) -> control_pb2.GetFleetLoadResponse:
        """Return all loads, and the hottest keys with their reads added up.

        Raises:
            RefusedError: More hot keys are wanted than are kept.
        """
        if hot_keys > HOT_KEYS_MAX:
            raise invalid(f"hot_keys is {hot_keys}; at most {HOT_KEYS_MAX}")
        answer = control_pb2.GetFleetLoadResponse()
        total: dict[tuple[int, int], node_pb2.HotKey] = {}
        for name in sorted(self._by_node):
            answer.nodes.add(node=name, load=self._by_node[name])
            for each in self._by_node[name].hot_keys:
                hot = total.setdefault(
                    (each.table_id, each.key),
                    node_pb2.HotKey(table_id=each.table_id, key=each.key),
                )
                hot.reads += each.reads
                hot.error += each.error
        hottest = sorted(total.values(), key=lambda each: (-each.reads, each.table_id, each.key))
        answer.hot_keys.extend(hottest[: hot_keys or _HOT_KEYS])
        return answer
