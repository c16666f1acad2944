"""The capacity planner: its arithmetic, and its prediction against a real store."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.lab import capacity
from embertide.trainer.lab.capacity import Goal, HitCurve, TierCosts

Keys = NDArray[np.int64]
COSTS = TierCosts(hbm_us=1, ddr_us=2, ssd_us=100, ssd_more_us=10, base_us=5)
CURVE = HitCurve(policy="lru", rows=(1, 10, 100), hits=(0.0, 0.5, 1.0))


def zipf(accesses: int, keys: int, seed: int = 1) -> Keys:
    weights = np.arange(1, keys + 1) ** -0.9
    drawn = np.random.default_rng(seed).choice(keys, accesses, p=weights / weights.sum())
    return drawn.astype(np.int64)


def test_latency_of_a_request_is_what_its_draws_cost() -> None:
    goal = Goal(mean_us=1, keys=20)
    mean_us, p99_us = capacity.latency(0.3, 0.5, goal, COSTS)
    # The same by drawing: a key is in HBM, DDR or on the SSD.
    random = np.random.default_rng(3)
    misses = random.binomial(20, 0.2, size=200_000)
    times = 5 + (20 - misses) * (0.3 * 1 + 0.5 * 2) / 0.8
    times += np.where(misses > 0, 100 + 10 * (misses - 1), 0)
    assert mean_us == pytest.approx(times.mean(), rel=0.005)
    assert p99_us == pytest.approx(np.quantile(times, 0.99), rel=0.001)
    assert capacity.latency(0, 1, goal, COSTS) == (45, 45)
    assert capacity.latency(0, 0, goal, COSTS) == (5 + 100 + 190, 5 + 100 + 190)


def test_the_plan_is_the_smallest_that_meets_the_goal() -> None:
    goal = Goal(mean_us=150, keys=10)
    found = capacity.plan(CURVE, goal, COSTS, row_bytes=64)
    assert found.meets
    assert found.mean_us <= 150
    smaller = capacity.latency(0, CURVE.at(found.ddr_rows - 1), goal, COSTS)[0]
    assert smaller > 150
    assert found.ddr_rows + found.ssd_rows == 100
    # What HBM holds, DDR need not; a policy's memory and rows that nobody asks for count.
    beside = capacity.plan(CURVE, goal, COSTS, row_bytes=64, hbm_bytes=640)
    assert beside.hbm_rows == 10
    assert beside.hbm_hits == pytest.approx(0.5)
    assert beside.ddr_rows <= found.ddr_rows - 10
    larger = capacity.plan(CURVE, goal, COSTS, row_bytes=64, policy_bytes=40, total_rows=10**6)
    assert larger.ddr_rows == found.ddr_rows
    assert larger.ddr_bytes > found.ddr_bytes + 40 * found.ddr_rows + 20 * 10**6


def test_a_p99_goal_asks_for_more_than_a_mean() -> None:
    mean = capacity.plan(CURVE, Goal(mean_us=140, keys=10), COSTS, row_bytes=64)
    p99 = capacity.plan(CURVE, Goal(p99_us=140, keys=10), COSTS, row_bytes=64)
    assert p99.ddr_rows > mean.ddr_rows
    assert p99.p99_us <= 140


def test_a_goal_out_of_reach_is_said_to_be() -> None:
    found = capacity.plan(CURVE, Goal(mean_us=1), COSTS, row_bytes=64)
    assert not found.meets
    assert found.ddr_rows == 100


def test_curves_never_fall_and_what_is_wrong_is_refused() -> None:
    keys_N = zipf(20_000, 2000)
    curve = capacity.hit_curve(keys_N, "s3-fifo", sizes=8)
    assert list(curve.hits) == sorted(curve.hits)
    assert curve.hits[-1] == 1.0
    for policy, sizes in (("fifo", 8), ("lru", 1), ("lru", 25)):
        with pytest.raises(ConfigurationError):
            capacity.hit_curve(keys_N, policy, sizes=sizes)
    for wrong in ({}, {"mean_us": 1, "keys": 0}):
        with pytest.raises(ConfigurationError):
            Goal(**wrong)
    with pytest.raises(ConfigurationError):
        TierCosts(ssd_us=math.nan)


# A store's clock keeps the counts of rows on the SSD too, which the simulator's forgets, and so may
# do better than is predicted: the plan is on the safe side.
@pytest.mark.parametrize(
    ("policy", "policy_bytes", "better"), [("clock", 0, 0.04), ("s3-fifo", 34, 0.02)]
)
def test_a_store_of_the_planned_size_hits_as_predicted(
    policy: str, policy_bytes: int, better: float, tmp_path: Path
) -> None:
    keys_N = zipf(240_000, 24_000)
    curve = capacity.hit_curve(keys_N, policy, sizes=12)
    goal = Goal(mean_us=260, keys=26)
    costs = TierCosts(ssd_us=100, ssd_more_us=20)
    planned = capacity.plan(
        curve, goal, costs, row_bytes=256, policy_bytes=policy_bytes, buckets=2, total_rows=24_000
    )
    assert planned.meets
    assert 0.4 < planned.ddr_hits < 0.9
    layout = _store.RowLayout(chunk_dim=64)
    table = _store.TableConfig(name="item", id=1, layout=layout, bucket_bits=1)
    trainer = _store.TrainingStore(tables=[table], ddr_budget_bytes=64 << 20)
    trainer.ensure_rows(0, np.arange(24_000))
    store = _store.ServingStore(
        tables=[table],
        ddr_budget_bytes=planned.ddr_bytes,
        ssd_budget_bytes=64 << 20,
        ssd_directory=str(tmp_path),
        ddr_policy=policy,
    )
    for bucket in range(2):
        store.stage_records(1, 0, bucket, trainer.export_bucket(0, bucket))
    store.commit(1)

    def read(part_N: Keys) -> float:
        before = store.stats()["hits"]["ddr"]
        for batch_N in np.array_split(part_N, len(part_N) // 200):
            store.lookup(0, batch_N)
            store.maintain()
        return float((store.stats()["hits"]["ddr"] - before) / len(part_N))

    read(keys_N[:120_000])
    assert -0.02 <= read(keys_N[120_000:]) - planned.ddr_hits <= better
    store.check_integrity()


def test_the_command_plans_from_a_file(tmp_path: Path) -> None:
    trace = tmp_path / "t.trace"
    trace.write_bytes(zipf(20_000, 2000).astype(">i8").tobytes())
    command = (sys.executable, "-m", "embertide.trainer", "capacity", str(trace))
    given = ("--row-bytes", "64", "--policy", "lru", "--policy", "clock", "--json")

    def run(*more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*command, *given, *more], capture_output=True, text=True, check=False
        )

    done = run("--latency-goal", "300", "--plot", str(tmp_path / "p.svg"))
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)["plans"]
    assert plans["lru"]["mean_us"] <= 300
    assert plans["clock"]["ddr_rows"] > 0
    assert (tmp_path / "p.svg").is_file()
    assert run("--latency-goal", "1").returncode == 1
    costs = json.loads(done.stdout)["costs"]
    assert {each["from"] for each in costs.values()} == {"assumed"}

    # Benchmarks' measurements are those of the nearest size of row; a given value stands before
    # them.
    measured = tmp_path / "costs.json"
    rows = [("ddr_us", 64, 0.07), ("ddr_us", 512, 0.2), ("ssd_us", 512, 90.0)]
    entries = [{"name": name, "row_bytes": size, "us": us, "by": "x"} for name, size, us in rows]
    measured.write_text(json.dumps({"machine": "this", "costs": entries}))
    with_measured = ("--latency-goal", "300", "--measured", str(measured))
    costs = json.loads(run(*with_measured, "--ssd-us", "80").stdout)["costs"]
    assert costs["ddr_us"] == {"us": 0.07, "from": "measured"}
    assert costs["ssd_us"] == {"us": 80, "from": "given"}
    assert costs["base_us"]["from"] == "assumed"
    slower = json.loads(run(*with_measured).stdout)["plans"]["lru"]
    assert slower["ddr_rows"] < plans["lru"]["ddr_rows"]  # 90 us a miss, not 120
    measured.write_text("[]")
    wrong = run(*with_measured)
    assert wrong.returncode == 2
    assert "is no costs.json of" in json.loads(wrong.stdout)["error"]
    refused = run()
    assert refused.returncode == 2
    assert "no goal" in json.loads(refused.stdout)["error"]
