"""Plans: the four rules, the moves between them, and what the greedy planner makes of a load."""

import random
from collections.abc import Callable

import pytest
from simulation import make_node, make_tables

from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.bootstrap import first_plan
from embertide.server.core.plan.greedy import Greedy
from embertide.server.core.plan.groups import followed
from embertide.server.core.plan.layout import (
    Bucket,
    Holders,
    Layout,
    Place,
    assignments_of,
    budget_bytes,
    devices,
    layout_of,
)
from embertide.server.core.plan.moves import Move, Step, arrived, moves_to, stepped
from embertide.server.core.plan.names import changes
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.validity import check_plan
from embertide.server.core.plan.workload import Work, Workload, device_work, predicted, skew
from embertide.v1 import plan_pb2


def make_plan(
    *, groups: int = 1, nodes: int = 2, bits: int = 3, budget: int = 1 << 30
) -> plan_pb2.Plan:
    machines = [
        make_node(f"node-{group}-{index}", group=group, devices=2, budget=budget)
        for group in range(groups)
        for index in range(nodes)
    ]
    return first_plan(machines, make_tables(user=bits, item=1))


def _unassign(plan: plan_pb2.Plan) -> None:
    del plan.assignments[3]


def _assign_twice(plan: plan_pb2.Plan) -> None:
    plan.assignments.append(plan.assignments[-1])


def _cut_off(plan: plan_pb2.Plan) -> None:
    del plan.assignments[-1]


def _split_rows(plan: plan_pb2.Plan) -> None:
    plan.assignments[0].chunk_begin = 1


def _own_elsewhere(plan: plan_pb2.Plan) -> None:
    plan.assignments[0].joining.add(node=9)


def _own_twice(plan: plan_pb2.Plan) -> None:
    plan.assignments[0].owners.add(node=plan.assignments[0].owners[0].node, device=1)


def _leave_twice(plan: plan_pb2.Plan) -> None:
    plan.assignments[0].leaving.add().CopyFrom(plan.assignments[0].owners[0])


def _forget_a_group(plan: plan_pb2.Plan) -> None:
    del plan.assignments[2].owners[1]


def _heat_what_is_not_there(plan: plan_pb2.Plan) -> None:
    plan.hot_rows.add(table_id=99, rows=5)


def _heat_twice(plan: plan_pb2.Plan) -> None:
    for _ in range(2):
        plan.hot_rows.add(table_id=plan.tables[0].id, rows=5)


def _go_back(plan: plan_pb2.Plan) -> None:
    plan.epoch = 0


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (_unassign, "rule 1: table 'user': bucket 6"),
        (_assign_twice, "rule 1: table 1 is assigned twice"),
        (_cut_off, "rule 1: table 'item': bucket 1 has no owner"),
        (_split_rows, "rule 1: table 'user': buckets 0 to 1: serving holds rows whole"),
        (_own_elsewhere, "rule 2: bucket 0 of table 'user': node 9"),
        (_own_twice, "rule 2: bucket 0 of table 'user': a node stands twice"),
        (_leave_twice, "rule 2: bucket 0 of table 'user': a device is named twice"),
        (_forget_a_group, "rule 3: bucket 4 of table 'user': group 1 has no owner"),
        (_go_back, "rule 4: epoch 0 does not follow 0"),
        (_heat_what_is_not_there, "rule 5: hot rows of table 99, which does not exist"),
        (_heat_twice, "rule 5: hot rows of table 0 stand twice"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_by_name(
    break_it: Callable[[plan_pb2.Plan], None], says: str
) -> None:
    plan = make_plan(groups=2)
    check_plan(plan, previous_epoch=0)
    break_it(plan)
    with pytest.raises(RefusedError) as refused:
        check_plan(plan, previous_epoch=0)
    assert says in refused.value.message


def test_the_first_plan_spreads_evenly_and_every_group_owns_everything() -> None:
    plan = make_plan(groups=2, nodes=3, bits=5)
    owned = dict.fromkeys(devices(plan.topology), 0)
    for held in layout_of(plan.assignments).values():
        assert [plan.topology.nodes[at.node].group for at in held.owners] == [0, 1]
        for at in held.owners:
            owned[at] += 1
    assert max(owned.values()) - min(owned.values()) <= 1


def test_runs_and_layouts_are_the_same_thing() -> None:
    dice = random.Random(1)
    layout: Layout = {
        Bucket(table, bucket): Holders((Place(dice.randrange(2), 0),))
        for table in range(2)
        for bucket in range(32)
    }
    runs = assignments_of(layout)
    assert layout_of(runs) == layout
    assert len(runs) < len(layout)


@pytest.mark.parametrize("seed", range(20))
def test_any_plan_is_reached_and_left_again_by_valid_steps(seed: int) -> None:
    dice = random.Random(seed)
    plan = make_plan(groups=2, nodes=2)
    layout = layout_of(plan.assignments)
    wanted = {
        at: tuple(
            Place(node, dice.randrange(2))
            for group in (0, 1)
            for node in dice.sample([2 * group, 2 * group + 1], dice.choice([1, 2]))
        )
        for at in layout
        if dice.random() < 0.7
    }
    moves = moves_to(plan, layout, wanted)
    taken_back = layout
    for count, step in enumerate((Step.JOINING, Step.BOTH_OWN, Step.LEAVING, Step.DROPPED)):
        if step is not Step.DROPPED:
            # Back from here, in one plan or two.
            taken_back = stepped(stepped(layout, moves, step), moves, Step.TAKEN_BACK)
            taken_back = stepped(taken_back, moves, Step.TAKEN_BACK)
            assert {at: set(held.owners) for at, held in taken_back.items()} == {
                at: set(held.owners) for at, held in layout_of(plan.assignments).items()
            }
        layout = stepped(layout, moves, step)
        after = plan_pb2.Plan()
        after.CopyFrom(plan)
        del after.assignments[:]
        after.assignments.extend(assignments_of(layout))
        after.epoch = count + 2
        check_plan(after, previous_epoch=count + 1)
    for at, owners in wanted.items():
        assert set(layout[at].owners) == set(owners)
        assert not layout[at].joining
        assert not layout[at].leaving
    start = layout_of(plan.assignments)
    assert {at: set(now) for at, now in arrived(start, moves).items()} == {
        at: set(layout[at].owners) for at in {move.at for move in moves}
    }


def test_a_difference_names_the_buckets() -> None:
    plan = make_plan()
    moved = plan_pb2.Plan()
    moved.CopyFrom(plan)
    layout = stepped(
        layout_of(plan.assignments), [Move(Bucket(0, 2), None, Place(1, 0))], Step.JOINING
    )
    del moved.assignments[:]
    moved.assignments.extend(assignments_of(layout))
    assert list(changes(plan, moved)) == [Bucket(0, 2)]


def test_positions_stay_when_nodes_come() -> None:
    plan = make_plan()
    registered = {node.name: node for node in plan.topology.nodes}
    layout = layout_of(plan.assignments)
    assert followed(plan, layout, registered) is None
    registered["a-node"] = make_node("a-node")
    registered["elsewhere"] = make_node("elsewhere", group=7)
    grown = followed(plan, layout, registered)
    assert grown is not None
    assert [node.name for node in grown.nodes] == ["node-0-0", "node-0-1", "a-node"]


@pytest.mark.parametrize("seed", range(20))
def test_greedy_evens_a_skew_within_budgets(seed: int) -> None:
    """One device is read at least twice as much as the mean; sizes differ, and room is scarce."""
    dice = random.Random(seed)
    plan = make_plan(groups=2, bits=8, budget=120_000)
    layout = layout_of(plan.assignments)
    hot = dice.choice([at for at in devices(plan.topology) if at.node < 2])
    work = {
        (at, owner.node): Work(
            dice.randint(50, 150) * (8 if owner == hot else 1), dice.randint(500, 2000)
        )
        for at, held in layout.items()
        for owner in held.owners
    }
    workload = Workload(work=work)
    before = device_work(plan.topology, layout, workload)
    assert skew([each.reads for at, each in before.items() if at.node < 2]) >= 2
    proposal = Greedy().propose(Problem(plan=plan, layout=layout, workload=workload))
    moves = moves_to(plan, layout, proposal.owners)
    after = predicted(before, moves, workload)
    for group in (0, 1):
        reads = [each.reads for at, each in after.items() if at.node // 2 == group]
        assert skew(reads) <= 1.2
    for at, device in devices(plan.topology).items():
        assert after[at].bytes <= max(budget_bytes(device), before[at].bytes)
    assert len(moves) < len(layout) / 2
    assert "max/mean" in proposal.explanation
    assert all(move.source and move.target for move in moves)


def test_greedy_moves_nothing_that_would_not_pay() -> None:
    plan = make_plan(bits=4)
    layout = layout_of(plan.assignments)
    one = Workload(work={(Bucket(0, 0), 0): Work(1000, 10)})
    nothing = Workload(work={})
    for workload in (one, nothing):
        proposal = Greedy().propose(Problem(plan=plan, layout=layout, workload=workload))
        assert not proposal.owners
        assert "nothing that moves would pay" in proposal.explanation
