"""The optimizers of rows, chosen by OptimizerConfig, in a loop as a user writes it.

Shapes: B samples, E all embedding values of a sample.
"""

import dataclasses
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from killing import unserved
from torch import Tensor, nn

from embertide import _store
from embertide.trainer.config import (
    FeatureConfig,
    ModelConfig,
    Optimizer,
    OptimizerConfig,
    RunConfig,
    TableConfig,
)
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.presets import news_model
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress

pytestmark = pytest.mark.usefixtures("one_thread")

KEYS, DIM, SEED = 300, 12, 3
CONFIG = ModelConfig(
    name="m",
    tables=(TableConfig(name="item", dim=DIM, chunks=3, bucket_bits=2),),
    features=(FeatureConfig(name="shown", table="item"),),
)


def make(optimizer: OptimizerConfig) -> EmbeddingStore:
    return EmbeddingStore(CONFIG, optimizer=optimizer, seed=SEED, ddr_budget_bytes=64 << 20)


def loss_of(rows_BE: Tensor, target_BE: Tensor) -> Tensor:
    return (rows_BE - target_BE).square().sum()


@pytest.mark.parametrize("name", get_args(Optimizer))
def test_rows_and_state_do_not_depend_on_the_threads(name: Optimizer) -> None:
    found: list[bytes] = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        rows = make(OptimizerConfig(name=name, sparse_learning_rate=0.01, max_gradient_norm=9.0))
        rng = np.random.default_rng(1)
        for _ in range(3):
            keys_BF = rng.integers(0, KEYS, (20_000, 1))
            gradient = torch.from_numpy(rng.standard_normal((20_000, DIM)).astype(np.float32))
            # One key's gradients, all over the batch, whose sum in fp64 depends on their order.
            keys_BF[::2500] = KEYS
            gradient[::2500] = torch.tensor([1e30, 1, -1e30, 1e-3, 1e22, 3, -1e22, 5])[:, None]
            (rows(keys_BF) * gradient).sum().backward()
            assert rows.step() == KEYS + 1
        assert rows.stats()["clipped_gradients"] > 0
        states = [a.tobytes() for b in range(4) for a in rows.store.bucket_state(0, b)]
        found.append(b"".join([*(r for _, _, r in rows.buckets()), *states]))
    assert found[0] == found[1] == found[2]


def torchs(name: Optimizer, config: OptimizerConfig, of: nn.Module) -> torch.optim.Optimizer:
    lr = config.sparse_learning_rate
    if name == "sgd":
        return torch.optim.SGD(of.parameters(), lr=lr)
    return torch.optim.Adagrad(of.parameters(), lr=lr, eps=config.epsilon)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_rows_become_those_of_torchs_optimizer(name: Optimizer) -> None:
    config = OptimizerConfig(name=name, sparse_learning_rate=0.02, epsilon=1e-6)
    rows, dense = make(config), nn.Embedding(KEYS, DIM)
    keys = np.arange(KEYS)[:, None]
    rows.store.ensure_rows(0, keys[:, 0])
    rows.eval()
    initial = rows(keys)
    rows.train()
    with torch.no_grad():
        dense.weight.copy_(initial)
    optimizer = torchs(name, config, dense)
    rng = np.random.default_rng(2)
    for _ in range(30):
        keys_BF = rng.integers(0, KEYS, (64, 1))
        target = torch.from_numpy(rng.standard_normal((64, DIM)).astype(np.float32))
        loss_of(rows(keys_BF), target).backward()
        rows.step()
        optimizer.zero_grad()
        loss_of(dense(torch.from_numpy(keys_BF[:, 0])), target).backward()
        optimizer.step()
    rows.eval()
    torch.testing.assert_close(rows(keys), dense.weight.detach(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", get_args(Optimizer))
def test_clipped_and_refused_gradients_are_counted(name: Optimizer) -> None:
    rows = make(OptimizerConfig(name=name, max_gradient_norm=1.0))
    keys_BF = np.array([[1], [2], [3]])
    gradient = torch.zeros(3, DIM)
    gradient[0, 0], gradient[1, 0], gradient[2, 0] = float("nan"), 2.0, 0.5
    (rows(keys_BF) * gradient).sum().backward()
    assert rows.step() == 2
    assert rows.stats()["refused_gradients"] == 1
    assert rows.stats()["clipped_gradients"] == 1
    rows.eval()
    assert torch.isfinite(rows(keys_BF)).all()
    rows.store.check_integrity()


def state_of(trainer: Trainer) -> list[bytes]:
    rows = trainer.state.rows
    return [
        part
        for t, table in enumerate(rows.tables)
        for bucket in range(1 << table.bucket_bits)
        for part in (
            rows.store.export_bucket(t, bucket),
            *(array.tobytes() for array in rows.store.bucket_state(t, bucket)),
        )
    ]


@pytest.mark.parametrize("name", get_args(Optimizer))
def test_a_run_that_is_resumed_has_the_rows_and_state_of_one_never_stopped(
    name: Optimizer, tmp_path: Path
) -> None:
    optimizer = OptimizerConfig(name=name, sparse_learning_rate=0.01, max_gradient_norm=0.01)
    # One table, so that there are few files.
    model = dataclasses.replace(
        news_model(),
        tables=(TableConfig(name="all", chunks=4),),
        features=tuple(dataclasses.replace(f, table="all") for f in news_model().features),
    )
    run = RunConfig(model=model, optimizer=optimizer, batch_size=24, snapshot_every=2)
    news = NewsSource(NewsConfig(hours=1, views_per_hour=60, users=80, new_items_per_hour=5))

    def begin(folder: str) -> Trainer:
        return Trainer(run, unserved(tmp_path / folder))

    def stop(progress: Progress) -> None:
        if progress.events > 150:
            raise KeyboardInterrupt

    whole, stopped = begin("whole"), begin("stopped")
    whole.fit(news)
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(news, progress=stop, every_s=0)
    resumed = begin("stopped")
    assert 0 < resumed.state.events < 150
    resumed.fit(news)
    assert resumed.state.events == whole.state.events
    assert state_of(resumed) == state_of(whole)
    assert resumed.state.rows.stats()["clipped_gradients"] > 0


def test_state_of_another_optimizer_is_refused() -> None:
    adagrad, rowwise = make(OptimizerConfig(name="adagrad")), make(OptimizerConfig())
    for rows in (adagrad, rowwise):
        rows.store.ensure_rows(0, np.arange(20))
    with pytest.raises(_store.StoreError, match="elements") as caught:
        rowwise.store.set_bucket_state(0, 0, adagrad.store.bucket_state(0, 0))
    assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "adam"},
        {"epsilon": 0.0},
        {"initial_accumulator": -1.0},
        {"beta1": 1.0},
        {"beta2": float("nan")},
        {"max_gradient_norm": -1.0},
        {"sparse_learning_rate": 0.0},
    ],
)
def test_numbers_that_cannot_learn_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(*wrong) if "name" not in wrong else "adam"):
        OptimizerConfig(**wrong)  # type: ignore[arg-type]
