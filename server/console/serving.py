"""Latency and storage of nodes as pages show them, worst first."""

import collections
from typing import Any

from embertide.server.cli.slow import lookup_facts, slow_facts
from embertide.server.console.source import Reading, Source
from embertide.v1 import plan_pb2

SHOWN_MAX = 100
_TIERS = {
    plan_pb2.TIER_HBM: "HBM",
    plan_pb2.TIER_DDR: "DDR",
    plan_pb2.TIER_SSD: "SSD",
}


def latency(reading: Reading, query: dict[str, str], source: Source) -> dict[str, Any]:
    """Return how long nodes take, the slowest first."""
    facts: Any = reading.facts
    nodes = sorted(facts["serving"], key=lambda each: -each["p99_us"])
    busy = [each for each in nodes if each["requests_per_s"]]
    return {
        "nodes": nodes[:SHOWN_MAX],
        "left_out": max(len(nodes) - SHOWN_MAX, 0),
        "requests_per_s": sum(each["requests_per_s"] for each in nodes),
        "slowest": max(nodes, key=lambda each: each["p99_us"], default=None),
        "mean_us": sum(each["mean_us"] * each["requests_per_s"] for each in busy)
        / max(sum(each["requests_per_s"] for each in busy), 1e-9),
        "longest_us": max((each["p99_us"] for each in nodes), default=0) or 1,
        "slow": [
            slow_facts(reading.answers, each) for each in reading.answers.figures.slow_requests
        ],
        "lookups": [
            lookup_facts(reading.answers, each) for each in reading.answers.figures.slow_lookups
        ],
    }


def storage(reading: Reading, query: dict[str, str], source: Source) -> dict[str, Any]:
    """Return what nodes may hold by tier and what they hold, and how full the bus is."""
    facts: Any = reading.facts
    held: collections.Counter[str] = collections.Counter()
    for each in facts["devices"]:
        held[each["device"].rpartition("/")[0]] += each["bytes"]
    shares = {each["node"]: each for each in facts["serving"]}
    rows: list[dict[str, Any]] = []
    for node in reading.answers.status.nodes:
        budgets: collections.Counter[str] = collections.Counter()
        for device in node.node.devices:
            for budget in device.budgets:
                budgets[_TIERS.get(budget.tier, "other")] += budget.budget_bytes
        name = node.node.name
        whole = sum(budgets.values())
        rows.append(
            {
                "node": name,
                "budgets": [budgets[tier] for tier in _TIERS.values()],
                "held": held[name],
                "share": min(held[name] / whole, 1.0) if whole else 0.0,
                "ssd_share": shares[name]["ssd_share"] if name in shares else 0.0,
            }
        )
    rows.sort(key=lambda each: -each["share"])
    bus = reading.versions.bus if reading.versions.HasField("bus") else None
    return {
        "nodes": rows[:SHOWN_MAX],
        "left_out": max(len(rows) - SHOWN_MAX, 0),
        "tiers": list(_TIERS.values()),
        "bus": bus,
        "oldest": min((v.version.number for v in reading.versions.versions), default=0),
    }
