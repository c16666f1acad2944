"""How long a writer waits for one new row while a table grows: buckets of 100,000 rows, as planned.

Beside it buckets of 1,600,000 rows, which no table should have. A machine that takes a core away
counts as a pause here, and one whose host must find memory; so a loop that waits for nothing stands
beside each run, one that writes to new pages, and the longest CPU time of an insert.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import report
from bench.report import CONSOLE
from bench.store import programs

_ROWS = 1_600_000
_BUCKET_BITS = (4, 0)
_REPETITIONS = 5
_BAR_US = 1_000.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Waits:
    """The waits of the inserts of one run, or of a loop that shows what the machine does."""

    total_ns: int
    longest_ns: int
    longest_own_ns: int
    longest_cpu_ns: int
    over_1_ms: int
    over_1_ms_own: int
    histogram: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    inserts: _Waits
    idle: _Waits
    touches: _Waits


def _run(program: Path, bits: int) -> _Run:
    said = json.loads(programs.run(program, _ROWS, bits))
    return _Run(**{name: _Waits(**waits) for name, waits in said.items()})


def _show(case: str, run: _Run) -> None:
    inserts = run.inserts
    CONSOLE.print(f"{case}: inserts by how long they took")
    for power, count in enumerate(inserts.histogram):
        if count:
            CONSOLE.print(f"  up to {2**power / 1000:>10,.1f} us {count:>10,}")
    CONSOLE.print(
        f"  over 1 ms {inserts.over_1_ms:,}, {inserts.over_1_ms_own:,} of them without a switch; a "
        f"loop that waits for nothing: {run.idle.over_1_ms:,}; one that writes to new pages: "
        f"{run.touches.over_1_ms:,}; longest CPU time of an insert "
        f"{inserts.longest_cpu_ns / 1000:,.1f} us"
    )


def _longest(name: str, waits: Sequence[_Waits]) -> list[float]:
    """Print and return the longest of each run, ascending."""
    longest = sorted(each.longest_ns / 1000 for each in waits)
    CONSOLE.print(f"longest, {name}: " + ", ".join(f"{us:,.0f} us" for us in longest))
    return longest


def run() -> Iterator[report.Row]:
    """Yield the rows of the report."""
    program = programs.build("growth_pauses")
    for bits in _BUCKET_BITS:
        case = f"{_ROWS:,} rows in {1 << bits} buckets"
        runs = sorted(
            (_run(program, bits) for _ in range(_REPETITIONS)),
            key=lambda run: run.inserts.longest_ns,
        )
        _show(case, runs[_REPETITIONS // 2])
        longest = _longest("an insert", [run.inserts for run in runs])
        _longest("of a loop that waits for nothing", [run.idle for run in runs])
        _longest("of a loop that writes to new pages", [run.touches for run in runs])
        yield report.compare(
            (case, "longest wait for one row", "us"),
            longest,
            [_BAR_US] * len(longest),
            peer_name="the bar",
            better="lower",
            target=1.0 if bits else 0.0,
        )
