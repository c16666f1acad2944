"""A trainer in facts and lines: whether it is alive, where it is, how far, and how it ended."""

import time
from typing import Any

from embertide._common.terminal import age_text, say, time_text
from embertide.server.core.news import trainer_state
from embertide.v1 import control_pb2

_DATES_FROM_MS = 365 * 86_400_000  # below a year after 1970 it is no clock's time


def trainer_facts(status: control_pb2.TrainerStatus) -> dict[str, Any]:
    """Return what is known of a trainer; `state` is alive, silent, ended, stopped or failed."""
    sign = status.sign
    return {
        "state": trainer_state(status),
        "age_ms": status.age_ms,
        "host": sign.host,
        "pid": sign.pid,
        "folder": sign.folder,
        "lineage": sign.lineage,
        "started_ms": sign.started_ms,
        "version": sign.version,
        "watermark_ms": sign.watermark_ms,
        "learned_ms": sign.learned_ms,
        "events": sign.events,
        "unread": sign.unread if sign.HasField("unread") else None,
        "ended_ms": sign.ended_ms or None,
        "exit_status": sign.exit_status if sign.ended_ms else None,
        "error": sign.error or None,
    }


def trainer_line(facts: dict[str, Any] | None) -> str:
    """Say whether the trainer is alive, and what to do if it is not."""
    if facts is None:
        return (
            "trainer: not known: none has run on this bus for a week, or the bus is not named or "
            "does not answer (`embertide control --bus`)"
        )
    where = f"on {facts['host']} (pid {facts['pid']}, {facts['folder']})"
    again = "start it again with the same command"
    age = age_text(facts["age_ms"])
    if facts["state"] == "alive":
        return f"trainer: alive {where}, {_progress(facts)}"
    if facts["state"] == "silent":
        return (
            f"trainer: SILENT for {age} {where}: it was killed, or cannot reach Redis; {again} if "
            f"it does not run; {_progress(facts)}"
        )
    how = f"exit status {facts['exit_status']}"
    if facts["state"] == "failed":
        return (
            f"trainer: FAILED {age} ago {where}, {how}: {facts['error']}; {again} once it is right"
        )
    word = "ended" if facts["state"] == "ended" else "was stopped"
    return f"trainer: {word} {age} ago {where}, {how}; {again} to go on; {_progress(facts)}"


def _progress(facts: dict[str, Any]) -> str:
    parts = [f"version {facts['version']:,}" if facts["version"] else "no version yet"]
    parts.append(f"{facts['events']:,} events")
    if facts["watermark_ms"] > _DATES_FROM_MS:
        parts.append(f"last event {time_text(facts['watermark_ms'])}")
    if facts["learned_ms"] and facts["state"] == "alive":
        parts.append(f"learned {age_text(time.time() * 1000 - facts['learned_ms'])} ago")
    if facts["unread"] is not None:
        parts.append(f"{facts['unread']:,} messages unread")
    return ", ".join(parts)


def show_trainer(facts: dict[str, Any] | None) -> None:
    """Print it."""
    say(trainer_line(facts))
