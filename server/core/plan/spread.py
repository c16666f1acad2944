"""Spreading whole tables over devices by their size: the first plan, and a group that joins.

A device's share of the bytes is its share of the byte budgets. It gets one run of neighbours of
each table: keys are hashed into buckets, so neighbours have nothing in common, and runs keep plans
small. The buckets of a table count as equally large.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.layout import Place
from embertide.v1 import plan_pb2

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A device that may get buckets.

    Attributes:
        name: As operators write it: NODE/DEVICE.
        bytes: Its budget. Without any budget in the whole group, devices count as equal.
    """

    place: Place
    name: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring buckets of a table that one device gets."""

    place: Place
    begin: int
    count: int


def spread(
    tables: Sequence[plan_pb2.PlannedTable],
    sites: Sequence[Site],
    table_bytes: Mapping[int, int] | None = None,
) -> dict[int, list[Run]]:
    """Return who gets which buckets, by table id.

    A device that rounding puts at a disadvantage in one table gets more of the next. A table with
    at least as many buckets as there are nodes reaches every node.

    Args:
        tables: All tables.
        sites: The devices of a group. Requires: one at least.
        table_bytes: Bytes of each table by id; None: not known, and buckets count as equal.

    Raises:
        RefusedError: The tables do not fit into the budgets.
    """
    budget_D = np.array([site.bytes for site in sites], np.float64)
    if table_bytes is not None:
        _check_total(sites, table_bytes)
    share_D = budget_D / budget_D.sum() if budget_D.sum() else np.full(len(sites), 1 / len(sites))
    given_D = np.zeros(len(sites))
    runs: dict[int, list[Run]] = {}
    for table in tables:
        buckets = 1 << table.bucket_bits
        size = table_bytes.get(table.id, 0) / buckets if table_bytes is not None else 1.0
        # A table without rows is spread too, as if it were small.
        size = size or 1.0
        wanted_D = share_D * (given_D.sum() + buckets * size) - given_D
        counts_D = _rounded(np.maximum(wanted_D, 0) / size, buckets, sites)
        room_D = (
            (budget_D - given_D) / size if table_bytes is not None else np.full(len(sites), np.inf)
        )
        _reach_all_nodes(counts_D, share_D, room_D, sites)
        given_D += counts_D * size
        begins_D = np.cumsum(counts_D) - counts_D
        runs[table.id] = [
            Run(site.place, int(begin), int(count))
            for site, begin, count in zip(sites, begins_D, counts_D, strict=True)
            if count
        ]
    if table_bytes is not None:
        _check_devices(sites, given_D)
    return runs


def _rounded(ideal_D: Floats, total: int, sites: Sequence[Site]) -> Ints:
    """Round to whole numbers of that sum, by largest remainder."""
    ideal_D = ideal_D * (total / ideal_D.sum())
    counts_D: Ints = np.floor(ideal_D + 1e-9).astype(np.int64)
    # Where remainders are equal, first devices come before second ones: few buckets meet all nodes.
    order = sorted(
        range(len(sites)),
        key=lambda at: (
            round(float(counts_D[at] - ideal_D[at]), 9),
            sites[at].place.device,
            sites[at].place.node,
        ),
    )
    counts_D[order[: total - int(counts_D.sum())]] += 1
    return counts_D


def _reach_all_nodes(
    counts_D: Ints, share_D: Floats, room_D: Floats, sites: Sequence[Site]
) -> None:
    """Give each node with room for it a bucket, if there are as many: then it has less to ask.

    The bucket comes from the device that has most for its share.
    """
    of_node: dict[int, list[int]] = {}
    for at, site in enumerate(sites):
        if share_D[at] > 0 and room_D[at] >= 1:
            of_node.setdefault(site.place.node, []).append(at)
    if int(counts_D.sum()) < len(of_node):
        return
    for devices in of_node.values():
        if any(counts_D[at] for at in devices):
            continue
        held_N = collections.Counter[int]()
        for at, site in enumerate(sites):
            held_N[site.place.node] += int(counts_D[at])
        rich = [
            at
            for at, site in enumerate(sites)
            if counts_D[at] and held_N[site.place.node] > 1 and share_D[at] > 0
        ]
        if not rich:
            return
        counts_D[max(rich, key=lambda at: (float(counts_D[at] / share_D[at]), -at))] -= 1
        counts_D[max(devices, key=lambda at: (float(share_D[at]), -at))] += 1


def _check_total(sites: Sequence[Site], table_bytes: Mapping[int, int]) -> None:
    total, budget = sum(table_bytes.values()), sum(site.bytes for site in sites)
    if total > budget:
        raise RefusedError(
            Code.RESOURCE_EXHAUSTED,
            f"the tables take {total:,} bytes, and the budgets of {len(sites)} devices are "
            f"{budget:,} together; raise them, or start further nodes",
        )


def _check_devices(sites: Sequence[Site], given_D: Floats) -> None:
    for site, given in zip(sites, given_D, strict=True):
        if given > site.bytes:
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED,
                f"device {site.name} has no room: its share of the tables is {int(given):,} bytes "
                f"in a budget of {site.bytes:,}; raise it, or start further nodes",
            )
