"""The results of `embertide chaos` as rows of claims: the last step of `make chaos`."""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import parts, report
from bench.servers import BUILD, BenchError

_ANSWERS, _ROUNDS, _VERSIONS_A_MINUTE = 10_000_000, 200, 100
_FRONT_ROUNDS = 50
_LATE_S = 2.0


def rows_of(said: Mapping[str, Any]) -> list[report.Row]:
    """Return the rows of a run's report."""
    rounds = said["each"]
    case = f"{len(rounds)} seeded rounds"
    minutes = (rounds[-1]["began_s"] - rounds[0]["began_s"]) / 60 if len(rounds) > 1 else 0.0
    versions = sum(each["versions"] for each in rounds[:-1])
    right = [float(not each["violations"]) for each in rounds]
    behind_front = float(len(rounds) >= _FRONT_ROUNDS and all(right))  # nodes have ours
    killed = [each for each in rounds if each["starts"]["node-0"] or each["starts"]["node-1"]]
    figures: list[tuple[str, str, list[float], str, float, str]] = [
        ("rounds", "count", [float(len(rounds))], "higher", _ROUNDS, "18.3"),
        ("rounds without a violation", "share", [sum(right) / len(right)], "higher", 1, "18.3"),
        ("at least 50 rounds, none with a violation", "1: yes", [behind_front], "higher", 1, "B.5"),
        ("time to heal, median", "s", [each["heal_s"] for each in rounds], "lower", 0, ""),
        ("time to heal, longest", "s", [said["heal_s_longest"]], "lower", 0, ""),
        ("flipped messages", "count", [float(said["flipped_messages"])], "higher", 0, ""),
        ("keys answered for and compared", "count", [said["answers"]], "higher", _ANSWERS, "18.2"),
    ]
    if minutes:
        rate = [versions / minutes]
        figures.append(("versions", "a minute", rate, "higher", _VERSIONS_A_MINUTE, "18.2"))
    if killed:
        late = [max(each["late_s"] for each in killed)]
        name = "last failed or degraded request after a node was ready"
        figures.append((name, "s", late, "lower", _LATE_S, "18.9"))
    return [
        report.measure(
            (case, name, unit),
            values,
            better="higher" if better == "higher" else "lower",
            target=target,
            claim=claim,
        )
        for name, unit, values, better, target, claim in figures
    ]


def _measure(given: argparse.Namespace) -> Iterator[report.Row]:
    said = json.loads(given.report.read_text())
    yield from rows_of(said)
    if said["rounds_failed"]:
        raise BenchError(f"{said['rounds_failed']} rounds failed: see {given.report}")


if __name__ == "__main__":
    parser = parts.options("chaos", __doc__)
    parser.add_argument("--report", type=Path, default=BUILD / "chaos" / "report.json")
    parts.command("Chaos", _measure, parser)
