"""The state of the drift monitor in facts and as a line: its mode, and why it does nothing now."""

import time
from typing import Any

from embertide._common.terminal import time_text
from embertide.server.core.drift.options import MODES
from embertide.v1 import control_pb2


def outcome_name(outcome: "control_pb2.DecisionOutcome.ValueType") -> str:
    """Return the name of an outcome as people and JSON have it."""
    name: str = control_pb2.DecisionOutcome.Name(outcome)
    return name.removeprefix("DECISION_OUTCOME_").lower()


def settings_facts(settings: control_pb2.DriftSettings) -> dict[str, Any]:
    """Return how drift is treated."""
    mode = next((name for name, each in MODES.items() if each == settings.mode), "not known")
    return {
        "mode": mode,
        "frozen_until_ms": settings.frozen_until_ms or None,
        "reason": settings.reason,
    }


def settings_line(facts: dict[str, Any]) -> str:
    """Return the same as a line."""
    text = f"mode {facts['mode']}"
    until_ms = facts["frozen_until_ms"]
    if until_ms and until_ms / 1000 > time.time():
        text += f", frozen until {time_text(until_ms)}"
    return text + (f" ({facts['reason']})" if facts["reason"] else "")


def drift_facts(status: control_pb2.DriftStatus) -> dict[str, Any]:
    """Return what a control plane says of its looks at the drift."""
    seen = status.outcome != control_pb2.DECISION_OUTCOME_UNSPECIFIED
    return {
        **settings_facts(status.settings),
        "outcome": outcome_name(status.outcome) if seen else None,
        "why": status.why,
        "looked_ms": status.looked_ms or None,
        "looks": {outcome_name(each.outcome): each.looks for each in status.counts},
    }


def drift_line(facts: dict[str, Any]) -> str:
    """Return the same as a line."""
    text = f"drift: {settings_line(facts)}; "
    if facts["outcome"] is None:
        return text + "the first look is still to come"
    looked = f" (last look at {time_text(facts['looked_ms'])})" if facts["looked_ms"] else ""
    return f"{text}{facts['outcome'].replace('_', ' ')}: {facts['why']}{looked}"
