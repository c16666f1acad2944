"""Straighten: columns that were moved several times are moved once.

A value that only moves columns is made again from where its columns come from, in as few pieces as
there are. So a candidate's columns are not read out of a concatenation with the user's.
"""

from collections.abc import Iterator

from embertide.trainer.model.rewrite.columns import Sources, moves
from embertide.trainer.model.rewrite.graph import Graph, Mark, Pseudo, Value


def straighten(graph: Graph) -> Iterator[Graph]:
    """Give the graph in which all moves are straight, if it is another one."""
    ends = {
        value
        for value in graph.values
        if value in graph.outputs or not all(moves(each) for each in graph.users[value])
    }
    straight = graph.changed(lambda new, old: _straight(new) if old in ends else new)
    if straight.digest != graph.digest:
        yield straight


def _straight(value: Value) -> Value:
    if value.mark is Mark.FIXED or value.op is Pseudo.GATHER or not moves(value):
        return value
    sources = Sources()
    columns = sources.columns(value)
    return sources.assembled(columns, value.mark) if columns.numel() else value
