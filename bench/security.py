"""What keeps strangers out, as rows of claims: the tests that show it (`make bench-security`).

What TLS costs is a row of `bench.remote`.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from bench import report
from bench.held import held
from bench.servers import BUILD, ROOT, BenchError

_CONSOLE = Console(stderr=True, highlight=False)
_CLAIMS = (
    ("nobody gets in whom the page does not name", "tests/e2e/test_who_gets_in.py", "21.1"),
    ("Triton's doors ask for a key", "tests/e2e/test_doors.py", "21.1"),
    ("credentials replaced under traffic", "tests/e2e/test_rotation.py", "21.3"),
    ("a node ends soon, whoever is connected", "tests/e2e/test_ends.py", "21.6"),
)


def _rows() -> Iterator[report.Row]:
    for case, tests, claim in _CLAIMS:
        yield held(case, tests, "test_", claim=claim)


def main() -> int:
    """Run the tests; the exit code says whether they ran, not whether they passed."""
    parser = argparse.ArgumentParser(prog="bench.security", description=__doc__)
    parser.add_argument("--out", type=Path, default=BUILD / "bench" / "security.json")
    arguments = parser.parse_args()
    try:
        rows = list(_rows())
        report.write(arguments.out, ROOT, rows)
    except BenchError as error:
        _CONSOLE.print(f"[red]bench-security: {error}")
        return 1
    report.show("Security", rows)
    _CONSOLE.print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
