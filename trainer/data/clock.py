"""Facts about a column of times from all rows: its begin, its end, its gaps, its outliers.

A few wrong values decide nothing: what lies far from all others is counted and named, and left out
of every figure. Array suffix: N values.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# 1985 to 2128 in seconds.
EPOCH_S = (5e8, 5e9)
UNITS = (("seconds", 1000.0), ("milliseconds", 1.0), ("microseconds", 1e-3), ("nanoseconds", 1e-6))
_DAY_MS = 86_400_000
# Outliers may be this share of the values on each side.
_TAIL = 0.1
_MIN_VALUES = 8  # of which one may be
_MAX_KEPT = 20_000_000  # values held in memory; more are read twice

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFacts:
    """Facts about a clock from all rows, in the units of its column; of a timestamp milliseconds.

    Attributes:
        rows: Rows of the input.
        missing: Rows without a time that can be read.
        first: Smallest value that is no outlier.
        last: Largest value that is none.
        backwards: Rows whose value is smaller than one before them, outliers apart.
        gap: Longest step forward.
        group: Most rows in a row of one value.
        together: As `group`, but for the group of each row, in the mean over all rows.
        is_number: Whether the column has numbers, whose unit it does not tell.
        outliers: Rows whose time lies far from all others.
        outlier: Row and value of the first of them.
        begins_outside: Whether such a one, that is too early, comes before all others.
    """

    rows: int
    missing: int
    first: float
    last: float
    backwards: int
    gap: float
    group: int
    together: float
    is_number: bool
    outliers: int = 0
    outlier: tuple[int, float] = (0, math.nan)
    begins_outside: bool = False


def epoch_unit(value_N: Floats) -> tuple[str, float] | None:
    """Return the unit in which most of the values are times since 1970, and its milliseconds."""
    for name, unit_ms in UNITS:
        scale = 1000 / unit_ms
        inside_N = (value_N >= EPOCH_S[0] * scale) & (value_N <= EPOCH_S[1] * scale)
        # Half is enough, for the other half may be of another unit.
        if len(value_N) and 2 * int(inside_N.sum()) >= len(value_N):
            return name, unit_ms
    return None


def usual_range(value_N: Floats, unit_ms: float, most: float = _TAIL) -> tuple[float, float]:
    """Return between which values the times lie that are no outliers.

    An outlier is one of the first or last tenth, and further from those between than they are from
    each other, by a day at least; or, where all times but `most` are of 1985 to 2128, another.

    Args:
        value_N: Finite values.
        unit_ms: Milliseconds in one of them.
        most: Share of outliers by their year.
    """
    if not len(value_N):
        return -math.inf, math.inf
    value_N = np.sort(value_N)
    low, high = float(value_N[0]), float(value_N[-1])
    if len(value_N) < _MIN_VALUES:
        return low, high
    epoch = [edge * 1000 / unit_ms for edge in EPOCH_S]
    inside_N = value_N[(value_N >= epoch[0]) & (value_N <= epoch[1])]
    if len(inside_N) >= (1 - most) * len(value_N):
        value_N = inside_N
    tail = max(1, int(_TAIL * len(value_N)))
    span = max(float(value_N[-1 - tail] - value_N[tail]), _DAY_MS / unit_ms)
    below = np.flatnonzero(np.diff(value_N[: tail + 1]) > span)
    above = np.flatnonzero(np.diff(value_N[-1 - tail :]) > span)
    low = float(value_N[below[-1] + 1] if len(below) else value_N[0])
    high = float(value_N[len(value_N) - 1 - tail + above[0]] if len(above) else value_N[-1])
    return low, high


def survey(read: Callable[[], Iterator[Floats]], unit_ms: float, *, is_number: bool) -> TimeFacts:
    """Look at the times of all rows.

    Args:
        read: Gives them in their order, nan where there is none, as often as it is called.
        unit_ms: Milliseconds in one of them.
        is_number: Whether the column has numbers.
    """
    kept: list[Floats] = []
    rows, sampled = 0, []
    for value_N in read():
        if rows + len(value_N) <= _MAX_KEPT:
            kept.append(value_N)
        step = 1 + rows // _MAX_KEPT
        sampled.append(value_N[np.isfinite(value_N)][::step])
        rows += len(value_N)
    # The unit of numbers is that of most of them, and the others are of none.
    most = 0.5 if is_number else _TAIL
    low, high = usual_range(np.concatenate(sampled) if sampled else np.empty(0), unit_ms, most)
    whole = sum(map(len, kept)) == rows
    with np.errstate(over="ignore", invalid="ignore"):
        return _figures(iter(kept) if whole else read(), low, high, is_number)


def _figures(pieces: Iterator[Floats], low: float, high: float, is_number: bool) -> TimeFacts:
    rows = missing = outliers = backwards = group = run = pairs = 0
    first, last, gap, latest = math.inf, -math.inf, 0.0, -math.inf
    outlier, begins_outside = (0, math.nan), False
    for piece_N in pieces:
        there_N = np.isfinite(piece_N)
        far_N = there_N & ((piece_N < low) | (piece_N > high))
        if far_N.any():
            at = int(far_N.argmax())
            outlier = outlier if outliers else (rows + at, float(piece_N[at]))
            usual = np.flatnonzero(there_N & ~far_N)
            before = piece_N[: usual[0]] if len(usual) else piece_N
            begins_outside |= latest == -math.inf and bool((before < low).any())
            outliers += int(far_N.sum())
        missing += int((~there_N).sum())
        rows += len(piece_N)
        value_N = piece_N[there_N & ~far_N]
        if not len(value_N):
            continue
        first, last = min(first, float(value_N.min())), max(last, float(value_N.max()))
        high_N = np.maximum.accumulate(np.append(latest, value_N))
        backwards += int((value_N < high_N[:-1]).sum())
        steps_N = np.diff(high_N)
        steps_N = steps_N[np.isfinite(steps_N)]
        gap = max(gap, float(steps_N.max()) if len(steps_N) else 0.0)
        edges = np.flatnonzero(np.append(True, np.diff(value_N) != 0))
        sizes = np.diff(np.append(edges, len(value_N)))
        if value_N[0] == latest:
            sizes[0] += run
            pairs -= run * run
        group, run = max(group, int(sizes.max())), int(sizes[-1])
        pairs += int((sizes * sizes).sum())
        latest = float(high_N[-1])
    return TimeFacts(
        rows=rows,
        missing=missing,
        first=first,
        last=last,
        backwards=backwards,
        gap=gap,
        group=group,
        together=pairs / max(1, rows - missing - outliers),
        is_number=is_number,
        outliers=outliers,
        outlier=outlier,
        begins_outside=begins_outside,
    )
