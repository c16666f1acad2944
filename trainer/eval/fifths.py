"""Figures of a stream by equal parts of its events, in memory of a fixed size.

A day says how a model does by the clock; a fifth of the stream, how far it has come: the first
shows where it began, the last what it is worth. How long a stream will be is not known while it
runs. So events are kept as blocks of equally many, oldest first; when all blocks are full, each two
become one. Parts end where blocks do, so that each end is off by half a block at most: less than a
hundredth of the stream.

Invariants: all blocks but the last have `_width` events, the last that many at most; blocks but the
last are never written to again, so that copies may share them.

Shapes: B events, K blocks, S bins of scores, N bins of all blocks that have an event.
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.eval.metrics import Array, Binned, Summary

PARTS = 5

_BLOCKS = 128  # the most; half as many after two became one
_FIRST_WIDTH = 64
# 0.016 apart in log odds: AUCs are within some 0.0001. 32 KiB a block.
_BINS = 2048


class Fifths:
    """The events of a stream with their scores from before they were learned. For one thread."""

    def __init__(self) -> None:
        """Begin with no events."""
        self._width = _FIRST_WIDTH
        self._blocks: list[Binned] = []
        self._in_last = 0

    def add(self, label_B: Array, score_B: Array) -> None:
        """Add events; scores are probabilities, which is not looked at."""
        begin = 0
        while begin < len(label_B):
            if not self._blocks or self._in_last == self._width:
                self._begin_block()
            end = min(len(label_B), begin + self._width - self._in_last)
            self._blocks[-1].add(label_B[begin:end], score_B[begin:end])
            self._in_last += end - begin
            begin = end

    def _begin_block(self) -> None:
        if len(self._blocks) == _BLOCKS:
            pairs = zip(self._blocks[::2], self._blocks[1::2], strict=True)
            self._blocks = [_joined(pair) for pair in pairs]
            self._width *= 2
        self._blocks.append(Binned(_BINS))
        self._in_last = 0

    @property
    def events(self) -> int:
        """Events added."""
        return self._width * max(0, len(self._blocks) - 1) + self._in_last

    def figures(self) -> list[Summary]:
        """Return the figures of `PARTS` equal parts of the events, oldest first.

        A block belongs to the part in which its middle lies. With few events a part may have none.
        """
        parts: list[list[Binned]] = [[] for _ in range(PARTS)]
        events = self.events
        for k, block in enumerate(self._blocks):
            in_block = self._in_last if block is self._blocks[-1] else self._width
            middle = k * self._width + in_block / 2
            parts[min(PARTS - 1, int(PARTS * middle / events))].append(block)
        return [_joined(part).summary() for part in parts]

    def frozen(self) -> "Fifths":
        """Return it as it is now, to which nothing may be added."""
        found = copy.copy(self)
        found._blocks = [*self._blocks[:-1], *(_joined((each,)) for each in self._blocks[-1:])]
        return found

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return what `from_state` makes an equal one of: numbers, for JSON, and arrays by name."""
        numbers = {"width": self._width, "in_last": self._in_last, "bins": _BINS}
        if not self._blocks:
            return numbers, {}
        counts_K2S = np.array([each.counts_2S for each in self._blocks])
        place_N = np.flatnonzero(counts_K2S)
        arrays: dict[str, NDArray[Any]] = {
            "place": place_N,
            "count": counts_K2S.reshape(-1)[place_N].astype(np.int64),
            "sums": np.array([(each.score, each.loss) for each in self._blocks]),
        }
        return numbers, arrays

    @classmethod
    def from_state(cls, numbers: Mapping[str, Any], arrays: Mapping[str, Array]) -> "Fifths":
        """Make one of what `state` returned; one without events of what older builds wrote."""
        made = cls()
        if numbers.get("bins") != _BINS or not arrays:
            return made
        made._width, made._in_last = numbers["width"], numbers["in_last"]
        counts_K2S = np.zeros((len(arrays["sums"]), 2, _BINS), np.int64)
        counts_K2S.reshape(-1)[arrays["place"]] = arrays["count"]
        for counts_2S, (score, loss) in zip(counts_K2S, arrays["sums"], strict=True):
            block = Binned(_BINS)
            block.counts_2S, block.score, block.loss = counts_2S.copy(), float(score), float(loss)
            made._blocks.append(block)
        return made


def _joined(blocks: "tuple[Binned, ...] | list[Binned]") -> Binned:
    joined = Binned(_BINS)
    for block in blocks:
        joined.merge(block)
    return joined
