"""The owners in a trainer of several ranks, even by the reads of a fleet.

A trainer balances its ranks by the keys that it was asked for in the run before. A fleet that
serves the model knows it before a first run: its reads are of the same keys.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.differencing import difference
from embertide.v1 import control_pb2, plan_pb2

FORMAT = "embertide ranks 1"
"""Format of the file that `embertide train --plan` takes (docs/formats.md, "Plan of a run")."""
# A key's index entry, beside its row.
_KEY_BYTES = 64
# Cost of a bucket that nobody read, as a share of the mean bucket's: its keys may come.
_SHARE_MIN = 1e-3


class RanksPlan(NamedTuple):
    """A plan of a run.

    Attributes:
        owners: By table name, the rank that owns each bucket.
        unevenness: Work of the dearest rank, over the mean.
    """

    owners: dict[str, list[int]]
    unevenness: float


def for_ranks(
    tables: Iterable[plan_pb2.PlannedTable], read: Iterable[control_pb2.TableReads], ranks: int
) -> RanksPlan:
    """Spread the buckets of all tables over ranks, by largest differencing.

    Args:
        tables: With all their buckets.
        read: Reads of each bucket, by all nodes.
        ranks: Number of the trainer's ranks.

    Raises:
        RefusedError: Nothing was read, so nothing is known of any bucket.
    """
    planned = list(tables)
    cost_of = {table.id: np.zeros(1 << table.bucket_bits) for table in planned}
    for each in read:
        if each.table_id in cost_of:
            reads, size = (np.array(column, np.float64) for column in (each.reads, each.bytes_read))
            cost_of[each.table_id][: len(reads)] += reads * _KEY_BYTES + size
    if not any(cost.any() for cost in cost_of.values()):
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            "no node has reported reads: send requests and wait for a load window (some seconds), "
            "or start the trainer without a plan; it balances its ranks by itself",
        )
    cost_B = np.concatenate([cost_of[table.id] for table in planned])
    cost_B += _SHARE_MIN * cost_B.mean()
    rank_B = np.zeros(len(cost_B), np.int64)
    for rank, members in enumerate(difference(cost_B.tolist(), ranks)):
        rank_B[members] = rank
    ends = np.cumsum([1 << table.bucket_bits for table in planned])[:-1]
    owners = {
        table.name: of_table.tolist()
        for table, of_table in zip(planned, np.split(rank_B, ends), strict=True)
    }
    cost_R = np.bincount(rank_B, cost_B, ranks)
    return RanksPlan(owners, float(cost_R.max() / cost_R.mean()))
