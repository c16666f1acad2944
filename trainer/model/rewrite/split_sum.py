"""Split a sum over columns by what they depend on.

    sum(cat(u, v), 1)  ->  gather(sum(u, 1)) + sum(v, 1)

u are entries of the context along the dimension of the sum, wherever they are.
"""

from collections.abc import Iterator
from typing import Any

import torch

from embertide.trainer.model.rewrite.columns import Sources, gathered
from embertide.trainer.model.rewrite.graph import Graph, Mark, Value, make
from embertide.trainer.model.rewrite.rowwise import row_by_row

_A: Any = torch.ops.aten


def split_sum(graph: Graph) -> Iterator[Graph]:
    """Give a graph for each sum that can be split."""
    for value in graph.values:
        if value.mark is Mark.CANDIDATE and value.op is _A.sum.dim_IntList and row_by_row(value):
            other = _split(value)
            if other is not None:
                yield graph.replaced({value: other})


def _split(value: Value) -> Value | None:
    x, dims, *more = value.args
    if len(dims) != 1:
        return None
    axis = dims[0] % len(x.shape) - 1  # of a row
    sources = Sources()
    columns = sources.columns(x)
    of_context = (
        sources.is_context(columns).movedim(axis, 0).reshape(columns.shape[axis], -1).all(1)
    )
    if not bool(of_context.any()) or bool(of_context.all()):
        return None
    sums = [
        gathered(
            make(
                value.op,
                sources.assembled(columns.index_select(axis, entries.nonzero().flatten()), mark),
                dims,
                *more,
                **dict(value.kwargs),
            )
        )
        for entries, mark in ((of_context, Mark.CONTEXT), (~of_context, Mark.CANDIDATE))
    ]
    return make(_A.add.Tensor, *sums)
