"""One step of the whole model against numbers that are not ours.

First a DLRM and all optimizers written out in fp64 numpy from the formulas, forward and backward;
then the run of a tiny model that the README of facebookresearch/dlrm prints (MIT), whose weights,
inputs, losses and updated weights are taken as they stand there.

Shapes: B samples, F features, V vectors of the interaction, d their width, D dense features.
"""

import itertools

import numpy as np
import pytest
import torch
from fp64 import KEYS, SEED, Reference, batch_of, model
from numpy.typing import NDArray
from torch import Tensor, nn

from embertide import _store
from embertide.trainer.config import (
    DenseConfig,
    FeatureConfig,
    ModelConfig,
    Optimizer,
    OptimizerConfig,
    RunConfig,
    TableConfig,
)
from embertide.trainer.model.dlrm import Dlrm, Probability
from embertide.trainer.model.learner import Learner


@pytest.mark.parametrize("top_sees_embeddings", [False, True])
@pytest.mark.parametrize("limit", [0.0, 0.004])
@pytest.mark.parametrize("name", ["rowwise_adagrad", "adagrad", "sgd", "rowwise_adam"])
def test_forward_backward_and_updates_are_those_of_fp64(
    name: Optimizer, limit: float, top_sees_embeddings: bool
) -> None:
    rate = 5.0 if name == "sgd" else 0.05  # others take the gradient's size out of a step
    optimizer = OptimizerConfig(
        name=name,
        sparse_learning_rate=rate,
        epsilon=1e-4,
        initial_accumulator=1e-5,
        beta1=0.8,
        beta2=0.95,
        max_gradient_norm=limit,
    )
    run = RunConfig(
        model=model(top_sees_embeddings=top_sees_embeddings),
        optimizer=optimizer,
        seed=SEED,
        ddr_budget_bytes=8 << 20,
    )
    learner = Learner(run)
    assert isinstance(learner.net, Dlrm)
    reference = Reference(run, learner.net)
    # Some have rows; the others read as zeros until a step makes theirs.
    for t in range(2):
        learner.rows.store.ensure_rows(t, np.arange(0, KEYS, 2))
        for key in range(0, KEYS, 2):
            reference.ensure_row(t, key)
    rng = np.random.default_rng(3)
    for _ in range(5):
        batch = batch_of(rng, 12)
        dense_BD, label_B = batch.dense_BD.astype(np.float64), batch.label_B.astype(np.float64)
        want_B = reference.step(batch.keys_BF, dense_BD, label_B)
        np.testing.assert_allclose(learner.learn(batch), want_B, rtol=0, atol=2e-6)
        for name_, value in learner.net.state_dict().items():
            np.testing.assert_allclose(value.numpy(), reference.weights[name_], rtol=0, atol=2e-6)
        for (t, key), row in reference.rows.items():
            got, _, _ = learner.rows.store.lookup(t, np.array([key]))
            np.testing.assert_allclose(got[0], row.w, rtol=0, atol=2e-6)
    assert (learner.rows.stats()["clipped_gradients"] > 20) == (limit > 0)


# From the README of facebookresearch/dlrm, "with a tiny model in debug mode": weights before and
# after three batches of two samples; the loss is the mean square error, the optimizer SGD of 0.01.
TRACE_TABLES = """
 .05438 -.11105 .42513 .34167 -.1426 -.45641 -.19523 -.10181
 .23667 .57199 -.16638 .30316 .10759 .22136
 -.49338 -.14301 -.36649 -.22139"""
TRACE_NET = """
 .51313 .66662 .10591 .13089 .32198 .66156 .84651 .55326 .85445 .38484 .31679 .35426
 .17108 .82911 .33867
 .55237 .57855 .52153 .00269 .98835 .90534
 .20764 .29249
 .52001 .90191 .98363 .25754 .56436 .80697 .39437 .73107
 .16107 .6007 .86586 .98352 .07937 .42835 .20454 .45064
 .54776 .09333 .29686 .92758 .569 .45741 .75353 .74186
 .04858 .7087 .83924 .16594 .781 .28654 .30647 .66526
 .11139 .66487 .88786 .69631
 .44033 .43821 .7651 .56564 .0849 .58267 .81484 .33707
 .92758 .75072
 .57406 .75164
 .07915"""
UPDATED_TABLES = """
 .0543 -.1112 .42513 .34167 -.14283 -.45679 -.19532 -.10197
 .23667 .57199 -.1666 .30285 .10751 .22124
 -.49338 -.14301 -.36664 -.22164"""
UPDATED_NET = """
 .51313 .66663 .10591 .1309 .32196 .66154 .84649 .55324 .85444 .38482 .31677 .35425
 .17109 .82907 .33863
 .55238 .57857 .52154 .00265 .98825 .90528
 .20764 .29244
 .51996 .90184 .98368 .25752 .56436 .807 .39437 .73107
 .16096 .60055 .86596 .98348 .07938 .42842 .20453 .45064
 .5476 .0931 .29701 .92752 .56902 .45752 .75351 .74187
 .04849 .70857 .83933 .1659 .78101 .2866 .30646 .66526
 .11137 .66482 .88778 .69627
 .44029 .43816 .76502 .56561 .08485 .5826 .81474 .33702
 .92754 .75067
 .57379 .7514
 .07908"""
# Dense features; for each table the keys of either sample; labels; the loss.
TRACE: list[tuple[list[list[float]], list[list[list[int]]], list[float], float]] = [
    (
        [[0.69647, 0.28614, 0.22685, 0.55131], [0.71947, 0.42311, 0.98076, 0.68483]],
        [[[1], [0, 1]], [[0], [1]], [[1], [0]]],
        [0.55679, 0.15896],
        0.451893,
    ),
    (
        [[0.36179, 0.22826, 0.29371, 0.63098], [0.0921, 0.4337, 0.43086, 0.49369]],
        [[[1], [0, 2, 3]], [[1], [1, 2]], [[1], [1]]],
        [0.15307, 0.69553],
        0.402002,
    ),
    (
        [[0.60306, 0.54507, 0.34276, 0.30412], [0.41702, 0.6813, 0.87546, 0.51042]],
        [[[2], [0, 1, 2]], [[1], [2]], [[1], [1]]],
        [0.31877, 0.69197],
        0.27546,
    ),
]
# Weights are printed with five digits, before and after.
PRINTED = 1.5e-5


def numbers(text: str) -> NDArray[np.float32]:
    return np.array(text.split(), np.float32)


class TracedTables:
    """The three tables of the trace in a store, by bags."""

    rows = (4, 3, 2)

    def __init__(self) -> None:
        layout = _store.RowLayout(dtype="fp32", chunks=1, chunk_dim=2)
        self.store = _store.TrainingStore(
            tables=[
                _store.TableConfig(name=f"t{t}", id=t, layout=layout, bucket_bits=0)
                for t in range(3)
            ],
            optimizer="sgd",
            ddr_budget_bytes=8 << 20,
        )
        values = iter(numbers(TRACE_TABLES).reshape(-1, 2))
        for t, count in enumerate(self.rows):
            payloads = [_store.encode_payload(layout, 1, next(values)) for _ in range(count)]
            records = (_store.encode_record(key, 1, 0, p) for key, p in enumerate(payloads))
            self.store.import_records(t, 0, b"".join(records))

    @staticmethod
    def _bags(keys: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        ends = np.cumsum([0, *map(len, keys)]).astype(np.uint32)
        return np.array(list(itertools.chain(*keys)), np.int64), ends

    def forward(self, keys: list[list[list[int]]]) -> Tensor:
        pooled = []
        for t, each in enumerate(keys):
            flat, ends = self._bags(each)
            pooled.append(self.store.lookup(t, flat, pooling="sum", offsets=ends)[0])
        return torch.from_numpy(np.concatenate(pooled, 1)).requires_grad_()

    def step(self, keys: list[list[list[int]]], gradient_BE: Tensor) -> None:
        bags: list[_store.BagGradients] = [
            (t, *self._bags(each), gradient_BE.numpy()[:, 2 * t : 2 * t + 2])
            for t, each in enumerate(keys)
        ]
        self.store.apply_gradients(bags, learning_rate=0.01)

    def values(self) -> NDArray[np.float32]:
        read = [self.store.lookup(t, np.arange(count))[0] for t, count in enumerate(self.rows)]
        return np.concatenate(read).reshape(-1)


def test_the_run_that_the_dlrm_readme_prints() -> None:
    config = ModelConfig(
        name="tiny",
        tables=tuple(TableConfig(name=f"t{t}", dim=2) for t in range(3)),
        features=tuple(FeatureConfig(name=f"f{t}", table=f"t{t}") for t in range(3)),
        dense=tuple(DenseConfig(name=f"x{d}", steps=()) for d in range(4)),
        bottom_mlp=(3,),
        top_mlp=(4, 2),
        top_sees_embeddings=False,
    )
    net = Dlrm(config)
    nn.utils.vector_to_parameters(torch.from_numpy(numbers(TRACE_NET)), net.parameters())
    served, tables = Probability(net), TracedTables()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for dense, keys, label, loss in TRACE:
        optimizer.zero_grad()
        embeddings_BE = tables.forward(keys)
        found = nn.functional.mse_loss(
            served(torch.tensor(dense), embeddings_BE), torch.tensor(label)
        )
        found.backward()
        assert float(found.detach()) == pytest.approx(loss, abs=PRINTED)
        optimizer.step()
        assert embeddings_BE.grad is not None
        tables.step(keys, embeddings_BE.grad)
    trained = nn.utils.parameters_to_vector(net.parameters()).detach().numpy()
    np.testing.assert_allclose(trained, numbers(UPDATED_NET), rtol=0, atol=PRINTED)
    np.testing.assert_allclose(tables.values(), numbers(UPDATED_TABLES), rtol=0, atol=PRINTED)
    # The printed digits do tell a step from none.
    assert np.abs(numbers(UPDATED_TABLES) - numbers(TRACE_TABLES)).max() > 20 * PRINTED
