"""Tensors one behind the other in a flat one, and back."""

from collections.abc import Iterable

import torch
from torch import Tensor


def lay_out(flat: Tensor, into: Iterable[Tensor]) -> int:
    """Copy the elements of a flat tensor into tensors, and return how many these took."""
    at = 0
    with torch.no_grad():
        for each in into:
            end = at + each.numel()
            each.copy_(flat[at:end].view_as(each))
            at = end
    return at
