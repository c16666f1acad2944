"""The few classes of TorchRec that docs/torchrec.md names, where TorchRec is not installed.

They hold what they are given and do no more. What learns in place of FBGEMM is torch's EmbeddingBag
with row-wise Adagrad written out.

Shapes: B samples, R rows of a table, d their width.
"""

import enum
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embertide.trainer.embedding.collection import KeyedTensor


class PoolingType(enum.Enum):
    """How bags are pooled."""

    SUM = "SUM"
    MEAN = "MEAN"


class EmbeddingBagConfig(types.SimpleNamespace):
    """A table."""

    pooling: Any = PoolingType.SUM


class KeyedJaggedTensor:
    """Keys of features."""

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> None:
        assert lengths is not None
        self._keys, self._values, self._weights, self._lengths = keys, values, weights, lengths

    def keys(self) -> Sequence[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def weights_or_none(self) -> Tensor | None:
        return self._weights


class RowWiseAdagrad:
    """The name of FBGEMM's exact row-wise Adagrad."""


class FusedEmbeddingBagCollection(nn.Module):
    """Tables of torch's EmbeddingBag, which learn in backward as FBGEMM's do."""

    def __init__(self, tables: Sequence[Any], optimizer_kwargs: dict[str, float], **_: Any) -> None:
        super().__init__()
        self.tables, self.rate = tables, optimizer_kwargs
        self.embedding_bags = nn.ModuleDict(
            {
                each.name: nn.EmbeddingBag(
                    each.num_embeddings, each.embedding_dim, mode=each.pooling.value.lower()
                )
                for each in tables
            }
        )
        self.sums = {each.name: torch.zeros(each.num_embeddings) for each in tables}
        for each in tables:
            bag = self.embedding_bags[each.name]
            assert isinstance(bag, nn.EmbeddingBag)
            bound = each.num_embeddings**-0.5
            nn.init.uniform_(bag.weight, -bound, bound)
            bag.weight.register_post_accumulate_grad_hook(self._step_of(each.name))

    def _step_of(self, name: str) -> Any:
        def step(weight_Rd: Tensor) -> None:
            gradient_Rd, sum_R = weight_Rd.grad, self.sums[name]
            assert gradient_Rd is not None
            sum_R += gradient_Rd.square().mean(1)
            scale_R = self.rate["lr"] / (sum_R.sqrt() + self.rate["eps"])
            weight_Rd.data -= scale_R.unsqueeze(1) * gradient_Rd
            weight_Rd.grad = None

        return step

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        lengths_FB = features.lengths().reshape(len(features.keys()), -1)
        parts = features.values().split(lengths_FB.sum(1).tolist())
        keys = {
            name: (part, length_B)
            for name, part, length_B in zip(features.keys(), parts, lengths_FB, strict=True)
        }
        pooled, names = [], []
        for table in self.tables:
            for name in table.feature_names:
                values, length_B = keys[name]
                pooled.append(
                    self.embedding_bags[table.name](values, length_B.cumsum(0) - length_B)
                )
                names.append(name)
        widths = [each.shape[1] for each in pooled]
        return KeyedTensor(names, widths, torch.cat(pooled, dim=1))

    def fused_optimizer(self) -> Any:
        """Return what has the accumulators, under TorchRec's names."""
        state = {
            f"{name}.weight": {f"{name}.weight.momentum_1": sum_R}
            for name, sum_R in self.sums.items()
        }
        return types.SimpleNamespace(state_dict=lambda: {"state": state})


def modules() -> dict[str, types.ModuleType]:
    """Return the modules that the page imports, for sys.modules."""
    here = sys.modules[__name__]
    names = (
        "torchrec",
        "torchrec.modules",
        "torchrec.modules.embedding_configs",
        "torchrec.modules.fused_embedding_modules",
        "torchrec.optim",
    )
    return dict.fromkeys(names, here)
