"""The files that k8s/monitoring describes: as written, by names that exist, explained once.

That Prometheus gets data for all of it is seen by tests/e2e/test_monitoring.py.
"""

import json
import re

import yaml
from manifests import ROOT, of_kind, with_components

from k8s.monitoring.__main__ import files
from k8s.monitoring.panels import BOARDS
from k8s.monitoring.rules import ALERTS, RECORDINGS

_METRIC = re.compile(r"\bembertide_\w+")
_PAGES = ("serving", "control", "training", "guard")
_SHORTENED = re.compile(r"`(_\w+)`")  # of metrics of one line of a table, after the first


def documented() -> set[str]:
    """The metrics that the pages list."""
    found = set[str]()
    for name in _PAGES:
        for line in (ROOT / "docs" / f"{name}.md").read_text().splitlines():
            names = _METRIC.findall(line)
            prefix = "embertide_control" if name == "control" else ""
            found |= {*names, *(prefix + each for each in _SHORTENED.findall(line))}
    return found


def queries() -> dict[str, str]:
    """Every query, by what it is of."""
    of_panels = {
        f"{board.title}: {panel.title}": query
        for board in BOARDS
        for panel in board.panels
        for query, _ in panel.queries
    }
    of_rules = {each.record: each.query for each in RECORDINGS}
    return of_panels | of_rules | {each.name: each.query for each in ALERTS}


def test_what_is_written_is_what_is_described() -> None:
    for name, text in files().items():
        assert (ROOT / name).read_text() == text, f"{name}: run `make monitoring`"


def test_each_metric_is_one_that_the_pages_list() -> None:
    known = documented() | {"embertide_trainer_quality_FIGURE"}
    assert "embertide_control_task_failures_total" in known  # shortened there
    recorded = {each.record.split(":")[1] for each in RECORDINGS}
    for of, query in queries().items():
        for metric in _METRIC.findall(re.sub(r'"[^"]*"', "", query)):
            name = metric.removesuffix("_bucket")
            figure = re.sub(r"(trainer_quality_)\w+", r"\1FIGURE", name)
            assert name in known | recorded or figure in known, f"{of}: {metric}"


def test_an_alert_sends_to_panels_that_are_there() -> None:
    titles = {panel.title for board in BOARDS for panel in board.panels}
    titles |= {board.title for board in BOARDS} | {"Status, Targets"}  # of Prometheus
    for alert in ALERTS:
        named = re.findall(r"\*([^*]+)\*", " ".join((*alert.look, *alert.act)))
        assert set(named) <= titles, alert.name


def test_titles_and_names_are_used_once() -> None:
    for board in BOARDS:
        titles = [panel.title for panel in board.panels]
        assert len(set(titles)) == len(titles), board.title
    names = [each.name for each in ALERTS]
    assert len(set(names)) == len(names)


def test_the_component_brings_rules_and_dashboards() -> None:
    resources = with_components("prometheus")
    (rule,) = of_kind(resources, "PrometheusRule").values()
    written = yaml.safe_load(files()["k8s/monitoring/embertide.rules.yml"])
    assert rule["spec"] == written
    boards = of_kind(resources, "ConfigMap")["embertide-dashboards"]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    shown = {json.loads(text)["uid"] for text in boards["data"].values()}
    assert shown == {board.uid for board in BOARDS}
