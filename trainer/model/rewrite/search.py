"""The search for the cheapest of equal graphs: MetaFlow's (Jia et al. 2019).

The cheapest graph of a queue is taken, and all rules give graphs of it. Those are kept that cost no
more than `alpha` times the best: with alpha above 1, a rule may make a graph slower, so that
another one can make it faster than any before. `budget` bounds the graphs that are taken.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Mapping

from embertide.trainer.model.rewrite.costs import Cost, graph_cost
from embertide.trainer.model.rewrite.graph import Graph
from embertide.trainer.model.rewrite.rules import RULES, Rule

ALPHA = 1.05
BUDGET = 100


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The best graph of a search.

    Attributes:
        steps: The rules that lead to it, in order.
        cost_us: Cost of the graph; `before_us` is that of the one that was given.
        looked_at: Graphs that rules gave and whose cost was computed.
        refused: Graphs whose scores were other than before, by rule.
    """

    graph: Graph
    steps: tuple[str, ...]
    cost_us: float
    before_us: float
    looked_at: int
    refused: Mapping[str, int]


def search(
    graph: Graph,
    cost: Cost,
    same: Callable[[Graph], bool],
    *,
    alpha: float = ALPHA,
    budget: int = BUDGET,
    rules: Mapping[str, Rule] = RULES,
) -> Found:
    """Return the cheapest graph that is found.

    Args:
        graph: The one to begin with.
        cost: Returns the cost of a value.
        same: Whether a graph gives the scores of `graph`; those that do not are put aside.
        alpha: The factor beyond the best cost up to which a graph is looked at further.
        budget: Graphs that are taken from the queue, at most.
        rules: By name.
    """
    before = graph_cost(graph, cost)
    best, best_cost, best_steps = graph, before, tuple[str, ...]()
    order = itertools.count()  # of equal costs, the first found
    queue = [(before, next(order), graph, best_steps)]
    seen = {graph.digest}
    refused: dict[str, int] = {}
    while queue and budget > 0:
        taken_cost, _, taken, steps = heapq.heappop(queue)
        if taken_cost > alpha * best_cost:
            break  # as all others in the queue
        budget -= 1
        for name, rule in rules.items():
            for other in rule(taken):
                if other.digest in seen:
                    continue
                seen.add(other.digest)
                other_cost = graph_cost(other, cost)
                if other_cost > alpha * best_cost:
                    continue
                if not same(other):
                    refused[name] = refused.get(name, 0) + 1
                    continue
                heapq.heappush(queue, (other_cost, next(order), other, (*steps, name)))
                if other_cost < best_cost:
                    best, best_cost, best_steps = other, other_cost, (*steps, name)
    return Found(
        graph=best,
        steps=best_steps,
        cost_us=best_cost,
        before_us=before,
        looked_at=len(seen) - 1,
        refused=refused,
    )
