"""The order of an operation's moves: devices have room for what comes."""

from simulation import make_node, make_tables

from embertide.server.core.plan.bootstrap import first_plan
from embertide.server.core.plan.layout import Bucket, Holders, LaidPlan, Place, assignments_of
from embertide.server.core.plan.moves import move_of
from embertide.server.core.plan.planner import Proposal
from embertide.server.core.plan.prices import Prices
from embertide.server.core.plan.workload import Work, Workload
from embertide.server.core.reshard import Situation, build_moves

A, B = Place(0, 0), Place(1, 0)


def test_what_leaves_makes_room_for_what_comes() -> None:
    tables = make_tables(user=2)
    nodes = [make_node("a", budget=300), make_node("b", budget=300)]
    plan = first_plan(nodes, tables)
    # a owns three buckets of 100 bytes and is full; b owns three, of which one is a copy.
    owners = {0: (A, B), 1: (A,), 2: (A, B), 3: (B,)}
    layout = {Bucket(0, at): Holders(places) for at, places in owners.items()}
    del plan.assignments[:]
    plan.assignments.extend(assignments_of(layout))
    laid = LaidPlan.of(plan)
    work = {
        (bucket, place.node): Work(reads=10 * (1 + bucket.bucket), bytes=100)
        for bucket, held in layout.items()
        for place in held.owners
    }
    now = Situation(
        plan=laid.head,
        layout=laid.layout,
        workload=Workload(work=work),
        unknown=frozenset(),
        live=frozenset(node.name for node in laid.head.topology.nodes),
        operations={},
        prices=Prices(),
    )
    # Both nodes are full. Each gets a copy of what only the other has, and gives up another copy.
    wanted = {Bucket(0, 0): (A,), Bucket(0, 1): (A, B), Bucket(0, 2): (B,), Bucket(0, 3): (B, A)}
    move_plan = build_moves("reshard", "x", Proposal(owners=wanted, explanation=""), now)
    used = {A: 300, B: 300}
    holding = {bucket: set(held.owners) for bucket, held in layout.items()}
    for message in move_plan.moves:
        move = move_of(message)
        if move.target is not None:
            used[move.target] += 100
            holding[move.at].add(move.target)
        if move.source is not None:
            used[move.source] -= 100
            holding[move.at].remove(move.source)
        assert max(used.values()) <= 300
        assert all(holding.values())
    assert {bucket: set(places) for bucket, places in wanted.items()} == holding
