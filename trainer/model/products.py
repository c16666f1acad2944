"""A net's program for many samples: products of its larger layers by oneDNN.

AOTInductor gives products of matrices to MKL, which does not use AVX-512 on AMD's CPUs: 105 GFLOP/s
of one core of a Zen 5, where oneDNN reaches 235 by the same weights, not packed. On other CPUs it
packs the weights for each product, and nodes do so once a version (backend_cpp/dense/plugin.cc). A
call of oneDNN takes some 10 us, so small products are left as they are, and few samples have the
other program (docs/results/serve.md). Without AVX-512 nodes run that one alone.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch

NAME = "products"
_LINEAR: Any = torch.ops.aten.linear.default
ONEDNN_LINEAR: Any = torch.ops.mkldnn._linear_pointwise.default
# Products of a row with so many weights or more are oneDNN's.
MIN_WEIGHTS = 1 << 13
# The cost of a call beyond MKL's, in multiplications that oneDNN saves half of the time of.
_CALL = 950_000
MIN_MULTIPLICATIONS = 4 * _CALL  # of a product that has the same number of rows in each request


def larger_layers(program: torch.export.ExportedProgram, rows: int) -> list[Any]:
    """Return the layers that are worth it, of as many rows as an input of the program has.

    Nodes of torch.fx, whose arguments are not typed by use.
    """
    nodes: list[Any] = list(program.graph.nodes)
    name = program.graph_signature.user_inputs[rows]
    (given,) = (node for node in nodes if node.op == "placeholder" and node.name == name)
    symbols = given.meta["val"].shape[0].node.expr.free_symbols
    return [
        node
        for node in nodes
        if node.target == _LINEAR
        and node.args[1].meta["val"].numel() >= MIN_WEIGHTS
        and _is_plain(node)
        and _has(node.meta["val"].shape[0], symbols)
    ]


def _is_plain(layer: Any) -> bool:
    """Whether oneDNN takes a layer's weights as they lie."""
    weight = layer.args[1].meta["val"]
    return bool(weight.dtype == torch.float32 and weight.is_contiguous())


def _of_weights(program: torch.export.ExportedProgram) -> list[Any]:
    """Return products of a version's own weights with others, of as many rows as it has."""
    return [
        node
        for node in program.graph.nodes
        if node.target == _LINEAR
        and _is_plain(node)
        and isinstance(node.meta["val"].shape[0], int)
        and math.prod(node.meta["val"].shape) * node.args[1].meta["val"].shape[1]
        >= MIN_MULTIPLICATIONS
    ]


def _has(size: Any, symbols: set[Any]) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols & symbols)


def first_batch(program: torch.export.ExportedProgram, rows: int = 0) -> int | None:
    """Return how many rows of an input (by place) a net gains from; None: it never does."""
    weights = [node.args[1].meta["val"].numel() for node in larger_layers(program, rows)]
    return math.ceil(len(weights) * _CALL / sum(weights)) if weights else None


def of(program: torch.export.ExportedProgram, rows: int = 0) -> torch.export.ExportedProgram:
    """Return a program whose larger layers, of as many rows as an input, are oneDNN's.

    So are larger products of weights with what a request brings, in a program of one user.
    """
    made = copy.deepcopy(program)
    for node in larger_layers(made, rows) + _of_weights(made):
        give_to_onednn(node)
    made.graph_module.recompile()
    return made


def packable(program: torch.export.ExportedProgram, rows: int = 0) -> tuple[int, ...]:
    """Return places among a program's inputs: weights of its larger layers and of nothing else.

    A node may hand them over in the form that oneDNN packs them in, which a product of other
    weights does each time.
    """
    layers = larger_layers(program, rows)
    inputs: list[str] = list(program.graph_signature.user_inputs)
    return tuple(
        sorted(
            inputs.index(weight.name)
            for weight in {node.args[1] for node in layers}
            if weight.name in inputs
            and all(user in layers and user.args[0] is not weight for user in weight.users)
        )
    )


def give_to_onednn(layer: Any) -> None:
    """Have a layer, of those that `larger_layers` gives, be oneDNN's."""
    x, weight, *bias = layer.args
    layer.target = ONEDNN_LINEAR
    layer.args = (x, weight, bias[0] if bias else None, "none", [], "")


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Have torch compile such programs in `with`, which it refuses where weights are inputs.

    Its own way to compile the operator asks for constants, as it may choose a product that packs
    them; ours always calls oneDNN.
    """
    from torch._inductor import ir, lowering, mkldnn_ir  # here, for they take seconds

    def boxed(create: Any) -> Any:
        # Torch's own come in a box, too, which the reshape behind a layer over places asks for.
        return lambda *args: ir.TensorBox.create(create(*args))

    ours = {
        ONEDNN_LINEAR: boxed(mkldnn_ir.LinearUnary.create),
        # Torch puts a sum behind a layer into its call.
        torch.ops.mkldnn._linear_pointwise.binary: boxed(mkldnn_ir.LinearBinary.create),
    }
    before = {operator: lowering.lowerings[operator] for operator in ours}
    lowering.lowerings |= ours
    try:
        yield
    finally:
        lowering.lowerings |= before
