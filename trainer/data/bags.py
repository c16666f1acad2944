"""Bags: any number of keys of one feature a sample, each counting as much as its weight.

Shapes: B samples, N keys, F features, vectors of width d.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import Pooling

Floats = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """The keys of one feature.

    Attributes:
        keys_N: Keys of all samples, one after the other.
        offsets_B1: Bag b is keys_N[offsets_B1[b] : offsets_B1[b + 1]]; empty bags may be.
        weights_N: The factor of each key's row before pooling; None: 1. A mean is divided by the
            number of keys, as FBGEMM's, and not by the sum of their weights.
    """

    keys_N: NDArray[np.int64]
    offsets_B1: NDArray[np.uint32]
    weights_N: Floats | None = None

    def __post_init__(self) -> None:
        """Refuse bags that do not cover the keys, and weights that cannot be learned with."""
        offsets = self.offsets_B1
        if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(self.keys_N):
            raise ValueError(
                f"offsets go from {offsets[:1]} to {offsets[-1:]} over {len(self.keys_N)} keys; "
                "give one more than bags, from 0 to the number of keys"
            )
        if (offsets[1:] < offsets[:-1]).any():
            raise ValueError("offsets descend; give the ends of the bags in their order")
        if self.weights_N is None:
            return
        if self.weights_N.shape != self.keys_N.shape:
            raise ValueError(
                f"there are {len(self.weights_N)} weights for {len(self.keys_N)} keys; give as many"
            )
        if not np.isfinite(self.weights_N).all():
            bad = np.flatnonzero(~np.isfinite(self.weights_N))
            raise ValueError(
                f"weight {self.weights_N[bad[0]]} of key {self.keys_N[bad[0]]} is not finite"
            )

    @classmethod
    def of(
        cls,
        keys_N: NDArray[np.int64],
        sizes_B: NDArray[np.int64],
        weights_N: Floats | None = None,
    ) -> "Bags":
        """Return bags of so many keys each."""
        offsets_B1 = np.zeros(len(sizes_B) + 1, np.uint32)
        np.cumsum(sizes_B, dtype=np.uint32, out=offsets_B1[1:])
        return cls(keys_N, offsets_B1, weights_N)

    @classmethod
    def concatenated(cls, parts: "Sequence[Bags]") -> "Bags":
        """Return the bags of all parts, which are weighed all or none."""
        weights = [part.weights_N for part in parts if part.weights_N is not None]
        return cls.of(
            np.concatenate([part.keys_N for part in parts]),
            np.concatenate([part.sizes_B for part in parts]),
            np.concatenate(weights) if weights else None,
        )

    def cut(self, begin: int, end: int) -> "Bags":
        """Return bags `begin` to `end`; they share memory with these."""
        offsets_B1 = self.offsets_B1[begin : end + 1]
        keys = slice(int(offsets_B1[0]), int(offsets_B1[-1]))
        weights_N = None if self.weights_N is None else self.weights_N[keys]
        return Bags(self.keys_N[keys], offsets_B1 - offsets_B1[0], weights_N)

    def where(self, keep_B: NDArray[np.bool_]) -> "Bags":
        """Return the bags that are to be kept."""
        keep_N = np.repeat(keep_B, self.sizes_B)
        weights_N = None if self.weights_N is None else self.weights_N[keep_N]
        return Bags.of(self.keys_N[keep_N], self.sizes_B[keep_B], weights_N)

    def at(self, bag_R: NDArray[np.int64]) -> "Bags":
        """Return these bags in this order."""
        sizes_R = self.sizes_B[bag_R]
        begin_R = np.cumsum(sizes_R) - sizes_R
        moved_R = self.offsets_B1[:-1].astype(np.int64)[bag_R] - begin_R
        from_N = np.arange(sizes_R.sum()) + np.repeat(moved_R, sizes_R)
        weights_N = None if self.weights_N is None else self.weights_N[from_N]
        return Bags.of(self.keys_N[from_N], sizes_R, weights_N)

    def __len__(self) -> int:
        """Number of bags."""
        return len(self.offsets_B1) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        weights = 0 if self.weights_N is None else self.weights_N.nbytes
        return self.keys_N.nbytes + self.offsets_B1.nbytes + weights

    @property
    def sizes_B(self) -> NDArray[np.int64]:
        """Keys of each bag."""
        return np.diff(self.offsets_B1.astype(np.int64))

    def pooled(self, rows_Nd: Floats, pooling: Pooling) -> Floats:
        """Return the weighed rows of each bag pooled, summed in fp64 and rounded once."""
        assert self.weights_N is not None
        out_Bd = np.zeros((len(self), rows_Nd.shape[1]), np.float64)
        bag_N = np.repeat(np.arange(len(self)), self.sizes_B)
        np.add.at(out_Bd, bag_N, self.weights_N[:, None].astype(np.float64) * rows_Nd)
        return self._divided(out_Bd, pooling).astype(np.float32)

    def gradients(
        self, gradient_Bd: Floats, pooling: Pooling
    ) -> tuple[NDArray[np.uint32] | None, Floats]:
        """Return offsets and the gradient of each bag's sum; with weights None and each row's."""
        of_sum_Bd = self._divided(gradient_Bd, pooling)
        if self.weights_N is None:
            return self.offsets_B1, of_sum_Bd
        return None, self.weights_N[:, None] * np.repeat(of_sum_Bd, self.sizes_B, axis=0)

    def _divided(self, values_Bd: NDArray[Any], pooling: Pooling) -> NDArray[Any]:
        if pooling == "sum":
            return values_Bd
        sizes_B = np.maximum(self.sizes_B, 1).astype(values_Bd.dtype)
        divided_Bd: NDArray[Any] = values_Bd / sizes_B[:, None]
        return divided_Bd


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class JaggedKeys:
    """Bags of all features, sample by sample: the jagged form of a request.

    Attributes:
        keys_N: The keys of sample 0's bags, feature by feature, then those of sample 1 ...
        lengths_BF: The number of keys of each bag.
        weights_N: Their weights, 1 in features without; None: no feature has any.
    """

    keys_N: NDArray[np.int64]
    lengths_BF: NDArray[np.int32]
    weights_N: Floats | None


def jagged(bags_F: Sequence[Bags]) -> JaggedKeys:
    """Bring the bags of features, as many each, into the order of samples."""
    lengths_BF = np.stack([bags.sizes_B for bags in bags_F], axis=1).astype(np.int32)
    begin_BF = (np.cumsum(lengths_BF) - lengths_BF.reshape(-1)).reshape(lengths_BF.shape)
    keys_N = np.empty(lengths_BF.sum(), np.int64)
    weighed = any(bags.weights_N is not None for bags in bags_F)
    weights_N = np.ones(len(keys_N), np.float32) if weighed else None
    for f, bags in enumerate(bags_F):
        # A bag's keys stay side by side: each moves as far as its bag does.
        moved_B: NDArray[np.int64] = begin_BF[:, f] - bags.offsets_B1[:-1].astype(np.int64)
        to_N = np.arange(len(bags.keys_N)) + np.repeat(moved_B, bags.sizes_B)
        keys_N[to_N] = bags.keys_N
        if weights_N is not None and bags.weights_N is not None:
            weights_N[to_N] = bags.weights_N
    return JaggedKeys(keys_N, lengths_BF, weights_N)
