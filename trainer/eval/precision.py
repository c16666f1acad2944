"""The cost of bf16 for a run's net: scores of both kinds of one event, over the last day.

One batch of sixteen is scored in fp32 and in bf16 before it is learned. Of the newest events, at
most a day of event time, the AUC of both and the largest difference of a score make the measurement
that each version carries (docs/formats.md, "Dense tensors"): so nodes know whether to compute it in
bf16.

Shapes: B events of a batch, H heads, N events that are held.
"""

import dataclasses
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import Bf16Config
from embertide.trainer.data.base import Batch
from embertide.trainer.eval.metrics import auc

_DAY_MS = 86_400_000
_EVERY = 16
_MAX_EVENTS = 1 << 16
"""The most that are held: their AUC takes some 30 ms, once a version."""

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The cost of bf16, and whether that is within the run's bounds.

    Attributes:
        events: Number of events that both were measured on.
        auc: The AUC in fp32; 0 while it is not known.
        auc_loss: The AUC that bf16 loses; below 0 it gains.
        max_error: The most that a score of any head differs.
        why: The bound that does not hold; empty: all do.
    """

    events: int
    auc: float
    auc_loss: float
    max_error: float
    why: str

    @property
    def taken(self) -> bool:
        """Whether nodes may compute the version in bf16."""
        return not self.why

    def metadata(self) -> dict[str, str]:
        """Return what the file of a version's tensors says of it."""
        said = {"taken": self.taken, **dataclasses.asdict(self)}
        return {"bf16": json.dumps(said, sort_keys=True)}


class PrecisionCheck:
    """Scores of the last day's events in fp32 and bf16. Used by one thread."""

    def __init__(self, config: Bf16Config, batch_size: int) -> None:
        """Begin with no event."""
        self._config, self._batch_size = config, batch_size
        self._ts_ms_N = np.empty(0, np.int64)
        self._label_N = np.empty(0, np.uint8)
        self._score_N = np.empty(0, np.float32)
        self._bf16_N = np.empty(0, np.float32)
        self._error_N = np.empty(0, np.float32)

    def takes(self, batch: Batch) -> bool:
        """Return whether a batch is among those that are scored in both ways."""
        return batch.first // self._batch_size % _EVERY == 0

    def add(
        self, batch: Batch, scores_BH: NDArray[np.float32], bf16_BH: NDArray[np.float32]
    ) -> None:
        """Add a batch with its scores in fp32 and in bf16; those that left the day go.

        A batch without finite scores is left out, as it cannot be learned; where those in bf16
        alone are not finite, they are wrong by 1.
        """
        if not np.isfinite(scores_BH).all():
            return
        finite_BH = np.isfinite(bf16_BH)
        bf16_BH = np.where(finite_BH, bf16_BH, 0)
        error_B = np.where(finite_BH, np.abs(scores_BH - bf16_BH), 1).max(axis=1)
        more = (batch.ts_ms_B, batch.label_B, scores_BH[:, 0], bf16_BH[:, 0], error_B)
        kept = self._ts_ms_N > int(batch.ts_ms_B.max()) - _DAY_MS
        for name, each_B in zip(_ARRAYS, more, strict=True):
            held_N = getattr(self, name)
            joined_N = np.concatenate((held_N[kept], each_B.astype(held_N.dtype)))
            setattr(self, name, joined_N[-_MAX_EVENTS:])

    def measured(self) -> Measurement:
        """Return what bf16 costs on the events that are held."""
        events, config = len(self._ts_ms_N), self._config
        if not 0 < int(self._label_N.sum()) < events:
            why = f"{events} events of the last day were measured, which have no AUC"
            return Measurement(events=events, auc=0.0, auc_loss=0.0, max_error=0.0, why=why)
        exact = auc(self._label_N, self._score_N)
        loss = exact - auc(self._label_N, self._bf16_N)
        error = float(self._error_N.max())
        why = ""
        if events < config.min_events:
            why = f"{events} events of the last day were measured, min_events={config.min_events}"
        elif not loss <= config.max_auc_loss:
            why = f"the AUC is {loss:.6f} lower, max_auc_loss={config.max_auc_loss}"
        elif not error <= config.max_error:
            why = f"a score differs by {error:.6f}, max_error={config.max_error}"
        return Measurement(events=events, auc=exact, auc_loss=loss, max_error=error, why=why)

    def state(self) -> dict[str, Array]:
        """Return what `restore` takes."""
        return {f"{_STATE}{name}": getattr(self, name) for name in _ARRAYS}

    def restore(self, arrays: dict[str, Array]) -> None:
        """Go on from what `state` gave, if that is among the arrays."""
        for name in _ARRAYS:
            if f"{_STATE}{name}" in arrays:
                setattr(self, name, arrays[f"{_STATE}{name}"])


_ARRAYS = ("_ts_ms_N", "_label_N", "_score_N", "_bf16_N", "_error_N")
_STATE = "bf16."
