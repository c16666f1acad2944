"""Counters hold what a sum over all events says, as of each version, and nobody learns them."""

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from embertide.trainer.config import (
    NO_TIME,
    CountersConfig,
    FeatureConfig,
    ModelConfig,
    PruneConfig,
    RunConfig,
    TableConfig,
)
from embertide.trainer.data.bags import Bags
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.embedding import counters
from embertide.trainer.embedding.counters import Counters, log_sums, merged
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.eval.blocks import BlockQuality
from embertide.trainer.model.layers import Columns
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import news_model

HALF_LIVES_S = (60, 1800, 40_000)
COUNTED = CountersConfig(feature="cand", half_lives_s=HALF_LIVES_S)
ORIGIN_MS = 1_700_000_000_000
NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=15, new_items_per_hour=5))


def model(chunks: int = 4) -> ModelConfig:
    """The news model with counts of articles: of the one shown and, read alone, of the same."""
    tables = tuple(
        dataclasses.replace(table, chunks=chunks, counters=COUNTED)
        if table.name == "cand"
        else table
        for table in news_model().tables
    )
    return dataclasses.replace(news_model(), tables=tables)


def events(count: int, keys: int, seed: int) -> tuple[NDArray[np.int64], ...]:
    """Return keys, times over some hours, ascending, and labels."""
    rng = np.random.default_rng(seed)
    ts_ms_N = ORIGIN_MS + np.sort(rng.integers(0, 20_000_000, count))
    return rng.integers(0, keys, count) ** 2, ts_ms_N, rng.integers(0, 2, count)


def decayed(
    ts_ms_N: NDArray[np.int64], taken_N: NDArray[np.bool_], now_ms: int, half_life_s: int
) -> float:
    """Return a count by its definition."""
    return float((2.0 ** (-(now_ms - ts_ms_N[taken_N]) / (1000 * half_life_s))).sum())


def test_sums_are_the_counts_that_their_definition_gives() -> None:
    keys_N, ts_ms_N, label_N = events(3000, 40, seed=1)
    halves = slice(0, 1700), slice(1700, 3000)
    parts = [
        log_sums(COUNTED, ORIGIN_MS, keys_N[at], ts_ms_N[at], label_N[at].astype(np.float32))
        for at in halves
    ]
    keys_U, logs_UC = merged(*map(np.concatenate, zip(*parts, strict=True)))
    assert keys_U.tolist() == sorted({*keys_N.tolist()})
    now_ms = int(ts_ms_N[-1])
    for key, logs_C in zip(keys_U, logs_UC, strict=True):
        for i, half_life_s in enumerate(HALF_LIVES_S):
            now = NO_TIME + (now_ms - ORIGIN_MS) / (1000 * half_life_s)
            seen_N = keys_N == key
            for log, taken_N in zip(
                logs_C[2 * i : 2 * i + 2], (seen_N, seen_N & (label_N == 1)), strict=True
            ):
                want = decayed(ts_ms_N, taken_N, now_ms, half_life_s)
                assert 2.0 ** (log - now) == pytest.approx(want, rel=1e-6, abs=2.0**-32)


def test_what_waits_is_bounded_by_keys_and_sums_to_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(most: int) -> tuple[int, list[NDArray[np.float32]]]:
        monkeypatch.setattr(counters, "_MAX_EVENTS", most)
        store = EmbeddingStore(model())
        waiting, keys_N = 0, list[NDArray[np.int64]]()
        counted = Counters(model())
        for batch in NEWS.batches(batch_size=50):
            store.store.ensure_rows(2, batch.keys_BF[:, 2])
            counted.add(batch, ORIGIN_MS)
            waiting = max(waiting, counted.waiting)
            keys_N.append(batch.keys_BF[:, 2])
        counted.flush(store, ORIGIN_MS)
        assert (counted.waiting, counted.uncounted) == (0, 0)
        rows, _, _ = store.store.lookup(2, np.unique(np.concatenate(keys_N)))
        return waiting, [rows]

    little, (few,) = run(64)
    much, (many,) = run(1 << 16)
    distinct = len(few)
    assert little < 2 * 64 + 3 * distinct < much
    np.testing.assert_allclose(few, many, rtol=1e-6)


def test_a_net_sees_the_counts_as_of_its_version() -> None:
    learner = Learner(RunConfig(model=model()))
    seen: list[Batch] = []
    waiting: list[Batch] = []
    origin_ms = now_ms = 0
    for i, batch in enumerate(NEWS.batches(batch_size=40)):
        origin_ms = origin_ms or int(batch.ts_ms_B[0])
        if i % 5 == 4:
            now_ms = int(batch.ts_ms_B[0]) - 1
            learner.refresh(now_ms)
            seen, waiting = [*seen, *waiting], []
        learner.learn(batch)
        waiting.append(batch)
    assert len(seen) > 5
    assert len(waiting) > 0
    keys_N = np.concatenate([batch.keys_BF[:, 2] for batch in seen])
    ts_ms_N = np.concatenate([batch.ts_ms_B for batch in seen])
    label_N = np.concatenate([batch.label_B for batch in seen])
    (columns,) = (each for each in learner.net.modules() if isinstance(each, Columns))
    keys_U = np.unique(keys_N)
    shown = np.zeros((len(keys_U), 10), np.int64)
    shown[:, 2] = keys_U
    with torch.no_grad():
        dense, vectors = columns(torch.empty(len(shown), 0), learner.rows(shown))
    assert dense.shape == (len(shown), 6)
    assert vectors.shape == (len(shown), 160)
    for key, columns_C in zip(keys_U, dense.tolist(), strict=True):
        want = [
            np.log2(1 + decayed(ts_ms_N, taken_N, now_ms, half_life_s)) / 8
            for half_life_s in HALF_LIVES_S
            for taken_N in (keys_N == key, (keys_N == key) & (label_N == 1))
        ]
        assert columns_C == pytest.approx(want, abs=2e-5)


def test_a_key_never_seen_counts_nothing() -> None:
    learner = Learner(RunConfig(model=model()))
    learner.refresh(5)  # before any event
    (columns,) = (each for each in learner.net.modules() if isinstance(each, Columns))
    with torch.no_grad():
        dense, _ = columns(torch.empty(3, 0), learner.rows(np.full((3, 10), 77)))
    assert float(dense.abs().max()) < 1e-9


def test_blocks_are_scored_with_the_counts_of_the_blocks_before() -> None:
    learner = Learner(RunConfig(model=model()))
    (columns,) = (each for each in learner.net.modules() if isinstance(each, Columns))
    nows: list[float] = []

    def note(_block: int) -> None:
        nows.append(columns.get_buffer("now_C").tolist()[0] - NO_TIME)

    BlockQuality(learner, NEWS, seen_by="cand").run(block_s=600, batch_size=40, after_block=note)
    first_ms = next(iter(NEWS.batches(batch_size=1))).ts_ms_B[0]
    assert learner.origin_ms == first_ms
    # Half-lives of a minute, blocks of ten.
    assert nows[:3] == pytest.approx([10, 20, 30], abs=0.01)


def test_counts_leave_gradients_and_pruning_alone() -> None:
    def run(tables: ModelConfig) -> EmbeddingStore:
        rows = EmbeddingStore(tables, prune=PruneConfig(bytes=12_000, first=(5,), every=10))
        for batch in NEWS.batches(batch_size=40):
            embeddings = rows(batch.keys_BF)
            embeddings[:, :48].sum().backward()
            rows.step()
        return rows

    counted = run(model())
    pruned = counted.pruned
    assert pruned is not None
    assert counted.store.stats()["unworthy_keys"] > 0
    assert pruned.bytes <= 12_000
    keys = np.unique(next(iter(NEWS.batches(batch_size=200))).keys_BF[:, 2])
    rows, _, _ = counted.store.lookup(2, keys)
    assert (rows[:, 16:] == 0).all(), "nothing was counted, and nothing learned"
    assert (rows[:, :16] != 0).any()


def test_what_no_counter_can_be_is_refused() -> None:
    table = TableConfig(name="item", counters=COUNTED)
    with pytest.raises(ValueError, match="its counters name feature 'cand'; its features are"):
        ModelConfig(name="m", tables=(table,), features=(FeatureConfig(name="a", table="item"),))
    with pytest.raises(
        ValueError, match="counters need rows of fp32, trained and served, not fp16"
    ):
        TableConfig(name="item", dtype="fp16", counters=COUNTED)
    with pytest.raises(ValueError, match="half_lives_s is"):
        CountersConfig(feature="cand", half_lives_s=(600, 0))
    features = list(model().features)
    features[2] = dataclasses.replace(features[2], keys="list")
    with pytest.raises(ValueError, match="feature 'cand', which has keys='list'; counts are of"):
        dataclasses.replace(model(), features=tuple(features))


def test_bags_of_several_keys_give_no_counts() -> None:
    bags = [Bags.of(np.ones(2, np.int64), np.array([1, 1]))] * 10
    rows = EmbeddingStore(model())
    assert rows.pool(bags).shape == (2, rows.embedding_dim)
    weighed = Bags.of(np.ones(2, np.int64), np.array([1, 1]), np.ones(2, np.float32))
    for wrong in (weighed, Bags.of(np.ones(2, np.int64), np.array([2, 0]))):
        assert rows.pool([wrong, *bags[1:]]).shape == (2, rows.embedding_dim)
        with pytest.raises(ValueError, match="feature 'cand' gives counts of its key, of which no"):
            rows.pool([*bags[:2], wrong, *bags[3:]])
