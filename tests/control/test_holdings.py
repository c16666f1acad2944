"""Nodes hold whole tables so as not to need each other, and what their clients read changes."""

import dataclasses

import numpy as np
import pytest
from simulation import make_node, make_tables
from test_planners import group, value

from embertide.server.core.plan.bootstrap import first_plan
from embertide.server.core.plan.instance import owned_after
from embertide.server.core.plan.layout import Bucket, Holders, LaidPlan, Place
from embertide.server.core.plan.oper import Oper, Search
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.prices import Prices
from embertide.server.core.plan.workload import Asking, TableTraits, Workload

BITS, BYTES = 4, 100
BUCKETS = 1 << BITS


def problem() -> Problem:
    """Nodes 0 and 1 hold tables 0 and 1, nodes 2 and 3 the others; 0 and 2 read what 2 and 0 hold.

    All are full. A node that reads a little of a table that it holds would need one peer more if it
    gave up a bucket.
    """
    tables = make_tables(a=BITS, b=BITS, c=BITS, d=BITS)
    nodes = [make_node(f"n{at}", budget=2 * BUCKETS * BYTES) for at in range(4)]
    plan = LaidPlan.of(first_plan(nodes, tables)).head
    holders = {table: ((0, 1), (2, 3))[table // 2] for table in range(4)}
    layout = {
        Bucket(table, bucket): Holders(tuple(Place(node, 0) for node in holders[table]))
        for table in range(4)
        for bucket in range(BUCKETS)
    }
    much, little = 2000.0, 120.0  # keys a second of a bucket
    wanted_NT = np.array([[little] * 2 + [much] * 2, [much] * 2 + [0.0] * 2])
    wanted_NT = np.vstack([wanted_NT, wanted_NT[:, ::-1]])
    asking = Asking(
        wanted_NB=np.repeat(wanted_NT, BUCKETS, axis=1),
        copied_NT=np.zeros((4, 4)),
        bytes_B=np.full(4 * BUCKETS, float(BYTES)),
        traits={table: TableTraits() for table in range(4)},
        requests_N=np.full(4, 100.0),
    )
    return Problem(
        plan=plan,
        layout=layout,
        workload=Workload(work={}, asking=asking),
        prices=Prices(call_us=1000.0, called_us=500.0),
    )


def gain(given: Problem) -> float:
    instance = group(given)
    after_DB = owned_after(instance, Oper().propose(given).owners)
    return 1 - value(given, after_DB) / value(given, instance.owned_DB)


def test_holdings_are_exchanged_where_no_bucket_is_worth_giving_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = problem()
    assert gain(given) > 0.05
    # The same found where nothing is exchanged: next to nothing.
    monkeypatch.setattr(Search, "_with_holdings_exchanged", lambda self: None)
    assert gain(given) < 0.01


def test_holdings_that_do_not_fit_are_not_exchanged() -> None:
    given = problem()
    nodes = given.plan.topology.nodes
    nodes[0].devices[0].budgets[0].budget_bytes *= 2
    instance = group(given)
    owned_DB = instance.owned_DB.copy()
    owned_DB[0] = True  # it holds twice as much as others may
    layout = {
        bucket: Holders(tuple(Place(node, 0) for node in np.flatnonzero(owned_DB[:, at])))
        for at, bucket in enumerate(instance.buckets_B)
    }
    given = dataclasses.replace(given, layout=layout)
    after_DB = owned_after(group(given), Oper().propose(given).owners)
    assert (
        after_DB.sum(axis=1) * BYTES <= [2 * 2 * BUCKETS * BYTES, *[2 * BUCKETS * BYTES] * 3]
    ).all()
