"""A DLRM and the optimizers of rows written out in fp64 numpy, forward and backward.

Shapes: B samples, F features, V vectors of the interaction, d their width, D dense features.
"""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.config import (
    DenseConfig,
    FeatureConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TableConfig,
)
from embertide.trainer.data.base import Batch
from embertide.trainer.model.dlrm import Dlrm

Doubles = NDArray[np.float64]
SEED, KEYS, DIM = 7, 12, 4


def model(*, top_sees_embeddings: bool) -> ModelConfig:
    """Two features share a table, and keys repeat in a batch."""
    return ModelConfig(
        name="m",
        tables=(
            TableConfig(name="item", dim=DIM, chunks=2, init_scale=1.0),
            TableConfig(name="user", dim=DIM, init_scale=1.0),
        ),
        features=(
            FeatureConfig(name="shown", table="item"),
            FeatureConfig(name="who", table="user"),
            FeatureConfig(name="before", table="item"),
        ),
        dense=tuple(DenseConfig(name=f"x{d}", steps=()) for d in range(3)),
        bottom_mlp=(5,),
        top_mlp=(6,),
        top_sees_embeddings=top_sees_embeddings,
    )


class Row:
    """A row and one optimizer's state of it."""

    def __init__(self, table: int, key: int, scale: float, h: float) -> None:
        self.w = np.array([_store.initial_value(SEED, table, key, d, scale) for d in range(DIM)])
        self.h: Any = h
        self.m, self.v, self.t = np.zeros(DIM), 0.0, 0

    def step(self, g: Doubles, config: OptimizerConfig) -> None:
        lr, eps, norm = config.sparse_learning_rate, config.epsilon, float(np.linalg.norm(g))
        if 0 < config.max_gradient_norm < norm:
            g = g * (config.max_gradient_norm / norm)
        if config.name == "sgd":
            self.w -= lr * g
        elif config.name == "rowwise_adam":
            b1, b2, self.t = config.beta1, config.beta2, self.t + 1
            self.m = b1 * self.m + (1 - b1) * g
            self.v = b2 * self.v + (1 - b2) * float(np.mean(g**2))
            first, second = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
            self.w -= lr * first / (np.sqrt(second) + eps)
        else:
            self.h = self.h + (np.mean(g**2) if config.name == "rowwise_adagrad" else g**2)
            self.w -= lr * g / (np.sqrt(self.h) + eps)


class Reference:
    """The net and its tables in fp64. Adam of the net as in Kingma & Ba 2015."""

    def __init__(self, run: RunConfig, net: Dlrm) -> None:
        self.run, self.config = run, run.model
        self.weights = {k: v.numpy().astype(np.float64) for k, v in net.state_dict().items()}
        self.moments = {k: (np.zeros_like(v), np.zeros_like(v)) for k, v in self.weights.items()}
        self.steps = 0
        self.rows: dict[tuple[int, int], Row] = {}

    def ensure_row(self, table: int, key: int) -> Row:
        if (table, key) not in self.rows:
            scale, h = self.config.tables[table].init_scale, self.run.optimizer.initial_accumulator
            self.rows[table, key] = Row(table, key, scale, h)
        return self.rows[table, key]

    def _mlp(self, name: str, x: Doubles, last_relu: bool) -> tuple[Doubles, list[Any]]:
        layers = sorted({int(k.split(".")[1]) for k in self.weights if k.startswith(name)})
        tape = []
        for layer in layers:
            weight = f"{name}.{layer}.weight"
            z = x @ self.weights[weight].T + self.weights[f"{name}.{layer}.bias"]
            relu = last_relu or layer != layers[-1]
            tape.append((layer, x, z > 0 if relu else np.ones_like(z)))
            x = z * tape[-1][2]
        return x, tape

    def _mlp_back(
        self, name: str, tape: list[Any], g: Doubles, grads: dict[str, Doubles]
    ) -> Doubles:
        for layer, x, alive in reversed(tape):
            g = g * alive
            grads[f"{name}.{layer}.weight"] = g.T @ x
            grads[f"{name}.{layer}.bias"] = g.sum(0)
            g = g @ self.weights[f"{name}.{layer}.weight"]
        return g

    def step(self, keys_BF: NDArray[np.int64], dense_BD: Doubles, y_B: Doubles) -> Doubles:
        """Learn from a batch; return its scores from before."""
        bottom, bottom_tape = self._mlp("bottom", dense_BD, last_relu=True)
        tables = [self.config.table_index(f.table) for f in self.config.features]
        x_BVd = np.zeros((len(keys_BF), 1 + len(tables), DIM))
        x_BVd[:, 0] = bottom
        for b, f in itertools.product(range(len(keys_BF)), range(len(tables))):
            row = self.rows.get((tables[f], int(keys_BF[b, f])))
            if row is not None:
                x_BVd[b, 1 + f] = row.w
        pairs = [(i, j) for i in range(1 + len(tables)) for j in range(i)]
        dots = np.stack([(x_BVd[:, i] * x_BVd[:, j]).sum(1) for i, j in pairs], 1)
        vectors = 1 + len(tables) if self.config.top_sees_embeddings else 1
        seen = x_BVd[:, :vectors].reshape(len(keys_BF), -1)
        logit, top_tape = self._mlp("top", np.concatenate([seen, dots], 1), last_relu=False)
        score_B = 1 / (1 + np.exp(-logit[:, 0]))

        grads: dict[str, Doubles] = {}
        # The gradient of the mean of -y log p - (1 - y) log (1 - p).
        g = self._mlp_back("top", top_tape, ((score_B - y_B) / len(y_B))[:, None], grads)
        g_BVd = np.zeros_like(x_BVd)
        g_BVd[:, :vectors] = g[:, : seen.shape[1]].reshape(len(keys_BF), vectors, DIM)
        for p, (i, j) in enumerate(pairs):
            g_dot = g[:, seen.shape[1] + p, None]
            g_BVd[:, i] += g_dot * x_BVd[:, j]
            g_BVd[:, j] += g_dot * x_BVd[:, i]
        self._mlp_back("bottom", bottom_tape, g_BVd[:, 0], grads)

        self.steps += 1
        for name, grad in grads.items():
            m, v = self.moments[name]
            m += 0.1 * (grad - m)
            v += 0.001 * (grad**2 - v)
            m_hat, v_hat = m / (1 - 0.9**self.steps), v / (1 - 0.999**self.steps)
            rate = self.run.optimizer.dense_learning_rate
            self.weights[name] -= rate * m_hat / (np.sqrt(v_hat) + 1e-8)
        sums: dict[tuple[int, int], Doubles] = {}
        for b, f in itertools.product(range(len(keys_BF)), range(len(tables))):
            of = tables[f], int(keys_BF[b, f])
            sums[of] = sums.get(of, np.zeros(DIM)) + g_BVd[b, 1 + f]
        for (t, key), grad in sums.items():
            self.ensure_row(t, key).step(grad, self.run.optimizer)
        return score_B


def batch_of(rng: np.random.Generator, count: int) -> Batch:
    index_B = np.arange(count)
    return Batch(
        first=0,
        next_offset=count,
        event_B=index_B,
        ts_ms_B=index_B,
        keys_BF=rng.integers(0, KEYS, (count, 3)),
        dense_BD=rng.standard_normal((count, 3)).astype(np.float32),
        label_B=rng.integers(0, 2, count).astype(np.float32),
    )
