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
    """A builder of something that is no net."""
    return len(model.features)


class Tasks(nn.Module):
    """A layer, dropout, and a logit for each head."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = sum(model.feature_widths)
        self.first, self.drop = nn.Linear(width, 8), nn.Dropout(0.1)
        self.last = nn.Linear(8, model.outputs)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.relu(self.first(embeddings))))
        return out


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss that events which are easy count less in (Lin et al. 2017, arXiv:1708.02002)."""
    each = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (1 - torch.exp(-each)) ** 2 * each


def joint(logits: Tensor, labels: Tensor) -> Tensor:
    """One loss an event for two heads, the second of which needs the first."""
    each = torch.stack([logits[:, 0], logits.sum(1)], dim=1)
    return nn.functional.binary_cross_entropy_with_logits(each, labels, reduction="none").mean(1)


def a_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss that is not one of each event."""
    return focal(logits, labels).mean()


def infinite(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss that nothing can learn from."""
    return -torch.log(logits * labels)


class Moving(Tower):
    """A net that puts another tensor into its buffer at each step."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.get_buffer("mean") + 0.1 * dense.detach().mean()
        return super().forward(dense, embeddings) - self.get_buffer("mean")
