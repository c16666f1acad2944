"""The planners that an operator may name. A further one is a module here and a line below."""

from collections.abc import Callable, Mapping

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.greedy import Greedy
from embertide.server.core.plan.neuroshard import Neuroshard
from embertide.server.core.plan.planner import Planner

PLANNERS: Mapping[str, Callable[[], Planner]] = {"greedy": Greedy, "neuroshard": Neuroshard}


def planner(name: str) -> Planner:
    """Return the planner of a name.

    Raises:
        RefusedError: There is none.
    """
    if name not in PLANNERS:
        raise RefusedError(
            Code.NOT_FOUND, f"no such planner: {name!r}; use one of {sorted(PLANNERS)}"
        )
    return PLANNERS[name]()
