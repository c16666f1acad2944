"""Claims that tests hold: whether they pass, as a row of the report."""

import re

from bench import report
from bench.servers import BenchError
from bench.tests import run_tests

_SAID = re.compile(r"^(?:(\d+) failed, )?(\d+) passed", re.MULTILINE)


def held(case: str, tests: str, chosen: str, *, claim: str) -> report.Row:
    """Run tests, the long ones too; return whether all that were chosen passed.

    Raises:
        BenchError: None ran.
    """
    done = run_tests("-m", "not gpu", "-k", chosen, tests)
    said = _SAID.search(done.stdout)
    if said is None:
        raise BenchError(f"{tests} -k {chosen!r} ran no test: {done.stdout[-500:]}")
    count = int(said[1] or 0) + int(said[2])
    name = (f"{case}: {count} tests of {tests}", "all passed", "1: yes")
    return report.measure(
        name, [float(done.returncode == 0)], better="higher", target=1, claim=claim
    )
