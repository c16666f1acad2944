"""The slowest requests by a node's own page, /slow: of a minute or an hour, and how they waited."""

import functools
import json
import time
from typing import Any

from embertide._common.terminal import Table, age_text, say, show_table
from embertide.server.cli.node_page import read_page

_STAGES = ("parse", "queue", "peers", "lookup", "net", "send")


def slow_requests(text: str, span: str) -> list[dict[str, Any]]:
    """Return the requests of a span by a node's page, slowest first.

    Raises:
        ValueError: It is no such page.
    """
    try:
        said = json.loads(text)
        return [
            {
                "ended_ms": int(each["ended_ms"]),
                "model": str(each["model"]),
                "samples": int(each.get("samples", 0)),
                "version": int(each.get("version", 0)),
                "trace": str(each.get("trace", "")),
                "us": float(each["us"]),
                "stages_us": {
                    stage: float(us) for stage, us in each["stages_us"].items() if stage in _STAGES
                },
            }
            for each in said[span]
        ]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is no page of slow requests ({type(error).__name__})") from error


def read(url: str, span: str) -> list[dict[str, Any]]:
    """Return the slowest requests of a node by its own page.

    Raises:
        ProcessError: There is no such page.
    """
    return read_page(url, "/slow", "slow requests", functools.partial(slow_requests, span=span))


def show(found: list[dict[str, Any]], span: str) -> None:
    """Print them as a table."""
    if not found:
        say(f"no request was answered in the last {span}")
        return
    table = Table("model", "ended", "ms", *_STAGES, "samples", "version", names=("model",))
    now_ms = time.time() * 1000
    for each in found:
        stages = (each["stages_us"].get(stage) for stage in _STAGES)
        table.add_row(
            each["model"],
            f"{age_text(max(0.0, now_ms - each['ended_ms']))} ago",
            f"{each['us'] / 1000:.2f}",
            *("-" if us is None else f"{us / 1000:.2f}" for us in stages),
            f"{each['samples']:,}" if each["samples"] else "-",
            str(each["version"] or "-"),
        )
    show_table(table)
    say("ms, from the last byte of the request; what no stage has is Triton's own work")
