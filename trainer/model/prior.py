"""Where a fresh net begins: at the label rate of its first events, not at a half.

A net whose bias starts at 0 gives every event a score near 0.5, and takes thousands of steps to
come down to a label rate of 0.2 %; it is far too sure of everything meanwhile. A net names the bias
of its heads by `head_bias`; one of the user's own without that method begins where it likes.

Shapes: B events of a batch, H heads.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embertide.trainer.data.base import Batch


def head_bias_of(net: nn.Module) -> Tensor | None:
    """Return the bias of a net's heads, [H]; None: it names none."""
    found = getattr(net, "head_bias", None)
    return None if found is None else found()


def label_logits(
    batches: Iterable[Batch],
    heads: int,
    left_out: Callable[[Batch], NDArray[np.bool_]] | None = None,
) -> NDArray[np.float32]:
    """Return the log odds of each head's label over some events, [H].

    Events count by their weight, as in the loss, and unknown labels do not. Half an event of either
    label is added, so that no rate is 0 or 1 (Krichevsky and Trofimov 1981): of 50,000 negatives
    alone the rate is 0.00001, of no event a half.

    Args:
        batches: The events.
        heads: The number of heads of the model.
        left_out: Tells which events of a batch do not count; None: all do.
    """
    sums_2H = np.full((2, heads), 0.5)
    for batch in batches:
        labels_BH = batch.labels(heads).astype(np.float64).reshape(len(batch), heads)
        weight_B = np.ones(len(batch)) if batch.weight_B is None else batch.weight_B
        if left_out is not None:
            weight_B = np.where(left_out(batch), 0.0, weight_B)
        known_BH = np.where(np.isnan(labels_BH), 0.0, np.asarray(weight_B, np.float64)[:, None])
        ones_H = (known_BH * np.nan_to_num(labels_BH)).sum(axis=0)
        sums_2H += np.stack((known_BH.sum(axis=0) - ones_H, ones_H))
    return np.asarray(np.log(sums_2H[1] / sums_2H[0]), np.float32)


def start_at(bias_H: Tensor, logit_H: NDArray[np.float32]) -> None:
    """Let a bias have these values."""
    with torch.no_grad():
        bias_H.copy_(torch.from_numpy(logit_H).to(bias_H.device))
