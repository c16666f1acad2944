"""Give a layer over products with a user's matrix weights of that user's own.

    linear(cat(x, x M, v), (A B C), b)  ->  x (A + B M')' + linear(v, C, b)

x are vectors of a candidate, M a matrix of its user: the user's vectors, in a product of all pairs.
What M and the weights B make of each other is computed once a user, and the layer has no columns
for products any more. For a program of one user (programs.py): of many, each candidate's would be
copied. The layer's columns of x itself go along if all of them are among its inputs.

Shapes: r vectors of n values, m columns of the user's matrix, N outputs of the layer, K inputs.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from embertide.trainer.model.rewrite.columns import Sources, gathered, reshaped
from embertide.trainer.model.rewrite.graph import Graph, Mark, Value, constant, make
from embertide.trainer.model.rewrite.programs import multiplies_gathered
from embertide.trainer.model.rewrite.rowwise import row_by_row
from embertide.trainer.model.rewrite.split_linear import weight_columns

_A: Any = torch.ops.aten


def user_weights(graph: Graph) -> Iterator[Graph]:
    """Give a graph for each layer and each product with a user's matrix among its inputs."""
    for value in graph.values:
        if value.mark is not Mark.CANDIDATE or value.op is not _A.linear.default:
            continue
        if not row_by_row(value) or len(value.shape) != 2:
            continue
        sources = Sources()
        columns_K = sources.columns(value.args[0])
        for source in [*sources.firsts]:
            if multiplies_gathered(source) and len(source.shape) == 3:
                other = _weighed(value, sources, columns_K, source)
                if other is not None:
                    yield graph.replaced({value: other})


def _weighed(value: Value, sources: Sources, columns_K: Tensor, product: Value) -> Value | None:
    """Return the layer without the columns of a product; None: some of them come twice."""
    _, weight, *bias = value.args
    vectors, copied = product.args  # [B,r,n] and [B,n,m]
    (matrix,) = copied.args  # [U,n,m]
    count, width = vectors.shape[1:]
    first = sources.firsts[product]
    inside_K = (columns_K >= first) & (columns_K < first + math.prod(product.shape[1:]))
    taken = _spread(weight, inside_K, columns_K[inside_K] - first, math.prod(product.shape[1:]))
    if taken is None:
        return None
    outputs = weight.shape[0]
    each = make(_A.reshape.default, taken, (outputs * count, matrix.shape[2]))
    turned = make(_A.transpose.int, matrix, 1, 2)
    own = reshaped(make(_A.matmul.default, each, turned), (outputs, count * width))
    of_vectors = sources.columns(vectors).flatten()
    direct_K = torch.isin(columns_K, of_vectors)
    if bool(torch.isin(of_vectors, columns_K).all()):
        of_column = {int(column): place for place, column in enumerate(of_vectors)}
        if len(of_column) == len(of_vectors):
            places = torch.tensor([of_column[int(column)] for column in columns_K[direct_K]])
            direct = _spread(weight, direct_K, places, len(of_vectors))
            if direct is not None:
                own = make(_A.add.Tensor, own, direct)
                inside_K = inside_K | direct_K
    rows = reshaped(vectors, (1, count * width))
    weights = gathered(make(_A.transpose.int, own, 1, 2))
    total = reshaped(make(_A.bmm.default, rows, weights), (outputs,))
    rest = (~inside_K).nonzero().flatten()
    if len(rest):
        left = sources.assembled(columns_K[rest], Mark.CANDIDATE)
        linear = make(_A.linear.default, left, weight_columns(weight, rest), *bias)
        return make(_A.add.Tensor, total, linear)
    return make(_A.add.Tensor, total, *bias) if bias else total


def _spread(weight: Value, taken_K: Tensor, places: Tensor, width: int) -> Value | None:
    """Return the taken columns of a weight at their places among `width`, zeros elsewhere."""
    if len(places.unique()) < len(places):
        return None
    numbers = taken_K.nonzero().flatten()
    at = torch.full((width,), weight.shape[1])  # the column of zeros
    at[places] = numbers
    if len(places) < width:
        zeros = constant(torch.zeros(weight.shape[0], 1))
        weight = make(_A.cat.default, [weight, zeros], 1)
    return weight_columns(weight, at)
