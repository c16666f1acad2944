"""Merge parallel linear layers: those of one input become one, with their weights side by side.

linear(x, V), linear(x, W)  ->  slices of linear(x, cat(V, W))
"""

from collections.abc import Iterator
from typing import Any

import torch

from embertide.trainer.model.rewrite.graph import Graph, Mark, Value, constant, make
from embertide.trainer.model.rewrite.rowwise import row_by_row

_A: Any = torch.ops.aten


def merge_linears(graph: Graph) -> Iterator[Graph]:
    """Give a graph for each value that several layers take."""
    layers: dict[Value, list[Value]] = {}
    for value in graph.values:
        if value.mark is Mark.FIXED or value.op is not _A.linear.default or not row_by_row(value):
            continue
        layers.setdefault(value.args[0], []).append(value)
    for several in layers.values():
        if len(several) > 1:
            yield graph.replaced(_merged(several))


def _merged(layers: list[Value]) -> dict[Value, Value]:
    weights = [each.args[1] for each in layers]
    more = []
    if any(len(each.args) > 2 and each.args[2] is not None for each in layers):
        biases = [
            each.args[2] if len(each.args) > 2 and each.args[2] is not None else _none(each)
            for each in layers
        ]
        more = [make(_A.cat.default, biases, 0)]
    one = make(_A.linear.default, layers[0].args[0], make(_A.cat.default, weights, 0), *more)
    instead, begin = {}, 0
    for layer in layers:
        end = begin + layer.shape[-1]
        last = len(layer.shape) - 1
        instead[layer] = make(_A.slice.Tensor, one, last, begin, end)
        begin = end
    return instead


def _none(layer: Value) -> Value:
    return constant(torch.zeros(layer.shape[-1]))
