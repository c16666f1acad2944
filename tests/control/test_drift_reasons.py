"""Each look at the drift that is due is told once: by what came of it, or by what forbade it."""

import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest
from test_autopilot import AUTO, make_fleet
from test_drift_rules import CASE
from virtual import VirtualFleet, make_nodes

from embertide.server.core.control import Control, ControlOptions
from embertide.server.core.drift.judge import judge
from embertide.server.core.state import SavedState
from embertide.server.core.tasks import TaskQueue
from embertide.v1 import control_pb2

# The judge's rules forbid these, each by itself (test_drift_rules.py).
JUDGED = {
    "ACTED", "ADVISED", "UNCONFIRMED", "NO_GAIN", "TOO_COSTLY", "COOLING_DOWN", "FROZEN",
    "OVER_BUDGET", "UNSURE",
}  # fmt: skip


def name(outcome: "control_pb2.DecisionOutcome.ValueType") -> str:
    return control_pb2.DecisionOutcome.Name(outcome).removeprefix("DECISION_OUTCOME_")


def status(fleet: VirtualFleet) -> control_pb2.DriftStatus:
    return fleet.core.status(fleet.now_ms).drift


def looks(fleet: VirtualFleet) -> dict[str, int]:
    return {name(each.outcome): each.looks for each in status(fleet).counts}


def _off() -> VirtualFleet:
    fleet = make_fleet(dataclasses.replace(AUTO, mode="off"))
    fleet.run(180)
    return fleet


def _quiet() -> VirtualFleet:
    fleet = make_fleet()
    fleet.run(180)
    return fleet


def _silent() -> VirtualFleet:
    fleet = _quiet()
    fleet.silent.add("node-1")
    fleet.run(180)
    return fleet


def _not_followed() -> VirtualFleet:
    fleet = _quiet()
    beat = fleet._beat(fleet.nodes[0])
    beat.sequence, beat.plan_epoch = beat.sequence + 1, 99
    fleet.core.fleet.beat(beat, fleet.now_ms)
    return fleet


def _at_work() -> VirtualFleet:
    fleet = _quiet()
    fleet.core.start(
        control_pb2.StartReshardRequest(operation_id="mine", drain_node="node-0"), fleet.now_ms
    )
    fleet.core.steer(
        control_pb2.SteerOperationRequest(id="mine", steering=control_pb2.STEERING_PAUSE),
        fleet.now_ms,
    )
    fleet.run(180)
    return fleet


def _moved_on() -> VirtualFleet:
    fleet = _quiet()
    with mock.patch.object(TaskQueue, "first", return_value=None):  # looks have no result yet
        fleet.run(fleet.core.options.drift.interval_s)
        assert fleet.core.tasks
        fleet.nodes.append(make_nodes(len(fleet.nodes) + 1, 1 << 20)[-1])
        fleet.run(2)
    fleet.run(1)
    return fleet


@pytest.mark.parametrize(
    ("expected", "make", "says"),
    [
        ("OFF", _off, "embertide drift mode advise"),
        ("QUIET", _quiet, "no detector fired"),
        ("UNKNOWN_LOAD", _silent, "node-1"),
        ("PLAN_NOT_FOLLOWED", _not_followed, "node-0 acts by plan 99"),
        ("OPERATION_AT_WORK", _at_work, "operation mine has not ended"),
        ("PLAN_MOVED_ON", _moved_on, "the plan moved on from 1 to 2"),
    ],
)
def test_status_says_why_nothing_is_done(
    expected: str, make: Callable[[], VirtualFleet], says: str
) -> None:
    found = status(make())
    assert name(found.outcome) == expected
    assert says in found.why


def test_without_a_plan_the_first_look_waits() -> None:
    core = Control(ControlOptions(model="news", expect_nodes=2), SavedState(), 1_000_000)
    core.tick(1_000_000)
    found = core.drift_status(1_000_000)
    assert name(found.outcome) == "NO_PLAN"
    assert "0 of 2 nodes have registered" in found.why
    assert not found.looked_ms
    assert [(name(each.outcome), each.looks) for each in found.counts] == [("NO_PLAN", 1)]


def test_every_outcome_has_a_case_here_or_by_the_judge() -> None:
    cases = {"OFF", "QUIET", "UNKNOWN_LOAD", "PLAN_NOT_FOLLOWED", "OPERATION_AT_WORK"}
    known = {*JUDGED, *cases, "PLAN_MOVED_ON", "NO_PLAN", "PLANNER_FAILED", "UNSPECIFIED"}
    assert known == set(map(name, control_pb2.DecisionOutcome.values()))
    assert name(judge(CASE, AUTO).outcome) in JUDGED


@pytest.mark.parametrize("make", [_off, _quiet, _silent, _at_work])
def test_looks_are_counted_as_often_as_they_are_due(make: Callable[[], VirtualFleet]) -> None:
    fleet = make()
    due = fleet.seconds / fleet.core.options.drift.interval_s
    assert due - 2 <= sum(looks(fleet).values()) <= due + 2, looks(fleet)


def test_a_pause_counts_once_for_each_look_that_it_forbids() -> None:
    fleet = _at_work()
    before = looks(fleet)["OPERATION_AT_WORK"]
    assert before in (2, 3)
    fleet.run(10 * fleet.core.options.drift.interval_s)
    assert looks(fleet)["OPERATION_AT_WORK"] == before + 10


def test_decisions_come_with_the_same_status() -> None:
    fleet = _quiet()
    page = fleet.core.decisions(control_pb2.ListDecisionsRequest(), fleet.now_ms)
    assert page.status == status(fleet)
    assert page.status.looked_ms == page.decisions[0].at_ms
