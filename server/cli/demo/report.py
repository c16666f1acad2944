"""The demo's report: report.json for programs, report.html for people, a page in one file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embertide.server.cli.demo.charts import charts
from embertide.server.cli.demo.figures import all_faults, groups
from embertide.server.pages.rendering import environment

_TEMPLATES = Path(__file__).parent / "templates"


def page(report: Mapping[str, Any]) -> str:
    """Return the page: it needs no server and no other file."""
    template = environment(_TEMPLATES).get_template("report.html")
    return template.render(
        groups=groups(report),
        charts=charts(report),
        faults=all_faults(report),
        moved=bool(report["reshard"]),
    )


def write_report(directory: Path, report: Mapping[str, Any]) -> None:
    """Write report.json and report.html."""
    text = json.dumps(report, indent=1) + "\n"
    (directory / "report.json").write_text(text, encoding="utf-8")
    (directory / "report.html").write_text(page(report), encoding="utf-8")
