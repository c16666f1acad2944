"""DCN-v2's dense net: cross layers, then an MLP (Wang et al. 2021, arXiv:2008.13535).

Shapes: B samples, D dense features, E all embedding values of a sample, n values of all vectors.
"""

import torch
from torch import Tensor, nn

from embertide.trainer.config import ModelConfig
from embertide.trainer.model.layers import VectorNet, bias_of, mlp, value_names


def _matrix(width: int, rank: int) -> nn.Module:
    """Return W x + b, with W = U V of a low rank unless that is 0."""
    if rank == 0:
        return nn.Linear(width, width)
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))


class DcnV2(VectorNet):
    """The paper's stacked net; gives logits.

    A cross layer is x' = x0 * (W x + b) + x, so that n of them hold interactions of up to n + 1
    values. x0 is the bottom MLP's output, if there are dense features, and all embeddings.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Build for a model whose features have one width; errors as `VectorNet`."""
        super().__init__(config)
        width = self.vectors * self.dim
        matrices = (_matrix(width, config.cross_rank) for _ in range(config.cross_layers))
        self.cross = nn.ModuleList(matrices)
        self.top = mlp((width, *config.top_mlp, config.outputs), last_relu=False)

    def axes(self) -> dict[str, tuple[list[str] | None, ...]]:
        """Name the positions of the tensors that depend on columns, as carry.py takes them."""
        values = value_names(self.vector_names, range(self.dim))
        named = {**super().axes(), "top.0.weight": (None, values)}
        for i, matrix in enumerate(self.cross):
            if isinstance(matrix, nn.Linear):
                named[f"cross.{i}.weight"] = (values, values)
                named[f"cross.{i}.bias"] = (values,)
            else:
                named[f"cross.{i}.0.weight"] = (None, values)
                named[f"cross.{i}.1.weight"] = (values, None)
                named[f"cross.{i}.1.bias"] = (values,)
        return named

    def head_bias(self) -> Tensor:
        """Return what is added to the logit of each head, where a fresh net's prior goes; [H]."""
        return bias_of(self.top)

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        """Return logits_B, or logits_BH of several heads."""
        x0_Bn = x_Bn = self.inputs(dense_BD, embeddings_BE).flatten(1)
        for matrix in self.cross:
            x_Bn = x0_Bn * matrix(x_Bn) + x_Bn
        return torch.squeeze(self.top(x_Bn), 1)
