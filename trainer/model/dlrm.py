"""DLRM's dense net: bottom MLP, pairwise dot products, top MLP (Naumov et al. 2019).

Shapes: B samples, D dense features, E all embedding values of a sample, F features of width d.
"""

import itertools

import torch
from torch import Tensor, nn

from embertide.trainer.config import ModelConfig


def _mlp(widths: tuple[int, ...], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if last_relu or i + 2 < len(widths):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Dlrm(nn.Module):
    """DLRM over features of one width; gives logits.

    Without dense features there is no bottom MLP, and the interaction runs over the embeddings
    alone. The top MLP sees the dot products beside the bottom MLP's output (the paper's net) or,
    with `top_sees_embeddings`, beside all vectors.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Build for a model whose features have one width.

        Raises:
            ValueError: The features' dims differ.
        """
        super().__init__()
        widths = set(config.feature_dims)
        if len(widths) != 1:
            raise ValueError(f"a DLRM needs features of one dim, not {sorted(widths)}")
        self.dim = widths.pop()
        self.vectors = len(config.features) + (1 if config.dense_features else 0)
        self.bottom = (
            _mlp((config.dense_features, *config.bottom_mlp, self.dim), last_relu=True)
            if config.dense_features
            else None
        )
        pairs = self.vectors * (self.vectors - 1) // 2
        rows, columns = torch.tril_indices(self.vectors, self.vectors, offset=-1)
        self.register_buffer("pairs", rows * self.vectors + columns, persistent=False)
        # The bottom MLP's output comes first among the vectors.
        seen = self.vectors if config.top_sees_embeddings else self.vectors - len(config.features)
        self.seen_width = seen * self.dim
        self.top = _mlp((pairs + self.seen_width, *config.top_mlp, 1), last_relu=False)

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        """Return logits_B."""
        x_BE = embeddings_BE
        if self.bottom is not None:
            x_BE = torch.cat([self.bottom(dense_BD), embeddings_BE], dim=1)
        x_BFd = x_BE.reshape(-1, self.vectors, self.dim)
        dots = torch.bmm(x_BFd, x_BFd.transpose(1, 2)).flatten(1)
        assert isinstance(self.pairs, Tensor)
        seen = x_BE[:, : self.seen_width]
        top = self.top(torch.cat([seen, dots.index_select(1, self.pairs)], dim=1))
        return torch.squeeze(top, 1)


class Probability(nn.Module):
    """A net of logits as one of scores: what is served."""

    def __init__(self, net: nn.Module) -> None:
        """Wrap `net`, sharing its parameters."""
        super().__init__()
        self.net = net

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        """Return scores_B in (0, 1)."""
        return torch.sigmoid(self.net(dense_BD, embeddings_BE))
