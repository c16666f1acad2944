"""The demand of tables' rows, from nodes' loads."""

import pytest

from embertide.server.core.plan.bucket_columns import bucket_columns
from embertide.server.core.plan.layout import Place
from embertide.server.core.plan.workload import MissCurve, TableTraits
from embertide.server.core.row_demand import RowDemand
from embertide.v1 import node_pb2


def make_load(rows: int, hot: dict[int, int], reads: int) -> node_pb2.NodeServiceGetLoadResponse:
    load = node_pb2.NodeServiceGetLoadResponse()
    load.buckets.add(table_id=3, bucket=0, reads=reads, rows=rows, held=True)
    load.buckets.add(table_id=3, bucket=1, asked=reads)  # of another node
    for key, count in hot.items():
        load.hot_keys.add(table_id=3, key=key, reads=count + 5, error=5)
    load.miss_curves.add(table_id=3, device=1, bytes=[0, 100, 200], missed=[1, 0.5, 0])
    load.row_rooms.add(device=1, bytes=5000)
    return load


def taken(demand: RowDemand, name: str, load: node_pb2.NodeServiceGetLoadResponse) -> None:
    demand.take(name, load, bucket_columns(load))


def test_rows_and_the_hottest_keys_are_those_of_all_nodes() -> None:
    demand = RowDemand()
    taken(demand, "a", make_load(100, {1: 200, 2: 50}, 500))
    taken(demand, "b", make_load(300, {1: 100}, 500))
    traits = demand.traits(3, 4, TableTraits(row_bytes=7.0))
    assert traits.rows == 800  # 200 a bucket
    assert traits.head_keys == 2
    assert traits.head_share == pytest.approx(350 / 2000)
    assert traits.row_bytes == 7.0
    assert demand.traits(9, 4, TableTraits()) == TableTraits()
    taken(demand, "b", make_load(300, {}, 5000))
    demand.forget("a")
    assert demand.traits(3, 4, TableTraits()) == TableTraits(rows=1200)  # too few are known


def test_curves_and_rooms_are_by_place() -> None:
    demand = RowDemand()
    taken(demand, "b", make_load(100, {}, 10))
    curve = MissCurve((0.0, 100.0, 200.0), (1.0, 0.5, 0.0))
    assert demand.curves(["a", "b"]) == {(Place(1, 1), 3): curve}
    assert demand.rooms(["a", "b"]) == {Place(1, 1): 5000.0}
