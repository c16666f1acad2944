"""Sharing out the DDR of one device among tables, by their miss curves.

Each table takes one point of its curve; the points taken fit the room, and what is then read from
the SSD is least. `share_out` solves that exactly by HiGHS (scipy.optimize.milp) where it can, and
by the lower hulls of the curves where it cannot. Letters of shapes: P points of a curve, Q points
of all curves one after the other.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# A fixed amount of search, not of time: the same problem has the same answer.
_NODES_MAX = 200
_GAP = 0.001
# Combinations of points that are looked at one by one.
_EXACT_MAX = 4096
# More points than this take HiGHS longer than a planner has.
POINTS_MAX = 20_000


class Curve(NamedTuple):
    """One table's reads from the SSD, by the bytes that its rows may take in DDR.

    Attributes:
        bytes_P: Ascending.
        missed_P: Keys a second; never rises.
    """

    bytes_P: Floats
    missed_P: Floats

    def at(self, size: float) -> float:
        """Return what is missed in so many bytes: of points between two, the line between them."""
        return float(np.interp(size, self.bytes_P, self.missed_P))

    def raised_to(self, least: float) -> "Curve":
        """Return the curve of a table that takes no less than `least`."""
        beyond_P = self.bytes_P > least
        first = self.at(least)
        return Curve(
            np.concatenate([[least], self.bytes_P[beyond_P]]),
            np.concatenate([[first], self.missed_P[beyond_P]]),
        )


class Step(NamedTuple):
    """From one corner of a table's lower hull to the next."""

    saved: float  # keys a second for each byte
    table: int
    bytes: float  # beyond the corner before


def lower_hull(curve: Curve) -> list[int]:
    """Return the positions of the corners of the convex curve below, left to right."""
    corners: list[int] = []
    for at in range(len(curve.bytes_P)):
        if corners and curve.missed_P[at] >= curve.missed_P[corners[-1]]:
            continue
        while len(corners) > 1 and _slope(curve, corners[-2], corners[-1]) >= _slope(
            curve, corners[-1], at
        ):
            corners.pop()
        corners.append(at)
    return corners


def _slope(curve: Curve, left: int, right: int) -> float:
    rise = curve.missed_P[right] - curve.missed_P[left]
    return float(rise / (curve.bytes_P[right] - curve.bytes_P[left]))


def _steps(curves: Sequence[Curve]) -> list[Step]:
    """Return all steps of all hulls, the most worth a byte first; a table's own stay in order."""
    steps = []
    for table, curve in enumerate(curves):
        corners = lower_hull(curve)
        for left, right in itertools.pairwise(corners):
            size = float(curve.bytes_P[right] - curve.bytes_P[left])
            steps.append(Step(-_slope(curve, left, right), table, size))
    return sorted(steps, key=lambda step: (-step.saved, step.table))


def by_hulls(curves: Sequence[Curve], room: float) -> Floats:
    """Return the bytes of each table by whole steps of the hulls, and what is left by parts of one.

    Requires: the first points of all curves fit the room.
    """
    given_T = np.array([curve.bytes_P[0] for curve in curves])
    room -= float(given_T.sum())
    ended: set[int] = set()
    rest: list[Step] = []
    for step in _steps(curves):
        if step.table not in ended and step.bytes <= room:
            given_T[step.table] += step.bytes
            room -= step.bytes
        else:
            ended.add(step.table)  # a later step of the table begins where this one ends
            rest.append(step)
    for step in rest:
        part = min(step.bytes, room)
        given_T[step.table] += part
        room -= part
    return given_T


def min_missed(curves: Sequence[Curve], room: float) -> float:
    """Return a bound: what is missed if every curve were its hull, and steps could be cut."""
    missed = sum(float(curve.missed_P[0]) for curve in curves)
    room -= sum(float(curve.bytes_P[0]) for curve in curves)
    for step in _steps(curves):
        missed -= step.saved * min(step.bytes, max(room, 0.0))
        room -= step.bytes
    return missed


def estimate_missed(curves: Sequence[Curve], room: float) -> float:
    """Return what the best shares miss: exactly for a few points, else the bound."""
    if math.prod(len(curve.bytes_P) for curve in curves) > _EXACT_MAX:
        return min_missed(curves, room)
    sizes, total = np.zeros(1), np.zeros(1)
    for curve in curves:
        sizes = (sizes[:, None] + curve.bytes_P).reshape(-1)
        total = (total[:, None] + curve.missed_P).reshape(-1)
        sizes, total = sizes[sizes <= room], total[sizes <= room]
    return float(total.min())


def by_milp(curves: Sequence[Curve], room: float, limit_s: float) -> Floats | None:
    """Return the bytes of each table, one point of its curve each; None: not found in the limit."""
    sizes_Q = np.concatenate([curve.bytes_P for curve in curves])
    missed_Q = np.concatenate([curve.missed_P for curve in curves])
    table_Q = np.repeat(np.arange(len(curves)), [len(curve.bytes_P) for curve in curves])
    points = len(sizes_Q)
    one_TQ = scipy.sparse.coo_array((np.ones(points), (table_Q, np.arange(points))))
    scale = max(float(missed_Q.max()), 1e-9)
    found = scipy.optimize.milp(
        missed_Q / scale,
        integrality=np.ones(points),
        bounds=scipy.optimize.Bounds(0, 1),
        constraints=[
            scipy.optimize.LinearConstraint(one_TQ.tocsr(), 1, 1),
            scipy.optimize.LinearConstraint(sizes_Q[None] / max(room, 1.0), -np.inf, 1),
        ],
        options={"node_limit": _NODES_MAX, "mip_rel_gap": _GAP, "time_limit": limit_s},
    )
    if found.x is None:
        return None
    taken_Q = found.x > 0.5
    given_T = np.bincount(table_Q[taken_Q], sizes_Q[taken_Q], len(curves)).astype(np.float64)
    return given_T if given_T.sum() <= room else None


def missed(curves: Sequence[Curve], given_T: Floats) -> float:
    """Return what all tables miss in so many bytes each."""
    return sum(curve.at(size) for curve, size in zip(curves, given_T, strict=True))


def share_out(curves: Sequence[Curve], room: float, limit_s: float) -> Floats:
    """Return the bytes of each table that leave the least to be read from the SSD.

    Requires: the first points of all curves fit the room.
    """
    hulls_T = by_hulls(curves, room)
    if sum(len(curve.bytes_P) for curve in curves) > POINTS_MAX:
        return hulls_T
    milp_T = by_milp(curves, room, limit_s)
    if milp_T is None:
        return hulls_T
    milp_T = _spend_rest(curves, milp_T, room)
    return milp_T if missed(curves, milp_T) < missed(curves, hulls_T) else hulls_T


def _spend_rest(curves: Sequence[Curve], given_T: Floats, room: float) -> Floats:
    """Give what is left to tables that can still use it."""
    grown = [curve.raised_to(size) for curve, size in zip(curves, given_T, strict=True)]
    return by_hulls(grown, room)
