"""Synthetic batches of Criteo's shape that every side of a comparison can draw for itself.

A batch follows from a seed, its step and its size alone: each rank draws the whole batch and takes
its part, and another program gets the same events. Keys of a column are dense ids below `ROWS`,
as TorchRec needs them; a side that wants 64-bit keys hashes them. They are drawn by Zipf's law with
the exponents of `bench.keys`.

Labels can be learned: a logistic teacher, which the seed alone makes, looks at the dense features
and has an effect for each key. About a quarter are positive.

Shapes: B samples, F columns of keys, D dense features.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from bench.keys import DENSE, zipf_keys
from embertide.trainer.data.keys import hash_keys

TABLES = 26
ROWS = 200_000
_EXPONENTS = (1.05, 1.2)
# The teacher's: spreads of its logits from dense features and from keys are about equal.
_DENSE_SCALE, _KEY_SCALE, _BIAS = 0.25, 0.3, -1.5


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """A batch: keys_BF of int64, dense_BD and label_B of float32."""

    keys_BF: NDArray[np.int64]
    dense_BD: NDArray[np.float32]
    label_B: NDArray[np.float32]

    def part(self, rank: int, ranks: int) -> "Drawn":
        """Return a rank's equal part.

        Raises:
            ValueError: The samples cannot be shared out evenly.
        """
        samples = len(self.label_B)
        if samples % ranks:
            raise ValueError(f"{samples} samples cannot be split evenly among {ranks} ranks")
        own = slice(rank * samples // ranks, (rank + 1) * samples // ranks)
        return Drawn(self.keys_BF[own], self.dense_BD[own], self.label_B[own])


def draw(seed: int, step: int, samples: int) -> Drawn:
    """Return the batch of a step: of equal arguments, equal bytes."""
    rng = np.random.default_rng([seed, step])
    exponents = np.linspace(*_EXPONENTS, TABLES)
    keys_BF = np.stack([zipf_keys(rng, ROWS, each, samples) for each in exponents], axis=1)
    dense_BD = rng.standard_normal((samples, DENSE)).astype(np.float32)
    odds_B = _teacher_logits(seed, keys_BF, dense_BD)
    label_B = (rng.random(samples) < 1 / (1 + np.exp(-odds_B))).astype(np.float32)
    return Drawn(keys_BF, dense_BD, label_B)


def _teacher_logits(
    seed: int, keys_BF: NDArray[np.int64], dense_BD: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Return what the labels are drawn from."""
    rng = np.random.default_rng(seed)
    weights_D = rng.standard_normal(DENSE) * _DENSE_SCALE
    salt_F = rng.integers(0, 1 << 62, TABLES, dtype=np.uint64)
    effect_BF = hash_keys(keys_BF.astype(np.uint64) + salt_F).astype(np.float64) / 2.0**63 - 1
    logits_B: NDArray[np.float64] = (
        dense_BD @ weights_D + effect_BF.sum(axis=1) * _KEY_SCALE + _BIAS
    )
    return logits_B
