"""Which operators work row by row: a row of the result depends on that row of the inputs alone.

What is not known to is left as it is: the list errs on the safe side.
"""

from typing import Any

import torch

from embertide.trainer.model.rewrite.graph import Mark, Pseudo, Value

_A: Any = torch.ops.aten

ELEMENTWISE = frozenset(
    {
        *(_A.add.Tensor, _A.sub.Tensor, _A.mul.Tensor, _A.div.Tensor, _A.rsub.Scalar),
        *(_A.add.Scalar, _A.sub.Scalar, _A.mul.Scalar, _A.div.Scalar),
        *(_A.pow.Tensor_Scalar, _A.square.default, _A.sqrt.default, _A.rsqrt.default),
        *(_A.neg.default, _A.abs.default, _A.exp.default, _A.log.default, _A.log1p.default),
        *(_A.reciprocal.default, _A.sign.default, _A.clamp.default, _A.clamp_min.default),
        *(_A.clamp_max.default, _A.maximum.default, _A.minimum.default, _A.where.self),
        *(_A.relu.default, _A.sigmoid.default, _A.tanh.default, _A.silu.default, _A.elu.default),
        *(_A.gelu.default, _A.leaky_relu.default, _A.softplus.default, _A.hardtanh.default),
        *(_A.log_sigmoid.default, _A.prelu.default),
        *(_A.gt.Tensor, _A.ge.Tensor, _A.lt.Tensor, _A.le.Tensor, _A.eq.Tensor, _A.ne.Tensor),
        *(_A.gt.Scalar, _A.ge.Scalar, _A.lt.Scalar, _A.le.Scalar, _A.eq.Scalar, _A.ne.Scalar),
        *(_A.logical_and.default, _A.logical_or.default, _A.logical_not.default),
        *(_A.bitwise_and.Tensor, _A.bitwise_or.Tensor, _A.bitwise_not.default),
        *(_A.bitwise_and.Scalar, _A.bitwise_right_shift.Tensor_Scalar, _A.view.dtype),
        *(_A.zeros_like.default, _A.ones_like.default, _A.to.dtype, _A._to_copy.default),
    }
)
# Where operators have the dimensions that they work along.
_DIMENSIONS: dict[Any, tuple[int, ...]] = {
    _A.cat.default: (1,),
    _A.stack.default: (1,),
    _A.slice.Tensor: (1,),
    _A.select.int: (1,),
    _A.index_select.default: (1,),
    _A.unsqueeze.default: (1,),
    _A.squeeze.dim: (1,),
    _A.transpose.int: (1, 2),
    _A.sum.dim_IntList: (1,),
    _A.mean.dim: (1,),
    _A.amax.default: (1,),
    _A.amin.default: (1,),
    _A.softmax.int: (1,),
    _A.log_softmax.int: (1,),
    _A.logsumexp.default: (1,),
    _A.cumsum.default: (1,),
}
# Those that add a dimension count among those of the result.
_ADDING = frozenset({_A.stack.default, _A.unsqueeze.default})
# These only change the order or the shape of what they keep.
MOVING = frozenset(
    {
        *(_A.cat.default, _A.stack.default, _A.slice.Tensor, _A.select.int, _A.transpose.int),
        *(_A.unsqueeze.default, _A.squeeze.dim, _A.permute.default, _A.index_select.default),
        *(_A.reshape.default, _A.expand.default),
    }
)


def _off_rows(value: Value) -> bool:
    """Whether the dimensions that it works along are none of rows."""
    given = _DIMENSIONS[value.op]
    like = value if value.op in _ADDING else value.inputs[0]
    for place in given:
        if place >= len(value.args):
            return False  # a default, which is 0, or all dimensions
        dims = value.args[place]
        for dim in dims if isinstance(dims, tuple) else (dims,):
            if not isinstance(dim, int) or dim % len(like.shape) == 0:
                return False
        if dims == ():
            return False
    return True


def _leading(value: Value) -> bool:
    """Whether an operator with rules of its own keeps to rows."""
    op, inputs = value.op, value.inputs
    first = inputs[0]
    if op is _A.linear.default:
        return first.mark is not Mark.FIXED and all(i.mark is Mark.FIXED for i in inputs[1:])
    if op is _A.embedding.default:
        return first.mark is Mark.FIXED and inputs[1].mark is not Mark.FIXED
    if op is _A.bucketize.Tensor:
        return inputs[1].mark is Mark.FIXED
    if op is _A.bmm.default:
        return all(each.mark is not Mark.FIXED for each in inputs)
    if op is _A.matmul.default:
        x, y = inputs if len(inputs) == 2 else (first, first)
        alike = x.mark is not Mark.FIXED and y.mark is not Mark.FIXED
        return alike and len(x.shape) == len(y.shape) > 2
    if op is _A.layer_norm.default:
        fixed = all(each.mark is Mark.FIXED for each in inputs[1:])
        return fixed and len(value.args[1]) < len(value.shape)
    if op is _A.batch_norm.default:
        return value.args[5] is False and all(i.mark is Mark.FIXED for i in inputs[1:])
    if op in (_A.reshape.default, _A.expand.default):
        return len(value.shape) > 0 and value.shape[0] == first.shape[0] and value.args[1][0] == -1
    if op is _A.permute.default:
        return bool(value.args[1][0] == 0)
    return False


def row_by_row(value: Value) -> bool:
    """Whether a value that is no input works row by row on those of its inputs that have rows."""
    if isinstance(value.op, Pseudo) or not value.shape:
        return False
    rows = value.shape[0]
    having = [each for each in value.inputs if each.mark is not Mark.FIXED]
    if not having or any(not each.shape or each.shape[0] != rows for each in having):
        return False
    if value.op in ELEMENTWISE:
        # A shorter shape is aligned with the last dimensions: its first is not of rows there.
        fixed = [each for each in value.inputs if each.mark is Mark.FIXED]
        aligned = all(len(each.shape) == len(value.shape) for each in having)
        return aligned and all(
            len(each.shape) < len(value.shape) or each.shape[0] == 1 for each in fixed
        )
    if value.op in _DIMENSIONS:
        return _off_rows(value)
    return _leading(value)
