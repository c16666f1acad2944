"""Hidden units that start fresh where a net gets columns."""

import dataclasses
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from embertide.trainer.model.build import build_net
from embertide.trainer.model.renew import renew
from embertide.trainer.presets import news_model


def net_and_fresh(
    kind: Literal["dlrm", "dcn_v2", "deepfm"] = "dlrm",
) -> tuple[Any, dict[str, Tensor]]:
    """A net of two hidden layers, and the weights of another one that learned nothing."""
    config = dataclasses.replace(news_model(), net=kind, top_mlp=(32, 8))
    other = build_net(config).state_dict()
    return build_net(config), {name: value.clone() for name, value in other.items()}


@pytest.mark.parametrize(("kind", "mlp"), [("dlrm", "top"), ("dcn_v2", "top"), ("deepfm", "deep")])
def test_the_least_used_quarter_of_units_starts_fresh(kind: Any, mlp: str) -> None:
    net, fresh = net_and_fresh(kind)
    layers = net.get_submodule(mlp)
    into, _, middle, _, out = layers
    with torch.no_grad():
        into.weight[4:12] *= 0.001
        out.weight[:, 3:5] *= 0.001
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert renew(net, fresh, {f"{mlp}.0.weight"}) == 8 + 2
    after = net.state_dict()
    first, then = torch.zeros(32, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
    first[4:12] = then[3:5] = True
    for name in ("weight", "bias"):
        value, was, new = (each[f"{mlp}.0.{name}"] for each in (after, before, fresh))
        assert torch.equal(value[first], new[first])
        assert torch.equal(value[~first], was[~first])
    value, was, new = (each[f"{mlp}.2.weight"] for each in (after, before, fresh))
    assert not middle.weight[~then][:, first].any()
    assert torch.equal(value[~then][:, ~first], was[~then][:, ~first])
    assert torch.equal(value[then], new[then])  # they see the fresh units of the layer before
    assert not out.weight[:, then].any()
    assert torch.equal(out.weight[:, ~then], before[f"{mlp}.4.weight"][:, ~then])
    others = {name for name in before if not name.startswith(mlp)}
    assert all(torch.equal(after[name], before[name]) for name in others)


def test_scores_stay_where_a_quarter_of_the_units_is_of_no_use() -> None:
    net, fresh = net_and_fresh()
    with torch.no_grad():
        net.get_submodule("top.2").weight[:, 8:16] = 0
        net.get_submodule("top.4").weight[:, :2] = 0
    inputs = torch.zeros(50, 0), torch.randn(50, 16 * len(news_model().columns))
    before = net(*inputs)
    assert renew(net, fresh, {"top.0.weight"}) == 10
    torch.testing.assert_close(net(*inputs), before)


def test_no_unit_starts_fresh_where_no_column_came() -> None:
    net, fresh = net_and_fresh()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert renew(net, fresh, {"columns.weight"}) == 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("between", [nn.BatchNorm1d(8), nn.Sigmoid(), nn.Identity()])
def test_no_unit_starts_fresh_before_another_layer_than_a_relu(between: nn.Module) -> None:
    """A layer between may have learned what its inputs are like."""
    net = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 1))})
    fresh = {name: value + 1 for name, value in net.state_dict().items()}
    assert renew(net, fresh, {"mlp.0.weight"}) == 0
