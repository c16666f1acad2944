"""How the replicas of the dense net stay one: a strategy behind an interface.

A step gives every rank the gradients of its part of a batch. A strategy makes of them what each
rank's optimizer takes. With `AllReduce` that is their sum, the same bits on every rank, so the
replicas never differ: a run of many ranks is synchronous, and repeats bit for bit.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from embertide.trainer.sync.channel import Channel, Pending


class DenseSync(Protocol):
    """Brings the gradients of all ranks together. Used by one thread."""

    def begin(self, gradients: Sequence[Tensor], beside: Tensor) -> "Summing":
        """Begin a step: gradients of this rank's part, and values that are added up beside them."""


class Summing:
    """A step's sum on its way."""

    def __init__(self, pending: Pending, gradients: Sequence[Tensor]) -> None:
        """Sum into `gradients`, in place, once `pending` is there."""
        self._pending = pending
        self._gradients = gradients

    def wait(self) -> Tensor:
        """Bring the sums into the gradients; return what was added up beside them.

        Raises:
            RankLostError: A rank is gone.
        """
        flat = self._pending.wait()
        at = 0
        for gradient in self._gradients:
            gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
            at += gradient.numel()
        return flat[at:]


class AllReduce:
    """Adds up the gradients of all ranks (torch.distributed's all-reduce), in fp32."""

    def __init__(self, channel: Channel) -> None:
        """Use a channel of the training thread."""
        self._channel = channel

    def begin(self, gradients: Sequence[Tensor], beside: Tensor) -> Summing:
        """See `DenseSync`."""
        flat = torch.cat([*(gradient.reshape(-1).cpu() for gradient in gradients), beside])
        return Summing(self._channel.sum(flat, "dense"), gradients)
