"""Times of operators on this CPU, by operator and shapes; measured once and kept in a file.

A graph's cost is the sum over its values. That is what eager torch takes, on one thread: a compiled
program runs several operators at once, so costs order programs and do not foretell their time
(docs/design/0029-rewriting.md compares the two). Equal files give equal costs.
"""

import copy
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from embertide.trainer.model import products
from embertide.trainer.model.one_thread import one_thread
from embertide.trainer.model.rewrite.graph import (
    ROWS,
    USERS,
    Argument,
    Graph,
    Mark,
    Pseudo,
    Value,
    name_of,
)
from embertide.trainer.model.rewrite.programs import by_one_matrix, by_user_matrix
from embertide.trainer.model.rewrite.rowwise import MOVING

Cost: TypeAlias = Callable[[Value], float]
"""Microseconds of a value, its arguments not counted."""

_FORMAT = 1
_A: Any = torch.ops.aten
_COPIES = frozenset({_A.cat.default, _A.stack.default, _A.index_select.default})
_SCATTERING = frozenset({_A.transpose.int, _A.permute.default, _A.expand.default})
_BLOCKS, _BLOCK_S = 5, 0.0005


def graph_cost(graph: Graph, cost: Cost) -> float:
    """Return the microseconds of a graph; what a version computes once is free."""
    return sum(cost(value) for value in graph.values)


def machine() -> str:
    """Name this CPU, as far as it says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    named = {name.strip(): text.strip() for name, text in facts.items()}
    return " ".join(named.get(name, "?") for name in ("model name", "cpu family", "model"))


class MeasuredCosts:
    """Costs of requests with some numbers of users and candidates, measured where unknown.

    Used by one thread at a time.
    """

    def __init__(self, file: Path | None, *, users: int = 1, candidates: int = 256) -> None:
        """Take what a file knows of this CPU and this torch; another's is measured anew."""
        self._file = file
        self._rows = {USERS: users, ROWS: candidates}
        self._own = False
        self._head = {"format": _FORMAT, "cpu": machine(), "torch": torch.__version__}
        self._us: dict[str, float] = {}
        self._known: dict[Value, float] = {}
        self._held = 0
        if file is not None and file.is_file():
            held = json.loads(file.read_text(encoding="utf-8"))
            if {name: held.get(name) for name in self._head} == self._head:
                self._us = {str(key): float(us) for key, us in held["microseconds"].items()}
                self._held = len(self._us)

    @property
    def measured(self) -> int:
        """Costs that were measured as the file did not know them."""
        return len(self._us) - self._held

    def of_one_user(self, candidates: int, *, own_program: bool) -> "MeasuredCosts":
        """Return costs of other requests, measured and kept with these.

        By an `own_program` (programs.py), no row of the user's is copied.
        """
        other = copy.copy(self)
        other._rows = {USERS: 1, ROWS: candidates}
        other._own = own_program
        other._known = {}
        return other

    def __call__(self, value: Value) -> float:
        """Return a value's microseconds."""
        if value not in self._known:
            free = _is_free(value) or (self._own and value.op is Pseudo.GATHER)
            self._known[value] = 0.0 if free else self._looked_up(value)
        return self._known[value]

    def save(self) -> None:
        """Write all costs to the file, if there is one and any is new."""
        if self._file is None or not self.measured:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        held = {**self._head, "microseconds": dict(sorted(self._us.items()))}
        temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self._file)

    def _looked_up(self, value: Value) -> float:
        one = "of one user, " if self._own and by_user_matrix(value) else ""
        key = f"{one}{name_of(value)} {self._key((*value.args, *value.kwargs))}"
        if key not in self._us:
            self._us[key] = round(self._measured(value), 3)
        return self._us[key]

    def _size(self, size: int) -> int:
        """A dimension or number as of the request: stand-ins by what they stand for."""
        for stand_in, rows in self._rows.items():
            if size >= stand_in and size % stand_in == 0:
                return size // stand_in * rows
        return size

    def _key(self, argument: Argument) -> str:
        if isinstance(argument, Value):
            shape = "x".join(str(self._size(size)) for size in argument.shape)
            inner = f"{argument.meta.dtype}".removeprefix("torch.") if argument.shape else ""
            return f"{inner}[{shape}]"
        if isinstance(argument, tuple):
            return f"({', '.join(self._key(each) for each in argument)})"
        return f"{argument}"

    def _measured(self, value: Value) -> float:
        generator = torch.Generator().manual_seed(1)

        def given(argument: Argument) -> Any:
            if isinstance(argument, tuple):
                return [given(each) for each in argument]
            if not isinstance(argument, Value):
                return argument
            if argument.op is Pseudo.CONSTANT:
                return argument.args[0]
            shape = [self._size(size) for size in argument.shape]
            if argument.meta.dtype.is_floating_point:
                return torch.rand(shape, generator=generator, dtype=argument.meta.dtype)
            return torch.zeros(shape, dtype=argument.meta.dtype)

        args = [given(each) for each in value.args]
        kwargs = {name: given(each) for name, each in value.kwargs}
        if value.op is Pseudo.GATHER:
            rows = torch.arange(self._rows[ROWS]) % self._rows[USERS]
            return _microseconds(lambda: args[0].index_select(0, rows))
        if self._own and by_user_matrix(value):
            rows, matrix = args
            us = _microseconds(lambda: by_one_matrix(rows, matrix))
            flat = matrix.dim() == 3
            return min(us, _by_onednn(rows.flatten(0, -2), matrix[0].T)) if flat else us
        if value.op is _A.reshape.default:
            return _microseconds(lambda: args[0].clone())
        us = _microseconds(lambda: value.op(*args, **kwargs))
        return min(us, _by_onednn(*args)) if value.op is _A.linear.default else us


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    """Microseconds of a layer by the library that programs have for large ones."""
    if math.prod(x.shape) * weight.shape[0] < products.MIN_MULTIPLICATIONS:
        return math.inf
    taken = weight.contiguous()
    return _microseconds(lambda: products.ONEDNN_LINEAR(x, taken, bias, "none", [], ""))


def _is_free(value: Value) -> bool:
    if value.mark is Mark.FIXED or not isinstance(value.meta, Tensor):
        return True
    if isinstance(value.op, Pseudo):
        return value.op is not Pseudo.GATHER
    if value.op is _A.reshape.default:
        return value.inputs[0].op not in _SCATTERING
    return value.op in MOVING and value.op not in _COPIES  # views


def _microseconds(work: Callable[[], object]) -> float:
    with one_thread(), torch.no_grad():
        work()
        began = time.perf_counter()
        work()
        count = max(1, int(_BLOCK_S / max(time.perf_counter() - began, 1e-7)))
        return min(_block(work, count) for _ in range(_BLOCKS)) / count * 1e6


def _block(work: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        work()
    return time.perf_counter() - began
