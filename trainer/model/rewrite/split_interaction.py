"""Split a product of vectors with vectors: those of two users' vectors are computed once a user.

    bmm(x, y), x_BFd rows of the context and of candidates, y_BdG likewise

becomes four products: context rows with context columns of U rows, candidate rows with context
columns, candidate rows with candidate columns, and context rows with candidate columns. Where y is
x transposed (dot products of all pairs of features), the last are those of the second, and not
computed. The second multiplies a candidate's rows by a matrix of its user, which a program for one
user never copies (programs.py).

Shapes: F and G vectors of width d.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from embertide.trainer.model.rewrite.columns import Sources, gathered, reshaped
from embertide.trainer.model.rewrite.graph import Graph, Mark, Value, constant, make
from embertide.trainer.model.rewrite.rowwise import row_by_row

_A: Any = torch.ops.aten


def split_interaction(graph: Graph) -> Iterator[Graph]:
    """Give a graph for each product that can be split."""
    for value in graph.values:
        if value.mark is Mark.CANDIDATE and value.op is _A.bmm.default and row_by_row(value):
            other = _split(value)
            if other is not None:
                yield graph.replaced({value: other})


class _Blocks:
    """The products that are computed, side by side, and where each pair is among them."""

    def __init__(self, x: Value, y: Value) -> None:
        self.sources = Sources()
        self.x_Fd, self.y_dG = self.sources.columns(x), self.sources.columns(y)
        self._flat: list[Value] = []
        self._width = 0
        self.place_FG = torch.full((self.x_Fd.shape[0], self.y_dG.shape[1]), -1)

    def add(self, rows: Tensor, columns: Tensor, mark: Mark) -> None:
        """Compute the products of some rows and columns."""
        left = self._assembled(self.x_Fd[rows], mark)
        right = self._assembled(self.y_dG[:, columns], mark)
        count = len(rows) * len(columns)
        self._flat.append(reshaped(gathered(make(_A.bmm.default, left, right)), (count,)))
        places = torch.arange(self._width, self._width + count).reshape(len(rows), len(columns))
        self.place_FG[rows.unsqueeze(1), columns] = places
        self._width += count

    def _assembled(self, columns: Tensor, mark: Mark) -> Value:
        """Return columns for rows of a mark; the context's are put together before that."""
        if bool(self.sources.is_context(columns).all()):
            whole = self.sources.assembled(columns, Mark.CONTEXT)
            return gathered(whole) if mark is Mark.CANDIDATE else whole
        return self.sources.assembled(columns, mark)

    def value(self) -> Value:
        """Return all products, as the one product gave them."""
        whole = make(_A.cat.default, self._flat, 1)
        index = constant(self.place_FG.flatten())
        taken = make(_A.index_select.default, whole, 1, index)
        return reshaped(taken, tuple(self.place_FG.shape))


def _split(value: Value) -> Value | None:
    blocks = _Blocks(*value.args)
    if not blocks.x_Fd.numel() or not blocks.y_dG.numel():
        return None
    of_context_F = blocks.sources.is_context(blocks.x_Fd).all(1)
    of_context_G = blocks.sources.is_context(blocks.y_dG).all(0)
    rows, columns = of_context_F.nonzero().flatten(), of_context_G.nonzero().flatten()
    if not len(rows) or not len(columns) or bool(of_context_F.all() and of_context_G.all()):
        return None
    other_rows = (~of_context_F).nonzero().flatten()
    other_columns = (~of_context_G).nonzero().flatten()
    blocks.add(rows, columns, Mark.CONTEXT)
    for each in (columns, other_columns):
        if len(other_rows) and len(each):
            blocks.add(other_rows, each, Mark.CANDIDATE)
    place = blocks.place_FG
    if torch.equal(blocks.x_Fd, blocks.y_dG.T):
        place[rows.unsqueeze(1), other_columns] = place[other_rows.unsqueeze(1), rows].T
    elif len(other_columns):
        blocks.add(rows, other_columns, Mark.CANDIDATE)
    return blocks.value()
