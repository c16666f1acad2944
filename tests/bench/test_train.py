"""The trainer's benchmarks over a few events: each part runs, and gives rows with their bars."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from bench.shapes import Shape
from bench.store import peers
from bench.train import beyond, budget, criteo, labels, memory, pruning, quality, speed
from bench.train.runs import Case, Experiment, Outcome, Stream
from embertide.trainer.data.generator import NewsConfig

EVENTS = 1500
KEYS = (
    *("user_id", "prev_article", "env", "device", "os", "country", "region", "referrer"),
    "cand",
)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return clicks of a day, as a news portal has them."""
    rng = np.random.default_rng(1)
    columns: dict[str, Any] = {name: rng.integers(1, 40, EVENTS) for name in KEYS}
    columns["ts"] = np.sort(rng.integers(0, 86_400, EVENTS))
    columns["y"] = (columns["cand"] % 3 == 0).astype(np.int64)
    path = tmp_path_factory.mktemp("clicks") / "clicks.parquet"
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def stream(clicks: Path) -> Stream:
    return Stream(path=clicks, days=(0, 0), seen_by="cand")


def _in_process(
    cases: Sequence[Case], seeds: Sequence[int], experiment: Experiment, *, jobs: int
) -> dict[str, list[Outcome]]:
    del jobs
    return {case.name: [experiment.measure(case, seed) for seed in seeds] for case in cases}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in this process, by one thread."""
    torch.set_num_threads(1)
    for module in (beyond, budget, criteo, labels, pruning, quality):
        monkeypatch.setattr(module, "outcomes", _in_process)


def _patched(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.long
def test_quality_is_rated_by_the_bar_and_by_the_ceiling(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = NewsConfig(hours=7, views_per_hour=300, users=50)
    _patched(monkeypatch, quality, _NEWS={"small": news}, _CASES=quality._CASES[:1])
    whole, made_up = quality.run(stream, [1, 2], 1)
    assert (whole.peer, whole.target, whole.n) == (0.87, 1.0, 2)
    assert made_up.peer_name == "the ceiling"
    assert 0.4 < made_up.ours < made_up.peer < 1


@pytest.mark.long
def test_pruned_models_are_paired_with_whole_ones(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    points = {
        "_points": lambda whole: [pruning._pruned("ours", 5, whole)],
        "_history_points": lambda whole: [
            pruning._hashed("hashing", 10, whole, quality.HISTORY, {"user": 40})
        ],
        "_counters_points": lambda whole: [
            pruning._narrow("one dimension", whole, quality.COUNTERS, {"article": 40})
        ],
        "_crosses_points": lambda whole: [
            pruning._pruned("crosses, ours", 24, whole, base=quality.CROSSED)
        ],
    }
    _patched(monkeypatch, pruning, _CURVE=tmp_path / "curve.svg", **points)
    rows = pruning.run(stream, [1, 2], 1)
    barred = [row.case.split(":")[0] for row in rows if row.target]
    assert barred == ["ours 5x"] * 2 + ["crosses, ours 24x"] * 2
    assert (tmp_path / "curve.svg").stat().st_size


def test_beyond_ddr_nothing_is_learned_otherwise(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    case_of = pruning.case_of

    def small(name: str, *of: Any) -> Case:  # enough for so few rows
        case = case_of(name, *of)
        return dataclasses.replace(case, run=dataclasses.replace(case.run, prune=None))

    _patched(monkeypatch, beyond, case_of=small, whole=lambda _: 10 * (2 << 20))
    rows = {row.metric: row for row in beyond.run(stream, [1, 2], 1)}
    assert rows["AUC"].ours == rows["AUC"].peer
    assert rows["AUC"].claim == "20.8"


def test_budgets_of_versions_are_rated_by_what_they_cost(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _patched(monkeypatch, budget, BUILD=tmp_path, _BUDGETS=(30,))
    rows = budget.run(stream, [1, 2], 1)
    assert [row.case for row in rows] == ["no budget"] * 3 + ["30 bytes/s"] * 3
    assert rows[0].ours == 0
    assert rows[4].ours >= rows[1].ours


def test_late_labels_are_rated_against_stale_ones(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = {labels._CLAIMED: labels._JOINS[labels._CLAIMED]}
    _patched(monkeypatch, labels, _JOINS=claimed)
    rows = {(row.case, row.metric): row for row in labels.run(stream, [1], 1)}
    lost = rows[labels._CLAIMED, f"AUC lost against {labels._STALE}"]
    assert (lost.target, lost.claim) == (0.003, "22.5")


def test_ads_are_learned_and_the_last_fifth_scored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    names = [f"C{n}" for n in range(1, 27)]
    columns: dict[str, Any] = {name: rng.integers(0, 200, EVENTS) for name in names}
    columns |= {f"I{n}": rng.integers(0, 9, EVENTS) for n in range(1, 14)}
    columns["label"] = (columns["C1"] % 2).astype(np.int64)
    pq.write_table(pa.table(columns), tmp_path / "ads.parquet")
    ads = Stream(path=tmp_path / "ads.parquet", days=(0, 0), seen_by="C1")
    _patched(
        monkeypatch,
        criteo,
        _SHARES=(11,),
        _LINES={"FIITED, rows": "norms"},
        _INT8_SHARES=(13,),
        _CURVE=tmp_path / "curve.svg",
    )
    rows = criteo.run(ads, [1, 2], 1)
    assert rows[0].peer_name == "a factorisation machine"
    barred = [row.case.split(":")[0] for row in rows[1:] if row.target]
    assert barred == ["FIITED, rows 11x", "FIITED, int8 13x"]


def test_memory_is_that_of_the_last_quarter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    samples = [memory.Sample(1000 * n, 100_000_000 + n, 17_000_000, 9) for n in range(1, 41)]

    class _Pool:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> "_Pool":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, *_: object) -> "_Pool":
            return self

        def result(self) -> list[memory.Sample]:
            return samples

    _patched(monkeypatch, memory, ProcessPoolExecutor=_Pool, _PICTURE=tmp_path / "curve.svg")
    least, median, store = memory.run(None)
    assert (least.ratio, least.target, least.n, median.target) == (1.0, 1.02, 5, 0.0)
    assert store.met


class _Tbe:
    name = peers.TrainingTbe.name

    def __init__(self, tables: int, _: int, dim: int, *__: float) -> None:
        self._wide = tables * dim

    def forward(self, _: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        samples = (len(offsets) - 1) // 26
        self._pooled = torch.zeros(samples, self._wide, requires_grad=True)
        return self._pooled

    def backward(self, gradients_BE: torch.Tensor) -> None:
        self._pooled.backward(gradients_BE)


def test_steps_are_timed_beside_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "TrainingTbe", _Tbe)
    small, wide = Shape(name="small", rows=300), Shape(name="wide", rows=300, dim=64, bag=2)
    _patched(
        monkeypatch,
        speed,
        _DLRM=small,
        _WIDE=wide,
        _RUN=dataclasses.replace(speed._RUN, model=small.config()),
        _STEPS={8: 1},
        _WIDE_STEPS={8: 1},
        _FILE_EVENTS=256,
        _FILE_BATCH=64,
        _PRUNE_EVERY=2,
    )
    rows = speed.run(None)
    assert len(rows) == 2 * 2 + 2 + 2
    assert all(row.n == 5 and row.ours > 0 and row.target for row in rows)
