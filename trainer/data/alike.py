"""Whether labels of neighbouring events are alike, so that a run should learn in small steps.

A step scores all events of its batch before it learns any. Where somebody rates film after film, or
all flights of a stormy evening come late, what the first events of a batch tell comes too late for
its others. Pure, over the first events of a file. Array suffix: N events, in their order.
"""

import numpy as np
from numpy.typing import NDArray

MAX_EVENTS = 200_000
"""Events that are looked at, at most."""

SMALL_STEPS = 0.01
"""The likeness from which on small steps are worth their time."""

QUICK_STEPS = 0.02
"""The likeness from which on rows should learn at a higher rate, too."""

_AROUND = 16  # batches that are a batch's surroundings
_ERRORS = 4.0  # standard errors that a likeness lies above chance


def alike(label_N: NDArray[np.bool_], ts_N: NDArray[np.float64], batch_size: int) -> float:
    """Return how alike labels of one batch are, beyond those of batches around it; 0: not.

    It is the correlation of two labels of a batch whose times differ, as events of one time are
    learned together anyway, less that of two labels of different batches nearby: a label rate that
    moves slowly is the same for all of them. With fewer than 32 batches it is always 0.

    Args:
        label_N: The labels.
        ts_N: Their times.
        batch_size: Events of a step.
    """
    if len(label_N) < 2 * _AROUND * batch_size:  # of a few batches, chance has long tails
        return 0.0
    centred_N = label_N - label_N.mean()
    variance = float((centred_N**2).mean())
    place_N = np.arange(len(label_N))
    batch_N, around_N = place_N // batch_size, place_N // (_AROUND * batch_size)
    of_batch = _pairs(centred_N, _runs(batch_N))
    within = of_batch - _pairs(centred_N, _runs(batch_N, ts_N))
    between = _pairs(centred_N, _runs(around_N)) - of_batch
    if variance == 0 or within[1] == 0 or between[1] == 0:
        return 0.0
    found = float(within[0] / within[1] - between[0] / between[1]) / variance
    # Both orders of a pair are in the sum, so by chance its variance is twice the count.
    error = float(np.sqrt(2 / within[1] + 2 / between[1]))
    return found if found >= max(SMALL_STEPS, _ERRORS * error) else 0.0


def _pairs(value_N: NDArray[np.float64], first_R: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sum of products, and the count, of all pairs of events that share a run.

    Each pair counts in both orders, and an event with itself once. Runs begin at `first_R`.
    """
    size_R = np.diff(np.append(first_R, len(value_N))).astype(np.float64)
    return np.array([(np.add.reduceat(value_N, first_R) ** 2).sum(), (size_R**2).sum()])


def _runs(*columns: NDArray[np.generic]) -> NDArray[np.int64]:
    """Return the first place of each run of equal values."""
    changes_N = np.zeros(len(columns[0]) - 1, np.bool_)
    for value_N in columns:
        changes_N |= value_N[1:] != value_N[:-1]
    return np.append(0, np.flatnonzero(changes_N) + 1)
