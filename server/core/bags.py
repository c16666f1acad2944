"""Keys in the bags of pooled tables, estimated from the sums that peers return.

A peer that answers the share s of a node's keys of a table has some of a bag of L keys with
probability 1 - (1 - s)^L, if they fall to owners by chance. Then it has k = L s / (1 - (1 - s)^L)
of them in the mean and returns one sum for them. Nodes report keys and sums by peer, which is k; s
follows from the same keys and from the part of its keys that a node asks of peers. L is what
explains the sums of all pairs together.

Counts are of what was asked between two loads, and halve as those of demand.py do.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
import scipy

from embertide.server.core.plan.wire import expected_sums
from embertide.v1 import node_pb2

KEYS_MAX = 10_000.0
# Fewer sums say nothing.
_SUMS_MIN = 100.0

_Pair = tuple[str, int]  # peer and table


@dataclasses.dataclass(slots=True)
class _Asked:
    """A node's pooled keys and their sums, by peer and table.

    Attributes:
        last: Since its start, as reported last.
        counts: Sums and keys that came since, halving.
    """

    last: dict[_Pair, tuple[int, int]]
    counts: dict[_Pair, tuple[float, float]]


class Bags:
    """The sums that nodes report, by name."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._nodes: dict[str, _Asked] = {}

    def take(self, name: str, load: node_pb2.NodeServiceGetLoadResponse, keep: float) -> None:
        """Add what a node asked since its last load, and keep a share of what was before."""
        said = {
            (peer.node, table.table_id): (table.sum_keys, table.sums)
            for peer in load.peers
            for table in peer.tables
            if table.sums
        }
        node = self._nodes.get(name)
        if node is None:
            self._nodes[name] = _Asked(said, {})
            return
        for pair in node.counts.keys() | said.keys():
            keys, sums = node.counts.get(pair, (0.0, 0.0))
            now, before = said.get(pair, (0, 0)), node.last.get(pair, (0, 0))
            if now[1] < before[1]:  # it has started again
                before = (0, 0)
            node.counts[pair] = (
                keys * keep + max(0, now[0] - before[0]),
                sums * keep + max(0, now[1] - before[1]),
            )
        node.last = said

    def forget(self, name: str) -> None:
        """Drop a node, as when it is removed."""
        self._nodes.pop(name, None)

    def clear(self) -> None:
        """Drop all, as when tables change."""
        self._nodes.clear()

    def keys(self, table: int, asked: Mapping[str, float], sent_share: float) -> float:
        """Return the mean keys of a bag of a table; 1: it is not known.

        Args:
            table: Its id.
            asked: By node, the share of the keys that its requests want of it which peers answer.
            sent_share: Share of the keys asked that are sent (workload.py).
        """
        pairs: list[tuple[float, float, float]] = []  # keys, sums, share of the node's keys
        for name, node in self._nodes.items():
            counts = [count for (_, of), count in node.counts.items() if of == table and count[0]]
            total = sum(keys for keys, _ in counts)
            share = asked.get(name, 0.0)
            if share > 0:
                pairs += [(keys, sums, share * keys / total) for keys, sums in counts]
        return _solved(pairs, sent_share)


def _solved(pairs: list[tuple[float, float, float]], sent_share: float) -> float:
    """Return the keys of a bag with which pairs return as many sums as they do."""
    keys_P, sums_P, share_P = np.array(pairs, np.float64).reshape(-1, 3).T
    keys_P = keys_P / sent_share
    share_P = np.minimum(share_P, 1.0)
    sums = float(sums_P.sum())

    def missing(bag_keys: float) -> float:
        """Return by how much too few sums come back with so many keys a bag."""
        expected_P = expected_sums(keys_P / (bag_keys * share_P), share_P, bag_keys)
        return sums - float(expected_P.sum())

    if sums < _SUMS_MIN or missing(1.0) >= 0:
        return 1.0
    if missing(KEYS_MAX) <= 0:
        return KEYS_MAX
    return float(scipy.optimize.brentq(missing, 1.0, KEYS_MAX, rtol=1e-6))
