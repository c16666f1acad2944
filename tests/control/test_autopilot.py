"""The loop that follows drift, in virtual time: real decisions about made-up demand."""

import dataclasses
import re

import numpy as np
import pytest
from virtual import Floats, VirtualFleet, make_nodes, make_tables, zipf_demand

from embertide.server.core.control import Control
from embertide.server.core.drift import autopilot
from embertide.server.core.drift.look import GainComparison, Look, probe_of
from embertide.server.core.drift.options import DriftOptions, FreezeWindow
from embertide.server.core.drift.signals import Signals
from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.greedy import Greedy
from embertide.server.core.plan.layout import Bucket, LaidPlan, Place
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.prices import prices_of
from embertide.server.core.plan.workload import Work, Workload
from embertide.server.core.reshard import problem_of
from embertide.server.core.state import SavedState
from embertide.v1 import control_pb2, plan_pb2

TABLES = make_tables([3, 3])
BUCKETS = 16
NODES = 4
EVEN = zipf_demand(TABLES, NODES, 20_000, seed=1, skew=0.0)
AUTO = DriftOptions(mode="auto", planner="greedy", half_life_s=60)
BYTES = np.full(BUCKETS, 1000)


def make_fleet(options: DriftOptions = AUTO) -> VirtualFleet:
    """Nodes read evenly; from second 1,000 on what node-0 owns is read six times as often."""

    def demand(seconds: float) -> Floats:
        factor_B = np.where(hot_B, 6.0, 1.0) if seconds >= 1000 else np.ones(BUCKETS)
        wanted_NB: Floats = EVEN * factor_B
        return wanted_NB

    hot_B = np.zeros(BUCKETS, np.bool_)

    fleet = VirtualFleet(
        nodes=make_nodes(NODES, 1 << 20),
        tables=TABLES,
        demand=demand,
        bytes_B=BYTES,
        drift=options,
        keys_a_request=10_000,
    )
    fleet.run(20)
    hot_B[:] = fleet.held_NB()[0]
    return fleet


def outcomes(fleet: VirtualFleet) -> list[str]:
    """Return what came of all looks, oldest first."""
    return [
        control_pb2.DecisionOutcome.Name(each.outcome).removeprefix("DECISION_OUTCOME_")
        for each in fleet.core.autopilot.decisions
    ][::-1]


def skew(fleet: VirtualFleet) -> float:
    busy_N = fleet.busy_us_N()
    return float(busy_N.max() / busy_N.mean())


def test_a_change_is_followed_and_nothing_else() -> None:
    fleet = make_fleet()
    fleet.run(900)
    assert fleet.acted() == []
    assert skew(fleet) == pytest.approx(1.0, abs=0.05)
    fleet.run(300)
    assert skew(fleet) < 1.15
    [decision] = fleet.acted()
    assert next(iter(decision.triggers)) == "skew", decision.triggers
    fleet.run(1800)
    assert len(fleet.acted()) == 1, outcomes(fleet)


def test_what_was_predicted_is_compared_with_what_was_measured() -> None:
    fleet = make_fleet()
    fleet.run(1400)
    [decision] = fleet.acted()
    assert decision.measured_ms
    assert decision.measured_gain == pytest.approx(decision.predicted_gain, rel=0.25)
    assert decision.measured_gain > 0.1
    record = fleet.core.operations.records[decision.operation_id]
    assert record.operation.state == control_pb2.OPERATION_STATE_SUCCEEDED
    assert record.operation.reason.startswith("drift: predicted gain")


def test_a_gain_is_predicted_by_the_newest_reads() -> None:
    # Half a minute after the change, nearly all reads of a half-life of ten minutes are older.
    fleet = make_fleet(dataclasses.replace(AUTO, half_life_s=600))
    fleet.run(3600)
    decision = fleet.acted()[0]
    words = re.search(
        r"; by the reads that it was planned by, it saves (.+)%", decision.explanation
    )
    assert words is not None
    assert decision.measured_ms
    settled = float(words[1]) / 100
    assert decision.predicted_gain > settled > 0
    off = [abs(each - decision.measured_gain) for each in (decision.predicted_gain, settled)]
    assert off[0] < 0.5 * off[1]


def test_what_a_plan_would_have_cost_is_told_by_the_prices_of_today_alone() -> None:
    # Before, the demand then was told by the prices then: prices that were learned since counted as
    # gains.
    fleet = make_fleet()
    fleet.run(100)
    problem = problem_of(fleet.core._situation(fleet.now_ms, 60))
    found = Look(planner=Greedy(), reference=None, seen=Signals(), due="asked").propose(problem)
    for factor in (1.0, 3.0):
        prices = prices_of(factor * problem.prices.us_F)
        today = dataclasses.replace(problem, prices=prices)
        costs = GainComparison(owners={}, work=found.work).propose(today)
        assert costs.before_value == pytest.approx(costs.undone.value)
    assert costs.before_value > 0


def test_predictions_learn_from_what_was_measured_and_a_new_leader_knows_it() -> None:
    fleet = make_fleet()
    fleet.run(1400)
    [decision] = fleet.acted()
    assert decision.expected_gain == pytest.approx(decision.predicted_gain), "nothing on record"
    assert not decision.correction.operations
    kept = {
        each.id: control_pb2.Decision.FromString(each.SerializeToString())
        for each in fleet.core.autopilot.decisions
    }
    decision = kept[decision.id]
    decision.measured_gain = 1 - (1 - decision.predicted_gain) ** 3
    again = Control(fleet.core.options, SavedState(decisions=kept), fleet.now_ms)
    found = again.decisions(control_pb2.ListDecisionsRequest(), fleet.now_ms).corrections
    assert [(each.kind, each.operations) for each in found] == [
        ("", 1), ("work", 0), ("balance", 1), ("work, held back", 0), ("balance, held back", 0),
    ]  # fmt: skip
    assert [round(each.factor, 2) for each in found] == [1.44, 1.44, 1.84, 1.44, 1.44]
    decision.ClearField("expected_gain")  # by a build before
    decision.ClearField("correction")
    before = Control(fleet.core.options, SavedState(decisions=kept), fleet.now_ms)
    assert before.decisions(control_pb2.ListDecisionsRequest(), fleet.now_ms).corrections == found


def test_a_gain_that_never_came_is_not_expected_again() -> None:
    """Nine operations of this kind saved nothing: the tenth is predicted to pay, and not made."""
    fleet = make_fleet()
    fleet.run(900)
    for at in range(9):
        fleet.core.autopilot.decisions.add(
            control_pb2.Decision(
                at_ms=fleet.now_ms + at,
                outcome=control_pb2.DECISION_OUTCOME_ACTED,
                plan_epoch=1,
                before=control_pb2.PlanCost(busiest_us=200, mean_us=100),
                after=control_pb2.PlanCost(busiest_us=150, mean_us=100),
                predicted_gain=0.2,
                measured_gain=-0.02,
                measured_ms=fleet.now_ms,
            )
        )
    fleet.run(600)
    assert len(fleet.acted()) == 9
    judged = [each for each in fleet.core.autopilot.decisions if each.HasField("correction")]
    assert judged[0].outcome == control_pb2.DECISION_OUTCOME_NO_GAIN, judged[0].why
    assert judged[0].predicted_gain > fleet.core.options.drift.min_gain > judged[0].expected_gain
    assert "corrected by 9 operations" in judged[0].why


def test_the_first_operation_may_be_a_probe() -> None:
    whole, probed = (
        make_fleet(dataclasses.replace(AUTO, probe_share=share, cooldown_s=60, min_gain=0.02))
        for share in (0.0, 0.3)
    )
    for fleet in (whole, probed):
        fleet.run(1900)
    all_of_it, (probe, *rest) = whole.acted()[0], probed.acted()
    assert probe.buckets <= 0.5 * all_of_it.buckets
    assert f"a probe moves {probe.bytes:,} bytes" in probe.why
    assert "a probe: " in probe.explanation
    assert 0 < probe.predicted_gain < all_of_it.predicted_gain
    assert probe.measured_ms
    assert rest, "the rest follows once the probe's gain is known"
    assert "probe" not in rest[0].why
    assert rest[0].at_ms >= probe.measured_ms
    assert skew(probed) == pytest.approx(skew(whole), abs=0.1)


def test_a_probe_that_has_no_room_is_the_whole_plan() -> None:
    """Two devices are full and exchange two buckets: one of them alone fits nowhere."""
    plan = plan_pb2.Plan(epoch=1, tables=make_tables([1]))
    plan.topology.nodes.extend(make_nodes(2, 1000))
    for at in range(2):
        owners = [plan_pb2.Owner(node=at)]
        plan.assignments.add(table_id=0, bucket_begin=at, bucket_count=1, owners=owners)
    laid = LaidPlan.of(plan)
    for size, expected in ((600, 2), (400, 1)):
        work = {(Bucket(0, at), at): Work(1, size) for at in range(2)}
        problem = Problem(
            plan=laid.head, layout=laid.layout, workload=Workload(work=work, asking=None)
        )
        exchanged = {Bucket(0, at): (Place(1 - at, 0),) for at in range(2)}
        found = probe_of(Proposal(owners=exchanged, explanation="exchange"), problem, 0.5)
        assert len(found.owners) == expected


def test_advice_moves_nothing() -> None:
    fleet = make_fleet(dataclasses.replace(AUTO, mode="advise"))
    fleet.run(1500)
    assert fleet.acted() == []
    assert "ADVISED" in outcomes(fleet)
    assert not fleet.core.operations.records


def test_off_does_not_look() -> None:
    fleet = make_fleet(dataclasses.replace(AUTO, mode="off"))
    fleet.run(1500)
    assert outcomes(fleet) == []


def test_a_node_that_says_nothing_is_unknown_and_holds_decisions_up() -> None:
    fleet = make_fleet()
    fleet.run(900)
    fleet.silent.add("node-1")
    fleet.run(600)
    assert fleet.acted() == []
    last = fleet.core.autopilot.decisions.last
    assert last is not None
    assert last.outcome == control_pb2.DECISION_OUTCOME_UNKNOWN_LOAD
    assert "node-1" in last.why
    fleet.silent.clear()
    fleet.run(300)
    assert len(fleet.acted()) == 1


def test_a_freeze_holds_until_it_ends() -> None:
    fleet = make_fleet()
    frozen = control_pb2.DriftSettings(
        mode=control_pb2.DRIFT_MODE_AUTO,
        frozen_until_ms=fleet.now_ms + 2_000_000,
        reason="release",
    )
    fleet.core.set_drift(frozen)
    fleet.run(1900)
    assert fleet.acted() == []
    assert "FROZEN" in outcomes(fleet)
    last = fleet.core.autopilot.decisions.last
    assert last is not None
    assert "release" in last.why
    fleet.run(300)
    assert len(fleet.acted()) == 1


def test_a_freeze_window_holds_too() -> None:
    # The virtual day begins at midnight.
    window = FreezeWindow.parse("00:00-00:40")
    fleet = make_fleet(dataclasses.replace(AUTO, freeze=(window,)))
    fleet.run(2370)
    assert fleet.acted() == []
    fleet.run(200)
    assert len(fleet.acted()) == 1


def test_settings_and_decisions_outlive_the_process() -> None:
    fleet = make_fleet()
    fleet.run(1300)
    settings = control_pb2.DriftSettings(mode=control_pb2.DRIFT_MODE_ADVISE, reason="audit")
    fleet.core.set_drift(settings)
    writes = fleet.core.take()
    assert writes.settings == settings
    kept = {each.id: each for each in fleet.core.autopilot.decisions}
    again = Control(
        fleet.core.options, SavedState(decisions=kept, settings=writes.settings), fleet.now_ms
    )
    assert again.autopilot.settings == settings
    page = again.decisions(control_pb2.ListDecisionsRequest(acted_only=True), fleet.now_ms)
    assert [each.operation_id for each in page.decisions] == [
        each.operation_id for each in fleet.acted()
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (control_pb2.DriftSettings(), "mode is not said"),
        (
            control_pb2.DriftSettings(mode=control_pb2.DRIFT_MODE_AUTO, reason="x" * 257),
            "257 bytes",
        ),
        (
            control_pb2.DriftSettings(mode=control_pb2.DRIFT_MODE_AUTO, frozen_until_ms=-1),
            "frozen_until_ms",
        ),
    ],
)
def test_wrong_settings_change_nothing(settings: control_pb2.DriftSettings, says: str) -> None:
    fleet = make_fleet()
    before = fleet.core.autopilot.settings
    with pytest.raises(RefusedError, match=says):
        fleet.core.set_drift(settings)
    assert fleet.core.autopilot.settings == before
    assert not fleet.core.take().settings


def test_a_planner_that_fails_is_recorded_and_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fails = [True]

    class Moody(Greedy):
        def propose(self, problem: Problem) -> Proposal:
            if fails:
                raise RefusedError(Code.RESOURCE_EXHAUSTED, "no room for bucket 3")
            return super().propose(problem)

    monkeypatch.setattr(autopilot, "planner", lambda name: Moody())
    fleet = make_fleet()
    fleet.run(1300)
    last = fleet.core.autopilot.decisions.last
    assert last is not None
    assert last.outcome == control_pb2.DECISION_OUTCOME_PLANNER_FAILED
    assert "no room for bucket 3" in last.why
    fails.clear()
    fleet.run(300)
    assert len(fleet.acted()) == 1


def test_a_node_that_joins_takes_its_share_by_itself() -> None:
    fleet = make_fleet()
    fleet.run(300)
    fleet.nodes.append(make_nodes(NODES + 1, 1 << 20)[-1])
    wanted_NB = np.vstack([EVEN, np.zeros((1, BUCKETS))])  # it has no clients yet
    fleet.demand = lambda seconds: wanted_NB
    fleet.run(200)
    [decision] = fleet.acted()
    assert decision.planner == "join"
    assert "node_joined" in decision.triggers
    assert 2 <= fleet.held_NB()[-1].sum() <= 4  # of 16 buckets, a fifth


def test_a_node_that_was_drained_stays_empty() -> None:
    fleet = make_fleet()
    fleet.run(60)
    drain = control_pb2.StartReshardRequest(operation_id="drain", drain_node="node-3")
    fleet.core.start(drain, fleet.now_ms)
    fleet.run(900)
    assert fleet.core.operations.records["drain"].operation.ended_ms
    assert fleet.held_NB()[3].sum() == 0
    assert not [each for each in fleet.acted() if "node_joined" in each.triggers]


def test_an_operator_goes_first() -> None:
    """While an operation of an operator is at work, nothing is decided."""
    fleet = make_fleet()
    fleet.run(1000)
    request = control_pb2.StartReshardRequest(operation_id="mine", planner="greedy")
    fleet.core.start(request, fleet.now_ms)
    fleet.run(400)
    assert fleet.core.operations.records["mine"].operation.ended_ms


def test_who_undoes_its_move_is_not_overruled() -> None:
    fleet = make_fleet()
    fleet.run(1300)
    [decision] = fleet.acted()
    undo = control_pb2.StartReshardRequest(
        operation_id="undo", undo_operation=decision.operation_id, dry_run=True
    )
    fleet.core.start(undo, fleet.now_ms)
    assert fleet.core.autopilot.settings.mode == control_pb2.DRIFT_MODE_AUTO, "a dry run"
    undo.dry_run = False
    answer = fleet.core.start(undo, fleet.now_ms)
    assert "drift mode auto" in answer.explanation
    settings = fleet.core.take().settings
    assert settings is not None
    assert settings.mode == control_pb2.DRIFT_MODE_ADVISE
    assert settings.reason == f"{decision.operation_id} was undone"
    fleet.run(3000)
    assert len(fleet.acted()) == 1, outcomes(fleet)
    assert "ADVISED" in outcomes(fleet)
