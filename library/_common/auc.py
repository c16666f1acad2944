"""The area under a ROC curve, and its standard error; exact, of events or of counts by score.

One implementation for all that tells AUCs. Array suffixes: B events, G groups of equal score,
ascending.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Counts = NDArray[np.int64]


def counts_by_score(label_B: Array, score_B: Array) -> tuple[Counts, Counts]:
    """Return (positives_G, negatives_G): how many events of either label each score has.

    Args:
        label_B: 0 or 1.
        score_B: Any scale; only the order counts. No nan.
    """
    order_B = np.argsort(score_B, kind="stable")
    sorted_B = score_B[order_B]
    first_G = np.flatnonzero(np.append(True, sorted_B[1:] != sorted_B[:-1])[: len(sorted_B)])
    positive_B = (label_B[order_B] != 0).astype(np.int64)
    positives_G = np.add.reduceat(positive_B, first_G) if len(first_G) else positive_B
    negatives_G = np.diff(np.append(first_G, len(sorted_B))) - positives_G
    return positives_G, negatives_G


def auc_of_counts(positives_G: Counts, negatives_G: Counts) -> float:
    """Return the AUC, equal scores a half; nan where one class is missing."""
    # In integers, so that no rounding creeps in however many events there are.
    below_G = np.cumsum(negatives_G) - negatives_G
    pairs = int(positives_G.sum()) * int(negatives_G.sum())
    if pairs == 0:
        return math.nan
    return int((positives_G * (2 * below_G + negatives_G)).sum()) / (2 * pairs)


def auc_error_of_counts(positives_G: Counts, negatives_G: Counts) -> float:
    """Return the standard error of the AUC, events taken for independent.

    DeLong, DeLong and Clarke-Pearson 1988, "Comparing the areas under two or more correlated
    receiver operating characteristic curves", equations 3 to 5: the variance of the share of
    negatives below a positive over the positives, and the same the other way round. It asks nothing
    of how scores are distributed. With a handful of a class it is itself uncertain.

    Returns:
        The error; nan with fewer than two events of a class. 0 where the classes do not overlap.
    """
    positives, negatives = int(positives_G.sum()), int(negatives_G.sum())
    if positives < 2 or negatives < 2:
        return math.nan
    # For each score: the share of negatives below it and of positives above it; ties count half.
    below_G = (np.cumsum(negatives_G) - negatives_G / 2) / negatives
    above_G = (positives - np.cumsum(positives_G) + positives_G / 2) / positives
    return math.sqrt(_variance(below_G, positives_G) + _variance(above_G, negatives_G))


def _variance(value_G: Array, count_G: Counts) -> float:
    """Return the variance of the mean of values, of which each was drawn so often."""
    count = int(count_G.sum())
    spread_G = value_G - float(value_G @ count_G) / count
    return float(spread_G**2 @ count_G) / (count - 1) / count
