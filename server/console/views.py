"""The contents of pages, from a reading: the figures of `embertide status`, and no others."""

import collections
from collections.abc import Iterator
from typing import Any

from embertide._common.terminal import age_text
from embertide.server.cli.control_client import enum_name
from embertide.server.cli.drift_view import drift_facts, drift_line, outcome_name
from embertide.server.cli.fleet_view import faults
from embertide.server.cli.gains import corrections_line, gain_facts, model_line
from embertide.server.cli.timeline import KINDS
from embertide.server.cli.trainer_view import trainer_line
from embertide.server.console.serving import latency, storage
from embertide.server.console.source import Reading, Source
from embertide.server.console.timeline import SHOWN_MAX, rows_like, rows_of
from embertide.server.console.versions import versions
from embertide.server.core.plan.layout import budget_bytes
from embertide.server.pages.rendering import Tile
from embertide.v1 import control_pb2

PAGE = 100
"""Rows of a page of nodes."""
_DEVICES_SHOWN = 100
_TABLES_OFFERED = 500
_ENDED = ("SUCCEEDED", "FAILED", "ABORTED")
_DATES_FROM_MS = 365 * 86_400_000  # below a year after 1970 it is no clock's time


def health(reading: Reading, query: dict[str, str], source: Source) -> dict[str, Any]:
    """Return what is wrong, and the figures to look at first."""
    facts: Any = reading.facts
    wrong = faults(facts)
    return {
        "faults": wrong,
        "tiles": list(_tiles(facts)),
        "trainer": trainer_line(facts["trainer"]).removeprefix("trainer: "),
        "running": [each for each in operation_rows(reading) if not each["ended"]],
        "latest": rows_of(reading)[:8],
    }


def _tiles(facts: Any) -> Iterator[Tile]:
    states = collections.Counter(node["state"] for node in facts["nodes"])
    all_nodes = len(facts["nodes"])
    live = all_nodes - states["dead"]
    others = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield Tile(
        "Live nodes",
        f"{live:,} of {all_nodes:,}",
        others or "none has registered",
        "bad" if states["dead"] else "good" if all_nodes else "warn",
    )
    unowned = facts["unowned_buckets"]
    yield Tile(
        "Buckets without a live owner",
        f"{unowned:,}",
        "their keys read as defaults" if unowned else "every key can be answered",
        "bad" if unowned else "good",
    )
    behind = facts["versions_behind"]
    known = facts["newest_committed"]
    yield Tile(
        "Versions behind",
        f"{behind:,}",
        f"newest commit is {known:,}" if known else "newest commit not known",
        "warn" if behind > 10 else "good",
    )
    ages = [node["staleness_ms"] for node in facts["nodes"] if node["staleness_ms"] is not None]
    yield Tile(
        "Staleness, worst node",
        age_text(max(ages)) if ages else "-",
        "since the commit of its newest version",
        "plain",
    )
    trainer = facts["trainer"]
    state = trainer["state"] if trainer else "not known"
    tone = {"alive": "good", "silent": "bad", "failed": "bad"}.get(state, "warn")
    note = f"{trainer['events']:,} events" if trainer else "no sign of one on the bus"
    yield Tile("Trainer", state, note, tone)
    yield Tile(
        "Plan",
        f"{facts['plan_epoch']:,}" if facts["plan_epoch"] else "none yet",
        "plan epoch",
        "plain" if facts["plan_epoch"] else "warn",
    )
    skews = facts["skew"].values()
    yield Tile(
        "Load skew",
        f"{max(skews):.2f}" if skews else "-",
        "max/mean of reads, worst group",
        "warn" if skews and max(skews) > 1.5 else "plain",
    )


def freshness(reading: Reading, query: dict[str, str], source: Source) -> dict[str, Any]:
    """Return the way of an event to the answers, and each node's age."""
    facts: Any = reading.facts
    living = [node for node in facts["nodes"] if node["staleness_ms"] is not None]
    worst = sorted(living, key=lambda node: -node["staleness_ms"])
    return {
        "trainer": facts["trainer"],
        "trainer_line": trainer_line(facts["trainer"]).removeprefix("trainer: "),
        "steps": list(_steps(facts)),
        "nodes": worst[:PAGE],
        "dead": [node for node in facts["nodes"] if node["state"] == "dead"][:PAGE],
        "left_out": max(len(worst) - PAGE, 0),
        "longest_ms": max((node["staleness_ms"] for node in living), default=0) or 1,
    }


def _steps(facts: Any) -> Iterator[dict[str, Any]]:
    trainer, now_ms = facts["trainer"], facts["at_ms"]
    event_ms = trainer["watermark_ms"] if trainer else 0
    dated = event_ms > _DATES_FROM_MS
    yield {
        "step": "Event",
        "what": "newest event that the trainer has learned from",
        "at_ms": event_ms if dated else None,
        "figure": None if dated or not trainer else "the stream's time is no date",
    }
    yield {
        "step": "Learned",
        "what": "the trainer learned from it",
        "at_ms": trainer["learned_ms"] or None if trainer else None,
        "figure": f"version {trainer['version']:,}" if trainer and trainer["version"] else None,
    }
    committed = facts["newest_committed"]
    yield {
        "step": "Published",
        "what": "newest version on the bus",
        "at_ms": None,
        "figure": f"version {committed:,}" if committed else None,
    }
    ages = [node["staleness_ms"] for node in facts["nodes"] if node["staleness_ms"] is not None]
    versions = [node["versions"][1] for node in facts["nodes"] if node["versions"][1]]
    yield {
        "step": "Visible",
        "what": "oldest version that a live node answers with",
        "at_ms": now_ms - max(ages) if ages else None,
        "figure": f"version {min(versions):,}" if versions else None,
    }


def timeline(reading: Reading, query: dict[str, str], source: Source) -> dict[str, Any]:
    """Return what happened, of a kind and with a text if they are asked for."""
    kind, text = query.get("kind", ""), query.get("q", "")[:100]
    found = rows_like(reading, kind, text)
    return {
        "events": found[:SHOWN_MAX],
        "count": len(found),
        "all": len(reading.events),
        "kinds": list(KINDS),
        "kind": kind if kind in KINDS else "",
        "text": text,
    }


def nodes(reading: Reading, query: dict[str, str], source: Source) -> dict[str, Any]:
    """Return a page of nodes, with what each holds and may hold."""
    facts: Any = reading.facts
    text, state = query.get("q", "")[:100], query.get("state", "")
    held: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for each in facts["devices"]:
        sums = held[each["device"].rpartition("/")[0]]
        for at, name in enumerate(("buckets", "reads", "bytes")):
            sums[at] += each[name]
    failing = {each.node.name: list(each.failing) for each in reading.answers.status.nodes}
    budgets = {
        each.node.name: sum(map(budget_bytes, each.node.devices))
        for each in reading.answers.status.nodes
    }
    reads = {each["node"]: each for each in facts["reads"]}
    found = [
        node
        for node in facts["nodes"]
        if text.casefold() in f"{node['node']} {node['address']}".casefold()
        and (not state or node["state"] == state)
    ]
    pages = max(-(-len(found) // PAGE), 1)
    number = query.get("page", "")
    page = min(max(int(number) if number.isascii() and number.isdigit() else 1, 1), pages)
    rows = []
    for node in found[(page - 1) * PAGE : page * PAGE]:
        buckets, read, size = held[node["node"]]
        own = reads.get(node["node"])
        rows.append(
            node
            | {
                "buckets": buckets,
                "reads": read,
                "bytes": size,
                "budget": budgets.get(node["node"], 0),
                "failing": failing.get(node["node"], []),
                "shares": [own[kind] / max(own["own"], 1) for kind in ("here", "hot", "asked")]
                if own
                else None,
            }
        )
    return {
        "nodes": rows,
        "count": len(found),
        "all": len(facts["nodes"]),
        "page": page,
        "pages": pages,
        "text": text,
        "state": state,
        "states": sorted({node["state"] for node in facts["nodes"]} | {state} - {""}),
        "refused": facts["refused"],
    }


def operation_row(each: control_pb2.Operation) -> dict[str, Any]:
    """Return an operation as pages show it."""
    state = enum_name(control_pb2.OperationState, each.state)
    return {
        "id": each.id,
        "kind": each.kind,
        "state": state.lower(),
        "ended": state in _ENDED,
        "began_ms": each.created_ms,
        "took_ms": each.ended_ms - each.created_ms if each.ended_ms else None,
        "done": each.buckets_done,
        "total": each.buckets_total,
        "bytes_done": each.bytes_done,
        "bytes_total": each.bytes_total,
        "eta_ms": each.eta_ms or None,
        "author": each.author or "not asked",
        "reason": each.reason,
        "message": each.message,
        "planner": each.planner,
        "base_epoch": each.base_epoch,
        "gain": gain_facts(each.before, each.after) if each.HasField("after") else None,
    }


def operation_rows(reading: Reading) -> list[dict[str, Any]]:
    """Return the operations, newest first."""
    return [operation_row(each) for each in reading.operations.operations]


def operations(reading: Reading, query: dict[str, str], source: Source) -> dict[str, Any]:
    """Return the operations, and what the form for another one offers."""
    rows = operation_rows(reading)
    facts: Any = reading.facts
    return {
        "running": [each for each in rows if not each["ended"]],
        "ended": [each for each in rows if each["ended"]],
        "more": bool(reading.operations.next_page_token),
        "drain": query.get("drain", ""),
        "undo": query.get("undo", ""),
        "names": [node["node"] for node in facts["nodes"][:500]],
    }


def load(reading: Reading, query: dict[str, str], source: Source) -> dict[str, Any]:
    """Return who owns what and how much it is read."""
    facts: Any = reading.facts
    devices = sorted(facts["devices"], key=lambda each: -each["reads"])
    name = reading.answers.table_name
    tables = [each.name for each in reading.answers.figures.tables]
    table = query.get("table", "")
    table = table if table in tables else ""
    return {
        "devices": devices[:_DEVICES_SHOWN],
        "left_out": max(len(devices) - _DEVICES_SHOWN, 0),
        "most": max((each["reads"] for each in devices), default=0) or 1,
        "skew": facts["skew"],
        "hot": [
            (name(each.table_id), each.key, each.reads, each.error)
            for each in reading.answers.figures.hot_keys
        ],
        "tables": tables[:_TABLES_OFFERED],
        "table": table,
        "groups": source.heat.newest(20, table),
        "no_plan": facts.get("no_plan", ""),
    }


def drift(reading: Reading, query: dict[str, str], source: Source) -> dict[str, Any]:
    """Return how drift is treated, why nothing was done, and the decisions."""
    answer = reading.decisions
    status = drift_facts(answer.status) if answer.HasField("status") else None
    return {
        "monitor": status,
        "line": drift_line(status).removeprefix("drift: ") if status else "",
        "model": model_line(answer.model).removeprefix("cost model: "),
        "corrections": corrections_line(answer.corrections).removeprefix("gains").lstrip(":, "),
        "decisions": [
            {
                "id": each.id,
                "at_ms": each.at_ms,
                "looks": each.looks,
                "outcome": outcome_name(each.outcome).replace("_", " "),
                "why": each.why,
                "predicted": each.predicted_gain if each.HasField("before") else None,
                "expected": each.expected_gain if each.HasField("correction") else None,
                "measured": each.measured_gain if each.measured_ms else None,
                "bytes": each.bytes,
                "triggers": ", ".join(each.triggers),
                "operation": each.operation_id,
                "signals": [
                    (field.name.replace("_", " "), getattr(each.signals, field.name))
                    for field in each.signals.DESCRIPTOR.fields
                ],
            }
            for each in answer.decisions[:PAGE]
        ],
    }


def control(reading: Reading, query: dict[str, str], source: Source) -> dict[str, Any]:
    """Return how the control plane is, and the console itself."""
    facts: Any = reading.facts
    return {
        "open": facts["open"],
        "tasks": facts["tasks"],
        "refused": facts["refused"],
        "epoch": facts["plan_epoch"],
        "reads": source.reads,
        "failures": source.failures,
        "took_s": reading.took_s,
    }


VIEWS = {
    "health": ("/", "Health", health),
    "freshness": ("/freshness", "Freshness", freshness),
    "timeline": ("/timeline", "Timeline", timeline),
    "nodes": ("/nodes", "Nodes", nodes),
    "operations": ("/operations", "Operations", operations),
    "load": ("/load", "Load", load),
    "latency": ("/latency", "Latency", latency),
    "drift": ("/drift", "Drift", drift),
    "versions": ("/versions", "Versions", versions),
    "storage": ("/storage", "Storage", storage),
    "control": ("/control", "Control plane", control),
}
"""The pages by their templates' names: path, title, and what makes what they show."""
