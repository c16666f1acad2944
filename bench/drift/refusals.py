"""Whether bad input is refused by a status of its own and changes nothing.

The table of requests is that of tests/control/test_refusals.py, which sends each to a real control
plane over gRPC and compares all bytes of its state store before and after.
"""

import re

from bench import report
from bench.held import run_tests
from bench.servers import BenchError

_TEST = "tests/control/test_refusals.py"
_SAID = re.compile(r"(\d+) refusals, (\d+) changed anything")


def measure(repetitions: int) -> list[report.Row]:
    """Return how many were tried, how many changed anything, and whether all held.

    Raises:
        BenchError: The test says nothing.
    """
    tried: list[float] = []
    changed: list[float] = []
    held: list[float] = []
    for _ in range(repetitions):
        done = run_tests("-s", _TEST)
        said = _SAID.search(done.stdout)
        if said is None:
            raise BenchError(f"{_TEST} does not say what was refused: {done.stdout[-500:]}")
        tried.append(float(said[1]))
        changed.append(float(said[2]))
        held.append(float(done.returncode == 0))
    case = "bad requests, each with a status of its own"
    return [
        report.measure((case, "refused", "requests"), tried, better="higher", target=0),
        report.measure((case, "changed anything", "requests"), changed, better="lower", target=0),
        report.measure((case, "held", "1: yes"), held, better="higher", target=1, claim="19.9"),
    ]
