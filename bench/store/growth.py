"""How long a writer waits for one new row while a table grows: buckets of 100,000 rows, as planned.

Beside it buckets of 1,600,000 rows, which no table should have. A system that takes the core away
counts as a pause here: the least of the repetitions' longest waits is what the store needs.
"""

import json
import subprocess
from collections.abc import Iterator, Sequence

from rich.console import Console

from bench import report
from bench.servers import BUILD, BenchError

_CONSOLE = Console(stderr=True, highlight=False)
_ROWS = 1_600_000
_BUCKET_BITS = (4, 0)
_REPETITIONS = 5
_BAR_US = 1_000.0


def _run(bits: int) -> tuple[float, list[int]]:
    program = BUILD / "cpp" / "bench" / "store" / "growth_pauses"
    command = [str(program), str(_ROWS), str(bits)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"{program.name}: {done.stderr.strip()}")
    said = json.loads(done.stdout)
    return said["longest_ns"] / 1000, said["histogram"]


def _show(case: str, histogram: Sequence[int]) -> None:
    _CONSOLE.print(f"{case}: inserts by how long they took")
    for power, count in enumerate(histogram):
        if count:
            _CONSOLE.print(f"  up to {2**power / 1000:>10,.1f} us {count:>10,}")


def run() -> Iterator[report.Row]:
    """Yield the rows of the report."""
    build = ["cmake", "--build", str(BUILD / "cpp"), "--target", "growth_pauses"]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    for bits in _BUCKET_BITS:
        case = f"{_ROWS:,} rows in {1 << bits} buckets"
        runs = [_run(bits) for _ in range(_REPETITIONS)]
        _show(case, min(runs)[1])
        longest = [each for each, _ in runs]
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
