"""Graphs that rules rewrite: immutable values, equal where they are computed alike.

A value is an operator of torch over other values. Two values of the same operator and arguments are
one, so nothing is computed twice. Every value has a mark: what it depends on. Context values have
U rows (users), candidate values B rows; they meet in GATHER alone, which repeats the row of each
candidate's user.

Numbers of rows are stand-ins, primes that no width has, so that shapes tell rows from columns.
"""

import dataclasses
import enum
import functools
import hashlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

USERS, ROWS = 10_007, 1_000_003

Argument: TypeAlias = Any  # values, numbers, texts, dtypes, RowCount, and tuples of them


class RewriteError(Exception):
    """The net cannot be brought into a graph; the message says why."""


class Mark(enum.IntEnum):
    """The inputs that a value depends on; of several arguments, the greatest."""

    FIXED = 0  # parameters and constants alone: computed once a version
    CONTEXT = 1
    CANDIDATE = 2


class Pseudo(enum.Enum):
    """Operators that torch does not have."""

    INPUT = "input"  # of a name
    PARAMETER = "parameter"  # of a name
    CONSTANT = "constant"  # a tensor
    GATHER = "gather"  # of a context value, the row of each candidate's user


@dataclasses.dataclass(frozen=True, slots=True)
class RowCount:
    """A number that is a multiple of B, as an argument."""

    multiple: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Value:
    """One operator over its arguments.

    Attributes:
        meta: A tensor without data (or what else the operator gives), of the shape and dtype.
        digest: Equal for equal values.
    """

    op: Any  # an operator of torch, or a Pseudo
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    meta: Any
    mark: Mark
    digest: bytes

    def __eq__(self, other: object) -> bool:
        """Whether both are computed alike."""
        return isinstance(other, Value) and self.digest == other.digest

    def __hash__(self) -> int:
        """Hash by the digest."""
        return hash(self.digest)

    def __repr__(self) -> str:
        """Name operator and shape."""
        return f"{name_of(self)}{list(self.shape)}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, with stand-ins for numbers of rows; () of what is no tensor."""
        return tuple(self.meta.shape) if isinstance(self.meta, Tensor) else ()

    @property
    def inputs(self) -> tuple["Value", ...]:
        """The values among the arguments."""
        return tuple(_values_in((self.args, self.kwargs)))


def name_of(value: Value) -> str:
    """Return the operator as a text."""
    return f"{value.op.value if isinstance(value.op, Pseudo) else value.op}"


def _values_in(argument: Argument) -> Iterator[Value]:
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, tuple):
        for each in argument:
            yield from _values_in(each)


def mapped(argument: Argument, change: Any) -> Argument:
    """Return an argument with `change` applied to what is no tuple in it."""
    if isinstance(argument, tuple):
        return tuple(mapped(each, change) for each in argument)
    return change(argument)


def _text(argument: Argument) -> str:
    if isinstance(argument, Value):
        return argument.digest.hex()
    if isinstance(argument, tuple):
        return f"({','.join(map(_text, argument))})"
    if isinstance(argument, Tensor):
        data = argument.contiguous().numpy().tobytes()
        return f"{argument.dtype}{list(argument.shape)}{hashlib.sha256(data).hexdigest()}"
    return f"{type(argument).__name__}:{argument!r}"


def _listed(argument: Argument) -> Argument:
    """An argument as torch's operators take it, of tensors without data."""
    if isinstance(argument, tuple):
        return [_listed(each) for each in argument]
    if isinstance(argument, RowCount):
        return argument.multiple * ROWS
    if isinstance(argument, torch.device):
        return torch.device("meta")
    return argument.meta if isinstance(argument, Value) else argument


def _meta(op: Any, args: tuple[Argument, ...], kwargs: tuple[tuple[str, Argument], ...]) -> Any:
    if op is Pseudo.GATHER:
        (x,) = args
        return torch.empty(ROWS, *x.shape[1:], dtype=x.meta.dtype, device="meta")
    return op(*_listed(args), **{name: _listed(each) for name, each in kwargs})


def _has_rows(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return any(map(_has_rows, argument))
    return isinstance(argument, RowCount)


def _made(op: Any, args: tuple[Argument, ...], kwargs: Any, meta: Any, mark: Mark) -> Value:
    name = op.value if isinstance(op, Pseudo) else str(op)
    digest = hashlib.sha256(f"{name} {_text(args)} {_text(kwargs)}".encode()).digest()
    return Value(op, args, kwargs, meta, mark, digest)


def make(op: Any, *args: Argument, **more: Argument) -> Value:
    """Return the value of an operator over arguments; lists among them become tuples.

    Raises:
        RewriteError: Context and candidate values meet outside GATHER, or torch refuses them.
    """
    args = tuple(_frozen(each) for each in args)
    kwargs = tuple((name, _frozen(more[name])) for name in sorted(more))
    marks = {each.mark for each in _values_in((args, kwargs))}
    if _has_rows((args, kwargs)) or op is Pseudo.GATHER:
        mark = Mark.CANDIDATE
    else:
        mark = max(marks, default=Mark.FIXED)
    if op is not Pseudo.GATHER and mark is Mark.CANDIDATE and Mark.CONTEXT in marks:
        raise RewriteError(f"{op} takes context and candidate values together")
    try:
        meta = _meta(op, args, kwargs)
    except Exception as error:
        raise RewriteError(f"{op} gives no shape: {error}") from error
    return _made(op, args, kwargs, meta, mark)


def _frozen(argument: Argument) -> Argument:
    if isinstance(argument, list | tuple):
        return tuple(_frozen(each) for each in argument)
    return argument


def made_input(name: str, shape: tuple[int, ...], mark: Mark) -> Value:
    """Return an input of the graph; its first dimension is USERS or ROWS."""
    return _made(Pseudo.INPUT, (name,), (), torch.empty(shape, device="meta"), mark)


def parameter(name: str, like: Tensor) -> Value:
    """Return a parameter, which is an input that a version brings."""
    meta = torch.empty(like.shape, dtype=like.dtype, device="meta")
    return _made(Pseudo.PARAMETER, (name,), (), meta, Mark.FIXED)


def constant(tensor: Tensor) -> Value:
    """Return a tensor that belongs to the program; it must not change."""
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return _made(Pseudo.CONSTANT, (tensor,), (), meta, Mark.FIXED)


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The outputs of a program: values with B rows."""

    outputs: tuple[Value, ...]

    @functools.cached_property
    def values(self) -> tuple[Value, ...]:
        """All values, each once, arguments first."""
        ordered: dict[Value, None] = {}
        # Not by recursion: a net may be deeper than Python's stack.
        waiting = [*reversed(self.outputs)]
        while waiting:
            value = waiting[-1]
            missing = [each for each in value.inputs if each not in ordered]
            if missing:
                waiting += reversed(missing)
            else:
                ordered[waiting.pop()] = None
        return tuple(ordered)

    @functools.cached_property
    def users(self) -> Mapping[Value, tuple[Value, ...]]:
        """The values that take each value."""
        found: dict[Value, list[Value]] = {value: [] for value in self.values}
        for value in self.values:
            for each in dict.fromkeys(value.inputs):
                found[each].append(value)
        return {value: tuple(users) for value, users in found.items()}

    @functools.cached_property
    def digest(self) -> bytes:
        """Equal for equal graphs."""
        return hashlib.sha256(b"".join(each.digest for each in self.outputs)).digest()

    def replaced(self, instead: Mapping[Value, Value]) -> "Graph":
        """Return the graph with other values in the place of some.

        Requires: each has the shape of the one that it replaces, and takes none that is replaced.
        """
        return self.changed(lambda value, _: instead.get(value, value), keep=instead)

    def changed(
        self, change: Callable[[Value, Value], Value], *, keep: Container[Value] = ()
    ) -> "Graph":
        """Return the graph with each value changed, arguments first.

        Args:
            change: From a value over arguments that are changed already, and the one that it was,
                to one of the same shape.
            keep: Values whose arguments are left as they were.
        """
        new: dict[Value, Value] = {}

        def argument(old: Argument) -> Argument:
            return new[old] if isinstance(old, Value) else old

        for value in self.values:
            other = value
            if value not in keep and any(new[each] is not each for each in value.inputs):
                kwargs = {name: mapped(each, argument) for name, each in value.kwargs}
                other = make(value.op, *mapped(value.args, argument), **kwargs)
            new[value] = change(other, value)
            assert new[value].shape == value.shape, f"{new[value]} in the place of {value}"
        return Graph(tuple(new[each] for each in self.outputs))
