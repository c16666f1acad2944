"""The simulator that judges planners, against cases worked out by hand.

A byte takes one microsecond in memory and on the link. The table has vectors of 16 bytes, and each
device asks for 3 bags of 2 keys.
"""

import numpy as np
import pytest

from bench.drift import heuristics
from bench.drift.simulator import Machine, Outcome, Shard, SimulatedTable, simulate
from bench.drift.tasks import FILL, Spread, reuse_shares, sources, tasks

TABLE = SimulatedTable(rows=100, dim=4, pooling=2)
MACHINE = Machine(memory_bytes_per_s=1e6, link_bytes_per_s=1e6)


def shard(*devices: int, share: float = 1.0, columns: tuple[int, int] = (0, 4)) -> Shard:
    return Shard(key_share=share, row_share=share, devices=devices, columns=columns)


def simulated(*shards: Shard, devices: int = 2) -> Outcome:
    return simulate([TABLE], [shards], devices, 3, MACHINE)


def test_one_owner_reads_all_keys_and_returns_one_vector_a_bag() -> None:
    outcome = simulated(shard(0))
    assert outcome.compute_us_D.tolist() == [12 * (16 + 64), 0]
    # The other device asks for 6 keys of 8 bytes; 3 vectors of 16 bytes come back.
    assert outcome.link_us_D.tolist() == [48, 48]
    assert outcome.bytes_D.tolist() == [1600, 0]
    assert outcome.busiest_us == 960 + 48
    assert outcome.mean_us == 480 + 48


def test_split_rows_return_a_partial_sum_where_a_bag_has_keys() -> None:
    outcome = simulated(shard(0, share=0.5), shard(1, share=0.5))
    assert outcome.compute_us_D.tolist() == [6 * 80, 6 * 80]
    # Each asks for 3 keys; 3 of 4 bags have at least one key at the other device.
    assert outcome.link_us_D.tolist() == pytest.approx([3 * 8 + 2.25 * 16] * 2)
    assert outcome.bytes_D.tolist() == [800, 800]


def test_a_bag_whose_keys_meet_at_one_owner_costs_one_sum() -> None:
    apart = simulated(shard(0, share=0.5), shard(1, share=0.5), devices=3)
    together = simulated(shard(0, share=0.5), shard(0, share=0.5), devices=3)
    assert apart.link_us_D[2] == pytest.approx(3 * 2 * 0.75 * 16)  # it sends 48 bytes of keys
    assert together.link_us_D[2] == pytest.approx(3 * 16)


def test_copies_answer_their_own_device_and_share_the_others() -> None:
    everywhere = simulated(shard(0, 1))
    assert everywhere.compute_us_D.tolist() == [480, 480]
    assert everywhere.link_us_D.tolist() == [0, 0]
    assert everywhere.bytes_D.tolist() == [1600, 1600]
    two_of_three = simulated(shard(0, 1), devices=3)
    assert two_of_three.compute_us_D.tolist() == [480 + 240, 480 + 240, 0]


def test_split_columns_ask_every_owner_for_every_key() -> None:
    outcome = simulated(shard(0, columns=(0, 2)), shard(1, columns=(2, 4)))
    assert outcome.compute_us_D.tolist() == [12 * (8 + 64)] * 2
    assert outcome.link_us_D.tolist() == [48 + 3 * 8] * 2
    assert outcome.bytes_D.tolist() == [800, 800]


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ((shard(0, share=0.5),), "table 0: key_share adds up to 0.5"),
        ((shard(0, columns=(0, 3)),), "columns .* do not cover its 4"),
        ((shard(2),), r"devices \[2\]; there are 2"),
        ((shard(),), r"devices \[\]; there are 2"),
    ],
)
def test_a_placement_that_does_not_cover_a_table_is_refused(
    shards: tuple[Shard, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        simulated(*shards)


def test_tasks_are_drawn_from_their_seed() -> None:
    first, again, other = (list(tasks(sources(None, None), 4, seed)) for seed in (1, 1, 2))
    assert [(task.name, task.tables, task.capacity) for task in first] == [
        (task.name, task.tables, task.capacity) for task in again
    ]
    assert first[0].tables != other[0].tables
    for task in first:
        assert 20 <= len(task.tables) <= 80
        assert 2 <= task.devices <= 8
        low, high = FILL[task.memory]
        assert low <= task.bytes / (task.capacity * task.devices) <= high


def test_shares_of_buckets_and_of_rows_add_up() -> None:
    spread = Spread(np.array([0.5, 0.2]), np.array([0.1, 0.9]), np.array([0.3, 0.3]))
    assert spread.by_hash(4).tolist() == pytest.approx([0.075, 0.775, 0.075, 0.075])
    assert spread.of_rows(0, 0.5) == pytest.approx(0.5 + 0.15)
    assert reuse_shares(3).sum() == pytest.approx(1)  # all rows are hot
    hot_H = reuse_shares(1_000_000)
    assert 0.2 < hot_H.sum() < 0.9
    assert hot_H[:10].min() > 100 * hot_H[-1]


def test_what_heuristics_place_fits() -> None:
    [task] = tasks(sources(None, None), 1, 3)
    placements = list(heuristics.placements(task))
    assert placements
    for placement in placements:
        outcome = simulate(task.tables, placement, task.devices, task.samples)
        assert outcome.bytes_D.max() <= task.capacity + 1
