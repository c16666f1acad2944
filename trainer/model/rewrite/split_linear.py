"""Split a linear layer by what its columns depend on.

    linear(cat(u, v), W, b)  ->  gather(linear(u, W_u)) + linear(v, W_v, b)

u are columns of the context, wherever they are among the layer's inputs. Of inputs with more
dimensions, columns that are the same along one (a target beside each item of a sequence) are
multiplied once, and not for each place.

Shapes: K a layer's inputs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from embertide.trainer.model.rewrite.columns import Sources, gathered
from embertide.trainer.model.rewrite.graph import Graph, Mark, Value, constant, make
from embertide.trainer.model.rewrite.rowwise import row_by_row

_A: Any = torch.ops.aten


def split_linear(graph: Graph) -> Iterator[Graph]:
    """Give a graph for each layer that can be split."""
    for value in graph.values:
        if value.mark is Mark.CANDIDATE and value.op is _A.linear.default and row_by_row(value):
            other = _split(value)
            if other is not None:
                yield graph.replaced({value: other})


def weight_columns(weight: Value, columns_K: Tensor) -> Value:
    """Return some of a weight's columns."""
    return make(_A.index_select.default, weight, 1, constant(columns_K))


def _split(value: Value) -> Value | None:
    x, weight, *bias = value.args
    sources = Sources()
    columns = sources.columns(x)
    if not columns.numel():
        return None
    places = tuple(range(columns.dim() - 1))
    width = columns.shape[-1]
    context_K = sources.is_context(columns).reshape(-1, width).all(0)
    # For each dimension, the columns that are the same along it.
    same = [
        (columns == columns.narrow(axis, 0, 1)).reshape(-1, width).all(0)
        if columns.shape[axis] > 1
        else torch.zeros_like(context_K)
        for axis in places
    ]
    kinds = torch.stack([context_K, *same]).int()
    groups = torch.unique(kinds, dim=1)
    if groups.shape[1] == 1 and not bool(groups.any()):
        return None
    total: Value | None = None
    rest = tuple(bias)
    for group in groups.flip(1).unbind(1):  # those of the context first
        of_group_K = (kinds == group.unsqueeze(1)).all(0).nonzero().flatten()
        part = columns.index_select(-1, of_group_K)
        for axis in places:
            if group[1 + axis]:
                part = part.narrow(axis, 0, 1)
        mark = Mark.CONTEXT if group[0] else Mark.CANDIDATE
        whole = len(of_group_K) == width
        taken = weight if whole else weight_columns(weight, of_group_K)
        made = gathered(make(_A.linear.default, sources.assembled(part, mark), taken, *rest))
        rest = ()  # one part takes the bias
        total = made if total is None else make(_A.add.Tensor, total, made)
    assert total is not None
    if total.shape != value.shape:
        total = make(_A.expand.default, total, (-1, *value.shape[1:]))
    return total
