"""The verdicts of bench.alerts on rounds that are made up."""

import pytest

from bench.alerts import CASES, Outcome, hurts, outcome, rows_of
from bench.report import Row
from embertide.server.cli.chaos.faults import Fault, kinds
from embertide.server.cli.chaos.inject import Injector
from embertide.server.cli.chaos.traffic import Asked
from k8s.monitoring.rules import ALERTS

NODE = next(case for case in CASES if case.name == "kill node-0")


def asked(*bad_s: float, until_s: int = 60, took_s: float = 0.01) -> list[Asked]:
    """A request each tenth of a second, of which those at `bad_s` failed."""
    return [
        Asked(
            node=0, sent_s=at / 10, took_s=took_s, failure="UNAVAILABLE" if at / 10 in bad_s else ""
        )
        for at in range(10 * until_s)
    ]


def judged(bad_s: tuple[float, ...], fired_s: dict[str, float], took_s: float = 0.01) -> Outcome:
    return outcome(NODE, asked(*bad_s, took_s=took_s), fired_s, (5.0, 50.0), told=True)


def test_users_are_hurt_by_one_request_in_a_hundred_of_ten_seconds() -> None:
    assert not hurts(asked())
    assert hurts(asked(12.0))
    many = [*asked(12.0), *(Asked(node=0, sent_s=12.05, took_s=0.01) for _ in range(500))]
    assert not hurts(sorted(many, key=lambda each: each.sent_s))
    degraded = Asked(node=0, sent_s=3.0, took_s=0.01, degraded=1)
    assert hurts([degraded])


def test_an_alert_is_in_time_from_the_first_bad_request() -> None:
    in_time = judged((12.0, 13.0), {"EmbertideNodeDead": 41.9})
    assert in_time.alerted_s == {"EmbertideNodeDead": 29.9}
    assert in_time.alerted
    assert not judged((12.0, 13.0), {"EmbertideNodeDead": 42.1}).alerted
    assert not judged((12.0,), {}).alerted
    unhurt = judged((), {"EmbertideNodeDead": 12.0})
    assert (unhurt.hurt, unhurt.alerted_s) == (False, {"EmbertideNodeDead": 7.0})


def test_an_alert_that_nothing_deserves_is_named() -> None:
    fired_s = {"EmbertideTrainerDown": 9.0, "EmbertideRequestsFail": 9.0, "EmbertideNodeDead": 9.0}
    assert judged((), fired_s).undeserved == ["EmbertideRequestsFail", "EmbertideTrainerDown"]
    assert judged((12.0,), fired_s).undeserved == ["EmbertideTrainerDown"]
    assert judged((), fired_s, took_s=0.2).undeserved == ["EmbertideTrainerDown"]
    quiet = outcome(None, asked(), {"EmbertideNodeDead": 9.0}, (0.0, 3600.0))
    assert quiet.undeserved == ["EmbertideNodeDead"]


def row(rows: list[Row], metric: str) -> Row:
    (found,) = [each for each in rows if each.metric == metric]
    return found


def test_rows_tell_what_was_missed() -> None:
    good = judged((12.0,), {"EmbertideNodeDead": 20.0})
    late = judged((12.0,), {"EmbertideNodeDead": 60.0, "EmbertideTrainerDown": 61.0})
    quiet = outcome(None, asked(), {}, (0.0, 3 * 3600.0))
    rows = rows_of([quiet, good, late])
    assert row(rows, "rounds").ours == 2
    assert row(rows, "alerted within 30 s").ours == 0.5
    assert row(rows, "deserved").ours == pytest.approx(2 / 3, abs=1e-6)
    assert row(rows, "hours").met
    assert row(rows, "alerts").ours == 0
    assert not row(rows, "alerted within 30 s").met
    noisy = outcome(None, asked(), {"EmbertideNodeDead": 9.0}, (0.0, 3600.0))
    assert row(rows_of([noisy, good]), "alerts").ours == 1


def test_cases_are_faults_that_chaos_knows_and_alerts_that_there_are() -> None:
    known = {(kind.name, target) for kind in kinds() for target in kind.targets}
    names = {alert.name for alert in ALERTS}
    for case in CASES:
        assert (case.kind, case.target) in known
        assert case.alerts <= names, case.name
        assert hasattr(Injector, "_" + case.kind.replace("-", "_"))
        assert Fault(at_s=0, kind=case.kind, target=case.target, for_s=1).line()
