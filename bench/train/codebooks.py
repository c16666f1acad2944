"""Product quantisation: a row as a code for each few of its values, and the codewords they name.

Jégou et al. 2011, "Product quantization for nearest neighbor search". Shapes: N rows, D values of
a row, S pieces of a row, d values of a piece, K codewords of a piece.
"""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CODEWORDS = 256  # a code is a byte
_SAMPLE = 32 * CODEWORDS
_STEPS, _STEPS_AGAIN = 12, 4  # of k-means: from nothing, and from the codebook before
_AT_ONCE = 1 << 16  # rows whose distances are in memory

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]


def _nearest(values_Nd: Tensor, words_Kd: Tensor) -> Tensor:
    """Return the nearest codeword of each piece; of equally near ones the first."""
    of_word_K = words_Kd.square().sum(1)
    parts = [
        torch.addmm(of_word_K, part, words_Kd.T, alpha=-2.0).argmin(1)
        for part in values_Nd.split(_AT_ONCE)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _k_means(values_Nd: Tensor, words_Kd: Tensor, steps: int) -> Tensor:
    """Return codewords after steps of Lloyd's; one that no piece is nearest to stays."""
    for _ in range(steps):
        code_N = _nearest(values_Nd, words_Kd)
        sums_Kd = torch.zeros_like(words_Kd).index_add_(0, code_N, values_Nd)
        count_K1 = torch.bincount(code_N, minlength=len(words_Kd)).unsqueeze(1)
        words_Kd = torch.where(count_K1 > 0, sums_Kd / count_K1.clamp_min(1), words_Kd)
    return words_Kd


@dataclasses.dataclass(frozen=True, slots=True)
class Codebook:
    """Codewords of each piece of a table's rows.

    Attributes:
        words_SKd: The codewords, whose values fp16 can say, as which they travel.
    """

    words_SKd: Tensor

    @classmethod
    def learned(
        cls, values_ND: Floats, piece: int, before: "Codebook | None", seed: int
    ) -> "Codebook":
        """Learn one from rows, by k-means; from the one before, if there is one.

        Args:
            values_ND: At least CODEWORDS rows; a sample of them is learned from.
            piece: d.
            before: The codebook that is renewed: a code then names about what it did.
            seed: Of the sample.
        """
        rng = np.random.default_rng(seed)
        taken = rng.choice(len(values_ND), min(_SAMPLE, len(values_ND)), replace=False)
        values_NSd = torch.from_numpy(values_ND[taken]).reshape(len(taken), -1, piece)
        words = []
        for s in range(values_NSd.shape[1]):
            first_Kd = values_NSd[:CODEWORDS, s] if before is None else before.words_SKd[s]
            steps = _STEPS if before is None else _STEPS_AGAIN
            words.append(_k_means(values_NSd[:, s].contiguous(), first_Kd, steps))
        return cls(torch.stack(words).half().float())

    @property
    def bytes(self) -> int:
        """Bytes of the codewords, as fp16."""
        return 2 * self.words_SKd.numel()

    def encode(self, values_ND: Floats) -> Codes:
        """Return codes_NS."""
        pieces, _, piece = self.words_SKd.shape
        values_NSd = torch.from_numpy(values_ND).reshape(len(values_ND), pieces, piece)
        codes = [
            _nearest(values_NSd[:, s].contiguous(), words_Kd)
            for s, words_Kd in enumerate(self.words_SKd)
        ]
        return torch.stack(codes, dim=1).to(torch.uint8).numpy()

    def decode(self, codes_NS: Codes) -> Floats:
        """Return values_ND."""
        pieces, _, piece = self.words_SKd.shape
        place_S = torch.arange(pieces)
        values_NSd = self.words_SKd[place_S, torch.from_numpy(codes_NS.astype(np.int64))]
        values_ND: Floats = values_NSd.reshape(len(codes_NS), pieces * piece).numpy()
        return values_ND
