"""Tasks between the core and its driver: each result reaches who asked, and nobody else."""

import pytest

from embertide.server.core.drift.look import GainComparison, Look
from embertide.server.core.drift.signals import Signals
from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.greedy import Greedy
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.workload import Workload
from embertide.server.core.tasks import (
    DriftSeen,
    GainMeasured,
    LookAtDrift,
    MeasureGain,
    TaskQueue,
)
from embertide.v1 import plan_pb2

REFUSAL = RefusedError(Code.NOT_FOUND, "nothing to see")


def make_problem(epoch: int) -> Problem:
    return Problem(plan=plan_pb2.Plan(epoch=epoch), layout={}, workload=Workload(work={}))


def make_look(epoch: int) -> LookAtDrift:
    look = Look(planner=Greedy(), reference=None, seen=Signals())
    return LookAtDrift(look=look, problem=make_problem(epoch))


def test_a_newer_task_takes_the_place_of_its_kind_alone() -> None:
    tasks = TaskQueue()
    measure = MeasureGain(compare=GainComparison(owners={}), problem=make_problem(1))
    first, second = make_look(1), make_look(2)
    for task in (first, measure, second):
        tasks.add(task)
    assert list(tasks) == [measure, second]
    tasks.finish(first.refused(REFUSAL))  # of a plan that has moved on
    assert list(tasks) == [measure, second]
    tasks.finish(second.refused(REFUSAL))
    assert list(tasks) == [measure]
    seen = tasks.take(DriftSeen)
    assert seen is not None
    assert seen.epoch == 2
    assert tasks.take(DriftSeen) is None
    assert tasks.take(GainMeasured) is None
    with pytest.raises(RefusedError, match="nothing to see"):
        seen.value()
