"""Fold a scale and a shift of columns into the linear layer behind or before them.

    linear(x * s + t, W, b)  ->  linear(x, W * s, b + W t)
    linear(x, W, b) * s + t  ->  linear(x, W * s, b * s + t)

Such are batch norms in eval mode, the last step of layer norms, and products and sums with
parameters or constants.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from embertide.trainer.model.rewrite.graph import Graph, Mark, Value, make
from embertide.trainer.model.rewrite.rowwise import row_by_row

_A: Any = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class _Affine:
    """x * scale + shift of each column; None: not there."""

    x: Value
    scale: Value | float | None
    shift: Value | float | None


def fold_norm(graph: Graph) -> Iterator[Graph]:
    """Give a graph for each fold."""
    for value in graph.values:
        if value.mark is Mark.FIXED:
            continue
        if value.op is _A.linear.default and row_by_row(value):
            affine = _affine(value.args[0])
            if affine is not None:
                yield graph.replaced({value: _behind(value, affine)})
        affine = _affine(value)
        if affine is not None and affine.x.op is _A.linear.default and row_by_row(affine.x):
            yield graph.replaced({value: _before(affine)})


def _affine(value: Value) -> _Affine | None:
    if value.op is _A.batch_norm.default and row_by_row(value) and len(value.shape) == 2:
        return _batch_norm(value)
    if value.op is _A.layer_norm.default and row_by_row(value):
        return _layer_norm(value)
    if value.kwargs or len(value.args) != 2:
        return None
    x, by = value.args
    if value.op in (_A.mul.Tensor, _A.add.Tensor) and _is_fixed(x):
        x, by = by, x
    if not isinstance(x, Value) or _is_fixed(x) or x.shape != value.shape or not _of_columns(by, x):
        return None
    if value.op is _A.mul.Tensor:
        return _Affine(x, by, None)
    if value.op is _A.div.Tensor:
        return _Affine(x, _inverse(by), None)
    if value.op is _A.add.Tensor:
        return _Affine(x, None, by)
    if value.op is _A.sub.Tensor:
        return _Affine(x, None, make(_A.neg.default, by) if isinstance(by, Value) else -by)
    return None


def _is_fixed(argument: Any) -> bool:
    return not isinstance(argument, Value) or argument.mark is Mark.FIXED


def _of_columns(argument: Any, x: Value) -> bool:
    """Whether a factor or term is one number, or one for each of the last dimension."""
    if not isinstance(argument, Value):
        return isinstance(argument, int | float)
    floats = argument.meta.dtype == x.meta.dtype
    return floats and argument.mark is Mark.FIXED and argument.shape in ((), (1,), x.shape[-1:])


def _inverse(by: Value | float) -> Value | float:
    return make(_A.reciprocal.default, by) if isinstance(by, Value) else 1 / by


def _batch_norm(value: Value) -> _Affine:
    x, weight, bias, mean, variance, _, _, eps, *_ = value.args
    scale = make(_A.rsqrt.default, make(_A.add.Tensor, variance, eps))
    if weight is not None:
        scale = make(_A.mul.Tensor, scale, weight)
    shift = make(_A.neg.default, make(_A.mul.Tensor, mean, scale))
    if bias is not None:
        shift = make(_A.add.Tensor, shift, bias)
    return _Affine(x, scale, shift)


def _layer_norm(value: Value) -> _Affine | None:
    x, shape, weight, bias, *rest = (*value.args, None, None)[: max(4, len(value.args))]
    if len(shape) != 1 or (weight is None and bias is None):
        return None
    return _Affine(make(_A.layer_norm.default, x, shape, None, None, *rest), weight, bias)


def _bias_of(layer: Value) -> Value | None:
    bias: Value | None = layer.args[2] if len(layer.args) > 2 else None
    return bias


def _plus(term: Value | None, more: Value | None) -> Value | None:
    if term is None or more is None:
        return more if term is None else term
    return make(_A.add.Tensor, term, more)


def _layer(x: Value, weight: Value, bias: Value | None) -> Value:
    return make(_A.linear.default, x, weight, *(() if bias is None else (bias,)))


def _behind(layer: Value, affine: _Affine) -> Value:
    """The layer, of what its input was scaled and shifted from."""
    weight, bias = layer.args[1], _bias_of(layer)
    if affine.shift is not None:
        ones = make(_A.new_ones.default, weight, (weight.shape[1],))
        shift_K = make(_A.mul.Tensor, ones, affine.shift)
        bias = _plus(bias, make(_A.mv.default, weight, shift_K))
    if affine.scale is not None:
        weight = make(_A.mul.Tensor, weight, affine.scale)
    return _layer(affine.x, weight, bias)


def _before(affine: _Affine) -> Value:
    """The layer whose outputs were scaled and shifted."""
    x, weight = affine.x.args[:2]
    bias = _bias_of(affine.x)
    if affine.scale is not None:
        scale = affine.scale
        if bias is not None:
            bias = make(_A.mul.Tensor, bias, scale)
        if isinstance(scale, Value) and scale.shape not in ((), (1,)):
            scale = make(_A.unsqueeze.default, scale, 1)
        weight = make(_A.mul.Tensor, weight, scale)
    if affine.shift is not None:
        ones = make(_A.new_ones.default, weight, (weight.shape[0],))
        bias = _plus(bias, make(_A.mul.Tensor, ones, affine.shift))
    return _layer(x, weight, bias)
