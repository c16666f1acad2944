"""The cache policies against plain models of them, and the command that simulates them."""

import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from cache_models import (
    Clock,
    FrequencyAdmission,
    Lfu,
    Lru,
    Model,
    ReuseDensity,
    S3Fifo,
    TinyLfu,
    Utility,
    hits,
)
from numpy.typing import NDArray

from embertide._store import CacheTrace, StoreError, cache_policies
from embertide.trainer.data.trace import read_trace
from embertide.trainer.errors import ConfigurationError, DataError
from embertide.trainer.lab import cache

Keys = NDArray[np.int64]


def zipf(accesses: int, *, seed: int, keys: int = 2000, moves: int = 0) -> Keys:
    """Few keys often, many seldom; with `moves`, another key takes a place after so many."""
    random = np.random.default_rng(seed)
    weights = np.arange(1, keys + 1) ** -0.8
    drawn = random.choice(keys, accesses, p=weights / weights.sum())
    return drawn + (np.arange(accesses) // moves if moves else 0)


def simulated(keys: Keys, policy: str, capacity: int, **options: int) -> int:
    return CacheTrace(keys).simulate(policy, capacity, **options).hits


@pytest.mark.parametrize("capacity", [1, 3, 20, 150])
@pytest.mark.parametrize("moves", [0, 10])
@pytest.mark.parametrize(("name", "model"), [("lru", Lru), ("lfu", Lfu), ("clock", Clock)])
def test_simple_policies_have_the_hits_of_their_models(
    name: str, model: type[Lru] | type[Lfu] | type[Clock], capacity: int, moves: int
) -> None:
    keys = zipf(12_000, seed=capacity, moves=moves)
    assert simulated(keys, name, capacity) == hits(model(capacity), keys.tolist())


def test_utility_has_the_hits_of_its_model() -> None:
    keys = zipf(12_000, seed=1, moves=30)
    expected = hits(Utility(30, version_accesses=700), keys.tolist())
    assert simulated(keys, "utility", 30, version_accesses=700) == expected


@dataclass(frozen=True)
class Nearly:
    policy: str
    model: Callable[[], Model]
    capacity: int
    accesses: int
    within: float  # of the hit rate


NEARLY = (
    # Sets of ghosts overflow now and then.
    Nearly("s3-fifo", lambda: S3Fifo(1000), 1000, 20_000, 0.002),
    # Keys share the counters of a sketch.
    Nearly("lru:3", lambda: FrequencyAdmission(1000, 3), 1000, 20_000, 0.01),
    # The same; the window does not climb before 10,000 accesses.
    Nearly("w-tinylfu", lambda: TinyLfu(1000), 1000, 9_999, 0.005),
    # It climbs twenty times, by hit rates that differ a little; without, 8 points are lost.
    Nearly("w-tinylfu", lambda: TinyLfu(200), 200, 40_000, 0.025),
    # Ghosts are ranked in sets of eight, counts have 16 bits.
    Nearly("reuse-density", lambda: ReuseDensity(20), 20, 25_000, 0.01),
)


@pytest.mark.parametrize("moves", [0, 10])
@pytest.mark.parametrize("case", NEARLY, ids=[f"{case.policy}-{case.capacity}" for case in NEARLY])
def test_bounded_policies_come_near_their_models(case: Nearly, moves: int) -> None:
    keys = zipf(case.accesses, seed=3, keys=5 * case.capacity, moves=moves)
    expected = hits(case.model(), keys.tolist()) / case.accesses
    rate = simulated(keys, case.policy, case.capacity) / case.accesses
    assert rate == pytest.approx(expected, abs=case.within)


def test_every_policy_has_a_model() -> None:
    held = {"lru", "lfu", "clock", "utility", *(case.policy for case in NEARLY)}
    assert {policy.name for policy in cache_policies()} <= held


def test_reuse_density_closes_the_gap_on_a_stream_that_drifts() -> None:
    figures = cache.simulate(
        CacheTrace(zipf(200_000, seed=5, keys=10_000, moves=20)),
        [100, 1000],
        ["reuse-density", "s3-fifo", "lru"],
    )
    for size in figures.sizes:
        rates = {name: policy.hit_rate for name, policy in size.policies.items()}
        assert rates["reuse-density"] > max(rates["s3-fifo"], rates["lru"], size.best_fixed) + 0.01
        assert rates["reuse-density"] < size.optimum
        closed = size.policies["reuse-density"].gap_closed
        assert closed is not None
        assert closed > 0.2
        assert size.policies["lru"].gap_closed == 0


def test_sizes_are_rows_or_shares() -> None:
    assert cache.parse_sizes("0.1%, 10%,7", 31_986) == [7, 31, 3198]
    assert cache.parse_sizes("10%", 258_368) == [25_836]
    assert cache.between([10, 1000], per_decade=2) == [10, 32, 100, 316, 1000]
    for wrong in ("", "x", "1.5", "0", "-3", "0.001%", "inf%", "1%%"):
        with pytest.raises(ConfigurationError, match="size"):
            cache.parse_sizes(wrong, 1000)


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(StoreError, match="0 accesses"):
        CacheTrace(np.empty(0, np.int64))


# --- traces and the command
def write_bare(path: Path, keys: Keys) -> None:
    path.write_bytes(keys.astype(">i8").tobytes())


def write_xz(path: Path, keys: Keys) -> None:
    path.write_bytes(lzma.compress(keys.astype(">i8").tobytes()))


def write_parquet(path: Path, keys: Keys) -> None:
    pq.write_table(pa.table({"at": np.arange(len(keys)) / 2, "item": keys}), path)


def write_csv(path: Path, keys: Keys) -> None:
    with pa.output_stream(path, compression="detect") as stream:
        pyarrow.csv.write_csv(pa.table({"at": np.arange(len(keys)) / 2, "item": keys}), stream)


WRITERS = {
    "t.trace": write_bare,
    "t.trace.xz": write_xz,
    "t.parquet": write_parquet,
    "t.csv": write_csv,
    "t.csv.gz": write_csv,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_trace_reads_alike_from_every_form(name: str, tmp_path: Path) -> None:
    keys = np.concatenate([zipf(300_000, seed=9), [-1, 1 << 62, -(1 << 63)]])
    WRITERS[name](tmp_path / name, keys)
    told: list[int] = []
    read = read_trace(str(tmp_path / name), progress=told.append)
    np.testing.assert_array_equal(read, keys)
    assert told[-1] == len(keys)
    assert told == sorted(told)
    first = read_trace(str(tmp_path / name), accesses=200_001)
    np.testing.assert_array_equal(first, keys[:200_001])


def test_text_is_hashed_and_a_missing_value_is_a_key(tmp_path: Path) -> None:
    table = pa.table({"a": ["x", "y", None, "x"], "b": pa.array([5, None, 5, -1])})
    pq.write_table(table, tmp_path / "t.parquet")
    a = read_trace(str(tmp_path / "t.parquet"), column="a")
    assert a[0] == a[3]
    assert len({*a.tolist()}) == 3
    b = read_trace(str(tmp_path / "t.parquet"), column="b")
    assert b.tolist() == [5, -1, 5, -1]


def test_what_is_no_trace_is_refused_with_the_remedy(tmp_path: Path) -> None:
    whole = tmp_path / "t.parquet"
    write_parquet(whole, zipf(100, seed=1))
    (tmp_path / "odd.trace").write_bytes(b"123456789")
    (tmp_path / "empty.trace").touch()
    (tmp_path / "cut.trace.xz").write_bytes(lzma.compress(bytes(8000))[:-20])
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-9])
    (tmp_path / "two.csv").write_text("a,b\n1,2\n")
    (tmp_path / "later.csv").write_text("a\n" + "1\n" * 900_000 + "x\n")
    wrong = {
        ("nothing.parquet", None): "no such file",
        ("t.parquet", "other"): "no column 'other'; there are at, item",
        ("t.parquet", "at"): "cast it to int64",
        ("two.csv", None): "2 columns of keys; --column chooses one: a, b",
        ("later.csv", None): "cannot be read as CSV",
        ("odd.trace", None): "whole key",
        ("odd.trace", "item"): "leave out --column",
        ("empty.trace", None): "holds no key",
        ("cut.trace.xz", None): "cannot be decompressed",
        ("cut.parquet", None): "cannot be read as Parquet",
        ("t.json", None): "convert",
    }
    for (name, column), reason in wrong.items():
        with pytest.raises(DataError, match=reason):
            read_trace(str(tmp_path / name), column=column)


def cache_sim(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "embertide.trainer", "cache-sim", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_a_table_or_json_and_draws(tmp_path: Path) -> None:
    trace = tmp_path / "t.parquet"
    keys = zipf(20_000, seed=2)
    write_parquet(trace, keys)
    picture = tmp_path / "hits.svg"
    done = cache_sim(trace, "--column", "item", "--sizes", "1%,100", "--json", "--plot", picture)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["accesses"] == 20_000
    assert figures["distinct"] == len(np.unique(keys))
    shown = {size["capacity"]: size for size in figures["sizes"]}
    assert {figures["distinct"] // 100, 100} <= shown.keys()
    at = shown[100]
    assert set(at["policies"]) == {*cache.policy_names(), "lru:2"}
    assert at["policies"]["lru"]["hit_rate"] == hits(Lru(100), keys.tolist()) / 20_000
    for policy in at["policies"].values():
        assert policy["hit_rate"] <= at["optimum"]
        assert 0 <= policy["insert_rate"] <= 1 - policy["hit_rate"] + 1e-9
    assert at["best_fixed"] == np.sort(np.bincount(keys))[-100:].sum() / 20_000
    assert "<svg" in picture.read_text()

    table = cache_sim(trace, "--column", "item", "--sizes", "100", "--policy", "lru")
    assert table.returncode == 0, table.stderr
    assert f"{at['policies']['lru']['hit_rate']:.4f}" in table.stdout
    assert "s3-fifo" not in table.stdout
    assert "optimum" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--policy", "mru"), "'mru': does not exist; there are reuse-density"),
        (("--policy", "lru:99"), "2 to 15"),
        (("--sizes", "none"), "neither rows nor a share"),
        (("--plot", "hits.pdb"), "is none of"),
        (("--plot", "no/such/folder/hits.svg"), "no folder"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    write_bare(tmp_path / "t.trace", zipf(10_000, seed=1))
    done = cache_sim(tmp_path / "t.trace", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert reason in done.stderr
