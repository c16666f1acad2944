"""A plan's sums over the demand, in arrays: checked against the same sums written out."""

import dataclasses

import numpy as np
import pytest
from simulation import make_node, make_tables

from embertide.server.core.demand import Demand
from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.bootstrap import first_plan
from embertide.server.core.plan.cost import busy_us_D, score
from embertide.server.core.plan.instance import instances, owners_of, rates
from embertide.server.core.plan.layout import Bucket, Place, layout_of
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.prices import Prices
from embertide.server.core.plan.workload import Workload
from embertide.v1 import node_pb2, plan_pb2

TABLES = make_tables(user=1, item=0)  # three buckets
NODES = [make_node("a"), make_node("b", devices=2)]
PRICES = Prices(
    hit_us=(1, 2, 3),
    default_us=5,
    copied_us=7,
    asked_row_us=11,
    asked_sum_us=13,
    answered_us=17,
    read_kib_us=32,
    wire_kib_us=1024 / 48,
)


def load(*buckets: tuple[int, int, int, int, int, int]) -> node_pb2.NodeServiceGetLoadResponse:
    """Buckets as (table, bucket, here, for peers, asked, hot), each in 5 s."""
    answer = node_pb2.NodeServiceGetLoadResponse(window_ms=5000, window=1)
    for table, bucket, here, peers, asked, hot in buckets:
        answer.buckets.add(
            table_id=table,
            bucket=bucket,
            reads=here + peers,
            peer_reads=peers,
            asked=asked,
            hot_reads=hot,
            resident_bytes=1000 if here + peers else 0,
            bytes_read=32 * (here + peers),
            reads_by_source=[0, here + peers, 0],
        )
    return answer


def problem() -> Problem:
    plan = first_plan(NODES, TABLES)
    demand = Demand()
    # user/0 is a's, user/1 and item/0 are b's.
    demand.take("a", load((0, 0, 500, 100, 0, 0), (0, 1, 0, 0, 300, 100)), TABLES, 0)
    demand.take(
        "b", load((0, 0, 0, 0, 100, 0), (0, 1, 50, 300, 0, 0), (1, 0, 25, 0, 0, 0)), TABLES, 0
    )
    layout = layout_of(plan.assignments)
    return Problem(
        plan=plan,
        layout=layout,
        workload=demand.workload(plan.topology, layout),
        prices=PRICES,
    )


def test_rates_are_those_that_were_measured() -> None:
    [instance] = instances(problem())
    assert instance.places_D == (Place(0, 0), Place(1, 0), Place(1, 1))
    assert instance.wanted_NB.tolist() == [[100, 80, 0], [20, 10, 5]]
    assert instance.copied_NT.tolist() == [[0.25, 0], [0, 0]]
    now = rates(instance, instance.owned_DB)
    assert now.here_DT.tolist() == [[100, 0], [10, 0], [0, 5]]
    assert now.for_peers_DT.tolist() == [[20, 0], [60, 0], [0, 0]]
    assert now.asked_NT.tolist() == [[60, 0], [20, 0]]
    assert now.copied_NT.tolist() == [[20, 0], [0, 0]]


def test_owners_share_what_others_ask() -> None:
    [instance] = instances(problem())
    owned_DB = instance.owned_DB.copy()
    owned_DB[1, 0] = True  # b owns user/0 too: it asks nobody for it
    now = rates(instance, owned_DB)
    assert now.asked_NT.tolist() == [[60, 0], [0, 0]]
    assert now.here_DT.tolist() == [[100, 0], [30, 0], [0, 5]]
    assert now.for_peers_DT.tolist() == [[0, 0], [60, 0], [0, 0]]


def test_time_is_the_sum_of_what_is_done() -> None:
    [instance] = instances(problem())
    busy_D = busy_us_D(instance, instance.owned_DB, PRICES)
    # A key found in DDR costs 2 and 1 for the 32 bytes of its row, one for a peer 17 more; rows
    # asked 11; a copy 7. The 48 bytes of a key between nodes, 8 + 32 + 8, cost each of them 1.
    node_b = (20 * 11 + 80) / 2  # shared by its two devices
    node_a = 60 * 11 + 20 * 7 + 80
    expected = [100 * 3 + 20 * 20 + node_a, 10 * 3 + 60 * 20 + node_b, 5 * 3 + node_b]
    assert busy_D == pytest.approx(expected)
    assert score(instance, instance.owned_DB, PRICES).busiest_us == pytest.approx(expected[0])


def test_owners_of_other_groups_stay() -> None:
    [instance] = instances(problem())
    owned_DB = instance.owned_DB.copy()
    owned_DB[:, 1] = [True, False, False]
    stranger = Place(9, 0)
    before = dict.fromkeys(instance.buckets_B, (stranger,))
    assert owners_of(instance, owned_DB, before) == {Bucket(0, 1): (stranger, Place(0, 0))}


def test_sums_by_table_stand_tables_without_reads() -> None:
    [instance] = instances(problem())
    nobody = np.zeros_like(instance.owned_DB)
    assert rates(instance, nobody).here_DT.tolist() == [[0, 0]] * 3


# An SSD of a million bytes beside little DDR: a plan does not push rows to SSD.
def test_a_device_with_an_ssd_tier_fills_its_memory_alone() -> None:
    posed = dataclasses.replace(problem(), filled=0.8)
    device = posed.plan.topology.nodes[0].devices[0]
    device.budgets[0].budget_bytes = 5000
    device.budgets.add(tier=plan_pb2.TIER_SSD, budget_bytes=1_000_000)
    [instance] = instances(posed)
    assert instance.budget_D[0] == pytest.approx(0.8 * 5000)
    device.budgets[0].budget_bytes = 500  # less than the 1,000 that it has: full
    [instance] = instances(posed)
    assert instance.budget_D[0] == pytest.approx(1100)
    assert instance.budget_D[1] == pytest.approx(0.8 * (1 << 30))


def test_a_workload_that_nobody_measured_is_refused() -> None:
    plan = first_plan(NODES, TABLES)
    empty = Problem(plan=plan, layout=layout_of(plan.assignments), workload=Workload(work={}))
    with pytest.raises(RefusedError, match="no node has reported"):
        list(instances(empty))
