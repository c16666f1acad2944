"""docs/torchrec.md run as it is printed: the loss curve here is that of TorchRec.

The short test takes torch's EmbeddingBag in TorchRec's place; the long ones need TorchRec itself
(`make build/.torchrec`). Shapes: B samples, R rows of a table.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchrec_standin
from torchrec_standin import EmbeddingBagConfig, KeyedJaggedTensor

from bench.drift.torchrec import load
from bench.servers import BenchError
from embertide.trainer.config import OptimizerConfig
from embertide.trainer.embedding.collection import EmbeddingBagCollection, model_of

PAGE = Path(__file__).parents[2] / "docs" / "torchrec.md"
STEPS = 1000
pytestmark = pytest.mark.usefixtures("one_thread")


def page() -> dict[str, Any]:
    """Return the names that the page's code defines."""
    names: dict[str, Any] = {}
    torch.manual_seed(3)
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def needs_torchrec() -> None:
    try:
        load("modules.fused_embedding_modules")
    except BenchError as error:
        if os.environ.get("EMBERTIDE_NEEDS_PEERS"):
            raise
        pytest.skip(f"{error}")


def largest_difference(names: dict[str, Any], steps: int) -> float:
    theirs = names["train_theirs"](steps, names["theirs"])
    ours = names["train_ours"](steps, names["ours"])
    # They learn, and not the labels by heart.
    assert 0.2 < np.mean(theirs[-20:]) < 0.9 * np.mean(theirs[:20])
    return float(np.abs(np.array(theirs) - np.array(ours)).max())


def goes_on(names: dict[str, Any]) -> float:
    """Train theirs, bring rows and accumulators over, and train both on."""
    names["train_theirs"](100, names["theirs"])
    moved = EmbeddingBagCollection(names["tables"], optimizer=names["rate"])
    names["move"](names["theirs"], moved)
    theirs = names["train_theirs"](60, names["theirs"])
    ours = names["train_ours"](60, moved)
    return float(np.abs(np.array(theirs) - np.array(ours)).max())


def test_the_page_learns_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in torchrec_standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert largest_difference(page(), 200) < 1e-5
    assert goes_on(page()) < 1e-5


@pytest.mark.long
def test_the_loss_curve_is_torchrecs_over_1000_steps() -> None:
    needs_torchrec()
    difference = largest_difference(page(), STEPS)
    print(f"largest difference of {STEPS} losses: {difference:.2g}")
    assert difference < 1e-5


@pytest.mark.long
def test_a_trained_torchrec_model_goes_on_here() -> None:
    needs_torchrec()
    assert goes_on(page()) < 1e-5


# --- the interface --------------------------------------------------------------------------------


def tables() -> list[Any]:
    """One of one bucket, one of many."""
    t = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=10, feature_names=["a", "b"])
    u = EmbeddingBagConfig(
        name="u", embedding_dim=4, num_embeddings=10**6, feature_names=["b"], pooling="MEAN"
    )
    return [t, u]


def features(weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    """Three features of two samples, of which the tables want two."""
    return KeyedJaggedTensor(
        keys=["x", "b", "a"],
        values=torch.tensor([9, 3, 4, 5, 1]),
        weights=weights,
        lengths=torch.tensor([1, 0, 2, 1, 0, 1]),
    )


def loaded(collection: EmbeddingBagCollection) -> tuple[torch.Tensor, torch.Tensor]:
    t_Rd, u_Rd = torch.randn(10, 8), torch.randn(10, 4)
    collection.load("t", t_Rd[:5])
    collection.load("t", t_Rd[5:], first=5)
    collection.load("u", u_Rd)
    return t_Rd, u_Rd


def test_features_are_pooled_by_name() -> None:
    collection = EmbeddingBagCollection(tables(), is_weighted=True)
    t_Rd, u_Rd = loaded(collection)
    weights = torch.tensor([1.0, 0.5, 2.0, 3.0, -1.0])
    pooled = collection(features(weights))
    assert pooled.keys() == ["a", "b@t", "b@u"] == collection.embedding_names
    assert pooled.length_per_key() == [8, 8, 4]
    zeros = torch.zeros(8)
    torch.testing.assert_close(pooled["a"], torch.stack([zeros, -t_Rd[1]]))
    torch.testing.assert_close(
        pooled["b@t"], torch.stack([0.5 * t_Rd[3] + 2 * t_Rd[4], 3 * t_Rd[5]])
    )
    torch.testing.assert_close(
        pooled["b@u"], torch.stack([(0.5 * u_Rd[3] + 2 * u_Rd[4]) / 2, 3 * u_Rd[5]])
    )
    assert torch.equal(torch.cat([*pooled.to_dict().values()], dim=1), pooled.values())


def test_rows_and_accumulators_are_where_their_keys_are() -> None:
    rate = OptimizerConfig(sparse_learning_rate=0.5, epsilon=1e-8)
    collection = EmbeddingBagCollection(tables()[1:], optimizer=rate)
    u_Rd, sum_R = torch.randn(10, 4), torch.arange(1.0, 11.0)
    collection.load("u", u_Rd, sum_R)
    pooled = collection(features())
    (pooled.values() * torch.tensor([2.0, 4.0]).unsqueeze(1)).sum().backward()
    assert collection.step() == 3
    after = collection.eval()(features())["b"]
    g = torch.tensor([1.0, 1.0, 4.0])  # of rows 3 and 4, whose mean it is, and 5
    moved = u_Rd[3:6] - (0.5 * g / (sum_R[3:6] + g**2).sqrt()).unsqueeze(1)
    torch.testing.assert_close(after, torch.stack([moved[:2].mean(0), moved[2]]))


def test_what_does_not_fit_is_refused() -> None:
    collection = EmbeddingBagCollection(tables())
    for wrong, message in (
        (KeyedJaggedTensor(["a"], torch.tensor([1]), None, torch.tensor([1])), "'b'.* not there"),
        (KeyedJaggedTensor(["a", "b"], torch.tensor([1]), None, torch.ones(3)), "3 lengths for 2"),
    ):
        with pytest.raises(ValueError, match=message):
            collection(wrong)
    with pytest.raises(ValueError, match="no weights; give them"):
        EmbeddingBagCollection(tables(), is_weighted=True)(features())
    for rows, sums, message in (
        (torch.zeros(3, 5), None, r"rows are \(3, 5\); give \[R, 8\]"),
        (torch.full((3, 8), torch.nan), None, "not finite"),
        (torch.zeros(3, 8), torch.zeros(2), "3 rows, 2 accumulators"),
    ):
        with pytest.raises(ValueError, match=message):
            collection.load("t", rows, sums)
    strange = tables()[0]
    strange.pooling = "NONE"
    with pytest.raises(ValueError, match="pooling is 'NONE'; use one of"):
        model_of([strange])
