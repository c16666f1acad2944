"""Graphs as torch modules: what a version prepares once, and what answers requests.

Shapes: U users, B candidates.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from embertide.trainer.model import gathers, one_sample
from embertide.trainer.model.rewrite.graph import (
    Argument,
    Graph,
    Mark,
    Pseudo,
    RowCount,
    Value,
    mapped,
)
from embertide.trainer.model.rewrite.reading import INPUTS, Contexts

_A: Any = torch.ops.aten
CANDIDATES_INPUT = INPUTS.index("candidate_embeddings")
"""The place of an input that has a row a candidate."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tensors:
    """The tensors of a program for contexts, in the order of its inputs.

    Attributes:
        prepared: Those that a version computes of its own by the prepare program, in its order.
        direct: Names of those of the version that are taken as they are; they come first.
    """

    direct: tuple[str, ...]
    prepared: tuple[Value, ...]


def tensors_of(*graphs: Graph) -> Tensors:
    """Return the tensors that graphs take: all programs of a package are given the same."""
    taken = [
        each
        for graph in graphs
        for value in graph.values
        if value.mark is not Mark.FIXED
        for each in value.inputs
        if each.mark is Mark.FIXED and each.op is not Pseudo.CONSTANT
    ]
    ordered = dict.fromkeys(taken)
    return Tensors(
        direct=tuple(str(each.args[0]) for each in ordered if each.op is Pseudo.PARAMETER),
        prepared=tuple(each for each in ordered if each.op is not Pseudo.PARAMETER),
    )


def evaluated(
    wanted: Iterable[Value],
    known: Mapping[Value, Tensor],
    user_of_row: Tensor | None = None,
    *,
    one_user: bool = False,
) -> tuple[Tensor, ...]:
    """Compute values from those that are known; of `one_user`, its row is never copied."""
    found: dict[Value, Any] = dict(known)

    def number(argument: Argument) -> Any:
        if isinstance(argument, Value):
            return found[argument]
        if isinstance(argument, RowCount):
            assert user_of_row is not None
            return argument.multiple * user_of_row.shape[0]
        return argument

    def listed(argument: Argument) -> Any:
        return [listed(each) for each in argument] if isinstance(argument, tuple) else argument

    for value in _below(tuple(wanted), known):
        if value.op is Pseudo.CONSTANT:
            found[value] = value.args[0]
        elif value.op is Pseudo.GATHER:
            assert user_of_row is not None
            given = found[value.args[0]]
            found[value] = (
                given.expand(user_of_row.shape[0], *given.shape[1:])
                if one_user
                else given.index_select(0, user_of_row)
            )
        elif one_user and by_user_matrix(value):
            rows, matrix = value.args
            found[value] = by_one_matrix(found[rows], found[matrix])
        elif one_user and value.op is _A.linear.default and value.mark is Mark.CONTEXT:
            found[value] = one_sample.linear(*(found[each] for each in value.args))
        else:
            args = [listed(mapped(each, number)) for each in value.args]
            kwargs = {name: listed(mapped(each, number)) for name, each in value.kwargs}
            found[value] = value.op(*args, **kwargs)
    return tuple(found[each] for each in wanted)


def multiplies_gathered(value: Value) -> bool:
    """Whether it is the product of a candidate's rows and a matrix of its user.

    The library takes such matrices one after the other in memory, so a program copies the user's
    matrix for each candidate: of 256 candidates and a history of 128 items, 16 MB a request.
    """
    if value.op not in (_A.matmul.default, _A.bmm.default):
        return False
    rows, matrix = value.args
    if matrix.op is not Pseudo.GATHER or rows.mark is not Mark.CANDIDATE:
        return False
    return rows.op is not Pseudo.GATHER and len(rows.shape) == len(matrix.shape) > 2


def by_user_matrix(value: Value) -> bool:
    """Whether it is the product of a candidate's rows, or of weights, and a matrix of its user."""
    if multiplies_gathered(value):
        return True
    if value.op is not _A.matmul.default or value.mark is not Mark.CONTEXT:
        return False
    rows, matrix = value.args
    return rows.mark is Mark.FIXED and (len(rows.shape), len(matrix.shape)) == (2, 3)


def by_one_matrix(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return the product of rows and the one matrix [1, .., n, m] of a user.

    Args:
        rows: [B, .., r, n], or weights [r, n].
        matrix: Its rows may be one matrix, or B times the same.
    """
    one = matrix[0]
    if rows.dim() == 2:
        return nn.functional.linear(rows, one.T.contiguous()).unsqueeze(0)
    together = rows.movedim(0, -3).flatten(-3, -2)  # [.., B r, n]
    if rows.dim() == 3:
        product = nn.functional.linear(together, one.T)
    else:
        product = torch.matmul(together, one)
    whole: Tensor = product.unflatten(-2, (-1, rows.shape[-2])).movedim(-3, 0)
    return whole


def _below(wanted: tuple[Value, ...], known: Mapping[Value, Tensor]) -> list[Value]:
    """The values to compute, arguments first."""
    ordered: dict[Value, None] = {}
    waiting = [*reversed(wanted)]
    while waiting:
        value = waiting.pop()
        if value in known or value in ordered:
            continue
        missing = [each for each in value.inputs if each not in known and each not in ordered]
        if missing:
            waiting += [value, *reversed(missing)]
        else:
            ordered[value] = None
    return list(ordered)


class Prepare(nn.Module):
    """(*tensors of the version, in the order of their names) -> the prepared tensors."""

    def __init__(self, tensors: Tensors, names: Iterable[str]) -> None:
        """Build for programs that take `tensors`, of a net with tensors of these names."""
        super().__init__()
        self._wanted = tensors.prepared
        self._parameters_of = _parameters(_below(tensors.prepared, {}))
        self._names = tuple(names)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the prepared tensors, each contiguous and with memory of its own."""
        given = dict(zip(self._names, tensors, strict=True))
        known = {value: given[name] for name, value in self._parameters_of.items()}
        return tuple(each.contiguous() for each in evaluated(self._wanted, known))


class Run(nn.Module):
    """(*INPUTS, user_of_row_B, *direct tensors, *prepared tensors) -> scores_B of each head.

    Of U users and B candidates; user_of_row is int64, below U. Of one user, it is not looked at.
    """

    def __init__(
        self, graph: Graph, *, tensors: Tensors | None = None, one_user: bool = False
    ) -> None:
        """Build for a graph, whose tensors are among those given; None: they are its own."""
        super().__init__()
        self._one_user = one_user
        self._outputs = graph.outputs
        tensors = tensors or tensors_of(graph)
        parameters = _parameters(graph.values)
        # None: another program's.
        direct = (parameters.get(name) for name in tensors.direct)
        self._tensors = (*direct, *tensors.prepared)
        self._inputs = {str(v.args[0]): v for v in graph.values if v.op is Pseudo.INPUT}

    def forward(
        self,
        context_dense: Tensor,
        context_embeddings: Tensor,
        candidate_dense: Tensor,
        candidate_embeddings: Tensor,
        user_of_row: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the scores."""
        given = (context_dense, context_embeddings, candidate_dense, candidate_embeddings)
        by_name = dict(zip(INPUTS, given, strict=True))
        known = {value: by_name[name] for name, value in self._inputs.items()}
        pairs = zip(self._tensors, tensors, strict=True)
        known |= {value: tensor for value, tensor in pairs if value is not None}
        return evaluated(self._outputs, known, user_of_row, one_user=self._one_user)


def _parameters(values: Iterable[Value]) -> dict[str, Value]:
    return {str(v.args[0]): v for v in values if v.op is Pseudo.PARAMETER}


def tensors_for_run(taken: Tensors, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return what `Run` takes as tensors, of a version's by name."""
    direct = tuple(tensors[name] for name in taken.direct)
    prepared: tuple[Tensor, ...] = Prepare(taken, tensors)(*tensors.values())
    return direct + prepared


def exported_run(
    graph: Graph,
    contexts: Contexts,
    tensors: Mapping[str, Tensor],
    *,
    taken: Tensors | None = None,
    one_user: bool = False,
) -> torch.export.ExportedProgram:
    """Export a graph's `Run`, of any number of candidates and of users, or of `one_user`.

    Args:
        graph: The graph.
        contexts: Which columns are the user's.
        tensors: A version's, by name.
        taken: Those that the program is given; None: the graph's own.
        one_user: Whether requests have one.
    """
    users = None if one_user else torch.export.Dim("users", min=1, max=1 << 20)
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    rows = (1, 1, 3, 3) if one_user else (2, 2, 3, 3)
    pairs = zip(rows, contexts.widths(), strict=True)
    inputs = tuple(torch.zeros(count, width) for count, width in pairs)
    taken = taken or tensors_of(graph)
    given = tensors_for_run(taken, tensors)
    of_users: dict[int, Any] = {} if users is None else {0: users}
    dims = (of_users, of_users, {0: batch}, {0: batch}, {0: batch})
    shapes: Any = (*dims, tuple({} for _ in given))
    example = (*inputs, torch.zeros(3, dtype=torch.int64), *given)
    run = Run(graph, tensors=taken, one_user=one_user).eval()
    program = torch.export.export(run, example, dynamic_shapes=shapes)
    gathers.take_ranges(program)
    return program
