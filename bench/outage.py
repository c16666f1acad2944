"""The cost of a Redis that is away, full or emptied: the second part of `make bench-fresh`.

The fleet of `embertide chaos` with one fault at a time: the bus is killed for a minute, it has no
room for half a minute, it is emptied. Counted are requests that failed, and the seconds from the
fault's end until every client of both nodes is answered with a version that came after it.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from bench import parts, report
from bench.report import CONSOLE
from bench.servers import BUILD
from embertide.server.adapters.process import interrupt_on_signals
from embertide.server.cli.chaos.faults import Fault
from embertide.server.cli.chaos.options import ChaosOptions
from embertide.server.cli.chaos.rounds import Chaos, Round, line
from embertide.server.cli.common_options import DEFAULT_BACKENDS, DEFAULT_CACHE

_FOLDER = BUILD / "bench" / "outage"


def _faults(away_s: float, full_s: float) -> dict[str, tuple[Fault, float]]:
    """Return each case's fault, and the seconds in which it may be caught up with."""
    return {
        f"Redis away {away_s:.0f} s": (
            Fault(at_s=0.5, kind="kill", target="bus", for_s=away_s),
            10.0,
        ),
        f"Redis full {full_s:.0f} s": (
            Fault(at_s=0.5, kind="full", target="bus", for_s=full_s),
            30.0,
        ),
        "Redis emptied": (Fault(at_s=0.5, kind="flush", target="bus", for_s=0.0), 10.0),
    }


def _rows(case: str, rounds: list[Round], target_s: float) -> list[report.Row]:
    failed = [sum(each.failed.values()) + each.degraded_requests for each in rounds]
    requests = [each.requests for each in rounds]
    none = [
        float(count == 0 and not each.violations)
        for count, each in zip(failed, rounds, strict=True)
    ]
    return [
        report.measure(
            (case, "caught up after", "s"),
            [each.heal_s for each in rounds],
            better="lower",
            target=target_s,
            claim="18.5",
        ),
        report.measure(
            (case, "no request failed, no answer was wrong", "holds"),
            [min(none)],
            better="higher",
            target=1,
            claim="18.5",
        ),
        report.measure((case, "requests", "count"), requests, better="higher", target=0),
        report.measure((case, "failed requests", "count"), [sum(failed)], better="lower", target=0),
    ]


def _measure(given: argparse.Namespace) -> Iterator[report.Row]:
    interrupt_on_signals()
    cases = _faults(given.away_s, given.full_s)
    options = ChaosOptions(directory=_FOLDER, backends=DEFAULT_BACKENDS, cache=DEFAULT_CACHE)
    done: dict[str, list[Round]] = {case: [] for case in cases}
    options.empty()
    with Chaos(options, CONSOLE.print) as chaos:
        for _ in range(given.repetitions):
            for n, (case, (fault, _target)) in enumerate(cases.items()):
                done[case].append(chaos.run(n, [fault]))
                CONSOLE.print(f"[dim]{line(done[case][-1])}")
    for case, (_, most_s) in cases.items():
        yield from _rows(case, done[case], most_s)
    details = {case: [asdict(each) for each in rounds] for case, rounds in done.items()}
    given.out.with_suffix(".rounds.json").write_text(json.dumps(details) + "\n")


if __name__ == "__main__":
    parser = parts.options("outage", __doc__)
    parser.add_argument("--away-s", type=float, default=60.0)
    parser.add_argument("--full-s", type=float, default=30.0)
    parser.set_defaults(repetitions=1)
    parts.command("A bus that is away, full, emptied", _measure, parser, barred=True)
