"""The strategy of a run: makes what its configuration names, for the ranks that there are."""

from collections.abc import Sequence

from torch import nn

from embertide.trainer.config.sync import DCT, AllReduce, Sync, check_ranks
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.sync.channel import Channel
from embertide.trainer.sync.dct import LargestGradients
from embertide.trainer.sync.dense import DenseSync, GradientSum


def make_dense_sync(sync: Sync, parameters: Sequence[nn.Parameter], channel: Channel) -> DenseSync:
    """Return a strategy that watches the gradients of a net.

    Args:
        sync: The run's settings of synchronisation.
        parameters: Parameters of the net; those that learn.
        channel: Channel of the training thread.

    Raises:
        ConfigurationError: The strategy is not for so many ranks.
    """
    check_ranks(sync, channel.size)
    if isinstance(sync, AllReduce):
        return GradientSum(parameters, channel, sync.values)
    if channel.size == 1:
        return GradientSum(parameters, channel)
    if isinstance(sync, DCT):
        if sync.density == 1:  # nothing is held back
            return GradientSum(parameters, channel, sync.values)
        return LargestGradients(parameters, channel, sync)
    raise ConfigurationError(
        f"sync is {type(sync).__name__}, and the run has {channel.size} ranks, which take every"
        " step together: use AllReduce() or DCT(), or one rank"
    )
