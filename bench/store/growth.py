"""How long a writer waits for one new row while a table grows: buckets of 100,000 rows, as planned.

Beside it buckets of 1,600,000 rows, which no table should have. A machine that takes a core away
counts as a pause here; so a loop that waits for nothing stands beside each run, and the longest CPU
time of an insert. The least of the repetitions' longest waits is what the store needs.
"""

import dataclasses
import json
import subprocess
from collections.abc import Iterator

from rich.console import Console

from bench import report
from bench.servers import BUILD, BenchError

_CONSOLE = Console(stderr=True, highlight=False)
_ROWS = 1_600_000
_BUCKET_BITS = (4, 0)
_REPETITIONS = 5
_BAR_US = 1_000.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Waits:
    """Of the inserts of one run, or of a loop that only asks for the time."""

    longest_ns: int
    longest_own_ns: int
    longest_cpu_ns: int
    over_1_ms: int
    over_1_ms_own: int
    histogram: list[int]


def _run(bits: int) -> tuple[_Waits, _Waits]:
    program = BUILD / "cpp" / "bench" / "store" / "growth_pauses"
    command = [str(program), str(_ROWS), str(bits)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"{program.name}: {done.stderr.strip()}")
    said = json.loads(done.stdout)
    return _Waits(**said["inserts"]), _Waits(**said["idle"])


def _show(case: str, inserts: _Waits, idle: _Waits) -> None:
    _CONSOLE.print(f"{case}: inserts by how long they took")
    for power, count in enumerate(inserts.histogram):
        if count:
            _CONSOLE.print(f"  up to {2**power / 1000:>10,.1f} us {count:>10,}")
    _CONSOLE.print(
        f"  over 1 ms {inserts.over_1_ms:,}, {inserts.over_1_ms_own:,} of them without a switch; a "
        f"loop that waits for nothing: {idle.over_1_ms:,}; longest CPU time of an insert "
        f"{inserts.longest_cpu_ns / 1000:,.1f} us"
    )


def run() -> Iterator[report.Row]:
    """Yield the rows of the report."""
    build = ["cmake", "--build", str(BUILD / "cpp"), "--target", "growth_pauses"]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    for bits in _BUCKET_BITS:
        case = f"{_ROWS:,} rows in {1 << bits} buckets"
        runs = [_run(bits) for _ in range(_REPETITIONS)]
        _show(case, *min(runs, key=lambda run: run[0].longest_ns))
        longest = [inserts.longest_ns / 1000 for inserts, _ in runs]
        yield report.Row(
            case=case,
            metric="longest wait for one row",
            unit="us",
            ours=round(min(longest), 1),
            peer=_BAR_US,
            peer_name="the bar",
            ratio=round(min(longest) / _BAR_US, 4),
            better="lower",
            n=_REPETITIONS,
            spread=round((max(longest) - min(longest)) / min(longest), 4),
            target=1.0 if bits else 0.0,
        )
