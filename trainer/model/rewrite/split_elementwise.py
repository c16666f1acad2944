"""Split a function of each value by what the columns depend on.

    f(cat(u, v))  ->  cat(gather(f(u)), f(v))

By itself, that moves as much as it saves; sums and layers behind it can be split then.
"""

from collections.abc import Iterator
from typing import Any

import torch

from embertide.trainer.model.rewrite.columns import Sources, moves
from embertide.trainer.model.rewrite.graph import Graph, Mark, Value, make
from embertide.trainer.model.rewrite.rowwise import ELEMENTWISE, row_by_row

_A: Any = torch.ops.aten


def split_elementwise(graph: Graph) -> Iterator[Graph]:
    """Give a graph for each function of one value that can be split."""
    for value in graph.values:
        if value.mark is not Mark.CANDIDATE or value.op not in ELEMENTWISE:
            continue
        if len(value.inputs) == 1 and moves(value.inputs[0]) and row_by_row(value):
            other = _split(value)
            if other is not None:
                yield graph.replaced({value: other})


def _split(value: Value) -> Value | None:
    sources = Sources()
    columns = sources.columns(value.inputs[0])
    flat = columns.flatten()
    if not flat.numel():
        return None
    of_context = sources.is_context(flat)
    if bool(of_context.all()) or not bool(of_context.any()):
        return None
    parts, place, width = [], torch.zeros_like(flat), 0
    for entries, mark in ((of_context, Mark.CONTEXT), (~of_context, Mark.CANDIDATE)):
        unique, at = torch.unique(flat[entries], return_inverse=True)
        made = make(
            value.op, sources.assembled(unique, mark), *value.args[1:], **dict(value.kwargs)
        )
        parts.append(made)
        place[entries] = at + width
        width += len(unique)
    moved = Sources()
    for part in parts:
        moved.columns(part)
    return moved.assembled(place.reshape(columns.shape), Mark.CANDIDATE)
