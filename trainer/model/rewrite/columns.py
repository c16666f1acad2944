"""Where the columns of a value come from, and values made of given columns.

Operators that only move columns (slices, concatenations, reshapes, constant indices) are run on one
row of numbers, one a column of what they begin with. What comes out says where each column is from,
whatever the operators were.

Shapes: U users, B candidates.
"""

import dataclasses
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from embertide.trainer.model.rewrite.graph import Argument, Mark, Pseudo, Value, constant, make
from embertide.trainer.model.rewrite.graph import mapped as mapped_argument
from embertide.trainer.model.rewrite.rowwise import MOVING, row_by_row

_A: Any = torch.ops.aten
_MAX_PIECES = 24  # of more, one index takes them


def moves(value: Value) -> bool:
    """Whether a value only has columns of its inputs, row by row."""
    if value.op is Pseudo.GATHER:
        return True
    if value.op not in MOVING or not row_by_row(value):
        return False
    index = value.inputs[1:] if value.op is _A.index_select.default else ()
    if any(each.op is not Pseudo.CONSTANT for each in index):
        return False
    rest = value.inputs[:1] if index else value.inputs
    return all(each.mark is not Mark.FIXED for each in rest)


@dataclasses.dataclass(slots=True)
class Sources:
    """The values that columns come from, each with the number of its first column."""

    firsts: dict[Value, int] = dataclasses.field(default_factory=dict)
    width: int = 0
    _known: dict[Value, Tensor] = dataclasses.field(default_factory=dict)

    def columns(self, value: Value) -> Tensor:
        """Return the number of each column of a value, of the shape of one of its rows."""
        return self._row(value)[0]

    def _row(self, value: Value) -> Tensor:
        if value not in self._known:
            self._known[value] = self._moved(value) if moves(value) else self._first(value)
        return self._known[value]

    def _moved(self, value: Value) -> Tensor:
        if value.op is Pseudo.GATHER:
            return self._row(value.args[0])

        def number(argument: Argument) -> Any:
            if not isinstance(argument, Value):
                return argument
            return argument.args[0] if argument.op is Pseudo.CONSTANT else self._row(argument)

        args = [
            list(each) if isinstance(each, tuple) else each
            for each in mapped_argument(value.args, number)
        ]
        kwargs = {name: mapped_argument(each, number) for name, each in value.kwargs}
        row: Tensor = value.op(*args, **kwargs)
        return row

    def _first(self, value: Value) -> Tensor:
        count = math.prod(value.shape[1:])
        self.firsts[value] = self.width
        self.width += count
        return torch.arange(self.width - count, self.width).reshape(1, *value.shape[1:])

    def is_context(self, columns: Tensor) -> Tensor:
        """Say of each column whether it is of the context."""
        found = torch.zeros(self.width, dtype=torch.bool)
        for value, first in self.firsts.items():
            found[first : first + math.prod(value.shape[1:])] = value.mark is Mark.CONTEXT
        return found[columns]

    def assembled(self, columns: Tensor, mark: Mark) -> Value:
        """Return a value with these columns, of U rows if all are of the context and `mark` is.

        Requires: there is at least one column.
        """
        for axis in range(columns.dim()):
            one = columns.narrow(axis, 0, 1)
            if columns.shape[axis] > 1 and torch.equal(one.expand_as(columns), columns):
                narrow = self.assembled(one, mark)
                return make(_A.expand.default, narrow, (-1, *columns.shape))
        pieces = self._pieces(columns.flatten())
        if len(pieces) > 1 and columns.dim() > 1:
            whole = self._side_by_side(columns, mark, len(pieces))
            if whole is not None:
                return whole
        source, begin, end = pieces[0]
        if len(pieces) == 1 and (begin, end) == (0, math.prod(source.shape[1:])):
            value = source
        elif len(pieces) > _MAX_PIECES:
            value = self._indexed(columns.flatten(), mark)
        else:
            parts = [self._piece(*piece) for piece in pieces]
            if mark is Mark.CANDIDATE:
                parts = [gathered(each) for each in parts]
            value = parts[0] if len(parts) == 1 else make(_A.cat.default, parts, 1)
        if mark is Mark.CANDIDATE:
            value = gathered(value)
        return reshaped(value, tuple(columns.shape))

    def _side_by_side(self, columns: Tensor, mark: Mark, pieces: int) -> Value | None:
        """Return columns transposed, or as parts of the last dimension, where these are fewer."""
        if columns.dim() == 2:
            turned = columns.T
            if 2 * len(self._pieces(turned.flatten())) <= pieces:
                return make(_A.transpose.int, self.assembled(turned, mark), 1, 2)
        breaks = (columns[..., 1:] != columns[..., :-1] + 1).flatten(0, -2).any(0)
        ends = [*(breaks.nonzero().flatten() + 1).tolist(), columns.shape[-1]]
        if not 1 < len(ends) < pieces:
            return None
        begins = [0, *ends[:-1]]
        parts = [
            self.assembled(columns[..., begin:end], mark)
            for begin, end in zip(begins, ends, strict=True)
        ]
        return make(_A.cat.default, parts, columns.dim())

    def _pieces(self, columns: Tensor) -> list[tuple[Value, int, int]]:
        """Return what follows each other in one source: the source, its first and last column."""
        sources = [*self.firsts]
        firsts = torch.tensor([*self.firsts.values()])
        # Sources that begin at one column have none, but for the last.
        source = torch.searchsorted(firsts, columns.contiguous(), right=True) - 1
        breaks = (columns[1:] != columns[:-1] + 1) | (source[1:] != source[:-1])
        begins = torch.cat((torch.zeros(1, dtype=torch.int64), breaks.nonzero().flatten() + 1))
        lengths = torch.diff(begins, append=torch.tensor([len(columns)]))
        at = columns[begins] - firsts[source[begins]]
        return [
            (sources[number], begin, begin + length)
            for number, begin, length in zip(
                source[begins].tolist(), at.tolist(), lengths.tolist(), strict=True
            )
        ]

    def _piece(self, source: Value, begin: int, end: int) -> Value:
        width = math.prod(source.shape[1:])
        flat = reshaped(source, (width,))
        return flat if (begin, end) == (0, width) else make(_A.slice.Tensor, flat, 1, begin, end)

    def _indexed(self, columns: Tensor, mark: Mark) -> Value:
        used = [
            (value, first, math.prod(value.shape[1:]))
            for value, first in self.firsts.items()
            if bool(((columns >= first) & (columns < first + math.prod(value.shape[1:]))).any())
        ]
        place = torch.zeros(self.width, dtype=torch.int64)
        ends = itertools.accumulate(width for _, _, width in used)
        for (_, first, width), end in zip(used, ends, strict=True):
            place[first : first + width] = torch.arange(end - width, end)
        flats = [reshaped(value, (width,)) for value, _, width in used]
        if mark is Mark.CANDIDATE:
            flats = [gathered(each) for each in flats]
        whole = flats[0] if len(flats) == 1 else make(_A.cat.default, flats, 1)
        return make(_A.index_select.default, whole, 1, constant(place[columns]))


def gathered(value: Value) -> Value:
    """Return a value with B rows: a context value's are those of each candidate's user."""
    return make(Pseudo.GATHER, value) if value.mark is Mark.CONTEXT else value


def reshaped(value: Value, columns: tuple[int, ...]) -> Value:
    """Return a value with rows of another shape; a view of a view is one of what is below."""
    if value.shape[1:] == columns:
        return value
    if value.op is _A.reshape.default and row_by_row(value):
        return reshaped(value.args[0], columns)
    return make(_A.reshape.default, value, (-1, *columns))
