"""How the replicas of the dense net stay one: a strategy behind an interface.

A step gives every rank the gradients of its part of a batch. A strategy makes of them what each
rank's optimizer takes. With `GradientSum` that is their sum, the same bits on every rank, so the
replicas never differ: a run of many ranks is synchronous, and repeats bit for bit. Which strategy
a run has, its configuration says (`RunConfig.sync`).
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embertide.trainer.config.sync import GradientValues
from embertide.trainer.sync.channel import Channel, Pending
from embertide.trainer.sync.entries import Spans
from embertide.trainer.sync.flat import lay_out

_TOGETHER = 1 << 20
"""Bytes of gradients that travel together: fewer messages cost less than what they hide."""


class DenseSync(Protocol):
    """Brings the gradients of all ranks together, step by step. Used by one thread.

    Attributes:
        accumulates: Whether another backward pass follows whose gradients add to those of this one.
    """

    accumulates: bool

    def finish(self, beside: Tensor, spans_R: Spans = ()) -> "Callable[[], Tensor]":
        """Begin what backward did not begin of a step's sums, and add up `beside` with them.

        Args:
            beside: Numbers, flat.
            spans_R: The spans of its first elements, [begin, end), that are other than 0 on one
                rank alone, by rank and one behind the other. Empty: none are.

        Returns:
            Waits for all: gradients are then those of all ranks, and it returns the sum of
            `beside`, which is overwritten. It may raise RankLostError.
        """

    def undo(self) -> None:
        """Be as before the last step, which the ranks do not take: its sums are not finite."""

    def state(self) -> dict[str, NDArray[Any]]:
        """Return a copy of what this rank keeps from step to step, by name; empty: nothing."""

    def restore(self, states_R: Sequence[Mapping[str, NDArray[Any]]]) -> None:
        """Take what `state` gave on each rank of a checkpoint, of any number of ranks.

        Args:
            states_R: By rank; none where the run had another strategy.
        """


class _GradientGroup:
    """Gradients that travel together."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)  # whose gradients backward has not made yet
        self.pending: Pending | None = None


class GradientSum:
    """Adds up the gradients of all ranks: torch.distributed's all-reduce, in fp32 or fp16.

    What is added up beside them is fp32 in any case. The gradients that backward makes first, of
    the net's last layers, travel while it makes the rest. Those of a net on a GPU pass through the
    memory of the host.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], channel: Channel, values: GradientValues = "fp32"
    ) -> None:
        """Watch the gradients of a net, on a channel of the training thread."""
        self.accumulates = False
        self._dtype = torch.float16 if values == "fp16" else torch.float32
        self._channel = channel
        self._groups: list[_GradientGroup] = []
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._begun = 0  # of `_groups`, in order: all ranks begin them alike
        if channel.size == 1:
            return
        group: list[nn.Parameter] = []
        for parameter in reversed(parameters):
            group.append(parameter)
            if sum(each.nbytes for each in group) >= _TOGETHER:
                self._groups.append(_GradientGroup(group))
                group = []
        # The last goes with what is added up beside, though it may be empty.
        self._groups.append(_GradientGroup(group))
        for number, each in enumerate(self._groups):
            for parameter in each.parameters:
                parameter.register_post_accumulate_grad_hook(self._made_hook(number))

    def _made_hook(self, number: int) -> Callable[[Tensor], None]:
        # torch keeps hooks where the garbage collector does not look: one that held this object,
        # or its parameters, would keep them and the channel's threads for ever.
        this = weakref.ref(self)

        def made(_: Tensor) -> None:
            if (watching := this()) is not None:
                watching._made(number)

        return made

    def _made(self, number: int) -> None:
        if self.accumulates:
            return
        self._groups[number].missing -= 1
        while self._begun < len(self._groups) - 1 and not self._groups[self._begun].missing:
            self._begin(self._groups[self._begun])

    def _begin(self, group: _GradientGroup, beside: Sequence[Tensor] = ()) -> None:
        for parameter in group.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [each.grad.reshape(-1) for each in group.parameters if each.grad is not None]
        flat = torch.cat([*gradients, *(each.to(self._device) for each in beside)])
        group.pending = self._channel.sum(flat.to(self._dtype).cpu(), "dense")
        self._begun += 1

    def finish(self, beside: Tensor, spans_R: Spans = ()) -> Callable[[], Tensor]:
        """See `DenseSync`."""
        del spans_R  # a sum of all costs as much
        if not self._groups:
            return lambda: beside
        while self._begun < len(self._groups) - 1:
            self._begin(self._groups[self._begun])
        exact = self._dtype == torch.float32
        # Rounded gradients and what is beside them, which must not be, are two messages.
        apart = None if exact else self._channel.sum(beside, "beside")
        self._begin(self._groups[-1], [beside] if exact else [beside[:0]])

        def wait() -> Tensor:
            flat = beside
            for group in self._groups:
                assert group.pending is not None
                flat = group.pending.wait()
                gradients = [each.grad for each in group.parameters if each.grad is not None]
                flat = flat[lay_out(flat.to(self._device), gradients) :]
                group.pending, group.missing = None, len(group.parameters)
            self._begun = 0
            return flat if apart is None else apart.wait()

        return wait

    def undo(self) -> None:
        """See `DenseSync`; it keeps nothing."""

    def state(self) -> dict[str, NDArray[Any]]:
        """See `DenseSync`; it keeps nothing."""
        return {}

    def restore(self, states_R: Sequence[Mapping[str, NDArray[Any]]]) -> None:
        """See `DenseSync`; it keeps nothing."""
