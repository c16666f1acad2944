"""A net that goes on from one of other columns gives the scores that the older one gave.

Shapes: B samples, D dense columns, E embedding values.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embertide.trainer.config import (
    DenseConfig,
    FeatureConfig,
    ModelConfig,
    SequenceConfig,
    TableConfig,
)
from embertide.trainer.model.build import build_net
from embertide.trainer.model.carry import axes_of, carry

DIM, BATCH = 4, 5


def model(features: str, dense: str, net: Any = "dlrm", **more: Any) -> ModelConfig:
    """A model over features and dense columns of one letter each."""
    return ModelConfig(
        name="m",
        tables=tuple(TableConfig(name=name, dim=DIM) for name in sorted(features)),
        features=tuple(FeatureConfig(name=name, table=name) for name in features),
        dense=tuple(DenseConfig(name=name, missing=name == "p") for name in dense),
        net=net,
        bottom_mlp=(6,),
        top_mlp=(8,),
        **more,
    )


SEQUENCES = (SequenceConfig(name="hist", user="a", item="b", length=3),)
NETS: dict[str, dict[str, Any]] = {
    "dlrm": {},
    "dlrm whose top sees dots alone": {"top_sees_embeddings": False},
    "dcn_v2": {"net": "dcn_v2"},
    "dcn_v2 of rank 2": {"net": "dcn_v2", "cross_rank": 2},
    "deepfm": {"net": "deepfm"},
    "history": {"net": "history", "sequences": SEQUENCES},
}


def build(config: ModelConfig, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build_net(config)


def sample(config: ModelConfig, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(dense_BD, embeddings_BE) of a model, by the names of its columns."""
    dense = [
        values[name]
        for feature in config.dense
        for name in ([feature.name, f"{feature.name}?"] if feature.missing else [feature.name])
    ]
    dense += [values[name] for name in config.raw_columns[len(config.dense) :]]
    embeddings_BE = torch.cat([values[column.name] for column in config.columns], dim=1)
    return torch.stack(dense, dim=1), embeddings_BE


def values_of(config: ModelConfig) -> dict[str, Tensor]:
    """A value for every column that a model of these tests may have."""
    generator = torch.Generator().manual_seed(7)
    values = {
        column.name: torch.randn(BATCH, DIM, generator=generator) for column in config.columns
    }
    for name in ("p", "p?", "q", "r", "s"):
        values[name] = torch.randn(BATCH, generator=generator)
    for name in config.raw_columns[len(config.dense) :]:
        values[name] = torch.ones(BATCH)
    return values


@pytest.mark.parametrize("name", NETS)
def test_scores_stay_when_columns_come_and_move(name: str) -> None:
    before = model("abc", "qr", **NETS[name])
    after = model("cadb", "pqsr", **NETS[name])
    old, net = build(before, 1), build(after, 2)
    carried = carry(old.state_dict(), axes_of(old), net)
    net.load_state_dict(carried.tensors)
    assert not carried.fresh
    values = values_of(after)
    if name == "deepfm":  # whose sums have no weight that could be 0
        values["d"] = torch.zeros(BATCH, DIM)
    torch.testing.assert_close(
        net(*sample(after, values)), old(*sample(before, values)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", NETS)
def test_a_feature_without_rows_keeps_the_fresh_weights(name: str) -> None:
    before, after = model("abc", "q", **NETS[name]), model("cadb", "q", **NETS[name])
    old, net = build(before, 1), build(after, 2)
    fresh = {name: value.clone() for name, value in net.state_dict().items()}
    carried = carry(old.state_dict(), axes_of(old), net, {"d"})
    net.load_state_dict(carried.tensors)
    values = values_of(after) | {"d": torch.zeros(BATCH, DIM)}
    torch.testing.assert_close(
        net(*sample(after, values)), old(*sample(before, values)), rtol=1e-5, atol=1e-6
    )
    of_d = [
        torch.equal(carried.tensors[tensor][:, i], fresh[tensor][:, i])
        for tensor, axes in axes_of(net).items()
        for i, position in enumerate((axes[-1] or ()) if len(axes) == 2 else ())
        if "d" in position.replace(":", "*").split("*")
    ]
    assert of_d
    assert all(of_d)


@pytest.mark.parametrize("name", NETS)
def test_a_column_that_came_is_learned_from(name: str) -> None:
    before, after = model("ab", "q", **NETS[name]), model("abd", "qs", **NETS[name])
    old, net = build(before, 1), build(after, 2)
    net.load_state_dict(carry(old.state_dict(), axes_of(old), net).tensors)
    dense_BD, embeddings_BE = sample(after, values_of(after))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        embeddings_BE = embeddings_BE.detach().requires_grad_()
        nn.functional.softplus(net(dense_BD, embeddings_BE)).sum().backward()
        optimizer.step()
    begin = [column.name for column in after.columns].index("d") * DIM
    assert embeddings_BE.grad is not None
    assert embeddings_BE.grad[:, begin : begin + DIM].abs().sum() > 0


def test_a_column_that_went_takes_its_weights_along() -> None:
    before, after = model("abc", "qr"), model("ac", "r")
    old, net = build(before, 1), build(after, 2)
    carried = carry(old.state_dict(), axes_of(old), net)
    weight, axes = old.state_dict()["bottom.0.weight"], axes_of(old)["bottom.0.weight"]
    assert axes[1] == ["q", "r"]
    torch.testing.assert_close(carried.tensors["bottom.0.weight"], weight[:, 1:])


def test_wider_rows_keep_what_the_narrow_ones_said() -> None:
    before = model("ab", "q")
    wide = tuple(dataclasses.replace(table, dim=2 * DIM) for table in before.tables)
    after = dataclasses.replace(before, tables=wide)
    old, net = build(before, 1), build(after, 2)
    carried = carry(old.state_dict(), axes_of(old), net)
    assert not carried.fresh
    net.load_state_dict(carried.tensors)
    dense_BD, embeddings_BE = sample(before, values_of(before))
    zeros = torch.zeros(BATCH, DIM)
    wide_BE = torch.cat([embeddings_BE[:, :DIM], zeros, embeddings_BE[:, DIM:], zeros], dim=1)
    # The bottom MLP gives more values, with fresh weights: only dots with zeros in rows know them.
    torch.testing.assert_close(
        net(dense_BD, wide_BE), old(dense_BD, embeddings_BE), rtol=1e-5, atol=1e-6
    )


def test_another_net_keeps_what_has_its_name_and_shape() -> None:
    old, net = build(model("ab", "q"), 1), build(model("ab", "q", "dcn_v2"), 2)
    carried = carry(old.state_dict(), axes_of(old), net)
    assert "top.0.weight" not in carried.fresh  # by the names of values that both see
    assert any(name.startswith("cross.") for name in carried.fresh)
    torch.testing.assert_close(carried.tensors["bottom.0.bias"], old.state_dict()["bottom.0.bias"])


def test_a_net_without_names_keeps_tensors_of_the_same_shape_alone() -> None:
    class Foreign(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(width, 3), nn.Linear(3, 1)

    old, net = Foreign(4), Foreign(6)
    carried = carry(old.state_dict(), axes_of(old), net)
    assert carried.fresh == ("first.weight",)
    torch.testing.assert_close(carried.tensors["last.weight"], old.last.weight)
