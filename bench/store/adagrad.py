"""Row-wise Adagrad against FBGEMM's: the same rows and accumulators after the same batches.

FBGEMM's TBE keeps dense ids, ours hashed keys; both begin with the same rows and take the same
gradients, of keys that repeat in bags and in the batch. A row of the report is the largest
difference in all steps, in millionths of the number or of 1 if that is more; it may be one.

Shapes: N keys, B bags, D dimensions, R rows.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from bench import report
from bench.store import ours, peers
from embertide import _store

_ROWS, _DIM, _BAGS, _BAG, _STEPS = 500, 32, 256, 5, 50
_RATE, _EPSILON = 0.05, 1e-6


def _apart(mine: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Return the largest difference, in millionths."""
    return float((np.abs(mine - theirs) / np.maximum(np.abs(theirs), 1.0)).max()) * 1e6


def _differences() -> tuple[list[float], list[float]]:
    """Return how far rows and accumulators are apart after each step."""
    table = ours.table_of(_ROWS, _DIM)
    store = _store.TrainingStore(tables=[table])
    keys_R = ours.keys_of(np.arange(_ROWS))
    store.ensure_rows(0, keys_R)
    tbe = peers.TrainingTbe(1, _ROWS, _DIM, _RATE, _EPSILON)
    weights_RD, accumulators_R = tbe.state()
    weights_RD.copy_(torch.from_numpy(store.lookup(0, keys_R)[0]))
    by_key_R = np.argsort(keys_R.view(np.uint64))
    rng, offsets = np.random.default_rng(1), np.arange(_BAGS + 1) * _BAG
    rows, accumulators = [], []
    for _ in range(_STEPS):
        (ids_N,) = ours.draw(rng, _ROWS, 1.05, 1, _BAGS * _BAG)
        gradients_BD = rng.standard_normal((_BAGS, _DIM), dtype=np.float32)
        tbe.forward(torch.from_numpy(ids_N), torch.from_numpy(offsets))
        tbe.backward(torch.from_numpy(gradients_BD))
        store.apply_gradients(
            [(0, ours.keys_of(ids_N), offsets.astype(np.uint32), gradients_BD)],
            learning_rate=_RATE,
            epsilon=_EPSILON,
        )
        rows.append(_apart(store.lookup(0, keys_R)[0], weights_RD.numpy()))
        theirs_R = accumulators_R.numpy().reshape(-1)[by_key_R]
        accumulators.append(_apart(store.bucket_state(0, 0)[0], theirs_R))
    return rows, accumulators


def run() -> Iterator[report.Row]:
    """Yield the rows of the report."""
    for what, found in zip(("rows", "accumulators"), _differences(), strict=True):
        yield report.compare(
            (
                f"{what}, {_STEPS} steps of {_BAGS * _BAG:,} keys",
                "largest difference",
                "millionths",
            ),
            [max(found)],
            [1.0],
            peer_name="allowed to FBGEMM TBE",
            better="lower",
            target=1.0,
        )
