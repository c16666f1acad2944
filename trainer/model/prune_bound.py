"""How much AUC a run loses by pruning, measured while it learns, and how much it may prune.

Two sets of rows score the same events before they are learned: pruned ones, and those of all keys
(unpruned.py). The AUCs of both over a piece of events differ by the loss of that piece. The newest
pieces count most; their spread gives the error of the mean. After each piece the ratio of pruning,
so many times fewer bytes than those of all keys seen, takes a small step towards the bound:

    room    = (AIM * within - loss - error) / within    between -1 and 1
    ratio  *= exp(GAIN * room)                          exp(BACK * room) if there is no room

A run begins with little pruning, the error counts as loss, and steps that keep more are larger than
those that prune more. All of it is a function of the scores: a run that is resumed from
`state` goes on as one that was never stopped.

Shapes: B events of a batch, N of the piece that is being filled.
"""

import logging
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide._common.auc import auc_of_counts, counts_by_score
from embertide.trainer.config import PruneConfig

HALF_LIFE = 10
"""Pieces in which one counts half: half a day of the news, by the default size of a piece."""

MAX_PIECES = 8 * HALF_LIFE
"""That are remembered: the oldest has less than a hundredth of the newest one's weight."""

MIN_PIECES = 4
"""Fewer have no spread to speak of: the loss is not known."""

MIN_OF_A_LABEL = 50
"""Events of either label that a piece has at least; one of rare labels takes more events."""

GAIN, BACK = 0.025, 0.1
"""Most that the logarithm of the ratio rises and falls by in a step: the ratio doubles in 28 pieces
at the soonest, more than a day of the news, and halves in 7."""

AIM = 0.9
"""Share of the bound that is aimed at: as a stream goes on the same ratio costs more, and what is
measured is of late."""

LEAST_RATIO, MOST_RATIO = 0.9, 1000.0  # at 0.9 every key has a row, and room to spare

Floats = NDArray[np.float32]

log = logging.getLogger(__name__)


def auc_of(label_N: NDArray[np.uint8], score_N: Floats) -> float:
    """Return the AUC of events; nan where one label is missing."""
    return auc_of_counts(*counts_by_score(label_N, score_N))


class PruneBound:
    """Follows the loss of a run and says its ratio. Used by one thread.

    Attributes:
        ratio: So many times fewer bytes than those of all keys seen; changes as `add` says.
        pieces: That were measured since the run began.
    """

    def __init__(self, prune: PruneConfig) -> None:
        """Begin with nothing measured, at the ratio that the settings begin with."""
        self._within, self._piece_events = prune.within, prune.measure_events
        self.ratio = prune.first_ratio
        self.pieces = 0
        self._sum = 0.0  # of the losses of all pieces
        self._losses: list[float] = []  # of the newest pieces, oldest first
        self._exceeds = False
        self._open = list[tuple[NDArray[np.uint8], Floats, Floats]]()
        self._events = self._positives = 0  # of the open piece

    def add(self, label_B: NDArray[np.float32], unpruned_B: Floats, pruned_B: Floats) -> bool:
        """Take events with both models' scores; return whether the ratio may have changed."""
        label_u8_B = (label_B != 0).astype(np.uint8)
        self._open.append((label_u8_B, unpruned_B, pruned_B))
        self._events += len(label_u8_B)
        self._positives += int(label_u8_B.sum())
        rarer = min(self._positives, self._events - self._positives)
        if self._events < self._piece_events or rarer < MIN_OF_A_LABEL:
            return False
        label_N, unpruned_N, pruned_N = self._piece()
        self._open, self._events, self._positives = [], 0, 0
        found = auc_of(label_N, unpruned_N) - auc_of(label_N, pruned_N)
        self._losses = [*self._losses, found][-MAX_PIECES:]
        self.pieces += 1
        self._sum += found
        self._step()
        return True

    @property
    def loss(self) -> float:
        """AUC that pruning costs of late; nan before `MIN_PIECES`."""
        return self._loss_and_error()[0]

    @property
    def error(self) -> float:
        """Its standard error."""
        return self._loss_and_error()[1]

    @property
    def exceeds(self) -> bool:
        """Whether the loss is above the bound by more than its error."""
        return self._exceeds

    def figures(self) -> dict[str, Any]:
        """Return what a run says of it; a loss that is not known yet is None."""
        loss, error = self._loss_and_error()
        known = not math.isnan(loss)
        return {
            "bound": self._within,
            "loss": loss if known else None,
            "error": error if known else None,
            "mean_loss": self._sum / self.pieces if known else None,
            "ratio": self.ratio,
            "pieces": self.pieces,
            "is_held": known and loss + error <= self._within,
            "exceeds": self._exceeds,
        }

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return what `restore` takes: figures, for JSON, and arrays by name."""
        figures = {
            "ratio": self.ratio,
            "pieces": self.pieces,
            "sum": self._sum,
            "losses": list(self._losses),
            "exceeds": self._exceeds,
        }
        label_N, unpruned_N, pruned_N = self._piece()
        return figures, {"label_N": label_N, "unpruned_N": unpruned_N, "pruned_N": pruned_N}

    def restore(self, figures: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        """Go on from what `state` returned."""
        self.ratio, self.pieces = figures["ratio"], figures["pieces"]
        self._sum, self._losses = figures["sum"], list(figures["losses"])
        self._exceeds = figures["exceeds"]
        piece = arrays["label_N"], arrays["unpruned_N"], arrays["pruned_N"]
        self._open = [piece] if len(piece[0]) else []
        self._events, self._positives = len(piece[0]), int(piece[0].sum())

    def _piece(self) -> tuple[NDArray[np.uint8], Floats, Floats]:
        """Return label_N, unpruned_N and pruned_N of the open piece."""
        if not self._open:
            return np.empty(0, np.uint8), np.empty(0, np.float32), np.empty(0, np.float32)
        labels, unpruned, pruned = zip(*self._open, strict=True)
        return np.concatenate(labels), np.concatenate(unpruned), np.concatenate(pruned)

    def _loss_and_error(self) -> tuple[float, float]:
        """Return the decayed mean of the pieces' losses, and its standard error by their spread."""
        if len(self._losses) < MIN_PIECES:
            return math.nan, math.nan
        loss_P = np.array(self._losses)
        weight_P = 0.5 ** (np.arange(len(loss_P))[::-1] / HALF_LIFE)
        weight_P /= weight_P.sum()
        mean = float(weight_P @ loss_P)
        squares = float(weight_P @ weight_P)  # 1 over the pieces that it is as good as
        variance = float(weight_P @ (loss_P - mean) ** 2) / (1 - squares)
        return mean, math.sqrt(variance * squares)

    def _step(self) -> None:
        loss, error = self._loss_and_error()
        if math.isnan(loss):
            return
        room = (AIM * self._within - loss - error) / self._within
        step = math.exp((GAIN if room > 0 else BACK) * min(1.0, max(room, -1.0)))
        self.ratio = min(MOST_RATIO, max(LEAST_RATIO, self.ratio * step))
        self._say(loss, error)

    def _say(self, loss: float, error: float) -> None:
        """Log when the bound is broken, and when it holds again."""
        said = f"pruning costs {loss:.5f} ± {error:.5f} of AUC, {self._within:g} is the bound"
        if loss - error > self._within and not self._exceeds:
            self._exceeds = True
            log.warning("%s: more rows are kept from now on, until it holds", said)
        elif loss + error <= self._within and self._exceeds:
            self._exceeds = False
            log.info("%s: it holds again, at %.1f times fewer bytes", said, self.ratio)
