"""What the nets are made of: MLPs, and the vectors that they begin with.

Shapes: B samples, D dense features, E all embedding values of a sample, F vectors of width d.
"""

import itertools

import torch
from torch import Tensor, nn

from embertide.trainer.config import ModelConfig


def mlp(widths: tuple[int, ...], *, last_relu: bool) -> nn.Sequential:
    """Return linear layers from each width to the next, with ReLUs between them."""
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if last_relu or i + 2 < len(widths):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class VectorNet(nn.Module):
    """A net that begins with vectors of one width; what becomes of them is the subclass's.

    They are the embeddings of the features. Dense features, through a bottom MLP, are one more
    vector, the first.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Build the bottom MLP.

        Raises:
            ValueError: The features' dims differ.
        """
        super().__init__()
        widths = set(config.feature_dims)
        if len(widths) != 1:
            raise ValueError(
                f"net {config.net!r} needs features of one dim, not {sorted(widths)}: give their "
                "tables one"
            )
        self.dim = widths.pop()
        self.vectors = len(config.features) + (1 if config.dense_features else 0)
        self.bottom = (
            mlp((config.dense_features, *config.bottom_mlp, self.dim), last_relu=True)
            if config.dense_features
            else None
        )

    def inputs(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        """Return the vectors x_BFd."""
        x_BE = embeddings_BE
        if self.bottom is not None:
            x_BE = torch.cat([self.bottom(dense_BD), embeddings_BE], dim=1)
        return x_BE.reshape(-1, self.vectors, self.dim)
