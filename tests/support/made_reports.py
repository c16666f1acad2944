"""Reports of demos: one that was recorded, and what may come otherwise."""

import copy
import json
from pathlib import Path
from typing import Any

_RECORDED = Path(__file__).resolve().parent.parent / "golden" / "demo" / "report.json"


def recorded() -> dict[str, Any]:
    """The report of `embertide demo --events 400000`, with a third of its samples."""
    report: dict[str, Any] = json.loads(_RECORDED.read_text(encoding="utf-8"))
    return report


def with_silent_hours(report: dict[str, Any], *hours: int) -> dict[str, Any]:
    """The same report, with hours in which nothing was asked."""
    silent = copy.deepcopy(report)
    for name in ("latency_by_hour", "served_auc_by_hour", "frozen_auc_by_hour"):
        for hour in hours:
            silent[name].pop(str(hour), None)
    return silent


def unmoved(report: dict[str, Any]) -> dict[str, Any]:
    """A report of so short a stream that no bucket moved and no copy was made."""
    nothing: dict[str, Any] = {"frozen_auc": None, "frozen_auc_by_hour": {}, "freezing_hour": {}}
    samples = [each | {"reshard": "waiting"} for each in report["samples"]]
    return report | nothing | {"reshard": None, "samples": samples}


def planned(
    report: dict[str, Any], why: str = "a step took 40 ms, 20 without it"
) -> dict[str, Any]:
    """A report of two ranks that looked for a plan."""
    plan = {
        **{"stage": "refused", "searched": 1200, "why": why, "profile_s": 3.0, "stop_s": 0.0},
        **{"default_s": 0.02, "predicted_s": 0.015, "measured_s": 0.04},
    }
    return report | {"ranks": 2, "plan": plan}
