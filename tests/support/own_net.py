"""A net that Embertide does not have: batch norm, dropout, an index, and a dot of two features."""

import torch
from torch import Tensor, nn

from embertide.trainer.config import ModelConfig
from embertide.trainer.model.layers import Columns


class Tower(nn.Module):
    """(dense_BD, embeddings_BE) -> logits_B."""

    def __init__(self, model: ModelConfig, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.columns = Columns(model)
        inputs = self.columns.dense_width + sum(model.feature_dims)
        self.register_buffer("order", torch.randperm(inputs))
        self.first = nn.Linear(inputs, width)
        self.norm = nn.BatchNorm1d(width)
        self.rest = nn.Sequential(nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 1))
        self.pair = [self.columns.embedding[each.name] for each in model.features[:2]]

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        dense, embeddings = self.columns(dense, embeddings)
        x = torch.cat([dense, embeddings], dim=1).index_select(1, self.get_buffer("order"))
        logits: Tensor = self.rest(self.norm(self.first(x))).squeeze(1)
        one, other = (embeddings[:, each] for each in self.pair)
        return logits + (one * other).sum(1)


class Wider(Tower):
    """The same by another name, with a layer more."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model, width=8)
        self.more = nn.Linear(3, 3)


class Other(Tower):
    """The same tensors as `Tower`, used otherwise."""

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        return 2 * super().forward(dense, embeddings)


class Blind(nn.Module):
    """A net that does not look at embeddings."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        out: Tensor = self.layer(torch.ones_like(embeddings[:, :1]))
        return out


class Double(nn.Module):
    """A net that gives two logits where one is wanted."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.layer = nn.Linear(sum(model.feature_widths), 2)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        out: Tensor = self.layer(embeddings)
        return out


class Narrow(nn.Module):
    """A net for columns that are not there."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        out: Tensor = self.layer(embeddings)
        return out


class Frozen(Narrow):
    """A net that learns nothing."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.layer = nn.Linear(sum(model.feature_widths), 1).requires_grad_(False)


class Plain(Narrow):
    """A net that takes what there is, and does not know of counters."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.layer = nn.Linear(sum(model.feature_widths), 1)


class Counting(Tower):
    """A net that changes what a version does not carry."""

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        if self.training:
            order = self.get_buffer("order")
            order.copy_(order.roll(1))
        return super().forward(dense, embeddings)


def nothing(model: ModelConfig) -> int:
    """What is no net."""
    return len(model.features)
