"""The store's benchmarks, small: what they ask for runs, and gives rows. Peers are stood in for."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import costs
from bench.servers import BenchError
from bench.shapes import Shape
from bench.store import (
    beyond,
    growth,
    lookup,
    memory,
    peers,
    programs,
    recovery,
    sizes,
    ssd,
    training,
    versions,
)
from embertide import _store


class _Tbe:
    name = peers.Tbe.name

    def __init__(self, rows: int, dim: int) -> None:
        self._weights_RD = torch.zeros(rows, dim)

    def lookup(self, ids_N: torch.Tensor, offsets_B: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = torch.nn.functional.embedding_bag(
            ids_N, self._weights_RD, offsets_B, mode="sum", include_last_offset=True
        )
        return pooled


class _TrainingTbe:
    name = peers.TrainingTbe.name

    def __init__(self, *_: object) -> None:
        pass

    def forward(self, *_: object) -> None:
        pass

    def backward(self, *_: object) -> None:
        pass


def test_lookups_by_case_end_with_their_mean_and_note_a_cost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "Tbe", _Tbe)
    monkeypatch.setattr(lookup, "KEYS", 500)
    monkeypatch.setattr(lookup, "_REPETITIONS", 5)
    monkeypatch.setattr(costs, "note", lambda *of, **what: noted.append((*of, what["row_bytes"])))
    noted: list[tuple[Any, ...]] = []
    rows = list(lookup.measure("avx2", ("dense", "half"), rows=1000, dims=(64,)))
    singles = len(lookup.EXPONENTS) * len(lookup.THREADS) * len(lookup.BAGS)
    means = [row for row in rows if row.metric == "geometric mean of the ratios" and row.target]
    assert [(row.case, row.target) for row in means] == [
        ("dim 64", 0.80),
        ("dim 64, 2 of 4 chunks live", 1.0),
    ]
    assert len([row for row in rows if row.metric == "pooled lookup"]) == 2 * singles
    assert all(row.n == 5 for row in rows)
    assert noted == [("ddr_us", 256)]


def test_training_steps_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    small = training.Model(2, 500, 16, ((8, 3),), 1.0)
    monkeypatch.setattr(training, "_MODELS", {"many": small})
    monkeypatch.setattr(training, "_REPETITIONS", 5)
    monkeypatch.setattr(peers, "TrainingTbe", _TrainingTbe)
    rows = list(training.measure(_store.vector_level(), ("many",)))
    assert {row.metric for row in rows} == {"training step", "forward alone", "backward alone"}
    assert len(rows) == 3 * len(training.THREADS) * len(training.EXPONENTS)
    assert all(row.ours > 0 and row.n == 5 for row in rows)


def test_growth_of_a_lookups_cost_is_beside_that_of_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "KEYS", 2000)
    *each, last = sizes.run(sizes=(1000, 4000))
    assert len(each) == 2
    assert (last.metric, last.target, last.n) == ("growth of the time a key", 1.3, 10)


def test_bytes_a_row_are_of_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_ROWS", 20_000)
    monkeypatch.setattr(memory, "_FROM", 2000)
    monkeypatch.setattr(memory, "_SHARES", 10)
    monkeypatch.setattr(memory, "_in_process", lambda work, *of: work(*of))
    monkeypatch.setattr(memory, "_pruned_hash", lambda: 70.0)
    rows = {(row.case.partition(", ")[2], row.metric): row for row in memory.run()}
    mean = rows["serve", "mean of growth"]
    assert 0 < mean.ours < 1000
    assert mean.claim == "23.2"
    assert ("train", "resident memory") in rows


def test_a_quarter_in_ddr_learns_beside_all_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(beyond, "_SHAPE", Shape(name="small", rows=2000))
    monkeypatch.setattr(beyond, "_FOLDER", tmp_path / "beyond")
    monkeypatch.setattr(beyond, "_SPARE_BYTES", 1 << 20)
    for name, value in (("_BATCH", 64), ("_WARM_STEPS", 2), ("_STEPS", 1), ("_REPETITIONS", 5)):
        monkeypatch.setattr(beyond, name, value)
    monkeypatch.setattr(beyond, "_UNIFORM_KEYS", 500)
    rates = [row for row in beyond.run() if row.metric == "rate"]
    assert [(row.n, row.target) for row in rates] == [(5, 0.5)]


# --- programs in C++, stood in for: what they print becomes rows --------------------------------


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Return what programs print, by name."""
    lines: dict[str, Any] = {}
    monkeypatch.setattr(programs, "build", lambda name, *_: tmp_path / name)
    monkeypatch.setattr(programs, "run", lambda program, *_: json.dumps(lines[program.name]))
    return lines


def test_readers_beside_versions_are_rated_against_quiet_ones(said: dict[str, Any]) -> None:
    seen = {"reads": 9, "versions": 3, "mixed": 0, "p50_us": 2.0, "p99_us": 4.0, "worst_us": 9.0}
    said["readers_and_versions"] = seen
    rows = list(versions.run())
    assert [(row.metric, row.ratio, row.n) for row in rows[:2]] == [
        ("p99_us", 1.0, 5),
        ("p50_us", 1.0, 5),
    ]
    seen["mixed"] = 1
    with pytest.raises(BenchError, match="another version"):
        list(versions.run())


def test_the_longest_wait_of_a_growing_table_is_a_median(said: dict[str, Any]) -> None:
    names = ("total_ns", "longest_ns", "longest_own_ns", "longest_cpu_ns", "over_1_ms")
    waits = dict.fromkeys((*names, "over_1_ms_own"), 500_000)
    of_one = {**waits, "histogram": [0, 3, 1]}
    said["growth_pauses"] = {"inserts": of_one, "idle": of_one, "touches": of_one}
    planned, one_bucket = growth.run()
    assert (planned.ours, planned.ratio, planned.target, planned.n) == (500.0, 0.5, 1.0, 5)
    assert one_bucket.target == 0


def test_a_start_from_a_seal_is_told_from_one_without(
    said: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said["recovery"] = {}
    monkeypatch.setattr(recovery, "_FOLDER", tmp_path / "recovery")

    def start(_: object, rows: int, *, from_seal: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        ready = {"seconds": 0.5 if from_seal else 10.0, "ssd_rows": rows}
        return ready, {"bytes": 1, "sealed_seconds": 2.0}

    monkeypatch.setattr(recovery.Recovery, "start", start)
    (row,) = recovery.run()
    assert (row.ours, row.peer, row.ratio, row.n) == (0.5, 10.0, 0.05, 5)


_PEER = """#!/usr/bin/env python3
import json, sys
said = {"ddr_rows_share": 0.05, "index_bytes": 9, "write_amplification": 1.1}
print(json.dumps(said), flush=True)
for line in sys.stdin:
    who, engine, threads, seconds, batch = line.split()
    rows = 1000 * (10 if who == "store" else 1) * (1 if batch == "1" else 5)
    print(json.dumps({"rows": rows, "seconds": 1, "cpu_seconds": 0.5, "blocks": rows}), flush=True)
"""


def test_the_ssd_tier_is_rated_by_rows_time_and_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "ssd_peer"
    program.write_text(_PEER)
    program.chmod(0o700)
    noted: list[str] = []
    monkeypatch.setattr(costs, "note", lambda name, **_: noted.append(name))
    monkeypatch.setattr(ssd, "build", lambda: program)
    monkeypatch.setattr(ssd, "_fio", lambda _: 50_000.0)
    monkeypatch.setattr(ssd, "FOLDER", tmp_path / "rows")
    monkeypatch.setattr("bench.store.ssd.shutil.which", lambda _: "fio")
    given = argparse.Namespace(rows=1000, repetitions=5, out=tmp_path)
    rows = {(row.case.partition(", ")[2], row.metric): row for row in ssd.run(given)}
    faster = rows["DDR 10%, io_uring, one thread", "rows/s"]
    assert (faster.ratio, faster.target, faster.n) == (10.0, 5.0, 5)
    assert rows["DDR 10%, io_uring, one thread", "4 KiB blocks/s"].ratio == 1.0
    assert noted == ["ssd_us", "ssd_more_us"]
    assert (tmp_path / "store_ssd_threads.svg").stat().st_size
