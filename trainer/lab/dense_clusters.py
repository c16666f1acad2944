"""Dense features that are distributed alike: clusters, whose features can share a transform.

A feature is described by a few statistics of a sample, each in units of which 1 is much. Features
whose descriptions are close are clustered by complete linkage: no two of a cluster are further
apart than `APART`. Shapes: N events of a sample, D columns of DENSE, V values that are not missing,
S statistics.
"""

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray
from scipy.cluster import hierarchy

Floats = NDArray[np.float64]

APART = 0.6
"""Distance of two descriptions that need clusters of their own."""

# Differences of a statistic that weigh as much as all of a share.
_MUCH_TAIL, _MUCH_SIZE, _MUCH_OFFSET = 3.0, 6.0, 3.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """How the values of a feature are distributed.

    Attributes:
        missing: Share of the events without a value.
        commonest: Share of the values that are the commonest one.
        distinct: Logarithm of the number of distinct values over that of values: 0 for one value,
            1 where none comes twice.
        skew: Kelly's: how far the middle of the 10th and the 90th percentile is from the median,
            from -1, a tail below, to 1, a tail above.
        tail: log10 of the range of the middle 99.8 % over that of the middle 50 %.
        size: log10 of the range of the middle 50 %.
        offset: log10 of 1 + the median's distance from 0 over the range of the middle 50 %.
    """

    missing: float
    commonest: float
    distinct: float
    skew: float
    tail: float
    size: float
    offset: float

    @property
    def place(self) -> Floats:
        """The statistics in the units in which distances are measured, [S]."""
        tail, size, offset = (
            self.tail / _MUCH_TAIL,
            self.size / _MUCH_SIZE,
            self.offset / _MUCH_OFFSET,
        )
        return np.array(
            (self.missing, self.commonest, self.distinct, self.skew, tail, size, offset)
        )


def describe(value_N: NDArray[np.float32]) -> Description:
    """Describe a feature by a sample; one without a value reads as if it were always 0."""
    value_V = value_N[np.isfinite(value_N)].astype(np.float64)
    missing = 1 - len(value_V) / len(value_N) if len(value_N) else 1.0
    value_V = value_V if len(value_V) else np.zeros(1)
    _, count_U = np.unique(value_V, return_counts=True)
    shares = (0.001, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999)
    least, low, quarter, middle, upper, high, most = np.quantile(value_V, shares).tolist()
    # Where most values are one, the next wider range tells how large the others are.
    wide = next((width for width in (upper - quarter, high - low, most - least) if width), 1.0)
    return Description(
        missing=missing,
        commonest=float(count_U.max()) / len(value_V),
        distinct=math.log(len(count_U)) / math.log(max(len(value_V), 2)),
        skew=(high + low - 2 * middle) / (high - low) if high > low else 0.0,
        tail=math.log10(max((most - least) / wide, 1.0)),
        size=math.log10(wide),
        offset=math.log10(1 + abs(middle) / wide),
    )


def clusters(found: list[Description], *, most: int) -> list[tuple[int, ...]]:
    """Return the clusters of D features, the largest first, each as the features' places.

    Args:
        found: The description of each feature.
        most: Clusters at most; where distance would make more, the nearest are joined.
    """
    if len(found) < 2:
        return [tuple(range(len(found)))] if found else []
    place_DS = np.stack([each.place for each in found])
    tree = hierarchy.linkage(place_DS, method="complete")
    of_D = hierarchy.fcluster(tree, APART, criterion="distance")
    if of_D.max() > most:
        of_D = hierarchy.fcluster(tree, most, criterion="maxclust")
    groups = [tuple(np.flatnonzero(of_D == group).tolist()) for group in np.unique(of_D)]
    return sorted(groups, key=lambda group: (-len(group), group))
