"""Hidden units that start fresh where a net gets columns: those that it uses least.

A net that has learned for days has few units left to take up a new column, and stays behind one
that had the column from its first step (docs/results/model.md). So the least used quarter of the
units of each hidden layer starts fresh, with the incoming weights of a fresh net and outgoing ones
of 0. Scores change by little, for those units had little part in them.

ReDo does this to dormant units (Sokar et al. 2023, "The Dormant Neuron Phenomenon in Deep
Reinforcement Learning", arXiv:2302.12902). It measures a unit's use by its mean activation. Here it
is the product of the norms of its incoming and outgoing weights, which takes no events.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

_SHARE = 0.25  # an eighth gains less, and half costs too much of what was learned


@torch.no_grad()
def renew(net: nn.Module, fresh: Mapping[str, Tensor], grown: Collection[str]) -> int:
    """Start units fresh in each MLP whose first layer grew; return how many.

    Args:
        net: The net, which changes.
        fresh: Its state_dict when it had learned nothing.
        grown: Names of tensors to which columns came.
    """
    units = 0
    for prefix, module in net.named_modules():
        if not isinstance(module, nn.Sequential) or f"{prefix}.0.weight" not in grown:
            continue
        layers: list[nn.Module] = [*module]
        for place in range(len(layers) - 2):
            into, between, out = layers[place : place + 3]
            is_hidden = isinstance(between, nn.ReLU)
            if is_hidden and isinstance(into, nn.Linear) and isinstance(out, nn.Linear):
                units += _renew(into, out, fresh, f"{prefix}.{place}")
    return units


def _renew(into: nn.Linear, out: nn.Linear, fresh: Mapping[str, Tensor], name: str) -> int:
    """Start units between two layers fresh; `name` is that of the first layer."""
    use_U = into.weight.norm(dim=1) * out.weight.norm(dim=0)
    least = use_U.argsort(stable=True)[: int(_SHARE * len(use_U))]
    for kind, value in into.named_parameters():
        value[least] = fresh[f"{name}.{kind}"][least]
    out.weight[:, least] = 0
    return len(least)
