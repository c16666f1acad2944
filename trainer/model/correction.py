"""A running correction of scores, learned from scores that events got before they were learned.

Adam, and Adagrad's of rows, make the steps after a rare positive smaller than those after the many
negatives, so that scores of a rare label stay some percent too low however long a net learns. What
is added to the logit of each head makes up for that: by it, over the events of late, mean score and
mean label are equal. The net does not learn from corrected scores, so the two do not follow one
another.

Of a head, w the weight of an event with a known label y, p its score without the correction:

    L = sum of w y    P = sum of w p    N = sum of w    V = sum of w p (1 - p)

each fading with a half-life in events. The correction is

    c = (logit(L / N) - logit(P / N)) * (P / N) (1 - P / N) N / V * V / (V + STRENGTH)

held within `bound`. Its middle factor is the step of Newton's method where scores differ from one
another; the last one keeps it small while few events tell it.

Shapes: B events, H heads.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import CorrectionConfig

Doubles = NDArray[np.float64]

_STRENGTH = 20.0  # as of so many positives of a rare label, seen as well calibrated


class Correction:
    """The addition to the logits of all heads. For one thread; all ranks have the same.

    Attributes:
        offset_H: As it is now, fp32 numbers.
    """

    def __init__(self, config: CorrectionConfig, heads: int) -> None:
        """Begin with none."""
        self._config = config
        self._sums_4H = np.zeros((4, heads))  # L, P, N, V
        self.offset_H = np.zeros(heads, np.float32)

    def add(
        self, labels_BH: NDArray[Any], scores_BH: NDArray[np.float32], weight_B: NDArray[Any] | None
    ) -> None:
        """Learn from events, by the scores that they got with the correction as it is now.

        Args:
            labels_BH: 0 to 1; NaN: unknown. Of one head [B].
            scores_BH: As many, in (0, 1).
            weight_B: The weight of each; None: 1.
        """
        heads = len(self.offset_H)
        label_BH = labels_BH.reshape(-1, heads).astype(np.float64)
        score_BH = scores_BH.reshape(-1, heads).astype(np.float64)
        # The odds of an event without the correction.
        plain_BH = score_BH * np.exp(-self.offset_H.astype(np.float64))
        plain_BH /= 1 - score_BH + plain_BH
        weight_BH = np.where(np.isnan(label_BH), 0.0, 1.0)
        if weight_B is not None:
            weight_BH *= weight_B[:, None]
        label_BH = np.nan_to_num(label_BH)
        parts = (label_BH, plain_BH, np.ones_like(plain_BH), plain_BH * (1 - plain_BH))
        fade = 0.5 ** (len(label_BH) / self._config.half_life)
        self._sums_4H = fade * self._sums_4H + np.stack([(weight_BH * x).sum(0) for x in parts])
        self._set()

    def _set(self) -> None:
        label_H, score_H, count_H, spread_H = self._sums_4H
        for h in np.flatnonzero((label_H > 0) & (label_H < count_H) & (spread_H > 0)).tolist():
            rate, mean = label_H[h] / count_H[h], score_H[h] / count_H[h]
            apart = np.log(rate / (1 - rate)) - np.log(mean / (1 - mean))
            slope = mean * (1 - mean) * count_H[h] / spread_H[h]
            trust = spread_H[h] / (spread_H[h] + _STRENGTH)
            bound = self._config.bound
            self.offset_H[h] = np.clip(apart * slope * trust, -bound, bound)

    def state(self) -> dict[str, Any]:
        """Return what `load` goes on from, as JSON can hold it."""
        return {"sums": self._sums_4H.tolist(), "offset": self.offset_H.tolist()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`, of as many heads."""
        self._sums_4H = np.array(state["sums"], np.float64)
        self.offset_H = np.array(state["offset"], np.float32)
