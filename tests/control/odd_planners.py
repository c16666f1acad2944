"""Planners that do what planners must not: processes of their own import them from here."""

import dataclasses
import os
import time
from pathlib import Path

from embertide.server.core.plan.greedy import Greedy
from embertide.server.core.plan.planner import Problem, Proposal


@dataclasses.dataclass(frozen=True)
class Slow:
    """Thinks for so long, and leaves a mark when it begins."""

    seconds: float
    mark: Path

    def propose(self, problem: Problem) -> Proposal:
        with self.mark.open("a") as marks:
            marks.write(f"{problem.plan.epoch}\n")
        time.sleep(self.seconds)
        return Greedy().propose(problem)


class Failing:
    def propose(self, problem: Problem) -> Proposal:
        raise ValueError("it cannot count")


class Dying:
    def propose(self, problem: Problem) -> Proposal:
        os._exit(1)
