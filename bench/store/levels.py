"""Benchmarks of the store by kind of vectors, each in a process of its own (bench/vectors.py).

A row says in `vectors` what its sides had.
"""

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench import report, vectors
from bench.servers import ROOT, BenchError

_MARK = "row: "


def rows(part: str, levels: Sequence[str], cases: Sequence[str]) -> Iterator[report.Row]:
    """Yield what `bench.store.PART` measures at each level, each in a process of its own.

    Raises:
        BenchError: A process failed; it has said why.
    """
    for level in levels:
        command = [sys.executable, "-m", "bench.store.levels", part, level, *cases]
        with subprocess.Popen(
            command, cwd=ROOT, env=vectors.environment(level), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_MARK):
                    yield report.Row(**json.loads(line.removeprefix(_MARK)))
        if process.returncode != 0:
            raise BenchError(f"{part} with {level} ended with {process.returncode}")


def main(part: str, level: str, *cases: str) -> int:
    """Measure in this process and print the rows, a line each."""
    try:
        vectors.check(level)
        module: Any = importlib.import_module(f"bench.store.{part}")
        for row in module.measure(level, cases):
            named = dataclasses.asdict(dataclasses.replace(row, vectors=level))
            print(_MARK + json.dumps(named), flush=True)
    except BenchError as error:
        print(f"bench-store: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
