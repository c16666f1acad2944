"""A sharding task as a problem of our planners, and their answers as placements.

Every device is a node with one device, and asks for an equal share of the batch; a unit of time is
a batch. Tables have 8 to 64 buckets, the more the larger they are.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from bench.drift.simulator import LINE_BYTES, Machine, Outcome, Placement, Shard, simulate
from bench.drift.tasks import Task
from embertide.server.core.plan.bootstrap import first_plan
from embertide.server.core.plan.layout import Bucket, Holders, Place, layout_of
from embertide.server.core.plan.planner import Planner, Problem
from embertide.server.core.plan.prices import Prices
from embertide.server.core.plan.workload import Asking, TableTraits, Work, Workload
from embertide.v1 import plan_pb2

_BITS = (3, 6)
_BUCKETS_A_DEVICE = 64


def bucket_bits(task: Task, table: int) -> int:
    """Return how many buckets a table has: each is at most a 64th of a device, if it may be."""
    wanted = task.tables[table].bytes * _BUCKETS_A_DEVICE / task.capacity
    return min(max(_BITS[0], math.ceil(math.log2(max(1.0, wanted)))), _BITS[1])


def problem_of(task: Task, limit_s: float = 10.0) -> Problem:
    """Return the problem; today's plan spreads every table over all devices."""
    tables = [
        plan_pb2.PlannedTable(id=at, name=f"t{at}", bucket_bits=bucket_bits(task, at), chunks=1)
        for at in range(len(task.tables))
    ]
    nodes = [_node(at, task.capacity) for at in range(task.devices)]
    plan = first_plan(nodes, tables)
    layout = layout_of(plan.assignments)
    keys_B: list[NDArray[np.float64]] = []
    bytes_B: list[NDArray[np.float64]] = []
    for table, spread in zip(task.tables, task.spreads, strict=True):
        buckets = 1 << bucket_bits(task, len(keys_B))
        keys_B.append(task.samples * table.pooling * spread.by_hash(buckets))
        bytes_B.append(np.full(buckets, table.bytes / buckets))
    wanted_B = np.concatenate(keys_B)
    asking = Asking(
        wanted_NB=np.tile(wanted_B, (task.devices, 1)),
        copied_NT=np.zeros((task.devices, len(tables))),
        bytes_B=np.concatenate(bytes_B),
        traits={
            at: TableTraits(
                row_bytes=table.dim * 4.0,
                wire_bytes=table.dim * 4.0 + 8,
                vector_bytes=table.dim * 4.0,
                sum_share=1.0,
                bag_keys=table.pooling,
            )
            for at, table in enumerate(task.tables)
        },
    )
    return Problem(
        plan=plan,
        layout=layout,
        workload=Workload(work=_work(layout, asking, task.devices), asking=asking),
        prices=true_prices(Machine()),
        limit_s=limit_s,
    )


def true_prices(machine: Machine) -> Prices:
    """Return what a machine's work costs: bytes alone. All rows are in DDR.

    The model adds up what a node sends and receives, of which the machine counts the larger; where
    both are equal, half of the sum is that.
    """
    return Prices(
        hit_us=(0.0, LINE_BYTES / machine.memory_bytes_per_us, 0.0),
        default_us=0.0,
        copied_us=0.0,
        asked_row_us=0.0,
        asked_sum_us=0.0,
        answered_us=0.0,
        request_us=0.0,
        call_us=0.0,
        called_us=0.0,
        read_kib_us=1024 / machine.memory_bytes_per_us,
        wire_kib_us=1024 / machine.link_bytes_per_us / 2,
    )


def _node(at: int, capacity: int) -> plan_pb2.Node:
    budget = plan_pb2.TierBudget(tier=plan_pb2.TIER_DDR, budget_bytes=capacity)
    device = plan_pb2.Device(index=0, kind=plan_pb2.DEVICE_KIND_CPU, budgets=[budget])
    return plan_pb2.Node(name=f"n{at}", address=f"n{at}:7000", devices=[device])


def _work(
    layout: Mapping[Bucket, Holders], asking: Asking, devices: int
) -> dict[tuple[Bucket, int], Work]:
    """Return what owners do, for planners that go by that."""
    reads_B = asking.wanted_NB.sum(axis=0)
    return {
        (bucket, held.owners[0].node): Work(round(reads_B[at]), round(asking.bytes_B[at]))
        for at, (bucket, held) in enumerate(sorted(layout.items()))
    }


def placement_of(task: Task, owners: Mapping[Bucket, tuple[Place, ...]]) -> Placement:
    """Return the shards that owners of buckets make; those of equal owners are one shard."""
    placement = []
    for at, (table, spread) in enumerate(zip(task.tables, task.spreads, strict=True)):
        buckets = 1 << bucket_bits(task, at)
        keys_B = spread.by_hash(buckets)
        shares: dict[tuple[int, ...], tuple[float, float]] = {}
        for bucket in range(buckets):
            devices = tuple(sorted(place.node for place in owners[Bucket(at, bucket)]))
            keys, rows = shares.get(devices, (0.0, 0.0))
            shares[devices] = (keys + float(keys_B[bucket]), rows + 1 / buckets)
        placement.append(
            [
                Shard(key_share=keys, row_share=rows, devices=devices, columns=(0, table.dim))
                for devices, (keys, rows) in shares.items()
            ]
        )
    return placement


def planned(task: Task, problem: Problem, planner: Planner) -> Outcome:
    """Return what a planner's proposal comes to."""
    owners = {at: held.owners for at, held in problem.layout.items()}
    owners.update(planner.propose(problem).owners)
    return outcome(task, placement_of(task, owners))


def outcome(task: Task, placement: Placement) -> Outcome:
    """Return what a placement of a task comes to."""
    return simulate(task.tables, placement, task.devices, task.samples)
