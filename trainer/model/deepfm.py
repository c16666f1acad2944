"""DeepFM's dense net: a factorisation machine beside an MLP (Guo et al. 2017, arXiv:1703.04247).

Shapes: B samples, D dense features, E all embedding values of a sample, F vectors of width d.
"""

import torch
from torch import Tensor, nn

from embertide.trainer.config import ModelConfig
from embertide.trainer.model.layers import VectorNet, mlp, value_names


class DeepFm(VectorNet):
    """A bias, the first order, the second order and the deep part, added up; gives logits.

    The first value of each vector is its weight in the first order, the others are its factors,
    which the machine and the deep part share. The bottom MLP's output counts as a feature.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Build for a model whose features have one width; errors as `VectorNet`.

        Raises:
            ValueError: A vector has no room for factors.
        """
        super().__init__(config)
        if self.dim < 2:
            raise ValueError(f"DeepFM needs a dim of 2 or more, not {self.dim}: raise the tables'")
        self.bias = nn.Parameter(torch.zeros(1))
        width = self.vectors * (self.dim - 1)
        self.deep = mlp((width, *config.top_mlp, 1), last_relu=False)

    def axes(self) -> dict[str, tuple[list[str] | None, ...]]:
        """Name the positions of the tensors that depend on columns, as carry.py takes them."""
        values = value_names(self.vector_names, range(1, self.dim))
        return {**super().axes(), "deep.0.weight": (None, values)}

    def head_bias(self) -> Tensor:
        """Return what is added to the logit of each head, where a fresh net's prior goes; [H]."""
        return self.bias

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        """Return logits_B."""
        x_BFd = self.inputs(dense_BD, embeddings_BE)
        first_B = x_BFd[:, :, 0].sum(1)
        factors = x_BFd[:, :, 1:]
        # The sum over pairs of dot products, in time linear in the features.
        second_B = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        return self.bias + first_B + second_B + torch.squeeze(self.deep(factors.flatten(1)), 1)
