"""Small planning problems from a seed, and what the best plan of each costs, by trying all.

The cost of an ownership is that of the cost model (server/core/plan/cost.py), evaluated bucket by
bucket: it shares no code with the planners' own ways to evaluate changes.
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embertide.server.core.demand import Demand
from embertide.server.core.plan.cost import MEAN_WEIGHT, busy_us_D, needed_NN
from embertide.server.core.plan.instance import Instance, rates
from embertide.server.core.plan.layout import layout_of
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.prices import Prices
from embertide.v1 import node_pb2, plan_pb2

_WINDOW_S = 5


class Shape(NamedTuple):
    """The distributions to draw from.

    Attributes:
        room: Bytes that all devices may hold, in copies of the whole model.
        skew: Standard deviation of the logarithm of a bucket's demand.
        locality: The same of a node's share of it.
    """

    nodes: int
    bits: tuple[int, ...]
    room: float
    skew: float = 1.0
    locality: float = 1.0
    copied: float = 0.1


def small_shape(random: np.random.Generator) -> Shape:
    """Draw a shape of 4 to 8 buckets and 2 or 3 nodes, memory tight to loose."""
    bits = ((2,), (1, 1), (2, 1), (3,), (2, 2))[random.integers(5)]
    return Shape(
        nodes=int(random.integers(2, 4)),
        bits=bits,
        room=float(random.uniform(1.1, 3.0)),
        skew=float(random.uniform(0.3, 1.5)),
        locality=float(random.uniform(0.0, 1.5)),
    )


def make_problem(
    seed: int,
    shape: Shape | None = None,
    loads: dict[str, node_pb2.NodeServiceGetLoadResponse] | None = None,
) -> Problem:
    """Return the problem of a seed: owners by chance, demand and sizes lognormal.

    Args:
        seed: Seed of all that is drawn.
        shape: The distributions; None: a small problem.
        loads: Gets what the nodes say, by name.
    """
    random = np.random.default_rng(seed)
    shape = shape or small_shape(random)
    plan = plan_pb2.Plan(epoch=1)
    for n in range(shape.nodes):
        node = plan.topology.nodes.add(name=f"node-{n}", address=f"10.0.0.{n}:1")
        node.devices.add(kind=plan_pb2.DEVICE_KIND_CPU)
    owners: list[int] = []
    sizes: list[int] = []
    for table, bits in enumerate(shape.bits):
        plan.tables.add(id=table, name=f"table-{table}", bucket_bits=bits, chunks=1)
        for bucket in range(1 << bits):
            owners.append(int(random.integers(shape.nodes)))
            sizes.append(int(1e5 * random.lognormal(0, 0.5)))
            plan.assignments.add(
                table_id=table,
                bucket_begin=bucket,
                bucket_count=1,
                owners=[plan_pb2.Owner(node=owners[-1])],
            )
    held_N = np.bincount(owners, weights=sizes, minlength=shape.nodes)
    for n, node in enumerate(plan.topology.nodes):
        budget = max(held_N[n], shape.room * sum(sizes) / shape.nodes)
        node.devices[0].budgets.add(tier=plan_pb2.TIER_DDR, budget_bytes=int(budget) + 1)
    keys_NB = (
        random.lognormal(0, shape.skew, (1, len(owners)))
        * random.lognormal(0, shape.locality, (shape.nodes, len(owners)))
        * 20_000
    ).astype(np.int64)
    keys_a_request = random.uniform(2, 200)
    demand = Demand()
    for n, node in enumerate(plan.topology.nodes):
        load = _load(n, plan, np.array(owners), np.array(sizes), keys_NB, shape)
        load.requests = int(keys_NB[n].sum() / keys_a_request)
        demand.take(node.name, load, plan.tables, 0)
        if loads is not None:
            loads[node.name] = load
    layout = layout_of(plan.assignments)
    return Problem(
        plan=plan,
        layout=layout,
        workload=demand.workload(plan.topology, layout),
        prices=Prices(),
    )


def _load(
    node: int,
    plan: plan_pb2.Plan,
    owner_B: NDArray[np.int64],
    size_B: NDArray[np.int64],
    keys_NB: NDArray[np.int64],
    shape: Shape,
) -> node_pb2.NodeServiceGetLoadResponse:
    """Return what a node says that does as much for each bucket."""
    load = node_pb2.NodeServiceGetLoadResponse(window_ms=1000 * _WINDOW_S, window=1)
    for at, bucket in enumerate(plan.assignments):
        mine = int(owner_B[at]) == node
        keys = int(keys_NB[node, at])
        hot = 0 if mine else int(keys * shape.copied)
        for_peers = sum(int(each) - int(each * shape.copied) for each in keys_NB[:, at] if mine) - (
            keys - int(keys * shape.copied) if mine else 0
        )
        load.buckets.add(
            table_id=bucket.table_id,
            bucket=bucket.bucket_begin,
            held=mine,
            reads=keys + for_peers if mine else 0,
            peer_reads=for_peers,
            asked=0 if mine else keys - hot,
            hot_reads=hot,
            resident_bytes=int(size_B[at]) if mine else 0,
            bytes_read=64 * (keys + for_peers) if mine else 0,
            reads_by_source=[0, keys + for_peers if mine else 0, 0],
        )
    for peer, each in enumerate(plan.topology.nodes):
        if peer != node:
            traffic = load.peers.add(node=each.name, calls=1)
            for table in plan.tables:
                asked = sum(
                    bucket.asked
                    for bucket, owner in zip(load.buckets, owner_B, strict=True)
                    if owner == peer and bucket.table_id == table.id
                )
                traffic.tables.add(table_id=table.id, keys=asked, bytes=80 * asked)
    return load


def optimum(instance: Instance, prices: Prices) -> float:
    """Return the least score of all ownerships that fit the budgets."""
    devices, buckets = len(instance.places_D), len(instance.buckets_B)
    sets = [
        list(chosen)
        for count in range(1, devices + 1)
        for chosen in itertools.combinations(range(devices), count)
    ]
    linear = dataclasses.replace(prices, call_us=0.0, called_us=0.0)
    nobody = dataclasses.replace(instance, wanted_NB=np.zeros_like(instance.wanted_NB))
    base_D = busy_us_D(nobody, instance.owned_DB, linear)
    rows = []
    for bucket in range(buckets):
        wanted_NB = np.zeros_like(instance.wanted_NB)
        wanted_NB[:, bucket] = instance.wanted_NB[:, bucket]
        alone = dataclasses.replace(instance, wanted_NB=wanted_NB)
        for chosen in sets:
            owned_DB = instance.owned_DB.copy()
            owned_DB[:, bucket] = False
            owned_DB[chosen, bucket] = True
            size_D = np.where(owned_DB[:, bucket], instance.bytes_B[bucket], 0.0)
            busy_D = busy_us_D(alone, owned_DB, linear) - base_D
            asked = rates(alone, owned_DB).asked_of_NN.ravel()
            rows.append(np.concatenate([busy_D, size_D, asked]))
    table_BSX = np.array(rows).reshape(buckets, len(sets), -1)
    halves = [_sums(table_BSX[: buckets // 2]), _sums(table_BSX[buckets // 2 :])]
    least = np.inf
    limit_D = np.maximum(instance.budget_D, instance.bytes_D(instance.owned_DB))
    for left_X in halves[0]:
        all_CX = halves[1] + left_X
        fits = (all_CX[:, devices : 2 * devices] <= limit_D + 0.5).all(axis=1)
        if not fits.any():
            continue
        all_CX = all_CX[fits]
        asked_CNN = all_CX[:, 2 * devices :].reshape(-1, *(len(instance.nodes_N),) * 2)
        needed_CNN = needed_NN(asked_CNN, instance.requests_N)
        calls_CN = prices.call_us * needed_CNN.sum(axis=2) + prices.called_us * needed_CNN.sum(
            axis=1
        )
        devices_N = np.bincount(instance.node_D)
        busy_CD = base_D + all_CX[:, :devices] + (calls_CN / devices_N)[:, instance.node_D]
        values_C = busy_CD.max(axis=1) + MEAN_WEIGHT * busy_CD.mean(axis=1)
        least = min(least, float(values_C.min()))
    return least


def _sums(table_BSX: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of all ways to choose one row of each bucket."""
    sums_CX = np.zeros((1, table_BSX.shape[2]))
    for rows_SX in table_BSX:
        sums_CX = (sums_CX[:, None, :] + rows_SX[None]).reshape(-1, table_BSX.shape[2])
    return sums_CX
