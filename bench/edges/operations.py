"""Operations (A.6): scripts of what went wrong in a day of operating, and schedules by chance.

The scripts are scenarios of tests/control. A schedule has nodes that leave, names that are used
again, undo at any time and a store that loses its keys at any time; its rules prove that no
operation touches a node that it does not name, and that SUCCEEDED implies that nodes follow
(tests/control/explore_rules.py). `EMBERTIDE_SCHEDULES` sets how many: 100,000 by default, some 35
minutes of CPU.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from bench import report
from bench.servers import ROOT

_SCRIPTS = ("names", "lost_state", "drain", "undo_last_owner")
_AT_ONCE = 500
_LOWEST = 100_000


def _scenario(name: str) -> float:
    """Return 1 if a script plays as it is written."""
    command = [*(sys.executable, "-m", "pytest", "-q"), "tests/control/test_scenarios.py"]
    done = subprocess.run([*command, "-k", f"scenario[{name}]"], cwd=ROOT, check=False)
    return float(done.returncode == 0)


def _explored(begin: int, count: int) -> bool:
    """Whether every rule held in some schedules; a process a part keeps memory bounded."""
    script = (
        "import sys; sys.path[:0] = ['tests/control', 'tests/support', '.']; "
        "import logging, explore; logging.disable(); "
        f"explore.explore(range({begin}, {begin + count}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    return done.returncode == 0


def run() -> Iterator[report.Row]:
    """Yield a row a script, and two of the schedules."""
    for name in _SCRIPTS:
        yield report.measure(
            (f"script {name}", "plays as written", ""),
            [_scenario(name)],
            better="higher",
            target=1,
            claim="A.6",
        )
    wanted = int(os.environ.get("EMBERTIDE_SCHEDULES", str(_LOWEST)))
    played = broken = 0
    with contextlib.suppress(KeyboardInterrupt):  # what was played until then counts
        for begin in range(0, wanted, _AT_ONCE):
            count = min(_AT_ONCE, wanted - begin)
            broken += not _explored(begin, count)
            played += count
    yield report.measure(
        ("schedules", "explored", ""), [played], better="higher", target=_LOWEST, claim="A.6"
    )
    yield report.measure(
        ("schedules", "parts in which a rule broke", ""),
        [broken],
        better="lower",
        target=0,
        claim="A.6",
    )
