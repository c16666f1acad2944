"""A running correction of scores, learned from scores that events got before they were learned.

Adam, and Adagrad's of rows, make the steps after a rare positive smaller than those after the many
negatives, so that scores of a rare label stay some percent too low however long a net learns; and a
label's rate may move within hours, as that of late flights does with the weather, while rates of
rows fall for good. What is added to the logit of each head makes up for both: by it, over the
events of late, mean score and mean label are equal. The net does not learn from corrected scores,
so the two do not follow one another.

Of a head, w the weight of an event with a known label y, p its score without the correction:

    L = sum of w y    P = sum of w p    N = sum of w    V = sum of w p (1 - p)

each fading with a half-life in events. The correction is

    c = (logit(L / N) - logit(P / N)) * (P / N) (1 - P / N) N / V * V / (V + STRENGTH)

held within `bound`. Its middle factor is the step of Newton's method where scores differ from one
another; the last one keeps it small while few events tell it.

Which half-life is best, the events say: with none that is given, corrections of HALF_LIVES run side
by side, and that by which scores had the least log loss of late is taken, or none at all unless
that is lower by more than chance makes it. A version serves until the next one, so what it gets is
the correction that had the least log loss as it was when the last version went out.

Shapes: B events, H heads, K half-lives; C = K + 1 choices, the first of which is no correction.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import CorrectionConfig

HALF_LIVES = (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
"""Events, of those that a run may choose."""

Doubles = NDArray[np.float64]

_STRENGTH = 20.0  # as of so many positives of a rare label, seen as well calibrated
_LOSSES_HALVE = 20_000  # events in which what is remembered of losses halves
_WORTH = 5.0  # nats, of all events that are remembered, by which a correction must be better
_TINY = 1e-12


class Correction:
    """The addition to the logits of all heads. For one thread; all ranks have the same.

    Attributes:
        offset_H: As it is now, fp32 numbers: of what is scored before it is learned.
        served_H: The same for a version that goes out now.
    """

    def __init__(self, config: CorrectionConfig, heads: int) -> None:
        """Begin with none."""
        self._bound = config.bound
        self._chooses = config.half_life == 0
        half_lives = HALF_LIVES if self._chooses else (config.half_life,)
        self._half_life_K = np.array(half_lives, np.float64)
        self._sums_K4H = np.zeros((len(half_lives), 4, heads))  # L, P, N, V
        self._offset_CH = np.zeros((len(half_lives) + 1, heads))
        self._last_CH = np.zeros_like(self._offset_CH)  # when the last version went out
        self._losses_2CH = np.zeros((2, *self._offset_CH.shape))  # by the above, in that order
        self.offset_H = self.served_H = np.zeros(heads, np.float32)

    def add(
        self,
        labels_BH: NDArray[Any],
        scores_BH: NDArray[np.float32],
        weight_B: NDArray[Any] | None,
        offset_H: NDArray[np.float32] | None = None,
    ) -> None:
        """Learn from events, by the scores that they got.

        Args:
            labels_BH: 0 to 1; NaN: unknown. Of one head [B].
            scores_BH: As many, in (0, 1).
            weight_B: The weight of each; None: 1.
            offset_H: The correction that they got the scores by; None: `offset_H`.
        """
        heads = len(self.offset_H)
        label_BH = labels_BH.reshape(-1, heads).astype(np.float64)
        score_BH = scores_BH.reshape(-1, heads).astype(np.float64)
        # The odds of an event without the correction.
        by_H = (self.offset_H if offset_H is None else offset_H).astype(np.float64)
        plain_BH = score_BH * np.exp(-by_H)
        plain_BH /= 1 - score_BH + plain_BH
        unknown_BH = np.isnan(label_BH)
        weight_BH = np.where(unknown_BH, 0.0, 1.0)
        if weight_B is not None:
            weight_BH *= weight_B[:, None]
        label_BH[unknown_BH] = 0
        if self._chooses:
            self._judge(label_BH, plain_BH, weight_BH)
        parts = (label_BH, plain_BH, np.ones_like(plain_BH), plain_BH * (1 - plain_BH))
        fade_K = 0.5 ** (len(label_BH) / self._half_life_K)
        sums_4H = np.stack([(weight_BH * x).sum(0) for x in parts])
        self._sums_K4H = fade_K[:, None, None] * self._sums_K4H + sums_4H
        self._set()

    def version_goes_out(self) -> None:
        """Have what a version gets be judged by corrections as they are now, until the next one."""
        self._last_CH = self._offset_CH.copy()

    def _judge(self, label_BH: Doubles, plain_BH: Doubles, weight_BH: Doubles) -> None:
        """Add the log loss that these events have by each choice."""
        plain_BH = np.minimum(np.maximum(plain_BH, _TINY), 1 - _TINY)
        logit_BH = np.log(plain_BH) - np.log1p(-plain_BH)
        offset_2CH = np.stack([self._offset_CH, self._last_CH])
        logit_2CBH = logit_BH + offset_2CH[:, :, None]
        loss_2CBH = np.logaddexp(0, logit_2CBH) - label_BH * logit_2CBH
        fade = 0.5 ** (len(label_BH) / _LOSSES_HALVE)
        self._losses_2CH = fade * self._losses_2CH + (weight_BH * loss_2CBH).sum(2)

    def _set(self) -> None:
        label_KH, score_KH, count_KH, spread_KH = self._sums_K4H.swapaxes(0, 1)
        tells_KH = (label_KH > 0) & (label_KH < count_KH) & (spread_KH > 0)
        count, spread = count_KH[tells_KH], spread_KH[tells_KH]
        rate, mean = label_KH[tells_KH] / count, score_KH[tells_KH] / count
        apart = np.log(rate / (1 - rate)) - np.log(mean / (1 - mean))
        slope = mean * (1 - mean) * count / spread
        trust = spread / (spread + _STRENGTH)
        offset = np.clip(apart * slope * trust, -self._bound, self._bound)
        self._offset_CH[1:][tells_KH] = offset
        self._choose()

    def _choose(self) -> None:
        heads = np.arange(len(self.offset_H))
        of_now_2H = self._offset_CH[self._taken_2H(), heads].astype(np.float32)
        self.offset_H, self.served_H = of_now_2H[0], of_now_2H[1]

    def _taken_2H(self) -> NDArray[np.int64]:
        """Return the choice of each head for scores, and for versions."""
        if not self._chooses:
            return np.ones((2, len(self.offset_H)), np.int64)
        losses_2CH = self._losses_2CH.copy()
        losses_2CH[:, 0] -= _WORTH
        taken_2H: NDArray[np.int64] = losses_2CH.argmin(1)
        return taken_2H

    @property
    def half_lives(self) -> tuple[list[int], list[int]]:
        """The half-lives taken now by head, for scores and for versions; 0: no correction."""
        of_C = [0, *(int(each) for each in self._half_life_K)]
        fresh, served = self._taken_2H().tolist()
        return [of_C[c] for c in fresh], [of_C[c] for c in served]

    def state(self) -> dict[str, Any]:
        """Return what `load` goes on from, as JSON can hold it."""
        return {
            "sums": self._sums_K4H.tolist(),
            "offsets": self._offset_CH.tolist(),
            "last": self._last_CH.tolist(),
            "losses": self._losses_2CH.tolist(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`, of as many heads; begin with none if others were to choose from."""
        if "offset" in state:  # of a build that had one half-life
            offsets = [[0.0] * len(state["offset"]), state["offset"]]
            state = {"sums": [state["sums"]], "offsets": offsets, "last": offsets}
        if len(state["sums"]) != len(self._sums_K4H):
            return
        self._sums_K4H = np.array(state["sums"], np.float64)
        self._offset_CH = np.array(state["offsets"], np.float64)
        self._last_CH = np.array(state["last"], np.float64)
        if "losses" in state:
            self._losses_2CH = np.array(state["losses"], np.float64)
        self._choose()
