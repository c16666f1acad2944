"""The replicas of the dense net of ranks that are at different steps, and how they become one.

Each rank has a net and an optimizer (Adam) of its own. Some ranks, or all, take the mean of their
nets now and then. Where a version ends all take the mean of nets and optimizers, weighed by the
events that each has learned since they were last one (McMahan et al. 2017, "Communication-Efficient
Learning of Deep Networks from Decentralized Data"): a rank that did nothing changes nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embertide.trainer.sync.calls import Calls
from embertide.trainer.sync.channel import Channel
from embertide.trainer.sync.flat import lay_out

_STATE = ("exp_avg", "exp_avg_sq", "step")


class Replicas:
    """This rank's replica among those of all ranks. Used by one thread at a time.

    Args:
        parameters: Parameters of the net; those that learn.
        optimizer: Theirs, an Adam.
        channel: For what all ranks do together.
        calls: For what some do.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        channel: Channel,
        calls: Calls,
    ) -> None:
        """Begin with replicas that are one."""
        self._parameters = parameters
        self._optimizer = optimizer
        self._channel = channel
        self._calls = calls
        self._events = 0

    def learned(self, events: int) -> None:
        """Say that this replica has learned from so many events."""
        self._events += events

    def average(self, *, optimizers: bool) -> None:
        """Make all replicas their mean, the same bits on every rank; all call it together.

        Args:
            optimizers: Whether the optimizers become one, too.

        Raises:
            RankLostError: A rank is gone.
        """
        events = self._channel.gather(self._events, "replicas")
        total = sum(events)
        if total == 0:
            return
        tensors = self._tensors(optimizers)
        flat = _flat(tensors) * (self._events / total)
        lay_out(self._channel.sum(flat, "replicas").wait(), tensors)
        if optimizers:
            self._events = 0

    def average_with(self, ranks: Sequence[int]) -> None:
        """Make the nets of some ranks their mean; each of them calls it with the same ranks.

        Raises:
            RankLostError: One is gone.
        """
        flat = _flat(self._parameters)
        found = self._calls.exchange([r for r in ranks if r != self._calls.rank], flat, "models")
        found[self._calls.rank] = flat
        mean = torch.zeros_like(flat)
        for rank in sorted(ranks):
            mean += found[rank]
        lay_out(mean / len(ranks), self._parameters)

    def net(self) -> Tensor:
        """Return a copy of this rank's net, fp32, flat."""
        return _flat(self._parameters)

    def mix(
        self, own: float, parts: Sequence[tuple[float, Tensor]], begun: Tensor | None = None
    ) -> None:
        """Make this rank's net the weighted mean of itself and others'.

        Args:
            own: Its weight.
            parts: Weights and nets of others, as of `net`.
            begun: The net before a step that stays whole: the mean is of this one, and the step
                follows it. None: no step does.
        """
        now = _flat(self._parameters)
        mean = (now if begun is None else begun) * own
        for weight, net in parts:
            mean += weight * net
        if begun is not None:
            mean += now - begun
        lay_out(mean, self._parameters)

    def _tensors(self, optimizers: bool) -> list[Tensor]:
        tensors: list[Tensor] = list(self._parameters)
        for each in self._parameters if optimizers else ():
            state: dict[str, Any] = self._optimizer.state[each]
            if not state:  # no step has been taken here
                state["step"] = torch.zeros((), device=each.device)
                state["exp_avg"] = torch.zeros_like(each)
                state["exp_avg_sq"] = torch.zeros_like(each)
            tensors += [state[name] for name in _STATE]
        return tensors


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().reshape(-1).float().cpu() for each in tensors])
