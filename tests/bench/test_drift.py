"""The benchmarks of following the drift, small: shares, placements, moves, many nodes."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bench.drift import compared, gains, moves, pays, recshard, scale, torchrec, traces
from bench.drift.tasks import sources, tasks
from embertide.server.core.plan.layout import Holders, LaidPlan, PackedLayout, Place
from embertide.v1 import control_pb2, plan_pb2


def test_shares_are_scored_by_simulation_and_by_a_store() -> None:
    trace = traces.reuse(20_000, 1, tables=2)
    room = 0.25 * float((trace.distinct_T * trace.dims_T * 4).sum())
    shares_T = recshard.shares_of(trace, room)
    assert 0 < shares_T.sum() <= room + 1
    scored = recshard.simulated(trace, shares_T, room)
    assert scored.first_reads <= scored.shares <= scored.by_size
    real = recshard.replayed(trace, room)
    assert real.shares <= 1.5 * real.predicted
    assert real.clock_bytes <= 1.1 * (room + (1 << 20))


def test_placements_are_rated_against_torchrecs(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = torchrec.Planned(placement=None, seconds=0.0, kinds={})
    monkeypatch.setattr(torchrec, "plan", lambda *_: nothing)
    (task,) = tasks(sources(None, None), 1, 1, (20, 20))
    found = compared.compare(task, ("greedy",))
    assert found.us["torchrec"] == np.inf
    assert 0 < found.us["greedy"] < np.inf
    there = dataclasses.replace(found, us={**found.us, "torchrec": 2 * found.us["greedy"]})
    assert compared._ratios([found, there], "greedy", "torchrec") == [0.5]


def test_nodes_exchange_half_of_what_they_own() -> None:
    plan = plan_pb2.Plan(epoch=7)
    for bucket in range(8):
        owners = [plan_pb2.Owner(node=bucket // 4)]
        plan.assignments.add(table_id=0, bucket_begin=bucket, bucket_count=1, owners=owners)
    target = moves._target(plan, turn=1)
    assert target.base_epoch == 7
    moved = {each.bucket_begin: each.owners[0].node for each in target.assignments}
    assert moved == {1: 1, 3: 1, 5: 0, 7: 0}


def test_customs_are_exchanged_by_pairs_of_nodes() -> None:
    first, second = (share for share, _ in zip(pays.customs(1), range(2), strict=False))
    np.testing.assert_allclose(first.sum(axis=1), 1)
    mains = [np.argsort(-share, axis=1)[:, :2].min(axis=1) // 2 for share in (first, second)]
    assert sorted(mains[0]) == sorted(mains[1]) == [0, 1, 2, 3]
    assert all(mains[0] != mains[1])


def test_an_operation_is_predicted_from_those_measured_before_it(tmp_path: Path) -> None:
    predicted = [0.1 + 0.02 * at for at in range(1, 8)]
    acted = [
        control_pb2.Decision(
            at_ms=100 * at,
            outcome=control_pb2.DECISION_OUTCOME_ACTED,
            predicted_gain=gain,
            measured_gain=1 - (1 - gain) ** 2,
            measured_ms=100 * at + 150,
        )
        for at, gain in enumerate(predicted, 1)
    ]
    gains.write(tmp_path / "operations.jsonl", acted)
    found = gains.gains(gains.read(tmp_path / "operations.jsonl"))
    expected = [each.expected for each in found]
    assert expected[:2] == pytest.approx(predicted[:2]), "none was measured when they were decided"
    assert expected[-1] == pytest.approx(1 - 0.76 ** (2 ** (5 / 7 + 2 / 7 * 5 / 7)))
    errors = [row for row in gains.measure(tmp_path / "operations.jsonl") if "error" in row.metric]
    assert errors[1].ours < 0.4 * errors[0].ours


def test_a_reshard_of_many_nodes_stays_in_its_group() -> None:
    head = plan_pb2.Plan(epoch=3)
    for node in range(6):
        head.topology.nodes.add(name=f"node-{node}", group=node % 2)
    held = [Holders((Place(node, 0), Place(4, 0))) for node in range(2)]
    codes = np.arange(16, dtype=np.int32) % 2
    target = scale._target(LaidPlan(head, PackedLayout({0: codes}, held)), 8)
    assert target.base_epoch == 3
    assert [each.bucket_begin for each in target.assignments] == list(range(0, 16, 2))
    assert {tuple(owner.node for owner in each.owners) for each in target.assignments} == {(2, 0)}
    assert scale.p99(list(map(float, range(1, 201)))) == 199
