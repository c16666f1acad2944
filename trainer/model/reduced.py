"""A net's program in reduced precision: larger layers multiply in bf16 or int8, all else in fp32.

Its inputs are those of the program in fp32, but that the weights of these layers are of that type,
and that those in int8 have their scales behind all others. A node converts them once a version, in
bf16 in the form that oneDNN packs them in, which products of other weights do each time
(backend_cpp/dense/plugin.cc). Layers are those that products.py has.

`multiplying_in` scores likewise without a program: what trains measures by it what that costs.

Shapes: K a layer's inputs, N its outputs; 1 after any others of a value's.
"""

import abc
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.proxy import GraphAppendingTracer, Proxy
from torch.overrides import TorchFunctionMode

from embertide.trainer.config import ReducedType
from embertide.trainer.model import products

NAME = "reduced"
_LEVELS = 127.0  # of int8, on both sides of 0
_LEAST = 1e-30  # a scale, of a row of zeros for one


class Precision(abc.ABC):
    """How layers multiply. Values may be tensors or, in a graph, their proxies."""

    dtype: torch.dtype
    """The type of a program's weights."""
    scaled: bool
    """Whether a weight has a scale a row, which is an input of its own."""

    def takes(self, weight: Tensor) -> bool:
        """Return whether a layer of this weight multiplies so.

        One input a layer has in fp32: oneDNN reads a matrix of int8 of one column wrongly.
        """
        return weight.numel() >= products.MIN_WEIGHTS and weight.shape[1] > 1

    @abc.abstractmethod
    def converted(self, weight_NK: Tensor) -> tuple[Tensor, ...]:
        """Return a weight as a node converts it, with its scales if it has any."""

    @abc.abstractmethod
    def program(self, x: Any, weight: Any, bias: Any) -> Any:
        """Return what a layer's program computes, of a weight as `converted` gives it."""

    @abc.abstractmethod
    def layer(self, linear: Callable[..., Tensor], x: Tensor, weight: Any, bias: Any) -> Tensor:
        """Return the same on any CPU or GPU, by torch's `linear`."""


class Bf16(Precision):
    """Values, weights and biases are rounded to bf16, and so is what a layer gives."""

    dtype, scaled = torch.bfloat16, False

    def converted(self, weight_NK: Tensor) -> tuple[Tensor, ...]:
        """Return the weight."""
        return (weight_NK.bfloat16(),)

    def program(self, x: Any, weight: Any, bias: Any) -> Any:
        """Multiply by oneDNN, which adds the bias."""
        added = None if bias is None else bias.to(torch.bfloat16)
        taken = x.to(torch.bfloat16)
        return products.ONEDNN_LINEAR(taken, weight[0], added, "none", [], "").to(torch.float32)

    def layer(self, linear: Callable[..., Tensor], x: Tensor, weight: Any, bias: Any) -> Tensor:
        """Multiply by torch's own product of bf16."""
        return linear(x.bfloat16(), weight[0], None if bias is None else bias.bfloat16()).float()


class Int8(Precision):
    """Values and weights are rounded to 255 levels a row; sums are exact, and biases fp32.

    A row of values has a scale of its own, so a sample's score does not depend on which others its
    request has. What is not finite stays so: its row's scale, and all that comes of it, is NaN.
    """

    dtype, scaled = torch.int8, True

    def largest(self, values: Any) -> Any:
        """Return the largest value of each row."""
        return values.amax(-1, keepdim=True)

    def quantised(self, values: Any) -> tuple[Any, Any]:
        """Return levels as int8, and the scale of each row.

        The largest comes last, so that a program keeps a row's scale, and does not compute it anew
        for each value. What is not finite becomes NaN.
        """
        size = values.abs() * (1 / _LEVELS)
        scale = self.largest((size + (size - size)).clamp_min(_LEAST))
        return (values / scale).round().to(torch.int8), scale

    def converted(self, weight_NK: Tensor) -> tuple[Tensor, ...]:
        """Return the levels, and the scale of each output."""
        levels_NK, scale_N1 = Int8.quantised(Int8(), weight_NK)
        return levels_NK, scale_N1.squeeze(1)

    def _scored(self, multiplied: Callable[[Any], Any], x: Any, scale_N: Any, bias: Any) -> Any:
        levels, scale_1 = self.quantised(x)
        y = multiplied(levels).to(torch.float32) * (scale_1 * scale_N)
        return y if bias is None else y + bias

    def program(self, x: Any, weight: Any, bias: Any) -> Any:
        """Multiply by oneDNN's exact product of int8, which takes matrices alone."""
        levels_NK, scale_N = weight

        def multiplied(levels: Any) -> Any:
            sums = torch._int_mm(levels.flatten(0, -2), levels_NK.t())
            return sums.reshape(levels.shape[:-1] + scale_N.shape)

        return self._scored(multiplied, x, scale_N, bias)

    def layer(self, linear: Callable[..., Tensor], x: Tensor, weight: Any, bias: Any) -> Tensor:
        """Multiply in fp64, which has these sums exactly."""
        levels_NK, scale_N = weight
        score: Tensor = self._scored(
            lambda levels: linear(levels.double(), levels_NK.double()), x, scale_N, bias
        )
        return score


PRECISIONS: dict[ReducedType, Precision] = {"bf16": Bf16(), "int8": Int8()}


@dataclasses.dataclass(frozen=True, slots=True)
class ReducedProgram:
    """A program, and what a node has to know of it.

    Attributes:
        program: Exported.
        rows: How many rows gain by it, at least.
        weights: Places among the program's inputs that are converted, ascending. Of int8, as many
            inputs come behind the others: their scales.
    """

    program: torch.export.ExportedProgram
    rows: int
    weights: tuple[int, ...]


def of(
    program: torch.export.ExportedProgram, precision: Precision, rows: int = 0
) -> ReducedProgram | None:
    """Return a program's form in a precision, by rows of an input (by place); None: no layer is."""
    first = products.first_batch(program, rows)
    made = copy.deepcopy(program)
    nodes = {node.name: node for node in made.graph.nodes if node.op == "placeholder"}
    inputs = [nodes[name] for name in made.graph_signature.user_inputs]
    layers = products.larger_layers(made, rows)
    # A weight that is also something else, or is computed, stays as it is.
    places = tuple(
        place for place in products.packable(made, rows) if precision.takes(_value(inputs[place]))
    )
    if first is None or not places:
        return None
    scales = _add_scales(made, [inputs[place] for place in places]) if precision.scaled else []
    taken = {inputs[place]: scales[at : at + 1] for at, place in enumerate(places)}
    for node in layers:
        weight = node.args[1]
        if weight in taken:
            _convert(made.graph, node, precision, (weight, *taken[weight]))
        else:
            products.give_to_onednn(node)
    for weight in taken:
        weight.meta["val"] = weight.meta["val"].to(precision.dtype)
    made.graph_module.recompile()
    _set_example(made, places, precision)
    return ReducedProgram(made, first, places)


def _value(node: Any) -> Any:
    return node.meta["val"]


def _add_scales(program: torch.export.ExportedProgram, weights: list[Any]) -> list[Any]:
    """Return inputs for scales of some weights, put behind all others."""
    made = []
    last = [node for node in program.graph.nodes if node.op == "placeholder"][-1]
    for at, weight in enumerate(weights):
        name = f"scale_of_weight_{at}"
        with program.graph.inserting_after(last):
            last = program.graph.placeholder(name)
        last.meta["val"] = _value(weight).new_empty(_value(weight).shape[0])
        argument = TensorArgument(name=name)
        spec = InputSpec(kind=InputKind.USER_INPUT, arg=argument, target=None)
        program.graph_signature.input_specs.append(spec)
        made.append(last)
    return made


def _convert(graph: torch.fx.Graph, node: Any, precision: Precision, weight: Any) -> None:
    """Have a layer multiply in a precision, between values in fp32."""
    x, _, *bias = node.args
    tracer = GraphAppendingTracer(graph)

    def proxy(each: Any) -> Proxy:
        return Proxy(each, tracer)

    added = proxy(bias[0]) if bias and bias[0] is not None else None
    with graph.inserting_before(node):
        made = precision.program(proxy(x), tuple(map(proxy, weight)), added)
    node.replace_all_uses_with(made.node)
    graph.erase_node(node)


def _set_example(
    program: torch.export.ExportedProgram, places: tuple[int, ...], precision: Precision
) -> None:
    """Convert example inputs, in whatever structure, as a node does."""
    tree = torch.utils._pytree
    args, kwargs = program.example_inputs
    leaves, spec = tree.tree_flatten(args)
    scales = []
    for at in places:
        leaves[at], *scale = precision.converted(leaves[at])
        scales += scale
    example = (*tree.tree_unflatten(leaves, spec), *scales), kwargs
    signature = program.module_call_graph[0].signature
    assert signature is not None
    signature.in_spec = tree.tree_flatten(example)[1]
    names = [f"scale_of_weight_{at}" for at, _ in enumerate(scales)]
    signature.inputs += [TensorArgument(name=name) for name in names]
    signature.forward_arg_names = [*(signature.forward_arg_names or ()), *names]
    program.example_inputs = example


class _Multiplying(TorchFunctionMode):
    """Has layers that programs have in a precision multiply in it."""

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self._precision = precision

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.linear:
            return func(*args, **kwargs)
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        x, weight = given["input"], given["weight"]
        if not self._precision.takes(weight) or x.dtype != torch.float32:
            return func(*args, **kwargs)
        return self._precision.layer(func, x, self._precision.converted(weight), given.get("bias"))


@contextlib.contextmanager
def multiplying_in(precision: Precision) -> Iterator[None]:
    """Have a net in fp32 score as its program in a precision does, in `with`."""
    with _Multiplying(precision):
        yield


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Have torch compile such programs in `with` without a copy of each vector of sums.

    It reads integers by a function for as many as are left, which goes through the stack for whole
    vectors, too: by this, a program in int8 took twice as long.
    """
    from torch._inductor.codegen import cpp, cpp_utils  # here, for they take seconds

    reading: Any = cpp.CppVecKernel
    before = reading._get_vec_load_line

    def line(kernel: Any, var: str, index: Any, dtype: torch.dtype, load_mask: Any = None) -> str:
        made: str = before(kernel, var, index, dtype, load_mask)
        whole = kernel.num_elems == kernel.tiling_factor
        count = f", {cpp_utils.cexpr_index(kernel.num_elems)})"
        if dtype == torch.int32 and whole and made.endswith(count):
            return made.removesuffix(count) + ")"
        return made

    reading._get_vec_load_line = line
    try:
        yield
    finally:
        reading._get_vec_load_line = before
