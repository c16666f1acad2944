"""Whether the pure core holds its rules: schedules of a fleet by chance, and Redis killed in moves.

The schedules are those of tests/control/explore.py, each from a seed; the kills are those of
tests/control/test_killed_state.py: around every write of a move, an abort and a take-back.
"""

import re
import subprocess
import sys

from bench import report
from bench.report import CONSOLE
from bench.servers import ROOT, BenchError

_EXPLORE, _KILLS = "tests/control/explore.py", "tests/control/test_killed_state.py"
SCHEDULES = 100_000
_SAID = re.compile(r"([\d,]+) schedules, .*: every rule held")
_PASSED = re.compile(r"(\d+) passed")


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    CONSOLE.print(f"[dim]{(done.stdout.strip() or done.stderr.strip())[-2000:]}")
    return done


def measure(schedules: int) -> list[report.Row]:
    """Return how many schedules held every rule, and how many kills left a valid plan.

    Raises:
        BenchError: The tests say nothing.
    """
    explored = _run(_EXPLORE, str(schedules))
    said = _SAID.search(explored.stdout)
    held = float(said[1].replace(",", "")) if said and not explored.returncode else 0.0
    killed = _run("-c", "import pytest, sys; sys.exit(pytest.main())", "-q", _KILLS)
    passed = _PASSED.search(killed.stdout)
    if passed is None:
        raise BenchError(f"{_KILLS} does not say what passed: {killed.stdout[-500:]}")
    return [
        report.measure(
            ("schedules by chance, seeds from 0", "every rule held", "schedules"),
            [held] * report.LEAST_REPETITIONS,
            better="higher",
            target=SCHEDULES,
            claim="19.7",
        ),
        report.measure(
            (f"Redis killed in every state of a move, {passed[1]} tests", "held", "1: yes"),
            [float(killed.returncode == 0)] * report.LEAST_REPETITIONS,
            better="higher",
            target=1,
            claim="19.7",
        ),
    ]
