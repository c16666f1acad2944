"""Benchmarks by kind of vectors: AVX-512 where the CPU has it, and all sides held to AVX2.

Libraries choose their vectors when they are loaded, so each level is a process of its own, in which
our store, torch and FBGEMM are told the same: EMBERTIDE_VECTORS, ATEN_CPU_CAPABILITY and
FBGEMM_ENABLE_INSTRUCTIONS. A row says in `vectors` what its sides had.
"""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.servers import ROOT, BenchError
from embertide import _store

LEVELS = ("avx512", "avx2")
_MARK = "row: "


def here() -> tuple[str, ...]:
    """Return the levels that this CPU has, the widest first."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    needed = {"avx512": ("avx512f", "avx512vl", "avx512bw", "avx512dq"), "avx2": ("avx2", "f16c")}
    return tuple(level for level in LEVELS if all(f" {flag}" in flags for flag in needed[level]))


def rows(part: str, levels: Sequence[str], cases: Sequence[str]) -> Iterator[report.Row]:
    """Yield what `bench.store.PART` measures at each level, each in a process of its own.

    Raises:
        BenchError: A process failed; it has said why.
    """
    for level in levels:
        environment = {
            **os.environ,
            "EMBERTIDE_VECTORS": level,
            "ATEN_CPU_CAPABILITY": level,
            "FBGEMM_ENABLE_INSTRUCTIONS": level.upper(),
        }
        command = [sys.executable, "-m", "bench.store.levels", part, level, *cases]
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_MARK):
                    yield report.Row(**json.loads(line.removeprefix(_MARK)))
        if process.returncode != 0:
            raise BenchError(f"{part} with {level} ended with {process.returncode}")


def check(level: str) -> None:
    """Raise BenchError unless our store and torch add by these vectors."""
    had = {_store.vector_level(), torch.backends.cpu.get_cpu_capability().lower()}
    if had != {level}:
        raise BenchError(f"{level} was asked for, and the sides have {', '.join(sorted(had))}")


def main(part: str, level: str, *cases: str) -> int:
    """Measure in this process and print the rows, a line each."""
    try:
        check(level)
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
