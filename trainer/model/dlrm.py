"""DLRM's dense net: bottom MLP, pairwise dot products, top MLP (Naumov et al. 2019).

Shapes: B samples, D dense features, E all embedding values of a sample, F vectors of width d.
"""

import torch
from torch import Tensor, nn

from embertide.trainer.config import ModelConfig
from embertide.trainer.model.layers import VectorNet, bias_of, mlp, value_names


class Dlrm(VectorNet):
    """DLRM over features of one width (arXiv:1906.00091); gives logits.

    Without dense features there is no bottom MLP, and the interaction runs over the embeddings
    alone. The top MLP sees the dot products beside the bottom MLP's output (the paper's net) or,
    with `top_sees_embeddings`, beside all vectors.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Build for a model whose features have one width; errors as `VectorNet`."""
        super().__init__(config)
        pairs = self.vectors * (self.vectors - 1) // 2
        rows, columns = torch.tril_indices(self.vectors, self.vectors, offset=-1)
        self.register_buffer("pairs", rows * self.vectors + columns, persistent=False)
        # The bottom MLP's output comes first among the vectors.
        seen = self.vectors if config.top_sees_embeddings else self.vectors - len(config.features)
        self.seen_width = seen * self.dim
        self.top = mlp((pairs + self.seen_width, *config.top_mlp, config.outputs), last_relu=False)

    def axes(self) -> dict[str, tuple[list[str] | None, ...]]:
        """Name the positions of the tensors that depend on columns, as carry.py takes them."""
        names = self.vector_names
        rows, columns = torch.tril_indices(self.vectors, self.vectors, offset=-1).tolist()
        # A dot product is the same whichever vector comes first.
        pairs = ["*".join(sorted((names[r], names[c]))) for r, c in zip(rows, columns, strict=True)]
        seen = value_names(names[: self.seen_width // self.dim], range(self.dim))
        return {**super().axes(), "top.0.weight": (None, [*seen, *pairs])}

    def head_bias(self) -> Tensor:
        """Return what is added to the logit of each head, where a fresh net's prior goes; [H]."""
        return bias_of(self.top)

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        """Return logits_B, or logits_BH of several heads."""
        x_BFd = self.inputs(dense_BD, embeddings_BE)
        dots = torch.bmm(x_BFd, x_BFd.transpose(1, 2)).flatten(1)
        assert isinstance(self.pairs, Tensor)
        seen = x_BFd.flatten(1)[:, : self.seen_width]
        top = self.top(torch.cat([seen, dots.index_select(1, self.pairs)], dim=1))
        return torch.squeeze(top, 1)


class Probability(nn.Module):
    """A net of logits as one of scores: what is served.

    With a correction its buffer `correction_H` is added to the logits of heads; it belongs to a
    version as parameters do.
    """

    def __init__(self, net: nn.Module, *, corrected_heads: int = 0) -> None:
        """Wrap `net`, sharing its parameters; a correction begins at 0, and 0 heads have none."""
        super().__init__()
        self.net = net
        self.is_corrected = corrected_heads > 0
        if self.is_corrected:
            self.register_buffer("correction_H", torch.zeros(corrected_heads))

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        """Return scores_B in (0, 1), or scores_BH of several heads."""
        logits: Tensor = self.net(dense_BD, embeddings_BE)
        if self.is_corrected:
            logits = logits + self.get_buffer("correction_H")
        return torch.sigmoid(logits)
