"""What the edges' benchmarks say of what they saw: disks, tasks with faults; a GPU."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from bench import hbm
from bench.edges import disk, outcomes


def test_a_full_disk_is_rated_by_what_its_process_does() -> None:
    seen: dict[str, Any] = {"core": 0.02, "amplification": 0.5, "named": True, "lives": True}
    rows = list(disk.rows("a log", **seen, heals_s=None))
    assert [row.met for row in rows] == [False, True, True, True, False]
    assert {row.claim for row in rows} == {"A.8"}
    assert disk.within(5.0, lambda: True) is not None
    assert disk.within(0.01, lambda: False) is None


def test_what_a_process_uses_is_its_share_of_a_core(tmp_path: Path) -> None:
    began = time.monotonic()
    used = disk.use_of(os.getpid(), 0.2)
    assert time.monotonic() - began >= 0.2
    assert used.core >= 0
    assert used.written >= 0


def test_one_task_that_does_not_heal_is_a_share_of_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good: dict[str, Any] = {"lives": True, "answers": True, "in_status": True, "in_log": True}
    tried = {
        "upkeep": outcomes.Outcome(**good, heals_s=1.0),
        "seals": outcomes.Outcome(**good, heals_s=None),
    }
    rows = {row.metric: row for row in outcomes.rows("a node", "exception", tried)}
    assert rows["healed"].ours == 0.5
    assert rows["until it is healed, the longest"].ours == 1.0
    assert "seals" in capsys.readouterr().err


def test_a_gpu_is_rated_by_the_bandwidth_of_a_copy() -> None:
    kernels = {f"{name}_bytes_per_s": [8.0] for name in ("pool", "gather", "lookup_and_pool")}
    kernels |= {"copy_bytes_per_s": [10.0], "lookup_keys_per_s": [5.0]}
    kernels["lookup_and_pool_keys_per_s"] = [4.0]
    store: dict[str, Any] = {"tenth_hit_share": 0.9}
    for asked in ("", "requests_", "single_keys_"):
        for tier in ("ddr", "hbm_resident", "hbm_tenth"):
            store[f"{tier}_{asked}keys_per_s"] = [2.0 if tier == "ddr" else 6.0]
    said = hbm.summary([{"kernels": kernels, "store": store}], [2.0])
    assert said["pool_share_of_copy"] == 0.8
    assert said["store_hbm_tenth_over_ddr"] == 3.0
    assert said["over_peer"] == 2.0
