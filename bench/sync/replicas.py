"""A small model on the virtual clock: rows that all ranks share, and a net of each rank.

Rows are served: each gradient is applied once, when the step of its rank ends. A batch is scored
before anything is learned from it; the AUC is of the second half of the events. Batches are handed
out in order, to whoever asks; events of one time stay together.

Shapes: B events, F columns, D values of a row, K rows, H hidden values.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bench.sync.clock import Learning
from embertide.trainer.eval.metrics import auc

_COLUMNS = (
    *("user_id", "prev_article", "env", "device", "os"),
    *("country", "region", "referrer", "cand"),
)
_D, _H = 8, 32
_BATCH = 32
_USER_ROWS = 1 << 16
Net = list[NDArray[np.float64]]


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """Events in order: rows_BF, whether each is positive, and where batches begin."""

    rows_BF: NDArray[np.int64]
    label_B: NDArray[np.float64]
    starts: list[int]


def read(path: Path | None, events: int, seed: int) -> Stream:
    """Read the first events of the news file, or make as many up."""
    if path is not None:
        table = pq.read_table(path, columns=[*_COLUMNS, "ts", "y"]).slice(0, events)
        codes = [table[name].to_numpy().astype(np.int64) for name in _COLUMNS]
        codes[0] = codes[0] % _USER_ROWS
        label, ts = table["y"].to_numpy().astype(np.float64), table["ts"].to_numpy()
    else:
        random = np.random.default_rng(seed)
        codes = [random.zipf(1.3, events) % size for size in (5000, 2000, 500, 50, 10, 5)]
        logit = sum(random.normal(0, 0.6, 5000)[each] for each in codes)
        label = (random.random(events) < 1 / (1 + np.exp(1.2 - logit))).astype(np.float64)
        ts = np.arange(events)
    columns, first = [], 0
    for each in codes:
        found, inverse = np.unique(each, return_inverse=True)
        columns.append(inverse + first)
        first += len(found)
    changes = np.flatnonzero(np.diff(ts, prepend=ts[0] - 1))
    ends = np.unique(changes[np.searchsorted(changes, np.arange(0, changes[-1], _BATCH))])
    return Stream(np.stack(columns, 1), label, [int(at) for at in ends])


class Replicas(Learning):
    """Ranks that learn from a stream."""

    def __init__(
        self, stream: Stream, ranks: int, seed: int, rate: float = 0.2, row_rate: float = 0.125
    ) -> None:
        """Start with the same net at all ranks.

        Args:
            stream: The events; of its batches the last ones that are no multiple of 8 steps of
                all ranks are left out.
            ranks: The number of ranks.
            seed: Seed of the net and the rows.
            rate: Learning rate of the net.
            row_rate: Learning rate of rows.
        """
        random = np.random.default_rng(seed)
        width = stream.rows_BF.shape[1] * _D
        self._stream = stream
        self._rate, self._row_rate = rate, row_rate
        self._rows_KD = random.normal(0, 0.05, (int(stream.rows_BF.max()) + 1, _D))
        self._sums_K = np.full(len(self._rows_KD), 0.01)
        net = [
            random.normal(0, (2 / width) ** 0.5, (width, _H)),
            np.zeros(_H),
            random.normal(0, (2 / _H) ** 0.5, _H),
            np.zeros(1),
        ]
        self.nets = [[each.copy() for each in net] for _ in range(ranks)]
        self._made: list[tuple[Net, NDArray[np.int64], NDArray[np.float64]]] = [
            (net, np.zeros(0, np.int64), np.zeros((0, _D)))
        ] * ranks
        self._batches = (len(stream.starts) - 1) // (8 * ranks) * 8 * ranks
        self._next = 0
        self.taken = np.zeros(ranks, np.int64)
        self._own_B = np.full(stream.starts[self._batches], np.nan)
        self._mean_B = self._own_B.copy()
        self.disagreement = 0.0

    def begin(self, rank: int) -> bool:
        """See `Learning`."""
        if self._next == self._batches:
            return False
        begin, end = self._stream.starts[self._next : self._next + 2]
        self._next += 1
        self.taken[rank] += 1
        rows_BF, label_B = self._stream.rows_BF[begin:end], self._stream.label_B[begin:end]
        first, bias, last, shift = self.nets[rank]
        input_BI = self._rows_KD[rows_BF].reshape(len(rows_BF), -1)
        hidden_BH = np.maximum(input_BI @ first + bias, 0)
        score_B = 1 / (1 + np.exp(-(hidden_BH @ last + shift)))
        self._own_B[begin:end] = score_B
        self._mean_B[begin:end] = self._score_by_mean(input_BI)
        error_B = score_B - label_B
        back_BH = np.outer(error_B, last) * (hidden_BH > 0)
        share = 1 / len(label_B)
        net = [
            input_BI.T @ back_BH * share,
            back_BH.sum(0) * share,
            hidden_BH.T @ error_B * share,
            error_B.sum(keepdims=True) * share,
        ]
        self._made[rank] = (net, rows_BF.ravel(), (back_BH @ first.T).reshape(-1, _D))
        if self._next * 2 > self._batches and self._next % 50 == 0:
            self.disagreement = max(self.disagreement, self.disagree())
        return True

    def _score_by_mean(self, input_BI: NDArray[np.float64]) -> NDArray[np.float64]:
        first, bias, last, shift = (
            sum(values) / len(values) for values in zip(*self.nets, strict=True)
        )
        hidden_BH = np.maximum(input_BI @ first + bias, 0)
        score_B: NDArray[np.float64] = hidden_BH @ last + shift
        return score_B

    def give(self, ranks: Sequence[int]) -> None:
        """See `Learning`: the rows take one step with the sums of all gradients."""
        rows = np.concatenate([self._made[rank][1] for rank in ranks])
        gradients = np.concatenate([self._made[rank][2] for rank in ranks])
        keys_K, inverse = np.unique(rows, return_inverse=True)
        sums_KD = np.zeros((len(keys_K), _D))
        np.add.at(sums_KD, inverse, gradients)
        self._sums_K[keys_K] += (sums_KD**2).mean(1)
        step_KD = self._row_rate * sums_KD / np.sqrt(self._sums_K[keys_K])[:, None]
        self._rows_KD[keys_K] -= step_KD

    def step(self, ranks: Sequence[int]) -> None:
        """See `Learning`."""
        for rank in ranks:
            for value, gradient in zip(self.nets[rank], self._made[rank][0], strict=True):
                value -= self._rate * gradient

    def mean(self, ranks: Sequence[int]) -> None:
        """See `Learning`."""
        for values in zip(*(self.nets[rank] for rank in ranks), strict=True):
            mean = sum(values) / len(ranks)
            for value in values:
                value[:] = mean

    def net(self, rank: int) -> Net:
        """See `Learning`."""
        return [each.copy() for each in self.nets[rank]]

    def mix(self, rank: int, own: float, parts: Sequence[tuple[float, Any]]) -> None:
        """See `Learning`."""
        for at, value in enumerate(self.nets[rank]):
            value *= own
            for weight, net in parts:
                value += weight * net[at]

    def disagree(self) -> float:
        """Return the largest distance of two nets, relative to the length of their mean."""
        flat = np.stack([np.concatenate([each.ravel() for each in net]) for net in self.nets])
        apart = max(float(np.linalg.norm(flat - each, axis=1).max()) for each in flat)
        return apart / float(np.linalg.norm(flat.mean(0)))

    def auc(self, *, own: bool = False) -> float:
        """Return the AUC of the second half of the events.

        Args:
            own: Whether each batch is scored by the net of the rank that took it. Otherwise by the
                mean of all nets at that moment: what a version would have.
        """
        score_B = self._own_B if own else self._mean_B
        half = len(score_B) // 2
        return float(auc(self._stream.label_B[half : len(score_B)], score_B[half:]))
