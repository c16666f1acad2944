"""Planners against the best of all answers, by brute force: `oper`, `auto` and `flexshard`."""

from collections.abc import Iterator

import numpy as np

from bench import report
from bench.drift import small_cases
from bench.drift.optimum import make_problem, optimum, ratio
from bench.report import CONSOLE
from embertide.server.core.plan.instance import instances
from embertide.server.core.plan.planners import planner

_CASES = 200
_OF_OPTIMUM = 1.05


def measure(cases: int = _CASES) -> Iterator[report.Row]:
    """Yield the rows of 19.5 that are about oper, auto and flexshard."""
    ratios: dict[str, list[float]] = {"oper": [], "auto": []}
    for seed in range(cases):
        problem = make_problem(seed)
        [instance] = instances(problem)
        least = optimum(instance, problem.prices)
        for name, found in ratios.items():
            found.append(ratio(problem, planner(name), least))
        if seed % 20 == 19:
            worst = {name: round(max(each), 4) for name, each in ratios.items()}
            CONSOLE.print(f"[dim]{seed + 1} small problems: at worst {worst}")
    case = f"{cases} problems of 4 to 8 buckets on 2 or 3 nodes"
    for name, found in ratios.items():
        CONSOLE.print(f"[dim]{name}: mean {np.mean(found):.4f}, worst {max(found):.4f}")
        for metric, values in (("worst", [max(found)]), ("median", found)):
            said = (case, f"cost of {name} / least cost of all plans, {metric}", "ratio")
            yield report.measure(said, values, better="lower", target=_OF_OPTIMUM, claim="19.5")
    yield from small_cases.flexshard(cases)
