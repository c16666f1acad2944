"""The programs of a package for requests with contexts: what a node runs beside the plain one.

A package (model/export.py) of a net with contexts has more programs: CONTEXT scores U users and B
candidates, PRODUCTS does so where there are many (model/products.py), ONE_USER where they are of
one user, whose matrices they are multiplied by; and PREPARE makes once a version the tensors that
all take beside the version's own. The node's side is backend_cpp/dense/plugin.cc.
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embertide.trainer.config import ModelConfig
from embertide.trainer.config.context import context_columns
from embertide.trainer.model import products, reduced
from embertide.trainer.model.rewrite import programs, reading
from embertide.trainer.model.rewrite.check import Check
from embertide.trainer.model.rewrite.costs import MeasuredCosts, graph_cost
from embertide.trainer.model.rewrite.graph import Graph, RewriteError
from embertide.trainer.model.rewrite.reading import Contexts
from embertide.trainer.model.rewrite.rules import RULES_OF_ONE_USER
from embertide.trainer.model.rewrite.search import search

CONTEXT, PRODUCTS, PREPARE = "context", "context_products", "prepare"
ONE_USER = "context_one_user"
REDUCED = "context_reduced"
COSTS = "costs.json"
REWRITING = 3
"""The rules that a cached package was made by: with more, a net has other programs."""
CANDIDATES = 256
"""Candidates of the one user, in the request that is timed."""
_CANDIDATES_OF_ONE_USER = (16, 32, 64, 128, CANDIDATES)
"""Candidates of a user from which on it may have a run of its own: the first that gain by it."""
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContextPrograms:
    """Programs for requests with contexts, and what a node has to know of them.

    Attributes:
        programs: Exported, by name: CONTEXT; PRODUCTS of a net with larger layers, ONE_USER of one
            that multiplies candidates with matrices of their users, and REDUCED by choice; and
            PREPARE where they take prepared tensors.
        description: Their description for the package's metadata: names of the tensors that are
            taken as they are, and shapes of those that PREPARE gives, in the order of CONTEXT's
            inputs; and how many candidates PRODUCTS, ONE_USER and REDUCED are for.
    """

    programs: dict[str, torch.export.ExportedProgram]
    description: dict[str, Any]


def context_programs(
    module: nn.Module,
    tensors: dict[str, Tensor],
    contexts: Contexts,
    costs: Path | None,
    *,
    precision: reduced.Precision | None = None,
) -> ContextPrograms | None:
    """Rewrite a net for requests with contexts; None, and a warning, if it cannot be.

    Args:
        module: In eval mode, on the CPU, (dense_BD, embeddings_BE) -> scores.
        tensors: Its parameters and buffers, by name.
        contexts: Which columns are the user's.
        costs: A file of measured costs; None: all are measured, some seconds.
        precision: That of a program in reduced precision; None: there is to be none.
    """
    try:
        program = reading.exported(module, tensors, contexts)
        graph = reading.read(program, list(tensors), contexts)
    except RewriteError as error:
        log.warning("the dense net is not computed once a user, and works as it is: %s", error)
        return None
    known = MeasuredCosts(costs, candidates=CANDIDATES)
    found = search(graph, known, Check(graph, contexts, tensors).same).graph
    for_one = of_one_user(found, contexts, tensors, known)
    known.save()
    taken = programs.tensors_of(found, *([for_one.graph] if for_one else []))
    run = {CONTEXT: programs.exported_run(found, contexts, tensors, taken=taken)}
    first = products.first_batch(run[CONTEXT], programs.CANDIDATES_INPUT)
    packed = dict[str, list[int]]()
    if first:
        run[PRODUCTS] = products.of(run[CONTEXT], programs.CANDIDATES_INPUT)
        packed["packed"] = _packable(run[CONTEXT])
    if for_one:
        one = programs.exported_run(for_one.graph, contexts, tensors, taken=taken, one_user=True)
        run[ONE_USER] = products.of(one, programs.CANDIDATES_INPUT) if first else one
        packed["one_user_packed"] = _packable(one) if first else []
    less = None
    if precision is not None:
        less = reduced.of(run[CONTEXT], precision, programs.CANDIDATES_INPUT)
    if less is not None:
        run[REDUCED] = less.program
    prepared: tuple[Tensor, ...] = ()
    if taken.prepared:
        prepare = programs.Prepare(taken, tensors).eval()
        given = tuple(each.detach().clone() for each in tensors.values())
        run[PREPARE] = torch.export.export(prepare, given)
        with torch.no_grad():
            prepared = prepare(*given)
    return ContextPrograms(
        programs=run,
        description={
            **column_ranges(contexts),
            "direct": list(taken.direct),
            "prepared": [list(each.shape) for each in prepared],
            **({products.NAME: first} if first else {}),
            **({"one_user": max(first or 0, for_one.first)} if for_one else {}),
            **{name: places for name, places in packed.items() if places},
            **({reduced.NAME: _reduced_json(less)} if less else {}),
        },
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForOneUser:
    """A graph for programs of one user.

    Attributes:
        first: From how many candidates on it costs less than the graph for any users.
    """

    graph: Graph
    first: int


def of_one_user(
    graph: Graph, contexts: Contexts, tensors: Mapping[str, Tensor], known: MeasuredCosts
) -> ForOneUser | None:
    """Look further from a graph for any users; None: one user's would gain nothing."""
    if not any(map(programs.multiplies_gathered, graph.values)):
        return None

    def cost(candidates: int, *, own: bool) -> MeasuredCosts:
        return known.of_one_user(candidates, own_program=own)

    check = Check(graph, contexts, tensors, one_user=True)
    found = search(graph, cost(CANDIDATES, own=True), check.same, rules=RULES_OF_ONE_USER).graph
    for candidates in _CANDIDATES_OF_ONE_USER:
        before = graph_cost(graph, cost(candidates, own=False))
        if graph_cost(found, cost(candidates, own=True)) < before:
            return ForOneUser(graph=found, first=candidates)
    return None


_BEFORE_TENSORS = len(reading.INPUTS) + 1  # inputs, the last of which is user_of_row


def _packable(program: torch.export.ExportedProgram) -> list[int]:
    """Return places among the tensors, which come last among the inputs."""
    places = products.packable(program, programs.CANDIDATES_INPUT)
    return [place - _BEFORE_TENSORS for place in places]


def _reduced_json(made: reduced.ReducedProgram) -> dict[str, Any]:
    """Say which of the tensors are converted."""
    return {"rows": made.rows, "tensors": [place - _BEFORE_TENSORS for place in made.weights]}


def contexts_of_model(model: ModelConfig) -> Contexts | None:
    """Return which columns of a model's net are the user's; None: it names none."""
    if not model.context:
        return None
    dense, embeddings = context_columns(model)
    return Contexts(dense=dense, embeddings=embeddings)


def column_ranges(contexts: Contexts) -> dict[str, list[list[int]]]:
    """Return the user's columns of each input, as ranges [begin, end)."""
    return {
        "dense": [list(each) for each in _ranges(contexts.dense)],
        "embeddings": [list(each) for each in _ranges(contexts.embeddings)],
    }


def _ranges(marks: tuple[bool, ...]) -> Iterator[tuple[int, int]]:
    begin = None
    for column, mark in enumerate((*marks, False)):
        if mark and begin is None:
            begin = column
        elif not mark and begin is not None:
            yield begin, column
            begin = None
