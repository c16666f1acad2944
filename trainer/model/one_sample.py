"""A net's program for one sample: products of weights and a vector as sums.

So are the layers of the user's own columns in a program for one user (rewrite/programs.py).

Of one sample, a linear layer should take as long as its weights are read. The matrix library's own
product of a matrix and a vector is far from that on some CPUs (MKL's on AMD's); as sums,
AOTInductor compiles it with all around it (docs/results/serve.md).

Shapes: K a layer's inputs, N its outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn

NAME = "one_sample"
# Reads that an expression may make before its value is kept, and not computed for each output anew.
# By torch's own limit, 4, each output of a layer would compute all of its inputs.
SETTINGS = {"realize_reads_threshold": 1}
# With fewer weights, less is gained than a compilation is worth: 7 of 28 us at 82,000, on a Zen 4.
_MIN_WEIGHTS = 1 << 17
# Parts of an output that are summed beside each other, as an addition waits for the one before; of
# whole vectors on any CPU.
_PARTS, _VECTOR = 4, 16
_LINEAR: Any = torch.ops.aten.linear.default


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return the layer of one vector as sums; of several, torch's own."""
    inputs = weight_NK.shape[1]
    if x.numel() != inputs:
        return nn.functional.linear(x, weight_NK, bias_N)
    x_1K = x.reshape(1, inputs)
    part = inputs // _PARTS // _VECTOR * _VECTOR
    whole = part * _PARTS
    sums_N = (x_1K[:, whole:] * weight_NK[:, whole:]).sum(1)
    if part:
        begins = range(0, whole, part)
        parts = [x_1K[:, b : b + part] * weight_NK[:, b : b + part] for b in begins]
        sums_N = sums_N + sum(parts[1:], start=parts[0]).sum(1)
    if bias_N is not None:
        sums_N = sums_N + bias_N
    return sums_N.reshape(*x.shape[:-1], weight_NK.shape[0])


def _linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Any:
    """As `linear`; NotImplemented leaves a layer of several vectors as it is."""
    return linear(x, weight_NK, bias_N) if x.numel() == weight_NK.shape[1] else NotImplemented


def gains(program: torch.export.ExportedProgram) -> bool:
    """Whether a net has layers large enough for a program of its own for one sample."""
    weights = 0
    for node in program.graph.nodes:
        if node.target == _LINEAR:
            weights += node.args[1].meta["val"].numel()
    return weights >= _MIN_WEIGHTS


def of(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program that was exported for one sample, its linear layers as sums."""
    sums: torch.export.ExportedProgram = program.run_decompositions({_LINEAR: _linear})
    return sums
