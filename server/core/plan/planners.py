"""The planners that an operator may name. A further one is a module here and a line below."""

from collections.abc import Callable, Mapping

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.auto import Auto
from embertide.server.core.plan.flexshard import FlexShard
from embertide.server.core.plan.greedy import Greedy
from embertide.server.core.plan.join import Join
from embertide.server.core.plan.ldm import Ldm
from embertide.server.core.plan.neuroshard import Neuroshard
from embertide.server.core.plan.oper import Oper
from embertide.server.core.plan.planner import Planner
from embertide.server.core.plan.recshard import RecShard

# Planners that decide who owns which buckets of a group: `auto` compares what they propose.
COMPARED: Mapping[str, Callable[[], Planner]] = {
    "greedy": Greedy,
    "ldm": Ldm,
    "neuroshard": Neuroshard,
    "oper": Oper,
}

PLANNERS: Mapping[str, Callable[[], Planner]] = {
    **COMPARED,
    "flexshard": FlexShard,
    "recshard": RecShard,
    "join": Join,
    "auto": lambda: Auto(planners={name: make() for name, make in COMPARED.items()}),
}


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
