"""Hoist: what depends on context alone is computed for users, and not for each candidate.

    op(gather(x), gather(y))  ->  gather(op(x, y))

of operators that work row by row; and columns that all come from the context, however they were
moved, are taken from there. One application does all of it.
"""

from collections.abc import Iterator

from embertide.trainer.model.rewrite.columns import Sources, gathered, moves
from embertide.trainer.model.rewrite.graph import Argument, Graph, Mark, Pseudo, Value, make, mapped
from embertide.trainer.model.rewrite.rowwise import row_by_row


def hoist(graph: Graph) -> Iterator[Graph]:
    """Give the graph in which all is hoisted that can be, if any can."""
    hoisted = graph.changed(lambda value, _: _hoisted(value))
    if hoisted.digest != graph.digest:
        yield hoisted


def _hoisted(value: Value) -> Value:
    if value.mark is not Mark.CANDIDATE or isinstance(value.op, Pseudo):
        return value
    having = [each for each in value.inputs if each.mark is not Mark.FIXED]
    if having and all(each.op is Pseudo.GATHER for each in having) and row_by_row(value):
        return _of_users(value)
    if moves(value):
        sources = Sources()
        columns = sources.columns(value)
        if columns.numel() and bool(sources.is_context(columns).all()):
            return gathered(sources.assembled(columns, Mark.CONTEXT))
    return value


def _of_users(value: Value) -> Value:
    def ungathered(argument: Argument) -> Argument:
        of_context = isinstance(argument, Value) and argument.op is Pseudo.GATHER
        return argument.args[0] if of_context else argument

    kwargs = {name: mapped(each, ungathered) for name, each in value.kwargs}
    return gathered(make(value.op, *mapped(value.args, ungathered), **kwargs))
