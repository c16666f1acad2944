"""The result of rewriting a net, and the parts of the net that it could not use, in words."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from embertide._common import private
from embertide.trainer.model.export import ExportError, named_tensors
from embertide.trainer.model.quiet import quiet_torch
from embertide.trainer.model.rewrite import reading
from embertide.trainer.model.rewrite.check import TOLERANCE, Check
from embertide.trainer.model.rewrite.columns import Sources, moves
from embertide.trainer.model.rewrite.costs import Cost, MeasuredCosts
from embertide.trainer.model.rewrite.graph import (
    Graph,
    Mark,
    Pseudo,
    RewriteError,
    RowCount,
    Value,
    name_of,
)
from embertide.trainer.model.rewrite.package import CANDIDATES, COSTS
from embertide.trainer.model.rewrite.reading import Contexts
from embertide.trainer.model.rewrite.rowwise import row_by_row
from embertide.trainer.model.rewrite.search import Found, search

_MAX_NAMED = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The result of a search for one user and CANDIDATES candidates.

    Attributes:
        context_columns: The columns of the net's two inputs that are the user's.
        columns: All of them.
        before_us: The sum of what operators take, before rewriting; `after_us` after it.
        rules: Those that made the difference, in order.
        left: The parts that could not be used, and those left to compute for each candidate.
    """

    context_columns: int
    columns: int
    before_us: float
    after_us: float
    rules: tuple[str, ...]
    left: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"candidates": CANDIDATES, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        """Return it as lines for people."""
        gain = f"{self.before_us:,.0f} us of operators before, {self.after_us:,.0f} after"
        return [
            f"one user, {CANDIDATES} candidates: {gain}; {self.context_columns:,} of "
            f"{self.columns:,} columns are the user's",
            f"rules: {', '.join(_counted(self.rules)) or 'none gains'}",
            *self.left,
        ]


def explain(module: nn.Module, contexts: Contexts, cache: Path | None) -> Explanation:
    """Rewrite a net, (dense_BD, embeddings_BE) -> scores, and say what came of it.

    Args:
        module: In eval mode, on the CPU.
        contexts: Which columns are the user's.
        cache: A folder where measured costs are kept; None: all are measured, some seconds.
    """
    tensors = named_tensors(module)
    marks = contexts.dense + contexts.embeddings
    widths = {"context_columns": sum(marks), "columns": len(marks)}
    try:
        with quiet_torch():
            program = reading.exported(module, tensors, contexts)
        graph = reading.read(program, list(tensors), contexts)
    except RewriteError as error:
        reason = f"this net cannot be rewritten, and works as it is: {error}"
        return Explanation(**widths, before_us=0.0, after_us=0.0, rules=(), left=(reason,))
    costs = None if cache is None else private.trusted_folder(cache) / COSTS
    known = MeasuredCosts(costs, candidates=CANDIDATES)
    found = search(graph, known, Check(graph, contexts, tensors).same)
    known.save()
    return Explanation(
        **widths,
        before_us=round(found.before_us, 1),
        after_us=round(found.cost_us, 1),
        rules=found.steps,
        left=tuple(left(found, known)),
    )


def left(found: Found, cost: Cost) -> Iterator[str]:
    """Say what a search could not use, and what is left for each candidate."""
    yield from dict.fromkeys(_unused(found.graph))
    for rule, count in found.refused.items():
        yield f"{rule}: {count} put aside, as scores would lie more than {TOLERANCE:.0e} apart"
    of_candidates = [v for v in found.graph.values if v.mark is Mark.CANDIDATE and cost(v) > 0]
    largest = sorted(of_candidates, key=lambda value: -cost(value))[:_MAX_NAMED]
    named = [f"{_named(v)} over {list(v.shape[1:])} {cost(v):,.0f} us" for v in largest]
    if named:
        yield f"most time for each candidate: {', '.join(named)}"


def _unused(graph: Graph) -> Iterator[str]:
    for value in graph.values:
        if value.mark is not Mark.CANDIDATE or isinstance(value.op, Pseudo) or not value.inputs:
            continue
        if any(_counts_rows(each) for each in value.args):
            yield f"{_named(value)} takes the number of candidates: computed for each"
        elif not row_by_row(value) and any(_of_context(each) for each in value.inputs):
            yield f"{_named(value)} is not known to work row by row: computed for each candidate"


def _of_context(value: Value) -> bool:
    """Whether all columns of a value are the user's."""
    if value.mark is not Mark.CANDIDATE or not moves(value):
        return False
    sources = Sources()
    return bool(sources.is_context(sources.columns(value)).all())


def _counts_rows(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return any(_counts_rows(each) for each in argument)
    return isinstance(argument, RowCount)


def _named(value: Value) -> str:
    return name_of(value).removeprefix("aten.").partition(".")[0]


def _counted(rules: tuple[str, ...]) -> list[str]:
    counts = {name: len(list(same)) for name, same in itertools.groupby(sorted(rules))}
    return [name if n == 1 else f"{name} x {n}" for name, n in counts.items()]


def contexts_of(
    dense_features: int,
    embedding_dim: int,
    of_dense: list[str] | None,
    of_embeddings: list[str] | None,
) -> Contexts:
    """Return which columns are the user's, from ranges as 0:640.

    Raises:
        ExportError: There is none, or one is no range within the columns.
    """
    if not of_dense and not of_embeddings:
        raise ExportError("no column is the user's; name some with --context-embeddings BEGIN:END")
    return Contexts.of(
        dense_features,
        embedding_dim,
        of_dense=[_range(text, dense_features, "dense") for text in of_dense or ()],
        of_embeddings=[_range(text, embedding_dim, "embeddings") for text in of_embeddings or ()],
    )


def _range(text: str, width: int, of: str) -> slice:
    begin, _, end = text.partition(":")
    if not (begin.isdecimal() and end.isdecimal() and int(begin) < int(end) <= width):
        raise ExportError(
            f"--context-{of} is {text!r}; give BEGIN:END within the {width} columns of {of}"
        )
    return slice(int(begin), int(end))
