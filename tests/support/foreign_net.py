"""A model that knows nothing of Embertide: plain torch, tables of two dims, batch norm, dropout."""

import torch
from torch import Tensor, nn

ITEMS, USERS, DENSE = 900, 300, 3
ITEM_DIM, USER_DIM = 8, 5
EMBEDDING_DIM = ITEM_DIM + ITEM_DIM + USER_DIM


class Tower(nn.Module):
    """(dense_BD, embeddings_BE) -> scores_B1, E the shown item, the items seen and the user."""

    def __init__(self) -> None:
        super().__init__()
        width = DENSE + EMBEDDING_DIM + ITEM_DIM
        self.norm = nn.BatchNorm1d(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 1)
        )
        self.register_buffer("order", torch.randperm(width))

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        item, seen, _ = embeddings.split([ITEM_DIM, ITEM_DIM, USER_DIM], dim=1)
        x = torch.cat([dense, embeddings, item * seen], dim=1)
        order: Tensor = self.get_buffer("order")
        return torch.sigmoid(self.layers(self.norm(x.index_select(1, order))))


class WholeModel(nn.Module):
    """The tower with its tables, as somebody trained it."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.EmbeddingBag(ITEMS, ITEM_DIM, mode="mean")
        self.user = nn.Embedding(USERS, USER_DIM)
        self.tower = Tower()


def make() -> nn.Module:
    """Make the same tower each time, with statistics of some batches."""
    torch.manual_seed(11)
    tower = WholeModel().tower.train()
    for _ in range(5):
        tower(torch.randn(64, DENSE), torch.randn(64, EMBEDDING_DIM))
    return tower


def whole() -> WholeModel:
    """Make the whole model, whose tower is that of `make`."""
    torch.manual_seed(11)
    model = WholeModel()
    for _ in range(5):
        model.tower(torch.randn(64, DENSE), torch.randn(64, EMBEDDING_DIM))
    return model.eval()
