"""Statistics that a net learns or draws beside gradients, so that ranks and restarts agree."""

import numpy as np
import torch
from torch import Tensor, nn

from embertide.trainer.errors import ConfigurationError, FinalError
from embertide.trainer.model.layers import Columns
from embertide.trainer.sync.ranks import Ranks

_NORM = nn.modules.batchnorm._NormBase


class Statistics:
    """The buffers of a net of one's own, as BatchNorm's: what a net learns without a gradient.

    Of many ranks each has those of its part of a batch; what all go on with is their mean, weighed
    by events. Those of `Columns` are the run's own, and no part of it.
    """

    def __init__(self, net: nn.Module, ranks: Ranks) -> None:
        """Find them.

        Raises:
            ConfigurationError: There are many ranks, and a module counts the batches of its own
                rank.
        """
        for name, module in net.named_modules():
            if ranks.size > 1 and isinstance(module, _NORM) and module.momentum is None:
                raise ConfigurationError(
                    f"{name} has momentum=None, which counts batches, and ranks differ in theirs:"
                    " give a momentum, or train with one rank"
                )
        # By place: a net may put another tensor into its buffer.
        self._places = {
            f"{name}.{key}" if name else key: (module, key)
            for name, module in net.named_modules()
            if not isinstance(module, Columns)
            for key, _ in module.named_buffers(recurse=False)
        }
        self._compiled: dict[str, Tensor] | None = None
        self.keep()

    @property
    def are_there(self) -> bool:
        """Whether the net has any."""
        return bool(self._places)

    def check(self) -> None:
        """Refuse a change of what the compiled program has as it was at the start.

        Raises:
            TrainerError: A buffer of integers has changed.
        """
        integers = {
            name: module.get_buffer(key)
            for name, (module, key) in self._places.items()
            if not module.get_buffer(key).is_floating_point() and not isinstance(module, _NORM)
        }
        if self._compiled is None:  # before anything is learned
            self._compiled = {name: buffer.clone() for name, buffer in integers.items()}
        for name, buffer in integers.items():
            if not torch.equal(buffer, self._compiled[name]):
                raise FinalError(
                    f"buffer {name} of the net has changed, and versions carry fp32 buffers alone:"
                    " make it one, or leave it as it was at the start"
                )

    def keep(self) -> None:
        """Remember them as they are before a step."""
        self._kept = [each.clone() for each in self._all()]

    def restore(self) -> None:
        """Bring back what they were; no step was taken."""
        for buffer, kept in zip(self._all(), self._kept, strict=True):
            buffer.copy_(kept)

    def are_finite(self) -> bool:
        """Whether all of them are finite numbers."""
        return all(bool(torch.isfinite(each).all()) for _, each in self._floats())

    def _all(self) -> list[Tensor]:
        return [module.get_buffer(key) for module, key in self._places.values()]

    def _floats(self) -> list[tuple[Tensor, Tensor]]:
        """Return those that are no integers: as they were kept, and as they are."""
        both = zip(self._kept, self._all(), strict=True)
        return [(kept, each) for kept, each in both if each.is_floating_point()]

    def changes(self) -> Tensor:
        """Return by how much each number has changed since `keep`, on the CPU."""
        flat = [(each - kept).reshape(-1).float().cpu() for kept, each in self._floats()]
        return torch.cat(flat) if flat else torch.empty(0)

    def change(self, changes: Tensor) -> None:
        """Make them what they were and this mean of all ranks' `changes`."""
        floats = self._floats()
        parts = changes.split([each.numel() for _, each in floats])
        for (kept, each), part in zip(floats, parts, strict=True):
            each.copy_(kept + part.view_as(each).to(kept.device))


def draw_seed(seed: int, first: int, rank: int) -> int:
    """Return the seed of what a rank draws while it learns the batch that begins at an event."""
    state = np.random.SeedSequence((seed, first, rank)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
