"""Hashes and buckets of many keys at once, as the store's library gives them one by one.

Shapes: N keys. Tests hold both to equal numbers.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embertide import _store

Keys = NDArray[np.uint64]


def hash_keys(keys_N: Keys) -> Keys:
    """Return SplitMix64 of every key, as `_store.hash_key` gives it."""
    z_N = keys_N + np.uint64(_store.HASH_SEED)  # unsigned arrays wrap around silently
    z_N ^= z_N >> np.uint64(30)
    z_N *= np.uint64(0xBF58476D1CE4E5B9)
    z_N ^= z_N >> np.uint64(27)
    z_N *= np.uint64(0x94D049BB133111EB)
    z_N ^= z_N >> np.uint64(31)
    return z_N


def buckets_of(keys_N: Keys, bucket_bits: int) -> NDArray[np.uint32]:
    """Return the bucket of every key: the top bits of its hash."""
    if bucket_bits == 0:
        return np.zeros(len(keys_N), np.uint32)
    return (hash_keys(keys_N) >> np.uint64(64 - bucket_bits)).astype(np.uint32)


def initial_values(
    table: _store.TableConfig, keys_N: Keys, dimensions: Sequence[int]
) -> NDArray[np.float32]:
    """Return what new rows hold in some dimensions, as `_store.initial_value` gives it."""
    seed = np.array([table.init_seed ^ table.id], np.uint64)
    of_key_N = hash_keys(hash_keys(seed) ^ keys_N)
    of_dimension_D = np.asarray(dimensions, np.uint64)
    hash_ND = hash_keys(of_key_N[:, None] ^ of_dimension_D)
    unit_ND = (hash_ND >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
    return unit_ND * np.float32(table.init_scale)
