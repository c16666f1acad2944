"""The message that a rank sends of a few gradients and of what is added up beside them.

All ranks know how long each message is, so no sizes go ahead. It has no header:

    refused | sums (fp32) | the rank's own span (fp32) | V values (2 or 4 bytes) | V gaps (2 bytes)

`refused` is 1 if the rank's gradients are not finite: no entry follows. A gap is the step from the
position before to that of the value. A step of more than 65,535 is made by way of entries with the
value 0, and such entries fill the message up.

Shapes: E entries; N positions; R ranks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FAR = 65_535  # the longest step

Spans = Sequence[tuple[int, int]]
_Array = NDArray[Any]
_Bytes = NDArray[np.uint8]


def room_of(entries: int, positions: int) -> int:
    """Return how many values a message needs for so many entries wherever they are."""
    return entries + positions // _FAR


class Messages:
    """Packs and adds up the messages of one step.

    Attributes:
        lengths_R: Bytes of each rank's message.
    """

    def __init__(
        self,
        room: int,
        dtype: type[np.float16 | np.float32],
        beside: int,
        spans_R: Spans,
        size: int,
    ) -> None:
        """Lay out messages.

        Args:
            room: Values of each.
            dtype: The type in which values travel.
            beside: Numbers that are added up beside.
            spans_R: See `DenseSync.finish`.
            size: The number of ranks.
        """
        self._room = room
        self._dtype = dtype
        self._spans_R = spans_R or [(0, 0)] * size
        self._summed_from = self._spans_R[-1][1]
        head = 1 + beside - self._summed_from
        self._heads_R = [head + end - begin for begin, end in self._spans_R]
        body = room * (np.dtype(dtype).itemsize + 2)
        self.lengths_R = [4 * head + body for head in self._heads_R]

    def pack(
        self, rank: int, beside: NDArray[np.float32], place_E: _Array, values_E: _Array
    ) -> _Bytes:
        """Return a rank's message.

        Args:
            rank: The rank that sends it.
            beside: All of it.
            place_E: Positions in order, at most as many as `room_of` was told.
            values_E: In the type that they travel in.
        """
        return self._message(rank, 0.0, beside, *self._coded(place_E, values_E))

    def refuse(self, rank: int, beside: NDArray[np.float32]) -> _Bytes:
        """Return the message of a rank whose gradients are not finite."""
        nothing = np.empty(0, np.int64)
        return self._message(rank, 1.0, beside, *self._coded(nothing, nothing.astype(self._dtype)))

    def _message(
        self, rank: int, refused: float, beside: NDArray[np.float32], values: _Array, gaps: _Array
    ) -> _Bytes:
        begin, end = self._spans_R[rank]
        head = np.concatenate(
            (np.array([refused], np.float32), beside[self._summed_from :], beside[begin:end])
        )
        return np.concatenate([each.view(np.uint8) for each in (head, values, gaps)])

    def _coded(self, place_E: _Array, values_E: _Array) -> tuple[_Array, _Array]:
        values, gaps = np.zeros(self._room, self._dtype), np.zeros(self._room, np.uint16)
        if len(place_E):
            steps_E = np.diff(place_E, prepend=-1)
            by_way_E = (steps_E - 1) // _FAR  # entries of 0 before each
            ends_E = np.cumsum(by_way_E + 1) - 1
            gaps[: ends_E[-1] + 1] = _FAR
            gaps[ends_E] = steps_E - by_way_E * _FAR
            values[ends_E] = values_E
        return values, gaps

    def add(
        self, rank: int, message: _Bytes, beside: NDArray[np.float32], sum_N: NDArray[np.float32]
    ) -> bool:
        """Add a message of a rank to sums, in place; return whether it refuses the step."""
        head_end = 4 * self._heads_R[rank]
        values_end = head_end + self._room * np.dtype(self._dtype).itemsize
        # Copies, for a message may begin anywhere.
        head = message[:head_end].copy().view(np.float32)
        values = message[head_end:values_end].copy().view(self._dtype).astype(np.float32)
        gaps = message[values_end:].copy().view(np.uint16)
        begin, end = self._spans_R[rank]
        summed = len(beside) - self._summed_from
        beside[self._summed_from :] += head[1 : 1 + summed]
        beside[begin:end] += head[1 + summed :]
        place = np.cumsum(gaps, dtype=np.int64) - 1
        # A position comes twice at most with the value 0, which adds nothing.
        is_there = values != 0
        sum_N[place[is_there]] += values[is_there]
        return bool(head[0])
