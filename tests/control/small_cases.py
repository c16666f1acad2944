"""Small problems of the planners recshard and flexshard, and the best of all their answers.

EMBERTIDE_CASES sets how many the tests of planners try (8); the claim is of 200.
"""

import itertools
import os

import numpy as np

from embertide.server.core.plan.flexshard import FlexShard
from embertide.server.core.plan.flexshard import _Group as FlexGroup
from embertide.server.core.plan.instance import Bools, Floats, Instance, instances, owned_after
from embertide.server.core.plan.layout import Bucket, Holders, Layout, Place
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.recshard import RecShard
from embertide.server.core.plan.recshard import _Group as TierGroup
from embertide.server.core.plan.row_reads import share_of_first
from embertide.server.core.plan.tier_budgets import Curve
from embertide.server.core.plan.workload import Asking, MissCurve, TableTraits, Workload
from embertide.v1 import plan_pb2

CASES = int(os.environ.get("EMBERTIDE_CASES", "8"))
_MIB = 1 << 20
_DDR = plan_pb2.TIER_DDR


def random_curve(random: np.random.Generator, points: int, size: float) -> Curve:
    """A curve that falls, with cliffs."""
    inner = np.sort(random.uniform(0.05, 0.95, points - 2)) * size
    falls = random.exponential(1.0, points - 1) ** 2
    missed_P = 1 - np.concatenate([[0.0], np.cumsum(falls) / falls.sum()]) * random.uniform(0.5, 1)
    return Curve(np.concatenate([[0.0], inner, [size]]), missed_P)


def brute_shares(curves: list[Curve], room: float) -> float:
    """Return the least that can be missed with one point of each curve."""
    sizes = np.array([0.0])
    total = np.array([0.0])
    for curve in curves:
        sizes = (sizes[:, None] + curve.bytes_P).reshape(-1)
        total = (total[:, None] + curve.missed_P).reshape(-1)
    return float(total[sizes <= room].min())


def tiers_problem(random: np.random.Generator, devices: int = 2, tables: int = 2) -> Problem:
    """Nodes of one device each, tables of two buckets, room for a part of their rows."""
    budgets = [
        plan_pb2.TierBudget(tier=_DDR, budget_bytes=8 * _MIB),
        plan_pb2.TierBudget(tier=plan_pb2.TIER_SSD, budget_bytes=64 * _MIB),
    ]
    device = plan_pb2.Device(index=0, kind=plan_pb2.DEVICE_KIND_CPU, budgets=budgets)
    nodes = [
        plan_pb2.Node(name=f"n{n}", address=f"n{n}:1", devices=[device]) for n in range(devices)
    ]
    named = [
        plan_pb2.PlannedTable(id=t, name=f"t{t}", bucket_bits=1, chunks=1) for t in range(tables)
    ]
    layout: Layout = {
        Bucket(t, b): Holders((Place(int(random.integers(devices)), 0),))
        for t in range(tables)
        for b in range(2)
    }
    wanted_NB = random.exponential(1000, (devices, 2 * tables)) + 10
    shape = [random_curve(random, 5, random.uniform(1, 6) * _MIB) for _ in range(tables)]
    curves = {}
    for table, place in itertools.product(range(tables), (Place(n, 0) for n in range(devices))):
        count = sum(layout[Bucket(table, b)].owners == (place,) for b in range(2))
        if count:
            each = shape[table]
            curves[place, table] = MissCurve(
                tuple(each.bytes_P * count), tuple(each.missed_P.tolist())
            )
    asking = Asking(
        wanted_NB=wanted_NB,
        copied_NT=np.zeros((devices, tables)),
        bytes_B=np.full(2 * tables, 1.0 * _MIB),
        traits={t: TableTraits(tier_share=(0.0, 0.5, 0.5)) for t in range(tables)},
        requests_N=np.full(devices, 10.0),
        curves=curves,
        row_room={Place(n, 0): random.uniform(1, 8) * _MIB for n in range(devices)},
    )
    plan = plan_pb2.Plan(
        epoch=1, tables=named, topology=plan_pb2.Topology(nodes=nodes), planner="first"
    )
    return Problem(plan=plan, layout=layout, workload=Workload(work={}, asking=asking), limit_s=0.4)


def best_missed_D(group: TierGroup, owned_DB: Bools) -> Floats:
    """Return what each device's best shares leave to its SSD."""
    found = []
    for device in range(len(group.room_D)):
        tables, curves = group.curves_of(owned_DB, device)
        found.append(brute_shares(curves, group.room(device, tables)) if curves else 0.0)
    return np.array(found)


def tiers_answer(problem: Problem) -> tuple[Proposal, float, float]:
    """Return what it proposes, with the score of that and the best one of all."""
    (instance,) = instances(problem)
    group = TierGroup(problem, instance)
    proposal = RecShard().propose(problem)
    owned_DB = owned_after(instance, proposal.owners)
    missed_D = np.zeros(len(group.room_D))
    for device, place in enumerate(instance.places_D):
        tables, curves = group.curves_of(owned_DB, device)
        sizes = {
            what.table: size
            for what, size in proposal.tier_shares.items()
            if what.device == place and size
        }
        missed_D[device] = sum(curve.at(sizes[t]) for t, curve in zip(tables, curves, strict=True))
    ours = group.score_of(owned_DB, missed_D).value
    best = min(
        group.score_of(each, best_missed_D(group, each)).value for each in ownerships(instance)
    )
    return proposal, ours, best


def ownerships(instance: Instance) -> list[Bools]:
    """Return every way to give each bucket one owner."""
    devices, buckets = instance.owned_DB.shape
    found = []
    for owners in itertools.product(range(devices), repeat=buckets):
        owned_DB = np.zeros((devices, buckets), np.bool_)
        owned_DB[list(owners), range(buckets)] = True
        found.append(owned_DB)
    return found


def sequences_problem(
    random: np.random.Generator,
    *,
    nodes: int = 2,
    exponents: tuple[float, ...] = (),
    slack: float | None = None,
    sums: float = 0.0,
) -> Problem:
    """Two tables of two buckets each; room for some of them on every node."""
    exponents = exponents or tuple(random.uniform(0, 1.3, 2))
    budget = plan_pb2.TierBudget(tier=plan_pb2.TIER_DDR, budget_bytes=0)
    device = plan_pb2.Device(index=0, kind=plan_pb2.DEVICE_KIND_CPU, budgets=[budget])
    topology = plan_pb2.Topology(
        nodes=[
            plan_pb2.Node(name=f"n{n}", address=f"n{n}:1", devices=[device]) for n in range(nodes)
        ]
    )
    layout: Layout = {
        Bucket(t, b): Holders((Place((t + b) % nodes, 0),)) for t in range(2) for b in range(2)
    }
    rows = random.integers(1000, 20_000, 2)
    traits = {
        t: TableTraits(
            row_bytes=float(random.choice([64, 256])),
            wire_bytes=float(random.choice([80, 280])),
            sum_share=sums,
            rows=float(rows[t]),
            head_keys=50,
            head_share=share_of_first(exponents[t], 50, float(rows[t])),
        )
        for t in range(2)
    }
    bytes_B = np.repeat([rows[t] * (traits[t].row_bytes + 24) / 2 for t in range(2)], 2)
    slack = random.uniform(0, 1.5) if slack is None else slack
    for n in range(nodes):
        own = sum(bytes_B[2 * t + b] for t in range(2) for b in range(2) if (t + b) % nodes == n)
        topology.nodes[n].devices[0].budgets[0].budget_bytes = int(
            own + slack * bytes_B.sum() / nodes
        )
    asking = Asking(
        wanted_NB=random.exponential(1000, (nodes, 4)) + 10,
        copied_NT=np.zeros((nodes, 2)),
        bytes_B=bytes_B,
        traits=traits,
    )
    tables = [plan_pb2.PlannedTable(id=t, name=f"t{t}", bucket_bits=1, chunks=1) for t in range(2)]
    plan = plan_pb2.Plan(epoch=1, tables=tables, topology=topology)
    return Problem(plan=plan, layout=layout, workload=Workload(work={}, asking=asking))


def best_link(group: FlexGroup, copy_bytes: float) -> float:
    """Return the least that the busiest link can carry, over a grid of copies and all owners."""
    instance = group.instance
    best = np.inf
    splits = np.linspace(0, 1, 101)
    for everywhere in itertools.product([False, True], repeat=4):
        owned_DB: Bools = instance.owned_DB | np.array(everywhere)
        if (instance.bytes_D(owned_DB) > instance.budget_D).any():
            continue
        for split in splits:
            parts = (split, 1 - split)
            copies = {
                t: min(part * copy_bytes / group.copy_bytes[t], group.law[t].rows)
                for t, part in enumerate(parts)
            }
            best = min(best, group.busiest(owned_DB, copies))
    return best


def sequences_answer(problem: Problem, copy_bytes: float) -> tuple[Proposal, float, float]:
    """Return what flexshard proposes, with the busiest link of that and the best one of all."""
    (instance,) = instances(problem)
    group = FlexGroup(instance)
    proposal = FlexShard(copy_bytes).propose(problem)
    owned_DB = owned_after(instance, proposal.owners)
    copies = {t: float(n) for t, n in proposal.hot_rows.items()}
    return proposal, group.busiest(owned_DB, copies), best_link(group, copy_bytes)
