"""A net that encodes sequences: HSTU's gated attention, with times (Zhai et al. 2024).

Layers run over a user's items, each of which attends to itself and to the older ones, and over the
candidate, which attends to itself and to all items. No item attends to a candidate, so what the
items become depends on the user alone: a program for contexts computes it once a user. Items come
newest first, and the candidate as one more before the newest. arXiv:2402.17152.

Two things are not as there. Nothing is normalised: rows come to be while the model is served, and
how long one is tells how much it has learned. And what comes out is without the candidate's own
vector, which the net has beside it. docs/results/training.md has what both are worth.

A history holds what the user liked, so there is one action, and no vector for it. The candidate
counts as of the newest item's time: a node does not know for how long that has been the newest.

Shapes: B samples, U sequences (B of them unless a net in training shares them among neighbours), L
places of a sequence, H heads of W values each, vectors of width d = H x W, T places with times, E
buckets of time, N layers x heads.
"""

import torch
from torch import Tensor, nn

from embertide.trainer.config import ModelConfig, SequenceConfig
from embertide.trainer.model.history import SequenceNet

# Buckets of time: two to each doubling of the seconds and one more, up to 194 days.
_BUCKETS = 49
# Parts of an fp32: bits of the fraction, the exponent of 1, and the fraction of the root of 2.
_FRACTION, _EXPONENT_OF_1, _ROOT = 23, 127, 0x3504F3


class Layer(nn.Module):
    """One layer, but for the biases of its attention: those of all layers are looked up at once."""

    def __init__(self, dim: int, heads: int) -> None:
        """Build for vectors of width `dim`."""
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.project = nn.Linear(dim, 4 * dim)
        self.merge = nn.Linear(dim, dim)

    def projected(self, x_BLd: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return u_BLd, and v_BHLW, q_BHLW, k_BHLW."""
        every: Tensor = nn.functional.silu(self.project(x_BLd))
        u_BLd, *of_heads = every.chunk(4, dim=2)
        places = x_BLd.shape[1]
        v, q, k = (
            each.reshape(-1, places, self.heads, self.width).transpose(1, 2) for each in of_heads
        )
        return u_BLd, v, q, k

    def merged(self, x_BLd: Tensor, u_BLd: Tensor, attended_BHLW: Tensor) -> Tensor:
        """Return x_BLd as it leaves the layer."""
        attended_BLd = attended_BHLW.transpose(1, 2).reshape(-1, *x_BLd.shape[1:])
        merged: Tensor = self.merge(u_BLd * attended_BLd)
        return x_BLd + merged


def _weights(score_BHLL: Tensor, bias: Tensor, taken: Tensor) -> Tensor:
    """Return how much each place counts: not as a share, so that more of a kind say more."""
    weight: Tensor = nn.functional.silu(score_BHLL + bias)
    return torch.where(taken, weight, torch.zeros_like(weight))


def _users(items_BLd: Tensor, length_B: Tensor, gap_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return where samples of one sequence after the other begin, [U], and which each is of, [B].

    So the impressions of one click, which stand side by side, share what becomes of its items.
    """
    row_BR = torch.cat((items_BLd.detach().flatten(1), length_B.unsqueeze(1), gap_BT), dim=1)
    begins_B = torch.ones(len(row_BR), dtype=torch.bool, device=row_BR.device)
    begins_B[1:] = (row_BR[1:] != row_BR[:-1]).any(1)
    return begins_B.nonzero().squeeze(1), begins_B.cumsum(0) - 1


def _for_candidates(x: Tensor, users: Tensor | None) -> Tensor:
    """Return the row of each candidate's user; None: each has its own."""
    return x if users is None else x.index_select(0, users)


class Hstu(nn.Module):
    """A candidate's vector in the light of a sequence."""

    def __init__(self, dim: int, sequence: SequenceConfig, layers: int, heads: int) -> None:
        """Build for vectors of width `dim`, of which `heads` is a divisor."""
        super().__init__()
        length, self.heads, self.times = sequence.length, heads, sequence.times
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        # By how many places apart; the candidate is one before the newest.
        self.position_NL = nn.Parameter(torch.zeros(layers * heads, length + 1))
        place = torch.arange(length)
        apart_LL = place[None, :] - place[:, None]
        self.register_buffer("place", place, persistent=False)
        self.register_buffer("apart", apart_LL.clamp_min(0).flatten(), persistent=False)
        self.register_buffer("older_LL", apart_LL >= 0, persistent=False)
        if self.times:
            self.time_EN = nn.Parameter(torch.zeros(_BUCKETS, layers * heads))

    def forward(
        self, target_Bd: Tensor, items_BLd: Tensor, length_B: Tensor, gap_BT: Tensor
    ) -> Tensor:
        """Return pooled_Bd: what the layers add to the candidate's vector, which the net has."""
        users = None
        items_ULd, length_U, gap_UT = items_BLd, length_B, gap_BT
        if self.training and len(items_BLd):
            first_U, users = _users(items_BLd, length_B, gap_BT)
            items_ULd, length_U, gap_UT = (
                each.index_select(0, first_U) for each in (items_BLd, length_B, gap_BT)
            )
        place, older_LL = self.get_buffer("place"), self.get_buffer("older_LL")
        taken_UL = place < length_U.unsqueeze(1)
        taken_U11L = taken_UL.reshape(-1, 1, 1, len(place))
        taken_ULL = torch.logical_and(taken_U11L, older_LL)
        taken_B11L = _for_candidates(taken_U11L, users)
        # The candidate counts, too.
        share_U = (length_U + 1).reciprocal().reshape(-1, 1, 1, 1)
        share_B = _for_candidates(share_U, users)
        own_N, of_target, of_items = self._biases(gap_UT)
        if self.times:
            of_target = _for_candidates(of_target, users)
        c_B1d, x_ULd = target_Bd.unsqueeze(1), items_ULd
        for n, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            heads = slice(n * self.heads, (n + 1) * self.heads)
            item_u, item_v, item_q, item_k = layer.projected(x_ULd)
            item_k = item_k.transpose(2, 3)
            u, v, q, k = layer.projected(c_B1d)
            own = nn.functional.silu((q * k).sum(3, keepdim=True) + own_N[heads].reshape(-1, 1, 1))
            score = torch.matmul(q, _for_candidates(item_k, users))
            weight = _weights(score, of_target[:, heads], taken_B11L)
            attended = torch.matmul(weight, _for_candidates(item_v, users)) + own * v
            c_B1d = layer.merged(c_B1d, u, attended * share_B)
            if n + 1 < len(self.layers):  # the last layer's are not read
                score = torch.matmul(item_q, item_k)
                weight = _weights(score, of_items[:, heads], taken_ULL)
                x_ULd = layer.merged(x_ULd, item_u, torch.matmul(weight, item_v) * share_U)
        return c_B1d.squeeze(1) - target_Bd

    def _biases(self, gap_UT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is added to scores, of all heads.

        Of the candidate and itself, [N]; of it and each item, [U or 1, N, 1, L]; of an item and
        another one, [U or 1, N, L, L].
        """
        places = self.position_NL.shape[1] - 1
        # Items of the last layer attend to nothing that is read.
        inner = self.position_NL[: max(len(self.position_NL) - self.heads, self.heads)]
        apart = inner.index_select(1, self.get_buffer("apart"))
        of_target = self.position_NL[:, 1:].reshape(1, -1, 1, places)
        of_items = apart.reshape(1, -1, places, places)
        if not self.times:
            return self.position_NL[:, 0], of_target, of_items
        of_target = of_target + self._of_time(gap_UT.unsqueeze(1), of_target.shape[1])
        since_ULL = gap_UT.unsqueeze(1) - gap_UT.unsqueeze(2)
        of_items = of_items + self._of_time(since_ULL, of_items.shape[1])
        return self.position_NL[:, 0] + self.time_EN[0], of_target, of_items

    def _of_time(self, seconds: Tensor, heads: int) -> Tensor:
        """Return the biases of the first heads for so many seconds, [U, heads, ..]."""
        # By the float's own bits, and no logarithm, whose last bit is another in another program.
        bits = (seconds.clamp_min(0) + 1).view(torch.int32)
        doublings = torch.bitwise_right_shift(bits, _FRACTION) - _EXPONENT_OF_1
        beyond_root = torch.bitwise_and(bits, (1 << _FRACTION) - 1) >= _ROOT
        bucket = (2 * doublings + beyond_root.to(torch.int32)).clamp_max(_BUCKETS - 1)
        # Head by head, so that a compiled program works on neighbouring places together.
        of_heads = (
            nn.functional.embedding(bucket, self.time_EN[:, n : n + 1]).squeeze(3)
            for n in range(heads)
        )
        return torch.stack(tuple(of_heads), dim=1)


class HstuNet(SequenceNet):
    """HSTU over each sequence."""

    @staticmethod
    def pooling(dim: int, sequence: SequenceConfig, config: ModelConfig) -> nn.Module:
        """See `SequenceNet`.

        Raises:
            ValueError: The heads do not divide the width.
        """
        if dim % config.sequence_heads:
            raise ValueError(
                f"net {config.net!r}: sequence_heads is {config.sequence_heads}; give a divisor of"
                f" the tables' dim, {dim}"
            )
        return Hstu(dim, sequence, config.sequence_layers, config.sequence_heads)
