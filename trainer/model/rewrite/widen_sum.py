"""Widen a linear layer over a sum: its terms become columns of the layer.

    linear(cat(x, a - b), (V W))  ->  linear(cat(x, a, b), (V W -W))

By itself, that is slower. But a and b may depend on less than their difference (the user's items
less the candidate), and columns that come twice are added up in the weights, once a version.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from embertide.trainer.model.rewrite.columns import Sources
from embertide.trainer.model.rewrite.graph import Graph, Mark, Value, constant, make
from embertide.trainer.model.rewrite.rowwise import row_by_row
from embertide.trainer.model.rewrite.split_linear import weight_columns

_A: Any = torch.ops.aten
_SIGNS = {_A.add.Tensor: 1.0, _A.sub.Tensor: -1.0}


def widen_sum(graph: Graph) -> Iterator[Graph]:
    """Give a graph for each sum among the columns of each layer."""
    for value in graph.values:
        if value.mark is not Mark.CANDIDATE or value.op is not _A.linear.default:
            continue
        if not row_by_row(value):
            continue
        sources = Sources()
        columns = sources.columns(value.args[0])
        for source in [*sources.firsts]:
            other = _widened(value, sources, columns, source)
            if other is not None:
                yield graph.replaced({value: other})


def _is_sum(value: Value) -> bool:
    if value.op not in _SIGNS or value.kwargs or len(value.args) != 2:
        return False
    alike = all(isinstance(each, Value) and each.shape == value.shape for each in value.args)
    return alike and all(each.mark is value.mark for each in value.args)


def _widened(value: Value, sources: Sources, columns: Tensor, source: Value) -> Value | None:
    """Return the layer with the terms of one source in its place."""
    if not _is_sum(source):
        return None
    _, weight, *bias = value.args
    first = sources.firsts[source]
    inside = (columns >= first) & (columns < first + math.prod(source.shape[1:]))
    inside = inside.reshape(-1, columns.shape[-1])
    of_sum_K = inside.all(0)
    if not bool(of_sum_K.any()) or bool((inside.any(0) & ~of_sum_K).any()):
        return None
    before, after = (sources.columns(each).flatten() for each in source.args)
    summed = of_sum_K.nonzero().flatten()
    kept = (~of_sum_K).nonzero().flatten()
    offsets = columns.index_select(-1, summed) - first
    parts = [columns.index_select(-1, kept), before[offsets], after[offsets]]
    all_columns = torch.cat(parts, dim=-1)
    minus = weight_columns(weight, summed)
    if _SIGNS[source.op] < 0:
        minus = make(_A.neg.default, minus)
    taken = [weight_columns(weight, kept)] if len(kept) else []
    wide = make(_A.cat.default, [*taken, weight_columns(weight, summed), minus], 1)
    flat = all_columns.reshape(-1, all_columns.shape[-1])
    unique, at = torch.unique(flat, dim=1, return_inverse=True)
    if unique.shape[1] < flat.shape[1]:
        wide = _added_up(wide, at, unique.shape[1])
        all_columns = unique.reshape(*all_columns.shape[:-1], unique.shape[1])
    made = make(_A.linear.default, sources.assembled(all_columns, value.mark), wide, *bias)
    return made if made != value else None


def _added_up(weight: Value, at: Tensor, width: int) -> Value:
    """Return a weight with the columns added that are of the same input."""
    rows = make(_A.transpose.int, weight, 0, 1)
    zeros = constant(torch.zeros(width, weight.shape[0]))
    added = make(_A.index_add.default, zeros, 0, constant(at), rows)
    return make(_A.transpose.int, added, 0, 1)
