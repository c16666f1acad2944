"""The DLRM's top MLP sees what its configuration says."""

import dataclasses

import pytest
import torch
from torch import nn

from bench.criteo import criteo
from embertide.trainer.config import FeatureConfig, ModelConfig, TableConfig
from embertide.trainer.model.dlrm import Dlrm


def _first_width(config: ModelConfig) -> int:
    first = Dlrm(config).top[0]
    assert isinstance(first, nn.Linear)
    return first.in_features


def test_the_reference_net_sees_the_dots_and_the_bottom_mlp() -> None:
    pairs, dim = 27 * 26 // 2, criteo().feature_dims[0]
    assert _first_width(criteo()) == pairs + dim
    wide = dataclasses.replace(criteo(), top_sees_embeddings=True)
    assert _first_width(wide) == pairs + 27 * dim


def test_without_dense_features_it_sees_the_dots_alone() -> None:
    tables = (TableConfig(name="t"),)
    features = tuple(FeatureConfig(name=name, table="t") for name in "abc")
    config = ModelConfig(name="m", tables=tables, features=features, top_sees_embeddings=False)
    assert _first_width(config) == 3
    net, dim = Dlrm(config), config.feature_dims[0]
    x_Fd = torch.randn(3, dim)
    turn, _ = torch.linalg.qr(torch.randn(dim, dim))
    # Dot products, and so the score, stay as they are when all vectors are turned alike.
    flat, turned = x_Fd.reshape(1, -1), (x_Fd @ turn).reshape(1, -1)
    torch.testing.assert_close(net(torch.zeros(1, 0), turned), net(torch.zeros(1, 0), flat))


def test_one_feature_alone_has_no_dot_product() -> None:
    with pytest.raises(ValueError, match=r"model 'm' has one feature.*set top_sees_embeddings"):
        ModelConfig(
            name="m",
            tables=(TableConfig(name="t"),),
            features=(FeatureConfig(name="f", table="t"),),
            top_sees_embeddings=False,
        )
