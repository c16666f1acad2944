"""Largest differencing (Karmarkar and Karp 1982, k ways): numbers into k sets with even sums.

Each number begins as a vector of k sums, one of them not zero. The two vectors whose largest and
smallest sums differ most are joined, the largest sum of one with the smallest of the other, until
one vector is left. Sums carry their members along, as trees.
"""

import heapq
from collections.abc import Sequence

# A leaf is a number's position; an inner node joins two sets; None is an empty set.
_Members = int | tuple["_Members", "_Members"] | None
_Sums = list[tuple[float, _Members]]  # ascending


def difference(loads: Sequence[float], sets: int) -> list[list[int]]:
    """Return the positions of the loads in each of so many sets.

    It takes len(loads) joins of `sets` sums each.
    """
    empty: _Sums = [(0.0, None)] * (sets - 1)
    # Ties are broken by position, so that vectors are never compared.
    heap: list[tuple[float, int, _Sums]] = [
        (-load, at, [*empty, (load, at)]) for at, load in enumerate(loads)
    ]
    heapq.heapify(heap)
    made = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = [
            (x + y, _joined(of_x, of_y))
            for (x, of_x), (y, of_y) in zip(one, reversed(other), strict=True)
        ]
        joined.sort(key=lambda each: each[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], made, joined))
        made += 1
    return [_positions(members) for _, members in heap[0][2]] if heap else [[] for _ in range(sets)]


def _joined(one: _Members, other: _Members) -> _Members:
    if one is None:
        return other
    return one if other is None else (one, other)


def _positions(members: _Members) -> list[int]:
    """Return the leaves of a tree, which may be as deep as there are numbers."""
    found: list[int] = []
    waiting = [members]
    while waiting:
        at = waiting.pop()
        if isinstance(at, tuple):
            waiting += at
        elif at is not None:
            found.append(at)
    return sorted(found)
