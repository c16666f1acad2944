"""The loss of a batch: cross entropy or a function of the user's, weighed by head and event.

The mean over the events of a batch is what ranks, and parts of a batch, add up to: so a loss is one
number an event, and does not compare events with one another.

Shapes: B events, H heads.
"""

import torch
from torch import Tensor
from torch.nn import functional

from embertide.trainer.config import RunConfig, user_objects
from embertide.trainer.errors import ConfigurationError


class Loss:
    """(logits, labels, weights) -> the mean loss of some events.

    Raises:
        ConfigurationError: The user's function cannot be imported, or gives something else.
    """

    def __init__(self, run: RunConfig) -> None:
        """Find the function, and try it."""
        self._each = None if run.loss == "bce" else user_objects.find(run.loss_name)
        self._outputs = run.model.outputs
        self._name = f"loss {run.loss!r}"
        weights = [head.weight for head in run.model.heads] or [1.0]
        self._weight_H = torch.tensor(weights)
        if self._each is not None:
            self._try(weights)

    def _try(self, weights: list[float]) -> None:
        shape = (3,) if self._outputs == 1 else (3, self._outputs)
        logits = torch.zeros(shape, requires_grad=True)
        try:
            each = self._own(logits, torch.ones(shape))
            each.sum().backward()
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"{self._name} failed on logits and labels of {list(shape)}: {error!r}"
            ) from error
        if not bool(torch.isfinite(each).all()):
            raise ConfigurationError(f"{self._name} of logits of 0 and labels of 1 is not finite")
        if each.dim() < len(shape) and any(weight != 1 for weight in weights):
            raise ConfigurationError(
                f"{self._name} gives one loss an event for all heads, which have weights: weigh"
                " them in it, or give one for each head"
            )

    def _own(self, logits: Tensor, labels: Tensor) -> Tensor:
        assert self._each is not None
        each = self._each(logits, labels)
        if not isinstance(each, Tensor) or each.shape not in (logits.shape, logits.shape[:1]):
            found = list(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise ConfigurationError(
                f"{self._name} gives {found} for logits of {list(logits.shape)}; give the loss of"
                f" each event, {list(logits.shape[:1])}, or of each head: no mean"
            )
        return each

    def __call__(self, logits: Tensor, labels: Tensor, weight_B: Tensor | None) -> Tensor:
        """Return the mean.

        Args:
            logits: [B], or of several heads [B, H].
            labels: As many; NaN: unknown.
            weight_B: The weight of each event; the sum stays divided by B. None: 1.
        """
        if self._each is None and self._outputs == 1:
            return functional.binary_cross_entropy_with_logits(logits, labels, weight_B)
        known = ~labels.isnan()
        filled = torch.where(known, labels, torch.zeros_like(labels))
        if self._each is not None:
            each = self._own(logits, filled)
        else:
            each = functional.binary_cross_entropy_with_logits(logits, filled, reduction="none")
        if each.dim() < known.dim():
            known = known.all(1)
        each = torch.where(known, each, torch.zeros_like(each))
        if each.dim() > 1:
            each = each @ self._weight_H.to(each.device)
        return (each if weight_B is None else each * weight_B).mean()
