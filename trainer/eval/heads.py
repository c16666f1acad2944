"""Figures of the heads of a model beside its first: scores from before an event was learned.

Shapes: B events, H heads.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import HeadConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.eval.prequential import Prequential

Array = NDArray[Any]


class Heads:
    """The prequential figures of every head but the first. Used by one thread.

    Attributes:
        by_name: The figures of each; events whose label is unknown are not among them.
    """

    def __init__(self, heads: Sequence[HeadConfig]) -> None:
        """Begin with no event."""
        self.by_name = {head.name: Prequential() for head in heads[1:]}

    def add(self, batch: Batch, scores_BH: NDArray[np.float32]) -> None:
        """Add a batch that was scored before it was learned."""
        for h, each in enumerate(self.by_name.values()):
            assert batch.more_labels_BL is not None
            label_B = batch.more_labels_BL[:, h]
            known_B = ~np.isnan(label_B)
            each.add(batch.ts_ms_B[known_B], label_B[known_B], scores_BH[known_B, h + 1])

    def quality(self) -> dict[str, dict[str, float]]:
        """Return the figures of the current day, by "head NAME"."""
        return {f"head {name}": each.live().as_json() for name, each in self.by_name.items()}

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return what `restore` takes: figures, for JSON, and arrays by name."""
        figures: dict[str, Any] = {}
        arrays: dict[str, Array] = {}
        for h, (name, each) in enumerate(self.by_name.items()):
            figures[name], mine = each.state()
            arrays |= {f"head{h}.{key}": array for key, array in mine.items()}
        return figures, arrays

    def restore(self, figures: dict[str, Any], arrays: dict[str, Array]) -> None:
        """Go on from what `state` gave."""
        for h, name in enumerate(self.by_name):
            begin = f"head{h}."
            mine = {k.removeprefix(begin): a for k, a in arrays.items() if k.startswith(begin)}
            self.by_name[name] = Prequential.from_state(figures[name], mine)
