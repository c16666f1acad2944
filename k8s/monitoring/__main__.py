"""Write rules, dashboards and the page of alerts: `python -m k8s.monitoring`."""

import re
from pathlib import Path
from typing import Any

import yaml

from k8s.monitoring.grafana import dashboard_json
from k8s.monitoring.page import page
from k8s.monitoring.panels import BOARDS
from k8s.monitoring.rules import GROUPS, RECORDINGS, Alert

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = "k8s/monitoring/embertide.rules.yml"
COMPONENT = "k8s/components/prometheus"
_EVERY = "5s"  # between looks at the rules, whatever Prometheus does with others
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
_WRITTEN = "# Written by `make monitoring`; k8s/monitoring/rules.py is what to change.\n"


class _Dumper(yaml.SafeDumper):
    """Writes queries of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": _LINK.sub(r"\1", alert.means),
            "runbook": f"docs/alerts.md#{alert.anchor}",
        },
    }


def rules() -> dict[str, Any]:
    """Return the rules as Prometheus reads them."""
    recorded = [{"record": each.record, "expr": each.query} for each in RECORDINGS]
    # Rules of a group are computed in order: alerts see what was recorded just now.
    groups = [
        {
            "name": group.name,
            "interval": _EVERY,
            "rules": [
                *(recorded if group is GROUPS[0] else []),
                *(_alert(alert) for alert in group.alerts),
            ],
        }
        for group in GROUPS
    ]
    return {"groups": groups}


def files() -> dict[str, str]:
    """Return all that is written, by its path."""

    def dumped(what: dict[str, Any]) -> str:
        return _WRITTEN + yaml.dump(what, Dumper=_Dumper, sort_keys=False, width=120)

    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "embertide"},
        "spec": rules(),
    }
    boards = {f"{COMPONENT}/dashboards/{board.uid}.json": dashboard_json(board) for board in BOARDS}
    return {
        RULES: dumped(rules()),
        f"{COMPONENT}/rules.yaml": dumped(resource),
        "docs/alerts.md": page(),
        **boards,
    }


if __name__ == "__main__":
    for name, text in files().items():
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_text(text)
