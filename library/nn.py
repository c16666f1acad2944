"""Modules of torch: tables of embeddings for a loop of your own, and the columns of a net's inputs.

`EmbeddingStore` and `EmbeddingBagCollection` (TorchRec's interface) hold tables by 64-bit keys with
an optimizer of their own. `Bags` are any number of keys a sample, and `Ranks` the processes that
share tables. `Columns` tells a net of your own where each feature lies. docs/library.md has
examples. Needs `embertide[train]`, and loads torch.
"""

from embertide._common.extras import needed_by

with needed_by("nn", "train"):
    from embertide.trainer.data.bags import Bags
    from embertide.trainer.embedding.collection import EmbeddingBagCollection, KeyedTensor
    from embertide.trainer.embedding.store import EmbeddingStore
    from embertide.trainer.model.layers import Columns
    from embertide.trainer.sync.ranks import Ranks

__all__ = [
    "Bags",
    "Columns",
    "EmbeddingBagCollection",
    "EmbeddingStore",
    "KeyedTensor",
    "Ranks",
]
