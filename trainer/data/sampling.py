"""A share of the negatives, the others left out: less to learn from, and the same chance promised.

Which are kept follows from an event's index and the run's seed, so whoever reads again keeps the
same. A kept negative counts as many as it stands for, so that scores stay the chances that they
were. (He et al. 2014, Practical Lessons from Predicting Clicks on Ads at Facebook, section 6.3, put
the scores of an unweighed sample right afterwards, by q = p / (p + (1 - p) / rate); a weight needs
nothing from who serves.)
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.data.base import Batch
from embertide.trainer.data.keys import hash_keys


def is_kept(batch: Batch, rate: float, seed: int) -> NDArray[np.bool_]:
    """Return which events of a batch are learned: positives, and a share `rate` of the others."""
    salt = hash_keys(np.array([seed], np.uint64))[0]
    hash_B = hash_keys(batch.event_B.astype(np.uint64) ^ salt)
    top_B = hash_B >> np.uint64(11)  # 53 bits, which a float has
    kept_B: NDArray[np.bool_] = (batch.label_B == 1) | (top_B < np.uint64(rate * 2.0**53))
    return kept_B


def weighed(batch: Batch, rate: float) -> Batch:
    """Return a sample whose negatives count for those that were left out."""
    weight_B = np.where(batch.label_B == 1, 1.0, 1.0 / rate).astype(np.float32)
    if batch.weight_B is not None:
        weight_B *= batch.weight_B
    return dataclasses.replace(batch, weight_B=weight_B)
