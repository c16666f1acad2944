"""The cost of reduced precision for a run's net: scores of both kinds, over the last day.

One batch of sixteen is scored in fp32 and in bf16 or int8 before it is learned. Of the newest
events, at most a day of event time, the AUC of both and the largest difference of a score make the
measurement that each version carries (docs/formats.md, "Dense tensors"): so nodes know whether to
compute it so.

Shapes: B events of a batch, H heads, N events that are held.
"""

import dataclasses
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import ReducedConfig, ReducedType
from embertide.trainer.data.base import Batch
from embertide.trainer.eval.metrics import auc

_DAY_MS = 86_400_000
_EVERY = 16
_MAX_EVENTS = 1 << 16
"""The most that are held: their AUC takes some 30 ms, once a version."""

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The cost of a type, and whether that is within the run's bounds.

    Attributes:
        type: That the net multiplied in.
        events: Number of events that both were measured on.
        auc: The AUC in fp32; 0 while it is not known.
        auc_loss: The AUC that it loses; below 0 it gains.
        max_error: The most that a score of any head differs.
        why: The bound that does not hold; empty: all do.
    """

    type: ReducedType
    events: int
    auc: float
    auc_loss: float
    max_error: float
    why: str

    @property
    def taken(self) -> bool:
        """Whether nodes may compute the version so."""
        return not self.why

    def metadata(self) -> dict[str, str]:
        """Return what the file of a version's tensors says of it."""
        said = {"taken": self.taken, **dataclasses.asdict(self)}
        return {"reduced": json.dumps(said, sort_keys=True)}


class PrecisionCheck:
    """Scores of the last day's events in fp32 and in less. Used by one thread."""

    def __init__(self, config: ReducedConfig, batch_size: int) -> None:
        """Begin with no event."""
        self._config, self._batch_size = config, batch_size
        self._ts_ms_N = np.empty(0, np.int64)
        self._label_N = np.empty(0, np.uint8)
        self._score_N = np.empty(0, np.float32)
        self._reduced_N = np.empty(0, np.float32)
        self._error_N = np.empty(0, np.float32)

    @property
    def type(self) -> ReducedType:
        """That of the scores in less than fp32."""
        return self._config.type

    def takes(self, batch: Batch) -> bool:
        """Return whether a batch is among those that are scored in both ways."""
        return batch.first // self._batch_size % _EVERY == 0

    def add(
        self, batch: Batch, scores_BH: NDArray[np.float32], reduced_BH: NDArray[np.float32]
    ) -> None:
        """Add a batch with its scores in fp32 and in less; those that left the day go.

        A batch without finite scores is left out, as it cannot be learned; where the others
        alone are not finite, they are wrong by 1.
        """
        if not np.isfinite(scores_BH).all():
            return
        finite_BH = np.isfinite(reduced_BH)
        reduced_BH = np.where(finite_BH, reduced_BH, 0)
        error_B = np.where(finite_BH, np.abs(scores_BH - reduced_BH), 1).max(axis=1)
        more = (batch.ts_ms_B, batch.label_B, scores_BH[:, 0], reduced_BH[:, 0], error_B)
        kept = self._ts_ms_N > int(batch.ts_ms_B.max()) - _DAY_MS
        for name, each_B in zip(_ARRAYS, more, strict=True):
            held_N = getattr(self, name)
            joined_N = np.concatenate((held_N[kept], each_B.astype(held_N.dtype)))
            setattr(self, name, joined_N[-_MAX_EVENTS:])

    def measured(self) -> Measurement:
        """Return what it costs on the events that are held."""
        events, config = len(self._ts_ms_N), self._config
        if not 0 < int(self._label_N.sum()) < events:
            why = f"{events} events of the last day were measured, which have no AUC"
            return Measurement(
                type=self.type, events=events, auc=0.0, auc_loss=0.0, max_error=0.0, why=why
            )
        exact = auc(self._label_N, self._score_N)
        loss = exact - auc(self._label_N, self._reduced_N)
        error = float(self._error_N.max())
        why = ""
        if events < config.min_events:
            why = f"{events} events of the last day were measured, min_events={config.min_events}"
        elif not loss <= config.max_auc_loss:
            why = f"the AUC is {loss:.6f} lower, max_auc_loss={config.max_auc_loss}"
        elif not error <= config.max_error:
            why = f"a score differs by {error:.6f}, max_error={config.max_error}"
        return Measurement(
            type=self.type, events=events, auc=exact, auc_loss=loss, max_error=error, why=why
        )

    @property
    def _prefix(self) -> str:
        """Keep scores in one type from those in another, where a run changes to it."""
        return f"reduced.{self.type}."

    def state(self) -> dict[str, Array]:
        """Return what `restore` takes."""
        return {f"{self._prefix}{name}": getattr(self, name) for name in _ARRAYS}

    def restore(self, arrays: dict[str, Array]) -> None:
        """Go on from what `state` gave, if that is among the arrays."""
        for name in _ARRAYS:
            if f"{self._prefix}{name}" in arrays:
                setattr(self, name, arrays[f"{self._prefix}{name}"])


_ARRAYS = ("_ts_ms_N", "_label_N", "_score_N", "_reduced_N", "_error_N")
