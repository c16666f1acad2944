"""Deciding about drift, rule by rule: functions of numbers alone."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from embertide.server.core.drift.judge import Case, judge
from embertide.server.core.drift.options import DriftOptions, FreezeWindow
from embertide.server.core.drift.records import MEASURED_KEPT, Decisions
from embertide.server.core.drift.seasons import DAY_MS, Seasons
from embertide.server.core.drift.signals import (
    THRESHOLDS,
    Signals,
    distance,
    fired,
    hot_set,
    mix_of,
    overlap,
)
from embertide.server.core.errors import RefusedError
from embertide.server.core.state import DECISIONS_KEPT
from embertide.v1 import control_pb2, node_pb2

OPTIONS = DriftOptions(
    mode="auto", horizon_s=1000, cooldown_s=60, min_gain=0.1, operations_per_day=3
)
# Saves 1,000 us a second for 1,000 s less the 10 s of the move; the move costs 100,000 us.
CASE = Case(
    mode=control_pb2.DRIFT_MODE_AUTO,
    gain=0.2,
    saved_us=1000,
    bytes=1_000_000,
    changes=True,
    bytes_per_s=100_000,
    us_per_byte=0.1,
    agreed=2,
)
MIN_MS = 60_000


def outcome(options: DriftOptions = OPTIONS, **changed: Any) -> str:
    verdict = judge(dataclasses.replace(CASE, **changed), options)
    return control_pb2.DecisionOutcome.Name(verdict.outcome).removeprefix("DECISION_OUTCOME_")


def test_what_pays_is_done() -> None:
    verdict = judge(CASE, OPTIONS)
    assert verdict.outcome == control_pb2.DECISION_OUTCOME_ACTED
    assert verdict.move_s == pytest.approx(10)
    assert verdict.cost_us == pytest.approx(100_000)
    assert verdict.horizon_gain_us == pytest.approx(990_000)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"changes": False}, "NO_GAIN"),
        ({"gain": 0.09}, "NO_GAIN"),
        ({"us_per_byte": 1.0}, "TOO_COSTLY"),
        ({"bytes_per_s": 1000}, "TOO_COSTLY"),  # it would last as long as the horizon
        ({"trusted": False}, "UNSURE"),
        ({"agreed": 1}, "UNCONFIRMED"),
        ({"mode": control_pb2.DRIFT_MODE_ADVISE}, "ADVISED"),
        ({"frozen": "frozen"}, "FROZEN"),
        ({"quiet_ms": 59_999}, "COOLING_DOWN"),
        ({"quiet_ms": 60_000}, "ACTED"),
        ({"measuring": True}, "COOLING_DOWN"),
        ({"acted": 3}, "OVER_BUDGET"),
        ({"must": "a node has joined", "gain": 0.0, "saved_us": -1.0, "agreed": 0}, "ACTED"),
        ({"must": "a node has joined", "frozen": "frozen"}, "FROZEN"),
    ],
)
def test_each_rule_forbids_alone(changed: dict[str, Any], expected: str) -> None:
    assert outcome(**changed) == expected


def test_the_bytes_of_a_day_are_bounded() -> None:
    bounded = dataclasses.replace(OPTIONS, bytes_per_day=3_000_000)
    assert outcome(bounded, moved_bytes=2_000_000) == "ACTED"
    assert outcome(bounded, moved_bytes=2_000_001) == "OVER_BUDGET"


def test_a_verdict_names_its_numbers() -> None:
    verdict = judge(dataclasses.replace(CASE, gain=0.05), OPTIONS)
    assert verdict.why == "predicted gain 5.0%, less than the 10.0% that a plan must save"


def test_a_corrected_gain_names_both_and_by_how_many_operations() -> None:
    corrected = dataclasses.replace(CASE, gain=0.05, predicted=0.2, learned_from=7)
    assert judge(corrected, OPTIONS).why == (
        "expected gain 5.0% (predicted 20.0%, corrected by 7 operations), less than the 10.0% that "
        "a plan must save"
    )


def test_freeze_windows_may_span_midnight() -> None:
    night = FreezeWindow.parse("22:00-06:00")
    assert [night.covers(hour * 60 * MIN_MS) for hour in (21, 22, 23, 0, 5, 6)] == [
        False, True, True, True, True, False,
    ]  # fmt: skip
    assert FreezeWindow.parse("08:30-09:00").covers((8 * 60 + 45) * MIN_MS)
    assert str(night) == "22:00-06:00"


@pytest.mark.parametrize("text", ["22-06", "24:00-01:00", "10:00-10:00", ""])
def test_wrong_freeze_windows_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="freeze window"):
        FreezeWindow.parse(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"half_life_s": 7},
        {"min_gain": 1.0},
        {"interval_s": 0},
        {"confirmations": 0},
        {"mode": "on"},
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=name):
        DriftOptions(**wrong)


def test_a_detector_fires_once_for_a_change_that_stays() -> None:
    calm = Signals(skew=1.1, remote_share=0.5)
    assert fired(calm, None) == ("first_look",)
    assert fired(calm, calm) == ()
    noisy = calm._replace(skew=1.1 + 0.9 * THRESHOLDS.skew)
    assert fired(noisy, calm) == ()
    moved = calm._replace(skew=1.5, remote_share=0.1)
    assert fired(moved, calm) == ("skew", "remote_share")
    assert fired(moved, moved) == ()
    assert fired(calm._replace(mix_change=0.2), calm) == ("mix_change",)


def test_an_exchange_between_nodes_changes_the_mix() -> None:
    wanted_NB = np.array([[8.0, 8.0, 1.0], [0.0, 0.0, 17.0]])  # two tables, of two buckets and one
    mix_NT = mix_of(wanted_NB, np.array([0, 2]))
    assert mix_NT.ravel().tolist() == pytest.approx([16 / 34, 1 / 34, 0, 17 / 34])
    assert distance(mix_NT, mix_NT[::-1]) == pytest.approx(32 / 34)
    assert distance(2 * mix_NT / 2, mix_NT) == 0
    assert distance(mix_NT, None) == 0
    assert distance(mix_NT, mix_NT[:1]) == 0


def load(*reads: tuple[int, int]) -> node_pb2.NodeServiceGetLoadResponse:
    answer = node_pb2.NodeServiceGetLoadResponse()
    for key, count in reads:
        answer.hot_keys.add(table_id=0, key=key, reads=count)
    return answer


def test_the_hot_set_is_that_of_all_nodes() -> None:
    # 0 to 99 by one node, 100 to 199 twice as hot by two: those are the hundred hottest.
    loads = [
        load(*((key, 3) for key in range(100))),
        load(*((key, 2) for key in range(100, 200))),
        load(*((key, 2) for key in range(100, 200))),
    ]
    hot = hot_set(loads)
    assert hot == {(0, key) for key in range(100, 200)}
    assert overlap(hot, None) == 1.0
    assert overlap(hot, hot_set(loads[:1])) == 0.0
    assert overlap(hot, hot_set([load(*((key, 1) for key in range(150, 250)))])) == 0.5


def test_where_reads_are_even_no_key_is_hot() -> None:
    even = load(*((key, 2) for key in range(100)))
    even.buckets.add(reads=1_000_000)
    assert hot_set([even]) == frozenset()
    assert overlap(hot_set([even]), hot_set([load((1, 5))])) == 1.0


def test_seasons_know_the_day_before() -> None:
    seasons = Seasons()
    hour_ms = DAY_MS // 24
    for hour in range(24):
        seasons.take(hour * hour_ms, {"a": 100.0 if hour < 12 else 300.0, "b": 100.0})
    today_ms = DAY_MS + 11 * hour_ms
    assert seasons.error(today_ms, {"a": 100.0, "b": 100.0}) == pytest.approx(0)
    assert seasons.error(today_ms, {"a": 300.0, "b": 100.0}) == pytest.approx(0.25)
    growth = seasons.growth(today_ms, hour_ms, ["a", "b", "c"])
    assert growth.tolist() == pytest.approx([3, 1, 1])


def test_without_a_day_before_seasons_say_nothing() -> None:
    seasons = Seasons()
    seasons.take(0, {"a": 1.0})
    seasons.take(5 * DAY_MS, {"a": 9.0})
    assert seasons.error(5 * DAY_MS, {"a": 9.0}) == 0
    assert seasons.growth(5 * DAY_MS, DAY_MS // 24, ["a"]).tolist() == [1]


def test_decisions_that_repeat_are_counted_in_one() -> None:
    decisions = Decisions({})

    def add(kind: str, at_ms: int, epoch: int = 1) -> control_pb2.Decision:
        value = control_pb2.DecisionOutcome.Value(f"DECISION_OUTCOME_{kind}")
        return decisions.add(control_pb2.Decision(at_ms=at_ms, outcome=value, plan_epoch=epoch))

    add("QUIET", 10)
    add("QUIET", 20)
    third = add("QUIET", 30)
    assert (third.id, third.looks, third.first_ms, third.at_ms) == ("look-1", 3, 10, 30)
    assert add("ACTED", 40).id == "look-2"
    assert add("ACTED", 50).id == "look-3"  # what acted is kept on its own
    assert add("QUIET", 60, epoch=2).id == "look-4"
    assert [each.id for each in decisions] == ["look-4", "look-3", "look-2", "look-1"]
    assert set(decisions.changed) == {"look-1", "look-2", "look-3", "look-4"}
    assert [each.id for each in Decisions(dict(decisions.changed))] == [  # type: ignore[arg-type]
        "look-4", "look-3", "look-2", "look-1",
    ]  # fmt: skip


def test_decisions_are_bounded_and_come_by_pages() -> None:
    decisions = Decisions({})
    for at in range(DECISIONS_KEPT + 5):
        decisions.add(
            control_pb2.Decision(at_ms=at + 1, outcome=control_pb2.DECISION_OUTCOME_ACTED)
        )
    assert len(list(decisions)) == DECISIONS_KEPT
    assert decisions.changed["look-1"] is None
    settings = control_pb2.DriftSettings(mode=control_pb2.DRIFT_MODE_AUTO)
    request = control_pb2.ListDecisionsRequest(page_size=400)
    seen = []
    while True:
        page = decisions.page(request, settings)
        seen += [each.id for each in page.decisions]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert seen == [f"look-{n}" for n in range(DECISIONS_KEPT + 5, 5, -1)]
    with pytest.raises(RefusedError, match="page_token"):
        decisions.page(control_pb2.ListDecisionsRequest(page_token="x"), settings)


def test_measured_operations_stay_while_looks_come_and_go() -> None:
    decisions = Decisions({})
    acted, quiet = control_pb2.DECISION_OUTCOME_ACTED, control_pb2.DECISION_OUTCOME_QUIET
    for at in range(MEASURED_KEPT + 5):
        decisions.add(control_pb2.Decision(at_ms=at + 1, outcome=acted, measured_ms=at + 2))
    for at in range(2 * DECISIONS_KEPT):
        decisions.add(control_pb2.Decision(at_ms=at + 1, outcome=quiet, plan_epoch=at + 1))
    kept = [each.id for each in decisions if each.measured_ms]
    assert kept == [f"look-{at}" for at in range(MEASURED_KEPT + 5, 5, -1)]
    assert len(list(decisions)) == DECISIONS_KEPT
    assert sum(each is None for each in decisions.changed.values()) == (
        MEASURED_KEPT + 5 + 2 * DECISIONS_KEPT - DECISIONS_KEPT
    )
