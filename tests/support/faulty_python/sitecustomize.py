"""Faults in the background tasks of a Python process, on the path of tests alone.

EMBERTIDE_FAULTS names a file. A line `KIND TASK` has each round of a task raise: `exception`,
`bad_alloc` or `unknown`; or has its thread refused: `start`. It is read at each round and start, so
that a fault comes and goes while the process runs.
"""

import os
import threading
from pathlib import Path
from typing import Any

from embertide._common.background import BackgroundTask

# The last is no Exception.
_ERRORS = {"exception": ValueError, "bad_alloc": MemoryError, "unknown": SystemExit}


def _faults_of(task: str) -> list[str]:
    try:
        lines = Path(os.environ["EMBERTIDE_FAULTS"]).read_text().splitlines()
    except (KeyError, OSError):
        return []
    return [kind for kind, _, name in (line.partition(" ") for line in lines) if name == task]


def _install() -> None:
    make, start = BackgroundTask.__init__, threading.Thread.start

    def make_faulty(self: BackgroundTask, name: str, work: Any, **options: Any) -> None:
        def round_of_work(stop: threading.Event) -> Any:
            for kind in _faults_of(name):
                if kind in _ERRORS:
                    raise _ERRORS[kind]("a fault on purpose")
            return work(stop)

        make(self, name, round_of_work, **options)

    def start_or_refuse(self: threading.Thread) -> None:
        if "start" in _faults_of(self.name):
            raise RuntimeError("can't start new thread")
        start(self)

    BackgroundTask.__init__ = make_faulty  # type: ignore[method-assign]
    threading.Thread.start = start_or_refuse  # type: ignore[method-assign]


_install()
