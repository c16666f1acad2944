"""Nodes that own nothing take their fair share of bytes and reads, by few moves."""

import math
import random
import time

import pytest
from simulation import make_node, make_tables

from embertide.server.core.plan.bootstrap import first_plan
from embertide.server.core.plan.join import Join
from embertide.server.core.plan.layout import (
    Bucket,
    Holders,
    Place,
    budget_bytes,
    devices,
    layout_of,
    packed,
)
from embertide.server.core.plan.moves import moves_to
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.workload import Work, Workload, device_work, predicted
from embertide.v1 import plan_pb2


def make_problem(
    old: list[plan_pb2.Node],
    new: list[plan_pb2.Node],
    work: dict[Bucket, Work] | None = None,
    bits: int = 8,
    shunned: frozenset[int] = frozenset(),
) -> Problem:
    """A first plan on the old nodes, and the new ones at the end of its topology."""
    plan = first_plan(old, make_tables(user=bits, item=4))
    plan.topology.nodes.extend(new)
    layout = layout_of(plan.assignments)
    of = {
        (at, place.node): (work or {}).get(at, Work(100, 1000))
        for at, held in layout.items()
        for place in held.owners
    }
    workload = Workload(work=of)
    return Problem(plan=plan, layout=layout, workload=workload, shunned=shunned)


def after(problem: Problem) -> tuple[dict[Place, Work], int]:
    """Return the work of each device once it has moved, and how many moves that takes."""
    proposal = Join().propose(problem)
    moves = moves_to(problem.plan, problem.layout, proposal.owners)
    assert all(move.source and move.target for move in moves)
    before = device_work(problem.plan.topology, problem.layout, problem.workload)
    now = predicted(before, moves, problem.workload)
    for at, device in devices(problem.plan.topology).items():
        assert now[at].bytes <= max(budget_bytes(device), before[at].bytes)
    for owners in proposal.owners.values():
        assert len({place.node for place in owners}) == len(owners)
    return now, len(moves)


def shares(problem: Problem, now: dict[Place, Work], group: int = 0) -> dict[Place, list[float]]:
    """Return bytes and reads of each device, in parts of what its budget is of the group's."""
    known = devices(problem.plan.topology)
    members = [at for at in now if problem.plan.topology.nodes[at.node].group == group]
    total = [sum(now[at][which] for at in members) for which in (1, 0)]
    budget = sum(budget_bytes(known[at]) for at in members)
    return {
        at: [now[at][w] / total[i] * budget / budget_bytes(known[at]) for i, w in enumerate((1, 0))]
        for at in members
    }


def test_one_node_takes_a_third_of_two_by_the_fewest_moves() -> None:
    problem = make_problem([make_node("a"), make_node("b")], [make_node("c")])
    now, moves = after(problem)
    assert moves == math.ceil(0.9 * (256 + 16) / 3)
    of = shares(problem, now)
    assert of[Place(2, 0)] == pytest.approx([0.9, 0.9], abs=0.02)
    # Both gave as much.
    assert abs(of[Place(0, 0)][0] - of[Place(1, 0)][0]) < 0.03


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_fair_whatever_buckets_and_budgets_are(seed: int) -> None:
    """Sizes and reads differ fourfold, budgets threefold; some nodes have two devices."""
    dice = random.Random(seed)

    def node(name: str) -> plan_pb2.Node:
        budget = dice.randint(1, 3) << 20
        return make_node(name, devices=dice.choice([1, 2]), budget=budget)

    old = [node(f"old-{at}") for at in range(dice.randint(2, 4))]
    new = [node(f"new-{at}") for at in range(dice.randint(1, 2))]
    work = {
        Bucket(table, bucket): Work(dice.randint(50, 200), dice.randint(500, 2000))
        for table, count in ((0, 1 << 9), (1, 16))
        for bucket in range(count)
    }
    problem = make_problem(old, new, work, bits=9)
    now, moves = after(problem)
    of = shares(problem, now)
    fresh = [at for at in of if at.node >= len(old)]
    for at in fresh:
        assert 0.89 <= min(of[at]) <= max(of[at]) <= 1.11, (at, of[at])
    # As many as the share of new devices is of all buckets, about: none for nothing.
    budget = {at: budget_bytes(each) for at, each in devices(problem.plan.topology).items()}
    share = sum(budget[at] for at in fresh) / sum(budget.values())
    assert moves <= 1.02 * share * (512 + 16) + len(fresh)


def test_reads_that_a_few_buckets_have_are_shared_too() -> None:
    """Eight of 256 buckets have half of the reads; the new node gets its part of these."""
    work = {Bucket(0, at * 32): Work(3400, 1000) for at in range(8)}
    problem = make_problem([make_node("a"), make_node("b")], [make_node("c")], work)
    now, _ = after(problem)
    held, reads = shares(problem, now)[Place(2, 0)]
    assert 0.89 <= held <= 1.11
    assert 0.8 <= reads <= 1.2  # a bucket is a sixth of a share


def test_who_has_less_than_its_share_gives_nothing() -> None:
    """Node b has 30 large buckets, 60,000 of 302,000 bytes, and 101,000 are fair."""
    problem = make_problem([make_node("a"), make_node("b")], [make_node("c")])
    ours = [at for at, held in problem.layout.items() if held.owners == (Place(1, 0),)]
    layout = packed(problem.layout).changed(
        {at: Holders((Place(0, 0),)) for at in ours[: len(ours) - 30]}
    )
    work = {
        (at, held.owners[0].node): Work(200, 2000) if held.owners[0].node else Work(100, 1000)
        for at, held in layout.items()
    }
    problem = Problem(plan=problem.plan, layout=layout, workload=Workload(work=work))
    now, moves = after(problem)
    assert now[Place(1, 0)] == Work(6000, 60_000)
    assert now[Place(2, 0)].bytes == moves * 1000 >= 0.89 * 302_000 / 3


def test_nothing_moves_where_all_nodes_own_or_are_shunned() -> None:
    a, b, c = (make_node(name) for name in "abc")
    assert not Join().propose(make_problem([a, b], [])).owners
    said = Join().propose(make_problem([a, b], [c], shunned=frozenset({2})))
    assert not said.owners
    assert said.explanation.startswith("every node owns buckets already")


def test_a_partial_group_is_left_alone_and_others_keep_their_owners() -> None:
    old = [make_node("a"), make_node("b", group=1)]
    new = [make_node("c", group=1), make_node("d", group=2)]
    problem = make_problem(old, new)
    problem.plan.topology.partial_groups.append(2)
    proposal = Join().propose(problem)
    assert 100 < len(proposal.owners) < 140
    for owners in proposal.owners.values():
        assert owners == (Place(0, 0), Place(2, 0))
    assert "c gets" in proposal.explanation
    assert "d gets" not in proposal.explanation


def test_two_devices_of_a_new_node_never_own_one_bucket() -> None:
    """Every bucket has two owners, so both could come."""
    problem = make_problem([make_node("a"), make_node("b")], [make_node("c", devices=2)])
    both = (Place(0, 0), Place(1, 0))
    layout = problem.layout
    assert hasattr(layout, "changed")
    twice = layout.changed({at: held._replace(owners=both) for at, held in layout.items()})
    of = {(at, node): Work(50, 1000) for at in twice for node in (0, 1)}
    problem = Problem(plan=problem.plan, layout=twice, workload=Workload(work=of))
    now, _ = after(problem)
    for at in (Place(2, 0), Place(2, 1)):
        assert min(shares(problem, now)[at]) >= 0.89


def test_budgets_hold_though_the_fair_share_is_larger() -> None:
    """Measured bytes exceed what the new node may hold: it takes what fits."""
    old = [make_node("a", budget=40_000), make_node("b", budget=40_000)]
    now, _ = after(make_problem(old, [make_node("c", budget=40_000)], bits=7))
    assert now[Place(2, 0)].bytes <= 40_000
    assert now[Place(2, 0)].bytes > 35_000


def test_many_buckets_take_seconds() -> None:
    dice = random.Random(1)
    work = {Bucket(0, at): Work(dice.randint(50, 150), 1000) for at in range(1 << 14)}
    problem = make_problem(
        [make_node(f"a-{at}") for at in range(7)], [make_node("z")], work, bits=14
    )
    began_s = time.monotonic()
    now, _ = after(problem)
    assert time.monotonic() - began_s < 10
    assert min(shares(problem, now)[Place(7, 0)]) >= 0.89
