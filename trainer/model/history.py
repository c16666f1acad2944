"""Nets that look back at sequences, and the simplest of them: target attention.

Shapes: B samples, D dense columns, E all embedding values of a sample, L places of a sequence,
vectors of width d, T places with times.
"""

import abc
import dataclasses

import torch
from torch import Tensor, nn

from embertide.trainer.config import DenseConfig, FeatureConfig, ModelConfig, SequenceConfig
from embertide.trainer.model.dlrm import Dlrm
from embertide.trainer.model.layers import Columns, mlp


class Attention(nn.Module):
    """A sum of the sequence's vectors, weighted by the target (Zhou et al. 2018, arXiv:1706.06978).

    Weights are not normalised, so that many items of a kind say more than one. A place that is
    not taken has weight 0, whatever is read there, and gets no gradient.
    """

    def __init__(self, dim: int, length: int, hidden: tuple[int, ...]) -> None:
        """Build for `length` vectors of width `dim`."""
        super().__init__()
        self.weigh = mlp((4 * dim, *hidden, 1), last_relu=False)
        self.register_buffer("place", torch.arange(length), persistent=False)

    def forward(
        self, target_Bd: Tensor, items_BLd: Tensor, length_B: Tensor, _gap_BT: Tensor
    ) -> Tensor:
        """Return pooled_Bd."""
        target_BLd = target_Bd.unsqueeze(1).expand_as(items_BLd)
        both = (items_BLd, target_BLd, items_BLd * target_BLd, items_BLd - target_BLd)
        weight_BL = torch.squeeze(self.weigh(torch.cat(both, dim=2)), 2)
        assert isinstance(self.place, Tensor)
        taken_BL = self.place < length_B.unsqueeze(1)
        weight_BL = torch.where(taken_BL, weight_BL, torch.zeros_like(weight_BL))
        return torch.bmm(weight_BL.unsqueeze(1), items_BLd).squeeze(1)


class SequenceNet(nn.Module, abc.ABC):
    """A DLRM that takes each sequence, pooled by what a subclass says, as one more feature.

    It gives logits. Whether a sequence holds the target, and its length as a share of its places,
    are dense features to the DLRM, as counts are; the times of items are not.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Build for a model whose features and sequences have one width; errors as `Dlrm`."""
        super().__init__()
        self.columns = Columns(config)
        pooled = tuple(
            FeatureConfig(
                name=each.name, table=config.features[config.feature_index(each.item)].table
            )
            for each in config.sequences
        )
        # How features come about, and what they read as without a row, is settled by then.
        plain = (
            dataclasses.replace(each, learned_default=False, crossed=()) for each in config.features
        )
        gaps = {name for each in config.sequences for name in each.gap_columns}
        self.dense_names = [name for name in self.columns.dense_names if name not in gaps]
        kept = [d for d, name in enumerate(self.columns.dense_names) if name not in gaps]
        self.register_buffer("kept", torch.tensor(kept) if gaps else None, persistent=False)
        dense = len(kept)
        inner = dataclasses.replace(
            config,
            net="dlrm",
            tables=tuple(dataclasses.replace(table, counters=None) for table in config.tables),
            features=(*plain, *pooled),
            sequences=(),
            context=(),
            dense=tuple(DenseConfig(name=f"dense{d}") for d in range(dense)),
        )
        self.dlrm = Dlrm(inner)
        self.features = len(config.features)
        self.lengths = [each.length for each in config.sequences]
        self.targets = [config.feature_index(each.item) for each in config.sequences]
        self.attention = nn.ModuleList(
            self.pooling(self.dlrm.dim, each, config) for each in config.sequences
        )
        share = torch.ones(dense)
        for i, length in enumerate(self.lengths):
            share[config.dense_features + 2 * i] /= length
        self.register_buffer("share", share, persistent=False)
        columns = self.columns.dense
        self.length_columns = [columns[each.dense_columns[0]].start for each in config.sequences]
        self.gap_widths = [len(each.gap_columns) for each in config.sequences]

    @staticmethod
    @abc.abstractmethod
    def pooling(dim: int, sequence: SequenceConfig, config: ModelConfig) -> nn.Module:
        """Make (target_Bd, items_BLd, length_B, gap_BT) -> pooled_Bd for vectors of width `dim`.

        Places from length_B on are not taken: what is read there must not count. gap_BT are seconds
        from an item to the newest one, which may be less than 0 where labels came late; T is 0
        without times.
        """

    def axes(self) -> dict[str, tuple[list[str] | None, ...]]:
        """Name the positions of the tensors that depend on columns, as carry.py takes them."""
        inner = self.dlrm.axes()
        if "bottom.0.weight" in inner:  # it has numbers for the names of dense columns
            inner["bottom.0.weight"] = (inner["bottom.0.weight"][0], self.dense_names)
        named = {f"dlrm.{name}": axes for name, axes in inner.items()}
        return named | {f"columns.{name}": axes for name, axes in self.columns.axes().items()}

    def head_bias(self) -> Tensor:
        """Return what is added to the logit of each head, where a fresh net's prior goes; [H]."""
        return self.dlrm.head_bias()

    def forward(self, dense_BD: Tensor, embeddings_BE: Tensor) -> Tensor:
        """Return logits_B, or logits_BH of several heads."""
        dense_BD, embeddings_BE = self.columns(dense_BD, embeddings_BE)
        # Not by len(embeddings_BE): the exported program takes batches of any size.
        columns = self.features + sum(self.lengths)
        x_BFd = embeddings_BE.reshape(-1, columns, self.dlrm.dim)
        vectors = [x_BFd[:, : self.features].flatten(1)]
        begin = self.features
        for i, attention in enumerate(self.attention):
            items_BLd = x_BFd[:, begin : begin + self.lengths[i]]
            at = self.length_columns[i]
            gap_BT = dense_BD[:, at + 2 : at + 2 + self.gap_widths[i]]
            target_Bd = x_BFd[:, self.targets[i]]
            vectors.append(attention(target_Bd, items_BLd, dense_BD[:, at], gap_BT))
            begin += self.lengths[i]
        if isinstance(self.kept, Tensor):
            dense_BD = dense_BD.index_select(1, self.kept)
        assert isinstance(self.share, Tensor)
        logits: Tensor = self.dlrm(dense_BD * self.share, torch.cat(vectors, dim=1))
        return logits


class HistoryNet(SequenceNet):
    """Target attention over each sequence."""

    @staticmethod
    def pooling(dim: int, sequence: SequenceConfig, config: ModelConfig) -> nn.Module:
        """See `SequenceNet`."""
        return Attention(dim, sequence.length, config.attention_mlp)
