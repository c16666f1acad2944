"""Sums of the largest gradients alone, of all ranks: what is left out is added to later ones.

Hard-threshold sparsification with error feedback (Gupta et al., DCT, KDD 2021, data parallel). The
first `whole_steps` steps are those of all-reduce in fp32: a short run does not make good what a new
net does not learn at once. In each later step a rank adds its gradients to what it held back, sends
the largest, and holds back the rest, the rounding of what it sent included:

    v = gradient + residual;  sent = round(v where it is large);  residual = v - sent

A gradient is large if it reaches the threshold of its tensor. Where more than the configured share
of all elements do, those travel that pass it by the largest factor. A threshold is the order
statistic that leaves a little more than the tensor's share of |v|. Each rank chooses its own at the
first, second, 4th ... 512th of these steps, then every `refresh_every`, and at once where far too
many reach it. Between, each step moves it by a few per cent towards its share.

A step takes one message from each rank to each other (`entries`), also for what is added up beside.
Every rank adds up the messages in the order of ranks, so that all end a step with the same bits.

Shapes: N elements of all tensors, one behind the other; T tensors; E of the elements, those that
travel; R ranks.
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
from embertide.trainer.sync.dense import GradientSum
from embertide.trainer.sync.entries import Messages, Spans, room_of

_EARLY = frozenset(1 << k for k in range(10))
# A threshold leaves this many times the tensor's share, or messages would have room left.
_SPARE = 1.15
# A threshold is chosen anew where more than _FAR_OVER times the share and _FEW more are large.
_FAR_OVER, _FEW = 4, 16
_GAIN = 0.1  # of the relative error of a tensor's share, by which its threshold moves in a step
_MAX_FP16 = 65_504.0
# The learner refuses gradients of a norm of 1e19; more must not be hidden in a residual.
_MAX_SQUARES = 1e38
_TINY = float(torch.finfo(torch.float32).tiny)

_Array = NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """A rank's state from one step to the next.

    Attributes:
        residual_N: The gradients that were held back.
        threshold_T: The threshold of each tensor, above 0: zeros do not travel.
        steps: Taken so far, the whole ones among them.
    """

    residual_N: NDArray[np.float32]
    threshold_T: NDArray[np.float32]
    steps: int = 0


class LargestGradients:
    """Adds up the largest gradients of all ranks, in their order; the rest waits (`DenseSync`).

    After the whole steps nothing travels before `finish`, and the gradients that a step ends with
    are valid until the next `finish`. Those of a net on a GPU pass through the host's memory.

    Attributes:
        entries: Gradients that this rank has sent by their positions, since the start.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], channel: Channel, config: DCT) -> None:
        """Hold nothing back so far, on a channel of the training thread."""
        self.entries = 0
        self._channel = channel
        self._config = config
        self._parameters = list(parameters)
        self._whole = GradientSum(parameters, channel)
        sizes_T = np.array([each.numel() for each in parameters], np.int64)
        self._ends_T = np.cumsum(sizes_T)
        self._begins_T = self._ends_T - sizes_T
        share_T = np.round(sizes_T * config.density_of(channel.size))
        self._share_T = np.maximum(share_T, 1).astype(np.int64)
        self._most = int(self._share_T.sum())
        self._dtype = np.float16 if config.values == "fp16" else np.float32
        elements = int(sizes_T.sum())
        # Memory that is new in each step would cost as much as the arithmetic.
        self._residuals = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
        self._scratch_N = np.zeros(elements, np.float32)
        self._sum_N = np.zeros(elements, np.float32)
        self._is_large_N = np.zeros(elements, np.bool_)
        self._state = _State(self._residuals[0], np.full(len(sizes_T), _TINY, np.float32))
        self._before = self._state

    @property
    def accumulates(self) -> bool:
        """See `DenseSync`."""
        return self._whole.accumulates

    @accumulates.setter
    def accumulates(self, value: bool) -> None:
        # A sum that begins before `finish` is one of whole gradients.
        self._whole.accumulates = value or not self._is_whole

    @property
    def _is_whole(self) -> bool:
        return self._state.steps < self._config.whole_steps

    # --- a step -----------------------------------------------------------------------------------

    def finish(self, beside: Tensor, spans_R: Spans = ()) -> Callable[[], Tensor]:
        """See `DenseSync`."""
        old, is_whole = self._state, self._is_whole
        self._before = old
        self._state = dataclasses.replace(old, steps=old.steps + 1)
        if is_whole:
            return self._whole.finish(beside, spans_R)
        rank, size = self._channel.rank, self._channel.size
        room = room_of(self._most, len(self._sum_N))
        messages = Messages(room, self._dtype, len(beside), spans_R, size)
        v_N = self._with_residual()
        if np.dot(v_N, v_N) < _MAX_SQUARES:
            message = messages.pack(rank, beside.numpy(), *self._take_largest(v_N))
        else:
            message = messages.refuse(rank, beside.numpy())
        to_R = [0 if other == rank else len(message) for other in range(size)]
        from_R = [0 if other == rank else n for other, n in enumerate(messages.lengths_R)]
        sent = torch.from_numpy(message).repeat(size - 1)
        pending = self._channel.exchange(sent, to_R, from_R, "dense")

        def wait() -> Tensor:
            received_R = np.split(pending.wait().numpy(), np.cumsum(from_R)[:-1])
            received_R[rank] = message
            summed = np.zeros(len(beside), np.float32)
            self._sum_N.fill(0)
            refused = [
                messages.add(other, each, summed, self._sum_N)
                for other, each in enumerate(received_R)
            ]
            if any(refused):
                self._sum_N.fill(np.nan)
            self._give()
            return torch.from_numpy(summed)

        return wait

    def undo(self) -> None:
        """See `DenseSync`."""
        self._state = self._before

    def _with_residual(self) -> NDArray[np.float32]:
        """Return the gradients and what was held back, in the residual that is not in use."""
        first, second = self._residuals
        v_N = second if self._state.residual_N is first else first
        for parameter, begin, end in self._tensors():
            if parameter.grad is None:
                gradient = np.zeros(end - begin, np.float32)
            else:
                gradient = parameter.grad.reshape(-1).cpu().numpy()
            if self._config.error_feedback:
                np.add(gradient, self._state.residual_N[begin:end], out=v_N[begin:end])
            else:
                v_N[begin:end] = gradient
        return v_N

    def _tensors(self) -> list[tuple[nn.Parameter, int, int]]:
        ends = zip(self._begins_T.tolist(), self._ends_T.tolist(), strict=True)
        return [(parameter, *span) for parameter, span in zip(self._parameters, ends, strict=True)]

    def _take_largest(self, v_N: NDArray[np.float32]) -> tuple[_Array, _Array]:
        """Return positions and values of what travels; `v_N` becomes the residual."""
        size_N = np.abs(v_N, out=self._scratch_N)
        threshold_T = self._state.threshold_T.copy()
        step = self._state.steps - self._config.whole_steps
        if step in _EARLY or step % self._config.refresh_every == 0:
            for t, (_, begin, end) in enumerate(self._tensors()):
                threshold_T[t] = self._chosen(t, size_N[begin:end])
        large_E, count_T = self._large(size_N, threshold_T)
        large_size_E = size_N[large_E]
        ends_T = np.cumsum(count_T)
        is_over_T = count_T > _FAR_OVER * self._share_T + _FEW
        for t in np.flatnonzero(is_over_T).tolist():
            threshold_T[t] = self._chosen(t, large_size_E[ends_T[t] - count_T[t] : ends_T[t]])
        place_E = self._most_of(large_E, large_size_E / np.repeat(threshold_T, count_T))
        self._move(threshold_T, np.where(is_over_T, _SPARE * self._share_T, count_T))
        values_E = v_N[place_E]
        if self._dtype is np.float16:
            values_E = np.clip(values_E, -_MAX_FP16, _MAX_FP16)
        values_E = values_E.astype(self._dtype)
        v_N[place_E] -= values_E
        self._state = _State(v_N, threshold_T, self._state.steps)
        self.entries += len(place_E)
        return place_E, values_E

    def _chosen(self, t: int, size_E: _Array) -> float:
        """Return the threshold of a tensor, of whose |v| the largest are given, or all."""
        count = min(len(size_E), int(np.ceil(_SPARE * self._share_T[t])))
        largest = torch.from_numpy(size_E).topk(count, sorted=False).values
        return max(float(largest.min()), _TINY)

    def _large(self, size_N: _Array, threshold_T: _Array) -> tuple[_Array, _Array]:
        """Return the positions of what reaches its threshold, and how many of each tensor do."""
        for begin, end, threshold in zip(self._begins_T, self._ends_T, threshold_T, strict=True):
            np.greater_equal(size_N[begin:end], threshold, out=self._is_large_N[begin:end])
        large_E = np.flatnonzero(self._is_large_N)
        return large_E, np.diff(np.searchsorted(large_E, self._ends_T), prepend=0)

    def _most_of(self, large_E: _Array, factor_E: _Array) -> _Array:
        """Return the positions of the largest factors, as many as may travel, in order."""
        if (over := len(large_E) - self._most) <= 0:
            return large_E
        return np.sort(large_E[np.argpartition(factor_E, over)[over:]])

    def _move(self, threshold_T: _Array, count_T: _Array) -> None:
        """Move thresholds towards the shares that are wanted of their tensors."""
        error_T = np.minimum(count_T / (_SPARE * self._share_T) - 1, 1)
        threshold_T *= (1 + _GAIN * error_T).astype(np.float32)
        np.maximum(threshold_T, np.float32(_TINY), out=threshold_T)

    def _give(self) -> None:
        for parameter, begin, end in self._tensors():
            gradient = torch.from_numpy(self._sum_N[begin:end]).view_as(parameter)
            # Without a copy, on a CPU.
            parameter.grad = gradient.to(parameter.device)

    # --- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, _Array]:
        """See `DenseSync`."""
        return {
            "residual_N": self._state.residual_N.copy(),
            "threshold_T": self._state.threshold_T.copy(),
            "steps": np.array([self._state.steps], np.int64),
        }

    def restore(self, states_R: Sequence[Mapping[str, _Array]]) -> None:
        """See `DenseSync`.

        As many ranks go on where they were. Of another number each takes an equal part of what all
        had held back, and chooses its thresholds anew.
        """
        if not states_R:
            return
        size, steps = self._channel.size, int(states_R[0]["steps"][0])
        threshold_T = np.full(len(self._share_T), _TINY, np.float32)
        if len(states_R) == size:
            mine = states_R[self._channel.rank]
            residual_N, threshold_T = mine["residual_N"], mine["threshold_T"].copy()
        else:
            total_N = np.sum([each["residual_N"] for each in states_R], axis=0, dtype=np.float64)
            residual_N = (total_N / size).astype(np.float32)
        np.copyto(self._residuals[0], residual_N)
        self._state = self._before = _State(self._residuals[0], threshold_T, steps)
