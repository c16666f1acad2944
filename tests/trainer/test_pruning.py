"""Pruning in the trainer: what configs refuse, when passes are made, and that bytes hold."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.config import FeatureConfig, ModelConfig, PruneConfig, RunConfig, TableConfig
from embertide.trainer.data.assemble import fold
from embertide.trainer.data.base import FeatureColumn
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.publish.snapshot import read_manifest

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
MODEL = ModelConfig(
    name="m",
    tables=(TableConfig(name="user", dim=4), TableConfig(name="item", dim=4)),
    features=(FeatureConfig(name="who", table="user"), FeatureConfig(name="what", table="item")),
)
# Payload, accumulator and marks, utility, index entry.
ROW = 16 + 8 + 4 + 24


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bytes": 0}, "bytes is 0, ratio 0.0; give one"),
        ({"ratio": 2.0}, "bytes is 1000, ratio 2.0; give one"),
        ({"bytes": -5}, "bytes is -5"),
        ({"half_life": 0}, "half_life is 0"),
        ({"counts_worth": -1.0}, "counts_worth is -1.0"),
        ({"every": 0}, "every is 0"),
        ({"waiting_bytes": 1000}, "leaves nothing of bytes = 1000"),
        ({"tables": ("user", "word")}, "names table 'word'"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig(model=MODEL, prune=PruneConfig(**{"bytes": 1000, **wrong}))


def test_before_the_first_pass_a_store_says_that_there_was_none() -> None:
    assert EmbeddingStore(MODEL).pruning() is None
    pruned = EmbeddingStore(MODEL, prune=PruneConfig(bytes=1000))
    assert pruned.pruning() == {"passes": 0, "seen_bytes": 0}


def test_a_pass_follows_early_steps_then_every_so_many_or_want_of_room() -> None:
    prune = PruneConfig(bytes=16_000, first=(2, 5), every=10, least=3, least_room=0.1)
    assert prune.row_bytes(seen=0) == 15_000
    made = []
    since = 0
    for step in range(1, 40):
        since += 1
        room = 0.09 if 20 < step < 30 else 0.11
        if prune.due(step, since, room):
            made.append(step)
            since = 0
    assert made == [2, 5, 15, 21, 24, 27, 37]


def learn(rows: EmbeddingStore, keys_BF: NDArray[np.int64], gradient: float) -> None:
    embeddings = rows(keys_BF)
    (embeddings * gradient).sum().backward()
    rows.step()


class Stakes:
    """A store that keeps what it is told is at stake."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.told: list[tuple[int, float, float]] = []

    def record_sensitivity(self, table: int, at_stake: float, squares: float) -> None:
        self.told.append((table, at_stake, squares))
        self._store.record_sensitivity(table, at_stake, squares)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("utility", ["fisher", "squares"])
def test_what_is_at_stake_is_of_samples_that_had_rows(
    monkeypatch: pytest.MonkeyPatch, utility: Any
) -> None:
    rows = EmbeddingStore(MODEL, prune=PruneConfig(bytes=1 << 20, utility=utility))
    stakes = Stakes(rows.store)
    monkeypatch.setattr(rows, "store", stakes)
    random = np.random.default_rng(5)
    told = []
    for step in range(9):
        keys_BF = random.integers(0, 40, (16, 2))
        gradient_BE = random.normal(size=(16, 8)).astype(np.float32)
        embeddings = rows(keys_BF)
        had_BE = embeddings.detach().numpy().astype(np.float64)
        (embeddings * torch.from_numpy(gradient_BE)).sum().backward()
        rows.step()
        if step % 4 == 0:
            for table in range(2):
                had_Bd, gradient_Bd = (
                    each[:, 4 * table : 4 * table + 4] for each in (had_BE, gradient_BE)
                )
                has_B = (had_Bd != 0).any(axis=1)
                along_B = (had_Bd * gradient_Bd).sum(axis=1)
                squares = (gradient_Bd[has_B].astype(np.float64) ** 2).sum()
                told.append((table, (along_B**2).sum(), squares))
    assert told[0][2] == 0 < told[-1][2]
    if utility == "squares":
        assert not stakes.told
    else:
        np.testing.assert_allclose(stakes.told, told, rtol=1e-5)


@pytest.mark.parametrize("tables", [(), ("user",)])
def test_rows_take_the_bytes_that_they_may_and_those_of_use_stay(tables: tuple[str, ...]) -> None:
    prune = PruneConfig(bytes=100 * ROW * 16 // 15, tables=tables, first=(), every=20, least=1)
    rows = EmbeddingStore(MODEL, prune=prune)
    random = np.random.default_rng(3)
    for _ in range(200):
        often = random.integers(0, 20, (30, 2))
        rare = random.integers(100, 5000, (30, 2))
        learn(rows, np.concatenate([often, rare]), 0.1)
    assert rows.pruned is not None
    assert rows.passes >= 10
    assert 0 < rows.pruned.bytes <= prune.row_bytes(seen=0)
    stats = rows.stats()
    items = 20 + len(range(100, 5000))
    limit = 100 if not tables else 100 + items
    assert 40 < stats["rows"] <= limit
    assert stats["unworthy_keys"] > 1000
    for table in range(2 if not tables else 1):
        _, source, _ = rows.store.lookup(table, np.arange(20))
        assert (source == 1).all(), "a key of every batch has no row"


def test_a_ratio_is_of_all_keys_that_were_seen() -> None:
    prune = PruneConfig(ratio=4.0, first=(), every=20)
    rows = EmbeddingStore(MODEL, prune=prune)
    random = np.random.default_rng(4)
    for first in range(0, 100_000, 1000):
        learn(rows, random.integers(first, first + 1000, (500, 2)), 0.1)
        assert rows.pruned is None or rows.pruned.bytes <= rows.store.seen_bytes(0) / 4
    distinct = 2 * 100 * 1000 * (1 - (1 - 1 / 1000) ** 500)
    assert rows.store.seen_bytes(0) == pytest.approx(distinct * ROW, rel=0.1)
    assert rows.stats()["rows"] == pytest.approx(distinct / 4, rel=0.15)


def test_a_store_goes_on_from_what_another_said() -> None:
    prune = PruneConfig(bytes=100 * ROW)
    rows = EmbeddingStore(MODEL, prune=prune)
    learn(rows, np.arange(10).reshape(5, 2), 0.1)
    other = EmbeddingStore(MODEL, prune=prune)
    other.resume(rows.progress())
    assert other.steps == 1
    assert other.progress() == rows.progress()
    wrong = EmbeddingStore(MODEL, prune=dataclasses.replace(prune, waiting_bytes=3000))
    with pytest.raises(Exception, match="waiting_bytes"):
        wrong.resume(rows.progress())


def test_the_command_prunes_to_a_share_and_publishes_what_went(tmp_path: Path) -> None:
    path = tmp_path / "pub"
    arguments = ["--demo", "--hours", "3", "--prune-ratio", "5", "--json", "--cache", str(CACHE)]
    done = CliRunner().invoke(app, ["train", str(path), *arguments])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])["result"]
    pruning = result["pruning"]
    assert pruning["passes"] > 2
    assert pruning["bytes"] <= pruning["seen_bytes"] / 5
    assert result["store"]["unworthy_keys"] > 0
    # Nodes load the rows that are left.
    manifest = read_manifest(max((path / "snapshots").iterdir()))
    assert sum(each["rows"] for each in manifest["buckets"]) == result["store"]["rows"]


def test_keys_are_folded_alike_and_evenly() -> None:
    keys = np.arange(-50_000, 50_000)
    folded = fold(keys, 100)
    assert folded.min() == 0
    assert folded.max() == 99
    assert np.bincount(folded).std() < 100
    assert (fold(keys[::-1], 100) == folded[::-1]).all()
    with pytest.raises(ValueError, match="rows is -1"):
        FeatureColumn(name="a", column="a", rows=-1)
