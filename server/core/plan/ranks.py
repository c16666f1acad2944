"""The owners in a trainer of several ranks, even by the reads of a fleet.

A trainer balances its ranks by the keys that it was asked for in the run before. A fleet that
serves the model knows it before a first run: its reads are of the same keys.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.differencing import difference
from embertide.server.core.plan.layout import Bucket
from embertide.v1 import node_pb2, plan_pb2

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
    tables: Iterable[plan_pb2.PlannedTable], loads: Iterable[node_pb2.BucketLoad], ranks: int
) -> RanksPlan:
    """Spread the buckets of all tables over ranks, by largest differencing.

    Args:
        tables: With all their buckets.
        loads: Reads of each bucket, by any node.
        ranks: Number of the trainer's ranks.

    Raises:
        RefusedError: Nothing was read, so nothing is known of any bucket.
    """
    cost_of: dict[Bucket, int] = {}
    for each in loads:
        at = Bucket(each.table_id, each.bucket)
        cost_of[at] = cost_of.get(at, 0) + each.reads * _KEY_BYTES + each.bytes_read
    if not any(cost_of.values()):
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            "no node has reported reads: send requests and wait for a load window (some seconds), "
            "or start the trainer without a plan; it balances its ranks by itself",
        )
    planned = list(tables)
    buckets = [(t.name, Bucket(t.id, b)) for t in planned for b in range(1 << t.bucket_bits)]
    cost_B = np.array([cost_of.get(at, 0) for _, at in buckets], np.float64)
    cost_B += _SHARE_MIN * cost_B.mean()
    rank_B = np.zeros(len(buckets), np.int64)
    for rank, members in enumerate(difference(cost_B.tolist(), ranks)):
        rank_B[members] = rank
    owners: dict[str, list[int]] = {table.name: [] for table in planned}
    for (name, _), rank in zip(buckets, rank_B.tolist(), strict=True):
        owners[name].append(rank)
    cost_R = np.bincount(rank_B, cost_B, ranks)
    return RanksPlan(owners, float(cost_R.max() / cost_R.mean()))
