"""Bags of keys, weighed or not, learn as torch's own pooling of single rows does.

Shapes: B samples, N keys, vectors of width d.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from embertide import _store
from embertide.trainer.config import (
    FeatureConfig,
    ModelConfig,
    OptimizerConfig,
    Pooling,
    TableConfig,
)
from embertide.trainer.data.bags import Bags
from embertide.trainer.embedding.store import EmbeddingStore

DIM, KEYS = 8, 40
RATES = OptimizerConfig(sparse_learning_rate=0.2, initial_accumulator=0.25)


def model(*poolings: Pooling) -> ModelConfig:
    """Features of one table, one a pooling."""
    return ModelConfig(
        name="m",
        tables=(TableConfig(name="item", dim=DIM, chunks=2, bucket_bits=1),),
        features=tuple(
            FeatureConfig(name=f"f{i}", table="item", pooling=pooling)
            for i, pooling in enumerate(poolings)
        ),
    )


def draw(rng: np.random.Generator, samples: int, weighted: bool) -> Bags:
    """Bags of 0 to 5 keys, which repeat within a bag and between them."""
    sizes_B = rng.integers(0, 6, samples)
    count = int(sizes_B.sum())
    weights_N = rng.standard_normal(count).astype(np.float32) if weighted else None
    offsets_B1 = np.append(0, np.cumsum(sizes_B)).astype(np.uint32)
    return Bags(rng.integers(0, KEYS, count), offsets_B1, weights_N)


def torch_pooled(rows_Nd: Tensor, bags: Bags, pooling: Pooling) -> Tensor:
    """The same from a row a key."""
    if bags.weights_N is not None:
        rows_Nd = rows_Nd * torch.from_numpy(bags.weights_N)[:, None]
    parts = np.split(np.arange(len(bags.keys_N)), bags.offsets_B1[1:-1].astype(np.int64))
    pooled = [rows_Nd[part].sum(0) for part in parts]
    if pooling == "mean":
        pooled = [one / max(len(part), 1) for one, part in zip(pooled, parts, strict=True)]
    return torch.stack(pooled)


def loss_of(pooled_Bd: Tensor) -> Tensor:
    target_d = torch.linspace(-1, 1, pooled_Bd.shape[1])
    return torch.tanh(pooled_Bd - target_d).square().sum()


def values(rows: EmbeddingStore) -> NDArray[np.float32]:
    return rows.store.lookup(0, np.arange(KEYS))[0]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_bags_learn_as_torchs_pooling_of_rows_does(pooling: Pooling, weighted: bool) -> None:
    ours = EmbeddingStore(model(pooling), optimizer=RATES)
    theirs = EmbeddingStore(model("sum"), optimizer=RATES)
    rng = np.random.default_rng(1)
    for _ in range(40):
        bags = draw(rng, 12, weighted)
        pooled_Bd = ours.pool([bags])
        wanted_Bd = torch_pooled(theirs(bags.keys_N[:, None]), bags, pooling)
        torch.testing.assert_close(pooled_Bd, wanted_Bd, rtol=1e-4, atol=1e-5)
        loss_of(pooled_Bd).backward()
        loss_of(wanted_Bd).backward()
        assert ours.step() == theirs.step() > 0
    assert ours.stats()["rows"] == theirs.stats()["rows"] == KEYS
    np.testing.assert_allclose(values(ours), values(theirs), rtol=1e-3, atol=1e-5)
    ours.store.check_integrity()


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_weighed_bags_are_pooled_as_their_rows_are_bit_for_bit(pooling: Pooling) -> None:
    rows = EmbeddingStore(model(pooling), optimizer=RATES)
    rng = np.random.default_rng(5)
    for samples in (12, 1, 900):  # the last has more keys than a lookup takes at once
        bags = draw(rng, samples, weighted=True)
        loss_of(rows.pool([bags])).backward()
        rows.step()
        with torch.no_grad():
            pooled_Bd = rows.pool([bags]).numpy()
        rows_Nd = rows.store.lookup(0, bags.keys_N)[0]
        np.testing.assert_array_equal(pooled_Bd, bags.pooled(rows_Nd, pooling))


def test_weights_of_another_number_than_keys_are_refused() -> None:
    store = EmbeddingStore(model("sum"), optimizer=RATES).store
    out_Bd = np.zeros((1, store.lookup(0, np.arange(1))[0].shape[1]), np.float32)
    offsets_B1 = np.array([0, 3], np.uint32)
    with pytest.raises(_store.StoreError, match="2 weights for 3 keys; give as many"):
        store.lookup_bags([(0, np.arange(3), offsets_B1, "sum", out_Bd, np.ones(2, np.float32))])


def test_one_key_a_bag_is_a_forward_pass_bit_for_bit() -> None:
    both = [EmbeddingStore(model("sum", "mean"), optimizer=RATES) for _ in range(2)]
    rng = np.random.default_rng(2)
    for _ in range(10):
        keys_BF = rng.integers(0, KEYS, (16, 2))
        offsets_B1 = np.arange(17, dtype=np.uint32)
        passes = (
            both[0](keys_BF),
            both[1].pool([Bags(np.ascontiguousarray(keys_BF[:, f]), offsets_B1) for f in (0, 1)]),
        )
        assert torch.equal(*passes)
        for rows, embeddings in zip(both, passes, strict=True):
            loss_of(embeddings).backward()
            rows.step()
    np.testing.assert_array_equal(values(both[0]), values(both[1]))


def test_forward_passes_and_bags_add_up_to_one_step() -> None:
    rows = EmbeddingStore(model("sum"), optimizer=OptimizerConfig(initial_accumulator=0))
    one = Bags(np.array([3, 3]), np.array([0, 2, 2], np.uint32))
    (rows(np.array([[3]])).sum() + 2 * rows.pool([one]).sum()).backward()
    assert rows.step() == 1
    states = [rows.store.bucket_state(0, bucket)[0] for bucket in (0, 1)]
    # One row, with gradient 1 + 2 + 2 in every dimension.
    assert np.concatenate(states).tolist() == [25]


def test_bags_of_several_features_come_side_by_side() -> None:
    rows = EmbeddingStore(model("sum", "mean"), optimizer=RATES)
    rng = np.random.default_rng(3)
    bags = [draw(rng, 7, False), draw(rng, 7, True)]
    loss_of(rows.pool(bags)).backward()
    rows.step()
    rows.eval()
    with torch.no_grad():
        both_BE = rows.pool(bags)
    for f, pooling in enumerate(("sum", "mean")):
        one, _, _ = rows.store.lookup(0, bags[f].keys_N)
        wanted_Bd = torch_pooled(torch.from_numpy(one), bags[f], pooling)  # type: ignore[arg-type]
        torch.testing.assert_close(both_BE[:, f * DIM : (f + 1) * DIM], wanted_Bd)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "begin": ({"offsets_B1": [1, 3]}, r"offsets go from \[1\] to \[3\] over 3 keys"),
    "end": ({"offsets_B1": [0, 2]}, r"offsets go from \[0\] to \[2\] over 3 keys"),
    "none": ({"offsets_B1": []}, "give one more than bags"),
    "order": ({"offsets_B1": [0, 2, 1, 3]}, "offsets descend"),
    "weights": ({"weights_N": [1, 2]}, "2 weights for 3 keys"),
    "nan": ({"weights_N": [1, np.nan, 2]}, "weight nan of key 8 is not finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bags_that_do_not_fit_are_refused(name: str) -> None:
    changes, message = WRONG[name]
    given: dict[str, Any] = {"offsets_B1": [0, 1, 3], "weights_N": [1, 2, 3], **changes}
    with pytest.raises(ValueError, match=message):
        Bags(
            np.array([7, 8, 9]),
            np.array(given["offsets_B1"], np.uint32),
            np.array(given["weights_N"], np.float32),
        )


def test_bags_of_another_number_or_of_too_few_features_are_refused() -> None:
    rows = EmbeddingStore(model("sum", "mean"))
    one, two = (
        Bags(np.array([1]), np.array([0, 1], np.uint32)),
        draw(np.random.default_rng(1), 2, False),
    )
    for wrong in ([one], [one, two]):
        with pytest.raises(ValueError, match=r"bags; give 2 of one number"):
            rows.pool(wrong)
