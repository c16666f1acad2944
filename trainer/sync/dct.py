"""Sums of the largest gradients alone, of all ranks: what is left out is added to later ones.

Hard-threshold sparsification with error feedback (Gupta et al., DCT, KDD 2021, data parallel). In
each step a rank adds its gradients to what it held back, sends what reaches its tensor's threshold,
and holds back the rest, the rounding of what it sent included:

    v = gradient + residual;  sent = round(v where |v| >= threshold);  residual = v - sent

A threshold is the order statistic that leaves the wanted share of a tensor's |v|. Each rank chooses
its own at steps 1, 2, 4, ..., 512 and then every `refresh_every`, and raises one by which more than
1.5 times the share has gone out for ten steps. The share is a half at first, and half as much after
each power of two of steps, until it is the configured one: what a new net does not learn at once, a
short run does not make good. Tensors of fewer than 1,024 elements, as biases, travel whole: they
cost little and matter much.

A rank's message to each other rank, no header, with 2 or 4 bytes a value:

    values of all small tensors | steps from one position to the next, 2 bytes each | their values

The positions are those of all large tensors, one behind the other. A step of more than 65,535 is
made by way of entries with the value 0. How many entries there are travels with what is added up
beside the gradients. Every rank adds up the messages in the order of ranks, so that all end a step
with the same bits.

Shapes: N elements of all tensors, the small ones first; T large tensors; E entries of a message.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embertide.trainer.config.sync import DCT
from embertide.trainer.sync.channel import Channel
from embertide.trainer.sync.flat import lay_out

_SMALL = 1024  # elements
_EARLY = frozenset(1 << k for k in range(10))
# A tensor may send so many times its share, for so many steps.
_MOST_OVER, _STEPS_OVER = 1.5, 10
_FEW = 20  # a twentieth or less
_FAR = 65_535  # the longest step of positions
_DIGIT = 4096  # counts of entries travel as two digits, each exact in fp32
_MOST_FP16 = 65_504.0
# The learner refuses gradients of this norm; more must not be hidden in a residual.
_MOST_ABS = 1e19
_TINY = float(torch.finfo(torch.float32).tiny)

_Array = NDArray[Any]


@dataclasses.dataclass(slots=True)
class _State:
    """What a rank keeps from one step to the next.

    Attributes:
        residual_N: What was held back.
        threshold_T: Of the large tensors.
        over_T: Steps since a large tensor last kept to its share.
        steps: Taken so far.
    """

    residual_N: Tensor
    threshold_T: NDArray[np.float32]
    over_T: NDArray[np.int64]
    steps: int = 0


class LargestGradients:
    """Adds up the largest gradients of all ranks, in their order; the rest waits (`DenseSync`).

    Nothing travels before `finish`. Gradients of a net on a GPU pass through the host's memory.

    Attributes:
        accumulates: As of `DenseSync`; of no matter here.
        entries: That this rank has sent of large tensors, since the start.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], channel: Channel, config: DCT) -> None:
        """Hold nothing back so far, on a channel of the training thread."""
        self.accumulates = False
        self.entries = 0
        self._channel = channel
        self._config = config
        small = [each for each in parameters if each.numel() < _SMALL]
        large = [each for each in parameters if each.numel() >= _SMALL]
        self._parameters = [*small, *large]
        self._whole = sum(each.numel() for each in small)  # elements, the first of all
        self._sizes_T = np.array([each.numel() for each in large], np.int64)
        self._ends_T = np.cumsum(self._sizes_T)
        self._dtype = torch.float16 if config.values == "fp16" else torch.float32
        elements = self._whole + int(self._sizes_T.sum())
        # Memory that is new in each step would cost as much as the arithmetic.
        self._residuals = torch.zeros(elements), torch.zeros(elements)
        self._scratch_N = torch.zeros(elements)
        self._state = _State(
            self._residuals[0],
            np.full(len(large), _TINY, np.float32),
            np.zeros(len(large), np.int64),
        )
        self._before = self._state
        self._every = range(len(large))
        self._threshold_N = torch.empty(elements - self._whole)
        self._spread(self._every)

    # --- a step -----------------------------------------------------------------------------------

    def finish(self, beside: Tensor) -> Callable[[], Tensor]:
        """See `DenseSync`."""
        used, spare = self._residuals
        v_N = used if self._state.residual_N is spare else spare
        begin = 0
        for parameter in self._parameters:
            end = begin + parameter.numel()
            v_N[begin:end] = _gradient(parameter).reshape(-1)
            begin = end
        if self._config.error_feedback:
            v_N += self._state.residual_N
        size_N = torch.abs(v_N, out=self._scratch_N)
        is_finite = bool(size_N.sum() < _MOST_ABS)
        self._before = self._state
        message, entries = self._encode(v_N, size_N) if is_finite else (torch.empty(0), 0)
        counts = torch.zeros(self._channel.size, 2)
        counts[self._channel.rank] = torch.tensor([entries // _DIGIT, entries % _DIGIT])
        refused = torch.tensor([float(not is_finite)])
        summing = self._channel.sum(torch.cat((beside, counts.reshape(-1), refused)), "beside")

        def wait() -> Tensor:
            summed = summing.wait()
            counts_R2 = summed[len(beside) : -1].reshape(-1, 2).to(torch.int64)
            if summed[-1] > 0:
                self._give(torch.full_like(v_N, torch.nan))
            else:
                entries_R = (counts_R2[:, 0] * _DIGIT + counts_R2[:, 1]).tolist()
                self._give(self._sum(message, entries_R))
            return summed[: len(beside)]

        return wait

    def undo(self) -> None:
        """See `DenseSync`."""
        self._state = self._before
        self._spread(self._every)

    def _encode(self, v_N: Tensor, size_N: Tensor) -> tuple[Tensor, int]:
        """Return a step's message and its entries; `v_N` becomes the residual."""
        old = self._state
        steps = old.steps + 1
        self._state = state = _State(v_N, old.threshold_T.copy(), old.over_T.copy(), steps)
        large_N = size_N[self._whole :]
        if steps in _EARLY or steps % self._config.refresh_every == 0:
            self._choose(large_N, self._every)
        # numpy finds few among many several times as fast as torch.
        place_E = np.flatnonzero(large_N.numpy() >= self._threshold_N.numpy())
        chosen_E = torch.from_numpy(place_E)
        counts_T = np.diff(np.searchsorted(place_E, self._ends_T), prepend=0)
        self._watch(large_N, counts_T)
        whole = self._rounded(v_N[: self._whole].clone())
        values_E = self._rounded(v_N[self._whole :][chosen_E])
        v_N[: self._whole] -= whole.float()
        v_N[self._whole :][chosen_E] -= values_E.float()
        state.residual_N = v_N
        self.entries += len(chosen_E)
        return self._packed(whole, place_E, values_E)

    def _share(self) -> _Array:
        """Return how many elements of each large tensor travel in this step."""
        doubled = 1 << self._state.steps.bit_length()  # twice the last power of two
        density = max(self._config.density, 1 / doubled)
        share_T: _Array = np.maximum(np.round(self._sizes_T * density), 1).astype(np.int64)
        return share_T

    def _choose(self, size_N: Tensor, tensors: Sequence[int]) -> None:
        """Choose the thresholds of some large tensors; `size_N` is |v| of all of them."""
        share_T = self._share()
        for t in tensors:
            n, share = int(self._sizes_T[t]), int(share_T[t])
            of_tensor = size_N[self._ends_T[t] - n : self._ends_T[t]]
            if share * _FEW < n:  # quicker for few
                found = float(of_tensor.topk(share, sorted=False).values.min())
            else:
                found = float(of_tensor.kthvalue(n - share + 1).values)
            # Zeros do not travel, whatever the share.
            self._state.threshold_T[t] = max(found, _TINY)
        self._state.over_T[list(tensors)] = 0
        self._spread(tensors)

    def _watch(self, size_N: Tensor, counts_T: _Array) -> None:
        """Raise the thresholds of tensors that have sent too much for too long."""
        state = self._state
        state.over_T = np.where(counts_T > _MOST_OVER * self._share(), state.over_T + 1, 0)
        if (late := np.flatnonzero(state.over_T >= _STEPS_OVER)).size:
            before_T = state.threshold_T.copy()
            self._choose(size_N, late.tolist())
            np.maximum(state.threshold_T, before_T, out=state.threshold_T)
            self._spread(late.tolist())

    def _spread(self, tensors: Sequence[int]) -> None:
        """Lay out the threshold of each of some large tensors over its elements."""
        for t in tensors:
            begin = self._ends_T[t] - self._sizes_T[t]
            self._threshold_N[begin : self._ends_T[t]] = float(self._state.threshold_T[t])

    def _rounded(self, values: Tensor) -> Tensor:
        if self._dtype == torch.float16:
            values = values.clamp(-_MOST_FP16, _MOST_FP16)
        return values.to(self._dtype)

    def _packed(self, whole: Tensor, place_E: _Array, values_E: Tensor) -> tuple[Tensor, int]:
        steps_E = np.diff(place_E, prepend=-1)
        by_way_E = (steps_E - 1) // _FAR  # entries of 0 before each
        ends_E = np.cumsum(by_way_E + 1) - 1
        entries = int(ends_E[-1]) + 1 if len(ends_E) else 0
        gaps = np.full(entries, _FAR, np.uint16)
        gaps[ends_E] = steps_E - by_way_E * _FAR
        if entries == len(values_E):
            values = values_E
        else:
            values = torch.zeros(entries, dtype=self._dtype)
            values[torch.from_numpy(ends_E)] = values_E
        parts = (_bytes_of(whole), torch.from_numpy(gaps.view(np.uint8)), _bytes_of(values))
        return torch.cat(parts), entries

    def _sum(self, message: Tensor, entries_R: Sequence[int]) -> Tensor:
        """Exchange the messages and return the sums of all ranks' values."""
        rank, size = self._channel.rank, self._channel.size
        lengths_R = [self._length(entries) for entries in entries_R]
        from_R = [0 if other == rank else n for other, n in enumerate(lengths_R)]
        to_R = [0 if other == rank else len(message) for other in range(size)]
        sent = message.repeat(size - 1)
        got = self._channel.exchange(sent, to_R, from_R, "dense").wait()
        sum_N = self._scratch_N.zero_()
        begin = 0
        for other in range(size):
            data = message
            if other != rank:
                data = got[begin : begin + from_R[other]]
                begin += from_R[other]
            self._add(sum_N, data, entries_R[other])
        return sum_N

    def _length(self, entries: int) -> int:
        return self._whole * self._dtype.itemsize + entries * (2 + self._dtype.itemsize)

    def _add(self, sum_N: Tensor, data: Tensor, entries: int) -> None:
        """Add a message's values to sums."""
        width = self._dtype.itemsize
        whole, gaps, values = data.split([self._whole * width, 2 * entries, entries * width])
        sum_N[: self._whole] += _values_of(whole, self._dtype)
        gaps_E = gaps.numpy().copy().view(np.uint16)
        place_E = torch.from_numpy(np.cumsum(gaps_E, dtype=np.int64) - 1)
        sum_N[self._whole :].index_add_(0, place_E, _values_of(values, self._dtype))

    def _give(self, sum_N: Tensor) -> None:
        lay_out(sum_N, map(_gradient, self._parameters))

    # --- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, _Array]:
        """See `DenseSync`."""
        return {
            "residual_N": self._state.residual_N.numpy().copy(),
            "threshold_T": self._state.threshold_T.copy(),
            "over_T": self._state.over_T.copy(),
            "steps": np.array([self._state.steps], np.int64),
        }

    def restore(self, states_R: Sequence[Mapping[str, _Array]]) -> None:
        """See `DenseSync`.

        As many ranks go on where they were. Of another number each takes an equal part of what all
        had held back, and chooses its thresholds anew.
        """
        if not states_R:
            return
        size = self._channel.size
        if len(states_R) == size:
            mine = states_R[self._channel.rank]
            residual_N = mine["residual_N"]
            self._state = _State(
                self._state.residual_N,
                mine["threshold_T"].copy(),
                mine["over_T"].copy(),
                int(mine["steps"][0]),
            )
        else:
            total = np.sum([each["residual_N"] for each in states_R], axis=0, dtype=np.float64)
            residual_N = (total / size).astype(np.float32)
        self._state.residual_N.copy_(torch.from_numpy(residual_N))
        self._before = self._state
        self._spread(self._every)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _values_of(data: Tensor, dtype: torch.dtype) -> Tensor:
    # Pieces of a message may begin anywhere.
    return data.clone().view(dtype).float()
