"""The planner `flexshard` against a fine grid of all answers, on small cases."""

import itertools

import numpy as np
import pytest

from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.flexshard import FlexShard, _Group
from embertide.server.core.plan.instance import Bools, instances, owned_after
from embertide.server.core.plan.layout import Bucket, Holders, Layout, Place
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.row_reads import RowReads, fit_exponent, share_of_first
from embertide.server.core.plan.workload import Asking, TableTraits, Workload
from embertide.v1 import plan_pb2

CASES = 12  # 200 in bench.drift
KIB = 1024


def make_problem(
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


def best_link(group: _Group, copy_bytes: float) -> float:
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


@pytest.mark.parametrize("seed", range(CASES))
def test_the_busiest_link_is_near_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    problem = make_problem(random)
    copy_bytes = float(random.uniform(20, 800)) * KIB
    proposal = FlexShard(copy_bytes).propose(problem)
    (instance,) = instances(problem)
    group = _Group(instance)
    owned_DB = owned_after(instance, proposal.owners)
    assert (instance.bytes_D(owned_DB) <= instance.budget_D).all()
    assert sum(n * group.copy_bytes[t] for t, n in proposal.hot_rows.items()) <= copy_bytes
    ours = group.busiest(owned_DB, {t: float(n) for t, n in proposal.hot_rows.items()})
    today = group.busiest(instance.owned_DB, {})
    # It leaves all as it is where less than 2 % would be saved.
    assert min(ours, today) <= best_link(group, copy_bytes) * 1.05
    assert FlexShard(copy_bytes).propose(problem) == proposal


def test_what_zipf_saves_uniform_keys_do_not() -> None:
    def saved(exponent: float) -> float:
        problem = make_problem(np.random.default_rng(1), exponents=(exponent, exponent), slack=0.0)
        (instance,) = instances(problem)
        group = _Group(instance)
        rows = sum(law.rows for law in group.law.values())
        # Copies of a twentieth of all rows.
        copy_bytes = rows / 20 * max(group.copy_bytes.values())
        proposal = FlexShard(copy_bytes).propose(problem)
        owned_DB = owned_after(instance, proposal.owners)
        copies = {t: float(n) for t, n in proposal.hot_rows.items()}
        return 1 - group.busiest(owned_DB, copies) / group.busiest(instance.owned_DB, {})

    assert saved(1.3) > 0.8
    assert saved(0.0) < 0.12
    assert saved(0.0) < saved(0.6) < saved(1.0) < saved(1.3)


def test_a_fit_gives_back_the_law() -> None:
    for exponent in (0.0, 0.5, 0.9, 1.0, 1.2, 2.0):
        share = share_of_first(exponent, 100, 1e6)
        found = fit_exponent(1e6, 100, share)
        assert found == pytest.approx(exponent, abs=1e-3)
        law = RowReads(TableTraits(rows=1e6, head_keys=100, head_share=share))
        assert law.first(100) == pytest.approx(share, rel=1e-3)
        assert law.first(1e6) == pytest.approx(1.0)
        if exponent:
            assert law.rank_of(law.of_rank(500)) == pytest.approx(500, rel=1e-3)
    weights = np.arange(1, 100_001) ** -1.1
    exact = weights[:5000].sum() / weights.sum()
    assert share_of_first(1.1, 5000, 100_000) == pytest.approx(exact, rel=1e-6)
    assert fit_exponent(0.0, 0, 0.0) == 0.0


def test_what_does_not_apply_is_refused() -> None:
    random = np.random.default_rng(1)
    with pytest.raises(RefusedError, match="no table is read as sequences"):
        FlexShard().propose(make_problem(random, sums=1.0))
    with pytest.raises(RefusedError, match="no group has two nodes"):
        FlexShard().propose(make_problem(random, nodes=1))
