"""Whole versions applied while a reader pools: its p99 beside that of a quiet store.

Ten versions a second of 0, 10,000 and 100,000 rows/s in all, in turn, a process each; the reader
also proves that no row is of a later version than its view's.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from bench import report
from bench.report import CONSOLE
from bench.servers import BenchError
from bench.store import programs

_RATES = (0, 10_000, 100_000)
_SECONDS = 3.0
_REPETITIONS = 5
_BAR = 1.3


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """The observations of one run's reader."""

    reads: int
    versions: int
    mixed: int
    p50_us: float
    p99_us: float
    worst_us: float


def _run(program: Path, rate: int) -> Seen:
    return Seen(**json.loads(programs.run(program, rate, _SECONDS)))


def run() -> Iterator[report.Row]:
    """Yield the rows of the report."""
    program = programs.build("readers_and_versions")
    seen: dict[int, list[Seen]] = {rate: [] for rate in _RATES}
    for _ in range(_REPETITIONS):
        for rate in _RATES:
            seen[rate].append(_run(program, rate))
    mixed = sum(each.mixed for runs in seen.values() for each in runs)
    if mixed:
        raise BenchError(f"{mixed} rows were of another version than the view's")
    quiet = seen[0]
    for rate in _RATES[1:]:
        runs = seen[rate]
        versions = sum(each.versions for each in runs)
        CONSOLE.print(f"{rate:,} rows/s: {versions} versions, worst {runs[-1].worst_us:,.0f} us")
        for metric, bar in (("p99_us", _BAR), ("p50_us", 0.0)):
            yield report.compare(
                (f"{rate:,} rows/s in 10 versions/s", metric, "us"),
                [getattr(each, metric) for each in runs],
                [getattr(each, metric) for each in quiet],
                peer_name="the quiet store",
                better="lower",
                target=bar,
            )
