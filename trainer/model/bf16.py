"""A net's program in bf16: its larger layers multiply in it, all else is as in fp32.

Its inputs are those of the program in fp32, but that the weights of these layers are bf16. A node
converts them once a version, in the form that oneDNN packs them in, which products of other
weights do each time (backend_cpp/dense/plugin.cc). Layers are those that products.py has.

`multiplying_in_bf16` scores likewise without a program: what trains measures by it what that costs.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from embertide.trainer.model import products

NAME = "bf16"
_CONVERT: Any = torch.ops.prims.convert_element_type.default


@dataclasses.dataclass(frozen=True, slots=True)
class Bf16Program:
    """A program, and what a node has to know of it.

    Attributes:
        program: Exported.
        rows: How many rows gain by it, at least.
        weights: Places among the program's inputs that are bf16, ascending.
    """

    program: torch.export.ExportedProgram
    rows: int
    weights: tuple[int, ...]


def of(program: torch.export.ExportedProgram, rows: int = 0) -> Bf16Program | None:
    """Return a program's form in bf16, by rows of an input (by place); None: no layer is in it."""
    first = products.first_batch(program, rows)
    made = copy.deepcopy(program)
    layers = products.larger_layers(made, rows)
    # A weight that is also something else, or is computed, stays as it is.
    places = products.packable(made, rows)
    if first is None or not places:
        return None
    weights = {made.graph_signature.user_inputs[place] for place in places}
    for node in made.graph.nodes:
        if node.name in weights:
            node.meta["val"] = node.meta["val"].to(torch.bfloat16)
    for node in layers:
        if node.args[1].name in weights:
            _convert(made.graph, node)
        else:
            products.give_to_onednn(node)
    made.graph_module.recompile()
    given, kwargs = made.example_inputs
    made.example_inputs = (_in_bf16(given, places), kwargs)
    return Bf16Program(made, first, places)


def _convert(graph: torch.fx.Graph, node: Any) -> None:
    """Have a layer multiply in bf16, between values in fp32."""

    def as_type(value: Any, dtype: torch.dtype) -> Any:
        made = graph.call_function(_CONVERT, (value, dtype))
        made.meta["val"] = value.meta["val"].to(dtype)
        return made

    x, weight, *bias = node.args
    with graph.inserting_before(node):
        taken = as_type(x, torch.bfloat16)
        added = as_type(bias[0], torch.bfloat16) if bias and bias[0] is not None else None
        product = graph.call_function(
            products.ONEDNN_LINEAR, (taken, weight, added, "none", [], "")
        )
        product.meta["val"] = node.meta["val"].to(torch.bfloat16)
        back = as_type(product, torch.float32)
    node.replace_all_uses_with(back)
    graph.erase_node(node)


def _in_bf16(inputs: Any, places: tuple[int, ...]) -> Any:
    """Return example inputs, in whatever structure, with some of the tensors in bf16."""
    leaves, spec = torch.utils._pytree.tree_flatten(inputs)
    for at in places:
        leaves[at] = leaves[at].to(torch.bfloat16)
    return torch.utils._pytree.tree_unflatten(leaves, spec)


class _InBf16(TorchFunctionMode):
    """Has layers that programs have in bf16 multiply in it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.linear:
            return func(*args, **kwargs)
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        weight, bias = given["weight"], given.get("bias")
        if weight.numel() < products.MIN_WEIGHTS or given["input"].dtype != torch.float32:
            return func(*args, **kwargs)
        x, w = given["input"].bfloat16(), weight.bfloat16()
        product: Tensor = func(x, w, None if bias is None else bias.bfloat16())
        return product.float()


@contextlib.contextmanager
def multiplying_in_bf16() -> Iterator[None]:
    """Have a net in fp32 score as its program in bf16 does, in `with`."""
    with _InBf16():
        yield
