"""Claims that tests hold: whether they pass, as a row of the report."""

import re
import subprocess
import sys

from bench import report
from bench.servers import ROOT, BenchError

# `-m pytest` would add the root to the path.
_PYTEST = (sys.executable, "-c", "import pytest, sys; sys.exit(pytest.main())", "-q")
_SAID = re.compile(r"^(?:(\d+) failed, )?(\d+) passed", re.MULTILINE)


def held(case: str, tests: str, chosen: str, *, claim: str) -> report.Row:
    """Run tests, the long ones too; return whether all that were chosen passed.

    Raises:
        BenchError: None ran.
    """
    done = subprocess.run(
        [*_PYTEST, "-m", "not gpu", "-k", chosen, tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    said = _SAID.search(done.stdout)
    if said is None:
        raise BenchError(f"{tests} -k {chosen!r} ran no test: {done.stdout[-500:]}")
    count = int(said[1] or 0) + int(said[2])
    name = (f"{case}: {count} tests of {tests}", "all passed", "1: yes")
    return report.measure(
        name, [float(done.returncode == 0)], better="higher", target=1, claim=claim
    )
