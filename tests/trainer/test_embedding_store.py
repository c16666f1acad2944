"""EmbeddingStore against plain torch: nn.Embedding and row-wise Adagrad written out.

Shapes: B samples, F features, E all embedding values of a sample.
"""

import dataclasses
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embertide import _store
from embertide.trainer.config import (
    FeatureConfig,
    ModelConfig,
    Optimizer,
    OptimizerConfig,
    TableConfig,
)
from embertide.trainer.embedding.store import EmbeddingStore

SEED = 5
KEYS = 50  # few, so that they repeat within a batch
RATES = OptimizerConfig(sparse_learning_rate=0.2, epsilon=1e-6)
CONFIG = ModelConfig(
    name="m",
    tables=(
        TableConfig(name="item", dim=8, chunks=2, bucket_bits=2),
        TableConfig(name="user", dim=4, bucket_bits=1),
        TableConfig(name="unused", dim=4),
    ),
    # Two features share a table, and another one stands between them.
    features=(
        FeatureConfig(name="shown", table="item"),
        FeatureConfig(name="who", table="user"),
        FeatureConfig(name="before", table="item"),
    ),
)
DIM = sum(CONFIG.feature_dims)
Keys = NDArray[np.int64]


class Reference:
    """The same tables in torch. A row that is not made yet is zeros, the default row."""

    def __init__(self) -> None:
        self.tables = []
        for t, table in enumerate(CONFIG.tables):
            values = [
                [_store.initial_value(SEED, t, k, d, table.init_scale) for d in range(table.dim)]
                for k in range(KEYS)
            ]
            embedding = nn.Embedding(KEYS, table.dim)
            nn.init.zeros_(embedding.weight)
            state = torch.zeros(KEYS, dtype=torch.float64)
            made = torch.zeros(KEYS, dtype=torch.bool)
            self.tables.append((embedding, torch.tensor(values), state, made))
        self.seen: list[set[int]] = [set() for _ in CONFIG.tables]

    def forward(self, keys_BF: Keys) -> Tensor:
        parts = []
        for f, feature in enumerate(CONFIG.features):
            t = CONFIG.table_index(feature.table)
            self.seen[t].update(keys_BF[:, f].tolist())
            parts.append(self.tables[t][0](torch.from_numpy(keys_BF[:, f].copy())))
        return torch.cat(parts, 1)

    def step(self) -> None:
        """One update a row, with the sum of its gradients: squares are averaged over the row."""
        for (embedding, initial, state, made), seen in zip(self.tables, self.seen, strict=True):
            gradient = embedding.weight.grad
            for key in seen:
                assert gradient is not None
                grad = gradient[key].double()
                state[key] += (grad**2).mean()
                start = embedding.weight[key] if made[key] else initial[key]
                rate = RATES.sparse_learning_rate / (state[key].sqrt() + RATES.epsilon)
                with torch.no_grad():
                    embedding.weight[key] = (start.double() - rate * grad).float()
                made[key] = True
            seen.clear()
            embedding.weight.grad = None


def make(
    ddr: int = 64 << 20, ssd: int = 0, directory: str = "", optimizer: OptimizerConfig = RATES
) -> EmbeddingStore:
    return EmbeddingStore(
        CONFIG,
        optimizer=optimizer,
        seed=SEED,
        ddr_budget_bytes=ddr,
        ssd_budget_bytes=ssd,
        ssd_directory=directory,
    )


def some_keys(rng: np.random.Generator, count: int) -> Keys:
    return rng.integers(0, KEYS, (count, len(CONFIG.features)))


def loss_of(embeddings_BE: Tensor, rng: np.random.Generator) -> Tensor:
    """Something not linear, so that gradients depend on the values."""
    weight = torch.from_numpy(rng.standard_normal((DIM, 3)).astype(np.float32))
    return torch.tanh(embeddings_BE @ weight).square().sum() + (embeddings_BE @ weight).sum()


def train(rows: EmbeddingStore, rng: np.random.Generator, steps: int) -> None:
    for _ in range(steps):
        loss_of(rows(some_keys(rng, 16)), rng).backward()
        rows.step()


def all_rows(rows: EmbeddingStore) -> list[tuple[str, int, bytes]]:
    return [(table.name, bucket, records) for table, bucket, records in rows.buckets()]


def every_key() -> Keys:
    return np.repeat(np.arange(KEYS)[:, None], len(CONFIG.features), 1)


@pytest.mark.parametrize("passes", [1, 3])
def test_values_are_those_of_torch_after_many_steps(passes: int) -> None:
    rows, reference = make(), Reference()
    rng = np.random.default_rng(passes)
    for _ in range(60 // passes):
        for _ in range(passes):  # gradients add up over them, as in torch
            keys_BF, seed = some_keys(rng, 16), int(rng.integers(1 << 30))
            ours, theirs = rows(keys_BF), reference.forward(keys_BF)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
            loss_of(ours, np.random.default_rng(seed)).backward()
            loss_of(theirs, np.random.default_rng(seed)).backward()
        rows.step()
        reference.step()
    rows.eval()
    with torch.no_grad():
        theirs = reference.forward(every_key())
    torch.testing.assert_close(rows(every_key()), theirs, rtol=1e-4, atol=1e-6)
    rows.store.check_integrity()
    assert rows.stats()["placed_keys"] > 16 * len(CONFIG.features)


def test_rows_on_the_ssd_learn_as_rows_in_memory_do(tmp_path: Path) -> None:
    config = ModelConfig(
        name="m",
        tables=(TableConfig(name="item", dim=64, bucket_bits=1),),
        features=(FeatureConfig(name="shown", table="item"),),
    )
    in_memory = EmbeddingStore(config, optimizer=RATES, seed=SEED)
    small = EmbeddingStore(
        config,
        optimizer=RATES,
        seed=SEED,
        ddr_budget_bytes=2 << 20,
        ssd_budget_bytes=64 << 20,
        ssd_directory=str(tmp_path),
    )
    rng = np.random.default_rng(1)
    ahead = again = 0
    for step in range(60):
        keys_BF = rng.integers(0, 12_000, (512, 1))
        gradient = torch.from_numpy(rng.standard_normal((512, 64)).astype(np.float32))
        for rows in (in_memory, small):
            read = [rows.stats()["promotions"]]
            if step % 2:
                rows.bring(rows.table_keys(keys_BF))
            read.append(rows.stats()["promotions"])
            (rows(keys_BF) * gradient).sum().backward()
            rows.step()
            if step % 2:
                ahead += read[1] - read[0]
                again += rows.stats()["promotions"] - read[1]
        if step % 20 == 10:
            for bucket in range(2):
                changes = [rows.store.take_changes(0, bucket) for rows in (in_memory, small)]
                assert changes[0] == changes[1]
                assert changes[0]
    assert small.stats()["evictions_to_ssd"] > 1000
    assert ahead > 1000
    # Some make room for others before the step comes to them.
    assert again < ahead / 10, "rows that were brought are read again"
    for bucket in range(2):
        assert small.store.export_bucket(0, bucket) == in_memory.store.export_bucket(0, bucket)
        states = [rows.store.bucket_state(0, bucket) for rows in (in_memory, small)]
        for mine, theirs in zip(*states, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        changes = [rows.store.take_changes(0, bucket) for rows in (in_memory, small)]
        assert changes[0] == changes[1]
    small.store.check_integrity()


def test_an_unknown_key_reads_the_default_row_until_step_makes_its_row() -> None:
    rows = make()
    keys_BF = np.array([[3, 4, 3]])
    embeddings = rows(keys_BF)
    assert not embeddings.detach().any()
    assert rows.stats()["rows"] == 0
    embeddings.sum().backward()
    assert rows.stats()["rows"] == 0
    assert rows.step() == 2
    assert rows.stats()["rows"] == 2
    rows.eval()
    # Gradient 2 for item 3, which occurs twice, 1 for user 4; a first step is the whole rate.
    item = [
        _store.initial_value(SEED, 0, 3, d, 0.05) - RATES.sparse_learning_rate for d in range(8)
    ]
    user = [
        _store.initial_value(SEED, 1, 4, d, 0.05) - RATES.sparse_learning_rate for d in range(4)
    ]
    np.testing.assert_allclose(rows(keys_BF)[0], [*item, *user, *item], rtol=1e-5)


def test_step_before_backward_is_an_error_and_changes_nothing() -> None:
    rows = make()
    train(rows, np.random.default_rng(1), 2)
    before = all_rows(rows)
    rows(every_key()).sum().backward()
    rows(every_key())
    with pytest.raises(RuntimeError, match="before backward"):
        rows.step()
    assert all_rows(rows) == before


def test_reading_without_gradients_needs_no_step() -> None:
    rows = make()
    train(rows, np.random.default_rng(1), 2)
    before = all_rows(rows)
    with torch.no_grad():
        rows(every_key())
    assert rows.step() == 0
    rows.eval()
    assert not rows(every_key()).requires_grad
    assert rows.step() == 0
    assert all_rows(rows) == before


@pytest.mark.parametrize("name", get_args(Optimizer))
def test_an_imported_store_goes_on_bit_for_bit(name: Optimizer) -> None:
    optimizer = dataclasses.replace(RATES, name=name)
    first, second = make(optimizer=optimizer), make(optimizer=optimizer)
    train(first, np.random.default_rng(1), 20)
    for t, table in enumerate(first.tables):
        for bucket in range(1 << table.bucket_bits):
            first.store.take_changes(t, bucket)
            second.store.import_records(t, bucket, first.store.export_bucket(t, bucket))
            states = first.store.bucket_state(t, bucket)
            assert states[2].all(), "a row without utility"
            second.store.set_bucket_state(t, bucket, states)
    for rows in (first, second):
        train(rows, np.random.default_rng(2), 20)
    assert all_rows(second) == all_rows(first)
    for t, table in enumerate(first.tables):
        for bucket in range(1 << table.bucket_bits):
            # Imported rows count as published; only what was learned since is a change.
            changes = first.store.take_changes(t, bucket)
            assert second.store.take_changes(t, bucket) == changes
            both = [rows.store.bucket_state(t, bucket) for rows in (first, second)]
            for mine, theirs in zip(*both, strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_a_marked_key_is_a_change_as_it_is_or_as_a_tombstone() -> None:
    rows = make()
    rows(np.array([[7, 7, 7]])).sum().backward()
    rows.step()
    layout, bucket = rows.tables[0].layout, _store.hash_key(7) >> 62
    record = rows.store.take_changes(0, bucket)
    gone = next(k for k in range(100, 200) if _store.hash_key(k) >> 62 == bucket)
    payload = _store.encode_payload(layout, 3, np.zeros(8, np.float32))
    other = _store.encode_record(gone, 3, 0, payload)
    rows.mark_changed(0, bucket, record + other)
    assert rows.store.take_changes(0, bucket) == record + _store.encode_record(gone, 0, 2, b"")
    assert rows.store.take_changes(0, bucket) == b""
    # A key that comes back before it is taken is a row, and no tombstone.
    rows.mark_changed(0, bucket, other)
    rows(np.array([[gone, 7, gone]])).sum().backward()
    rows.step()
    assert list(_store.record_keys(layout, rows.store.take_changes(0, bucket))) == [gone]
    assert rows.store.export_bucket(0, bucket).count(_store.encode_record(gone, 3, 0, b"")[:10])


def test_lookups_do_not_depend_on_the_threads() -> None:
    rng = np.random.default_rng(8)
    rows = make()
    keys_BF = rng.integers(0, 10 * KEYS, (5000, len(CONFIG.features)))  # enough for all threads
    before = torch.get_num_threads()
    try:
        rows(keys_BF).sum().backward()
        rows.step()
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(rows(keys_BF).detach().numpy())
    finally:
        torch.set_num_threads(before)
    tables = (CONFIG.table_index(feature.table) for feature in CONFIG.features)
    want = [rows.store.lookup(t, keys_BF[:, f])[0] for f, t in enumerate(tables)]
    for each in found:
        assert (each == np.concatenate(want, axis=1)).all()


@pytest.mark.parametrize(
    "out",
    [
        np.empty((3, 8), np.float64),
        np.empty((2, 8), np.float32),
        np.empty((3, 4), np.float32),
        np.empty((3, 16), np.float32)[:, ::2],
        np.empty((3, 8), np.float32)[::-1],
        np.frombuffer(bytes(96), np.float32).reshape(3, 8),
    ],
    ids=["fp64", "rows", "dim", "apart", "backwards", "read-only"],
)
def test_an_answer_that_cannot_be_written_is_refused(out: NDArray[np.float32]) -> None:
    with pytest.raises(_store.StoreError, match="out must be fp32"):
        make().store.lookup_bags([(0, np.arange(3), None, "sum", out)])
