"""From an exported net to a graph of contexts and candidates.

Shapes: B samples, D dense columns, E all embedding values of a sample.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from embertide.trainer.model.rewrite.columns import gathered
from embertide.trainer.model.rewrite.graph import (
    ROWS,
    USERS,
    Argument,
    Graph,
    Mark,
    RewriteError,
    RowCount,
    Value,
    constant,
    made_input,
    make,
    parameter,
)
from embertide.trainer.model.rewrite.rowwise import row_by_row

_A: Any = torch.ops.aten
_ENDLESS = 1 << 40  # ends of slices are larger
INPUTS = ("context_dense", "context_embeddings", "candidate_dense", "candidate_embeddings")
"""Inputs of a program for contexts, in order; `user_of_row` and the tensors follow."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contexts:
    """Which columns of the net's two inputs are the user's.

    Attributes:
        dense: For each column of dense, whether it is.
        embeddings: For each column of the embeddings, whether it is.
    """

    dense: tuple[bool, ...]
    embeddings: tuple[bool, ...]

    @classmethod
    def of(
        cls,
        dense: int,
        embeddings: int,
        *,
        of_dense: Iterable[slice],
        of_embeddings: Iterable[slice],
    ) -> "Contexts":
        """Return contexts from ranges of columns."""
        marks = []
        for width, ranges in ((dense, of_dense), (embeddings, of_embeddings)):
            inside = {column for each in ranges for column in range(width)[each]}
            marks.append(tuple(column in inside for column in range(width)))
        return cls(dense=marks[0], embeddings=marks[1])

    def widths(self) -> tuple[int, ...]:
        """Columns of each of INPUTS."""
        dense, embeddings = sum(self.dense), sum(self.embeddings)
        return dense, embeddings, len(self.dense) - dense, len(self.embeddings) - embeddings

    def split(self, dense_BD: Tensor, embeddings_BE: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of each of INPUTS, all with B rows."""
        dense = torch.tensor(self.dense, dtype=torch.bool)
        embeddings = torch.tensor(self.embeddings, dtype=torch.bool)
        return (
            *(dense_BD[:, dense], embeddings_BE[:, embeddings]),
            *(dense_BD[:, ~dense], embeddings_BE[:, ~embeddings]),
        )


class _Exported(nn.Module):
    """A module with its tensors as arguments; it gives a score_B for each head."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        super().__init__()
        self._module = [module]  # in a list, torch.export does not see it as a child
        self._names = names

    def forward(self, dense: Tensor, embeddings: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        state = dict(zip(self._names, tensors, strict=True))
        scores: Tensor = torch.func.functional_call(self._module[0], state, (dense, embeddings))
        several = scores.dim() == 2 and scores.shape[1] > 1
        return scores.unbind(1) if several else (scores.reshape(-1),)


def exported(
    module: nn.Module, tensors: dict[str, Tensor], contexts: Contexts
) -> torch.export.ExportedProgram:
    """Export a module, (dense_BD, embeddings_BE) -> scores, whose tensors are inputs.

    Args:
        module: In eval mode.
        tensors: Its parameters and buffers, by name.
        contexts: Gives the columns of its inputs.
    """
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    example = torch.zeros(3, len(contexts.dense)), torch.zeros(3, len(contexts.embeddings))
    weights = tuple(tensor.detach().clone() for tensor in tensors.values())
    shapes: Any = ({0: batch}, {0: batch}, tuple({} for _ in tensors))
    functional = _Exported(module, list(tensors)).eval()
    program = torch.export.export(functional, (*example, *weights), dynamic_shapes=shapes)
    # A ReLU in place is one that is not; other programs are left as they were written.
    return program.run_decompositions({}) if any(map(_mutates, program.graph.nodes)) else program


def _mutates(node: fx.Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def read(program: torch.export.ExportedProgram, names: Iterable[str], contexts: Contexts) -> Graph:
    """Return the graph of a program that `exported` made.

    Args:
        program: Its inputs are dense, embeddings and tensors.
        names: Names of the tensors, in their order.
        contexts: Which columns are the user's.

    Raises:
        RewriteError: It has something that graphs cannot say.
    """
    return _Reader(program, list(names), contexts).graph()


class _Reader:
    def __init__(
        self, program: torch.export.ExportedProgram, names: list[str], contexts: Contexts
    ) -> None:
        self._program = program
        self._signature = program.graph_signature
        self._known: dict[fx.Node, Any] = {}
        self._names = names
        self._contexts = contexts

    def graph(self) -> Graph:
        inputs = [*self._inputs(), *self._parameters()]
        for each in inputs[2:]:
            for size in each.shape:
                _check_number(size)
        given = iter(inputs)
        outputs: Argument = ()
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                self._known[node] = self._placeholder(node, given)
            elif node.op == "call_function" and _mutates(node):
                raise RewriteError(f"{node.target} changes its input in place")
            elif node.op == "call_function":
                self._known[node] = self._call(node)
            elif node.op == "output":
                outputs = self._argument(node.args[0])
            else:
                raise RewriteError(f"{node.op} {node.target} is no call of an operator")
        if not all(isinstance(each, Value) and each.shape[:1] == (ROWS,) for each in outputs):
            raise RewriteError("a score does not depend on candidates, or is not one a row")
        return Graph(outputs)

    def _inputs(self) -> list[Value]:
        widths = self._contexts.widths()
        rows = (USERS, USERS, ROWS, ROWS)
        marks = (Mark.CONTEXT, Mark.CONTEXT, Mark.CANDIDATE, Mark.CANDIDATE)
        made = [
            made_input(name, (count, width), mark)
            for name, count, width, mark in zip(INPUTS, rows, widths, marks, strict=True)
        ]
        return [
            _interleaved(self._contexts.dense, made[0], made[2]),
            _interleaved(self._contexts.embeddings, made[1], made[3]),
        ]

    def _parameters(self) -> list[Value]:
        nodes = [n for n in self._program.graph.nodes if n.op == "placeholder"]
        tensors = nodes[len(nodes) - len(self._names) :]
        return [
            parameter(name, node.meta["val"])
            for name, node in zip(self._names, tensors, strict=True)
        ]

    def _placeholder(self, node: fx.Node, given: Any) -> Value:
        kept = self._signature.inputs_to_lifted_tensor_constants.get(node.name)
        kept = kept or self._signature.inputs_to_buffers.get(node.name)
        if kept is None:
            value: Value = next(given)
            return value
        tensor = self._program.constants.get(kept, self._program.state_dict.get(kept))
        assert isinstance(tensor, Tensor)
        return constant(tensor.detach().cpu())

    def _argument(self, argument: Argument) -> Argument:
        if isinstance(argument, fx.Node):
            return self._known[argument]
        if isinstance(argument, list | tuple):
            return tuple(self._argument(each) for each in argument)
        _check_number(argument)
        return argument

    def _call(self, node: fx.Node) -> Any:
        args: tuple[Argument, ...] = self._argument(node.args)
        kwargs = {name: self._argument(each) for name, each in node.kwargs.items()}
        plain = _REPLACED.get(node.target)
        if plain is not None:
            return plain(*args, **kwargs)
        if not any(isinstance(each, Value) for each in _flat((args, kwargs))) and not node.users:
            return None  # an assertion
        if not kwargs and all(isinstance(each, int | float) for each in _flat(args)):
            return _numbers(node, args)
        args = tuple(_counted(each) for each in args)
        kwargs = {name: _counted(each) for name, each in kwargs.items()}
        return _plain(make(node.target, *args, **kwargs))


def _flat(argument: Argument) -> list[Argument]:
    if isinstance(argument, dict):
        argument = tuple(argument.values())
    if isinstance(argument, tuple):
        return [inner for each in argument for inner in _flat(each)]
    return [argument]


def _check_number(argument: Argument) -> None:
    """Refuse a number of the net's own that would be taken for a number of rows."""
    large = isinstance(argument, int) and USERS <= argument < _ENDLESS
    if large and (argument % USERS == 0 or argument % ROWS == 0):
        raise RewriteError(f"{argument} stands for numbers of rows; take another width")


def _numbers(node: fx.Node, args: tuple[Argument, ...]) -> Any:
    """Compute with numbers of rows, by their stand-ins; what they are not multiples of is refused.

    Comparisons are of torch's own assertions.
    """
    target: Any = node.target
    made = target(*args)
    of_rows = [each for each in args if isinstance(each, int) and each >= ROWS]
    divides = target is operator.floordiv and args[1] in of_rows and args[0] % args[1] == 0
    if of_rows and not isinstance(made, bool) and made % ROWS != 0 and not divides:
        raise RewriteError(f"{node.target} of the number of candidates gives no multiple of it")
    return made


def _counted(argument: Argument) -> Argument:
    """Say of numbers that they are multiples of B."""
    if isinstance(argument, tuple):
        return tuple(_counted(each) for each in argument)
    number = isinstance(argument, int) and not isinstance(argument, bool)
    if number and ROWS <= argument < _ENDLESS and argument % ROWS == 0:
        return RowCount(argument // ROWS)
    return argument


def _interleaved(of_context: tuple[bool, ...], context: Value, candidate: Value) -> Value:
    """Return the columns of one input of the net, in its order."""
    if not any(of_context):
        return candidate
    if all(of_context):
        return gathered(context)
    parts, places = [], {True: 0, False: 0}
    for mark, run in itertools.groupby(of_context):
        begin = places[mark]
        places[mark] += len(list(run))
        source = gathered(context) if mark else candidate
        parts.append(make(_A.slice.Tensor, source, 1, begin, places[mark]))
    return make(_A.cat.default, parts, 1)


def _sizes(value: Value, sizes: Iterable[int]) -> Value:
    """A reshape whose first dimension is told by the others, where it is one of rows."""
    sizes = [*sizes]
    if sizes and sizes[0] == ROWS and -1 not in sizes:
        sizes[0] = -1
    args = (value, tuple(_counted(each) for each in sizes))
    made = make(_A.reshape.default, *args)
    if made.shape and made.shape[0] == ROWS == value.shape[0] and made.args[1][0] != -1:
        made = make(_A.reshape.default, value, (-1, *made.shape[1:]))
    return made


def _expanded(value: Value, sizes: Iterable[int], **_: Argument) -> Value:
    sizes = [*sizes]
    if value.mark is not Mark.FIXED and len(sizes) == len(value.shape) and sizes[0] == ROWS:
        sizes[0] = -1
    return make(_A.expand.default, value, tuple(_counted(each) for each in sizes))


def _flattened(value: Value, begin: int = 0, end: int = -1) -> Value:
    dims = len(value.shape)
    begin, end = begin % dims, end % dims
    kept = (*value.shape[:begin], -1, *value.shape[end + 1 :])
    if begin > 0:  # -1 is for rows
        width = 1
        for size in value.shape[begin : end + 1]:
            width *= size
        kept = (*value.shape[:begin], width, *value.shape[end + 1 :])
    return _sizes(value, kept)


def _pieces(value: Value, sizes: Iterable[int], dim: int = 0) -> tuple[Value, ...]:
    ends = [*itertools.accumulate(sizes)]
    begins = [0, *ends[:-1]]
    pairs = zip(begins, ends, strict=True)
    return tuple(make(_A.slice.Tensor, value, dim, begin, end) for begin, end in pairs)


def _split(value: Value, size: int, dim: int = 0) -> tuple[Value, ...]:
    width = value.shape[dim]
    return _pieces(value, [min(size, width - b) for b in range(0, width, size)], dim)


def _chunks(value: Value, count: int, dim: int = 0) -> tuple[Value, ...]:
    return _split(value, -(-value.shape[dim] // count), dim)


def _unbound(value: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(make(_A.select.int, value, dim, i) for i in range(value.shape[dim]))


def _product(x: Value, y: Value) -> Value:
    """X @ y, as a linear layer where y is one."""
    if y.mark is Mark.FIXED and len(y.shape) == 2 and x.mark is not Mark.FIXED:
        return make(_A.linear.default, x, make(_A.transpose.int, y, 0, 1))
    return make(_A.matmul.default, x, y)


def _biased_product(bias: Value, x: Value, y: Value, **more: Argument) -> Value:
    if not more and bias.mark is Mark.FIXED and y.mark is Mark.FIXED and len(bias.shape) == 1:
        return make(_A.linear.default, x, make(_A.transpose.int, y, 0, 1), bias)
    return make(_A.addmm.default, bias, x, y, **more)


def _dropped(value: Value, share: float, training: bool) -> Value:
    if training:
        raise RewriteError("dropout in training mode; export the net in eval mode")
    return value


def _plain(value: Value) -> Value:
    """A concatenation of one value is that value."""
    if value.op is _A.cat.default and len(value.inputs) == 1 and row_by_row(value):
        return value.inputs[0]
    return value


def _same(value: Value, *_: Argument, **__: Argument) -> Value:
    return value


# Operators that are said by others, so that rules know few.
_REPLACED: dict[Any, Any] = {
    operator.getitem: operator.getitem,
    _A.sym_size.int: lambda value, dim: value.shape[dim],
    _A.alias.default: _same,
    _A.detach.default: _same,
    _A.contiguous.default: _same,
    _A.clone.default: _same,
    _A.dropout.default: _dropped,
    _A.reshape.default: _sizes,
    _A.view.default: _sizes,
    _A._unsafe_view.default: _sizes,
    _A.flatten.using_ints: _flattened,
    _A.expand.default: _expanded,
    _A.expand_as.default: lambda value, like: _expanded(value, like.shape),
    _A.split_with_sizes.default: _pieces,
    _A.split.Tensor: _split,
    _A.chunk.default: _chunks,
    _A.unbind.int: _unbound,
    _A.matmul.default: _product,
    _A.mm.default: _product,
    _A.addmm.default: _biased_product,
    _A.t.default: lambda value: make(_A.transpose.int, value, 0, 1),
}
