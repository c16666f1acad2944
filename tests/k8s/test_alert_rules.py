"""Each alert in a case that it is for, and in a near one that it is not for.

`promtool` computes the rules over series that are made here, a sample each five seconds for twenty
minutes.
"""

import subprocess
from pathlib import Path

import pytest
import yaml

from bench.prometheus import RULES, program
from k8s.monitoring.rules import ALERTS

pytestmark = pytest.mark.long

_SAMPLES = 240
_BEGIN = 120  # sample of what happens once
Series = dict[str, str]


def gauge(name: str, value: float) -> Series:
    return {name: f"{value}x{_SAMPLES}"}


def counter(name: str, by: float) -> Series:
    """One that grows with every sample."""
    return {name: f"0+{by}x{_SAMPLES}"}


def once(name: str) -> Series:
    """A counter that counts one thing."""
    return {name: f"0x{_BEGIN} 1x{_SAMPLES - _BEGIN}"}


def ends(name: str) -> Series:
    """A gauge of 1 whose process dies."""
    return {name: f"1x{_BEGIN} stale"}


def dips(name: str, samples: int) -> Series:
    """A gauge of 1 that is 0 for some samples."""
    return {name: f"1x{_BEGIN} 0x{samples - 1} 1x{_SAMPLES - _BEGIN - samples}"}


def calls(**by_code: float) -> Series:
    name = "embertide_front_calls_total"
    return {
        f'{name}{{method="ModelInfer", code="{code}"}}': f"0+{count}x{_SAMPLES}"
        for code, count in by_code.items()
    }


def burst() -> Series:
    """All inferences of five seconds fail, and none before or after."""
    failed = 'embertide_front_calls_total{method="ModelInfer", code="UNAVAILABLE"}'
    return calls(OK=100) | {failed: f"0x{_BEGIN} 100x{_SAMPLES - _BEGIN}"}


def refused(reason: str) -> Series:
    """A node without our front end refuses three of a hundred."""
    return (
        counter("nv_inference_request_success", 97)
        | counter('nv_inference_request_failure{reason="BACKEND"}', 3)
        | counter('nv_inference_request_failure{reason="REJECTED"}', 0)
        | counter(f'embertide_requests_refused_total{{reason="{reason}"}}', 3)
    )


def degraded(keys: float) -> Series:
    asked = counter('embertide_lookup_keys_total{model="m", source="ddr"}', 1000)
    return asked | counter('embertide_degraded_keys_total{model="m", reason="dead"}', keys)


def slow(requests: float) -> Series:
    """A hundred requests: so many take between 50 and 200 ms; the others are faster."""
    name = "embertide_front_request_us_bucket"
    bounds = {"50000": 100 - requests, "200000": 100, "+Inf": 100}
    return {f'{name}{{le="{le}"}}': f"0+{count}x{_SAMPLES}" for le, count in bounds.items()}


def behind(unread: float) -> Series:
    """A trainer that learns 100 events a second."""
    lag = gauge('embertide_trainer_source_lag{input="i"}', unread)
    return lag | counter("embertide_trainer_events_total", 500)


def rejects(events: float) -> Series:
    name = 'embertide_trainer_rejected_events_total{reason="label"}'
    return counter("embertide_trainer_events_total", 500) | counter(name, events)


def stale(seconds: float, trainer: str) -> Series:
    age = gauge('embertide_version_age_ms{model="triton"}', seconds * 1000)
    return age | gauge(f'embertide_control_trainer{{model="m", state="{trainer}"}}', 1)


def drive(free: float) -> Series:
    folder = '{folder="/ssd"}'
    size = gauge("embertide_drive_bytes" + folder, 1000)
    return size | gauge("embertide_drive_free_bytes" + folder, free)


def trainer_is(state: str) -> Series:
    return gauge(f'embertide_control_trainer{{model="m", state="{state}"}}', 1)


M = '{model="m"}'
PEERS = gauge('embertide_peers_alive{model="triton"}', 1)
REFUSED_VERSIONS = 'embertide_bus_events_total{model="m", event="refused"}'
GAPS = 'embertide_bus_events_total{model="m", event="gap"}'
WITHDRAWN = 'embertide_versions_withdrawn_total{{model="m", reason="{}"}}'
# By alert: series by which it fires, and series by which it does not.
CASES: list[tuple[str, Series, Series]] = [
    ("EmbertideRequestsFail", calls(OK=97, UNAVAILABLE=3), calls(OK=97, INVALID_ARGUMENT=3)),
    ("EmbertideRequestsFail", burst(), calls(OK=1000, UNAVAILABLE=5)),
    ("EmbertideRequestsFail", refused("degraded"), refused("shape")),
    ("EmbertideAnswersDegraded", degraded(20), degraded(5)),
    ("EmbertideAnswersSlow", slow(2), slow(0.5)),
    (
        "EmbertideBucketsUnowned",
        gauge("embertide_control_buckets_unowned" + M, 3),
        gauge("embertide_control_buckets_unowned" + M, 0),
    ),
    (
        "EmbertideNodeDead",
        gauge('embertide_control_nodes{model="m", state="dead"}', 1),
        gauge('embertide_control_nodes{model="m", state="loading"}', 1)
        | gauge('embertide_control_nodes{model="m", state="dead"}', 0),
    ),
    # Nodes alone have no control plane to miss.
    ("EmbertideControlPlaneAway", PEERS | ends("embertide_control_leads" + M), gauge("up", 1)),
    # One stands by, and the other leads.
    (
        "EmbertideControlPlaneAway",
        PEERS | gauge("embertide_control_leads" + M, 0),
        PEERS
        | gauge('embertide_control_leads{model="m", instance="a"}', 0)
        | gauge('embertide_control_leads{model="m", instance="b"}', 1),
    ),
    (
        "EmbertidePlansNotFollowed",
        dips("embertide_control_plans_followed" + M, 4),
        dips("embertide_control_plans_followed" + M, 1),
    ),
    (
        "EmbertideTaskFails",
        gauge('embertide_task_failing{task="follower"}', 1),
        gauge('embertide_task_failing{task="follower"}', 0)
        | gauge('embertide_control_task_ok{what="control-tick"}', 1),
    ),
    (
        "EmbertideTaskFails",
        dips('embertide_trainer_background_ok{task="upload"}', 20),
        dips('embertide_trainer_background_ok{task="upload"}', 6),
    ),
    (
        "EmbertideNotScraped",
        dips('up{job="embertide-node"}', 20),
        gauge('up{job="embertide-train"}', 0),  # a trainer may come to its end
    ),
    ("EmbertideTrainerDown", trainer_is("silent"), trainer_is("stopped")),
    ("EmbertideTrainerDown", trainer_is("failed"), trainer_is("ended")),
    ("EmbertideTrainerLags", behind(40_000), behind(20_000)),
    ("EmbertideEventsRejected", rejects(100), rejects(20)),
    ("EmbertideVersionsStale", stale(900, "alive"), stale(300, "alive")),
    ("EmbertideVersionsStale", stale(601, "alive"), stale(10_000, "ended")),
    ("EmbertideNodeBehind", dips("embertide_ready" + M, 6), dips("embertide_ready" + M, 2)),
    (
        "EmbertideBusAway",
        dips("embertide_bus_connected" + M, 5),
        dips("embertide_bus_connected" + M, 1),
    ),
    ("EmbertideVersionsRefused", once(REFUSED_VERSIONS), once(GAPS)),
    (
        "EmbertideRowsRefused",
        once("embertide_rows_refused_total" + M),
        counter("embertide_rows_refused_total" + M, 0),
    ),
    (
        "EmbertideVersionsWithdrawn",
        once(WITHDRAWN.format("auc")),
        once(WITHDRAWN.format("rollback")),
    ),
    ("EmbertideDriveNearlyFull", drive(50), drive(150)),
]


def firing(alert: str) -> str:
    """For how many samples an alert fired."""
    fired = f'count_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[20m])'
    return f"sum({fired}) > bool 0"


def promtool(cases: list[tuple[str, Series, Series]], folder: Path) -> str:
    """Return promtool's complaints about cases; empty: all is as it should be."""

    def case(alert: str, series: Series, *, fires: bool) -> dict[str, object]:
        expected = [{"labels": "{}", "value": 1}] if fires else []
        return {
            "interval": "5s",
            "input_series": [{"series": name, "values": at} for name, at in series.items()],
            "promql_expr_test": [
                {"expr": firing(alert), "eval_time": "20m", "exp_samples": expected}
            ],
        }

    tests = [case(alert, series, fires=True) for alert, series, _ in cases]
    tests += [case(alert, series, fires=False) for alert, _, series in cases]
    file = folder / "tests.yml"
    file.write_text(
        yaml.safe_dump(
            {"rule_files": [str(RULES)], "evaluation_interval": "5s", "tests": tests},
            sort_keys=False,
        )
    )
    command = [str(program("promtool")), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_prometheus_takes_the_rules() -> None:
    command = [str(program("promtool")), "check", "rules", "--lint-fatal", str(RULES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_alert_has_a_case() -> None:
    assert list(dict.fromkeys(alert for alert, _, _ in CASES)) == [each.name for each in ALERTS]


def test_alerts_fire_in_their_cases_alone(tmp_path: Path) -> None:
    assert promtool(CASES, tmp_path) == ""


def test_a_case_that_is_wrong_is_noticed(tmp_path: Path) -> None:
    alert, fires, quiet = CASES[0]
    said = promtool([(alert, quiet, fires)], tmp_path)
    assert said.count("FAILED") == 1
    assert said.count("exp:") == said.count("got:") == 2
