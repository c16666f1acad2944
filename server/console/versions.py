"""Versions as pages show them: their quality, what was decided on them, and how to go back."""

from typing import Any

from embertide.server.cli.versions import rollback_line, version_facts
from embertide.server.console.source import Reading, Source

SHOWN_MAX = 100


def versions(reading: Reading, query: dict[str, str], source: Source) -> dict[str, Any]:
    """Return the newest versions, and where a rollback would be run."""
    facts: Any = reading.facts
    trainer = facts["trainer"]
    found = [version_facts(each) for each in reading.versions.versions]
    wanted = query.get("to", "")
    return {
        "versions": found[:SHOWN_MAX],
        "left_out": max(len(found) - SHOWN_MAX, 0),
        "promoted": reading.versions.promoted,
        "newest": max((each["number"] for each in found), default=0),
        "rollback": rollback_line(reading.versions),
        "wanted": wanted if wanted.isdecimal() else "",
        "trainer_lives": bool(trainer) and trainer["state"] == "alive",
        "folder": trainer["folder"] if trainer else "PUBLICATION",
        "host": trainer["host"] if trainer else "",
        "auc_least": min((each["auc"] for each in found if each["auc"] is not None), default=0.0),
    }
