"""A program whose larger layers are oneDNN's, of nets that have such layers in sequences."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.package.package import load_package

from embertide.trainer.model import products
from embertide.trainer.model.export import export_dense, named_tensors

PLACES, WIDTH = 3, 96


class Places(nn.Module):
    """A layer over each place of a sequence, large enough for oneDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        x_BLd = torch.relu(self.layer(embeddings_BE.reshape(-1, PLACES, WIDTH)))
        return torch.sigmoid(self.end(x_BLd.sum(1)) + dense_BD.sum(1, keepdim=True)).squeeze(1)


def test_a_large_layer_over_places_of_a_sequence_is_compiled(tmp_path: Path) -> None:
    assert WIDTH * WIDTH >= products.MIN_WEIGHTS
    torch.manual_seed(5)
    net, path = Places().eval(), tmp_path / "net.pt2"
    export_dense(net, path, dense_features=2, embedding_dim=PLACES * WIDTH)
    program: Any = load_package(str(path), products.NAME)
    given = torch.randn(300, 2), torch.randn(300, PLACES * WIDTH)
    with torch.no_grad():
        scores = program(*given, *named_tensors(net).values())
        torch.testing.assert_close(scores, net(*given), rtol=0, atol=1e-6)
