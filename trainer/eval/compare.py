"""Comparing answers with those of a copy: the same request, at the same version.

A copy of the model that holds all rows by itself and never moves one is the measure for a fleet
that moves them. Comparing begins when the copy is loaded and ends when it is unloaded, so whoever
runs the copy says what is compared.

Shapes: B samples.
"""

import threading
import time

import numpy as np

from embertide.trainer.data.base import Batch
from embertide.trainer.errors import TrainerError
from embertide.trainer.eval.served import Answer, ServedModel, VersionNotHeldError

EQUAL = 1e-6
"""Scores that differ by no more are equal: what a GEMM is batched with changes its last bits."""

_LOOK_EVERY_S = 0.1
_POLL_S = 0.005
_PATIENCE_S = 120.0
_LAG_S = 5.0  # the copy may take a version a little later


class Copy:
    """The copy that answers are compared with. Thread-safe.

    Args:
        model: The copy, which follows the same publication.
    """

    def __init__(self, model: ServedModel) -> None:
        """Nothing is asked yet."""
        self._model = model
        self._lock = threading.Lock()
        self._loaded, self._looked_s = False, -_LOOK_EVERY_S

    def loaded(self) -> bool:
        """Return whether the copy is loaded, as of a tenth of a second ago at most."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_s >= _LOOK_EVERY_S:
                self._loaded, self._looked_s = self._model.ready(), now_s
            return self._loaded

    def wait(self) -> None:
        """Wait until the copy is loaded.

        Raises:
            TrainerError: It is not loaded in two minutes.
        """
        end_s = time.monotonic() + _PATIENCE_S
        while not self.loaded():
            if time.monotonic() > end_s:
                raise TrainerError(
                    f"the copy {self._model.model!r} at {self._model.url} was not loaded in "
                    f"{_PATIENCE_S:.0f} s: load it, or compare with nothing"
                )
            time.sleep(_POLL_S)

    def difference(self, batch: Batch, answer: Answer) -> float | None:
        """Return the largest difference of a score; None: the copy does not hold the version.

        Raises:
            ServingError: The copy refuses the request, or is gone.
        """
        end_s = time.monotonic() + _LAG_S
        while True:
            try:
                copied = self._model.score(batch, version=answer.version)
            except VersionNotHeldError:
                if time.monotonic() > end_s:
                    return None
                time.sleep(_POLL_S)
                continue
            apart_B = np.abs(copied.score_B.astype(np.float64) - answer.score_B)
            return float(apart_B.max())
