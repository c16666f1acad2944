"""The C++ programs of these benchmarks: built where they are asked for, run to their end."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench.servers import BUILD, BenchError, build_target


def build(target: str, remedy: str = "`make cpp` says more") -> Path:
    """Build a program and return where it lies; BenchError with the remedy where it does not."""
    build_target(target, remedy)
    return BUILD / "cpp" / "bench" / "store" / target


def run(program: Path, *words: object) -> str:
    """Return what a program printed; BenchError with what it complained of if it failed."""
    command = [str(program), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"{' '.join([program.name, *command[1:]])}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def folder(path: Path) -> Iterator[Path]:
    """Make a folder of programs' files anew, and remove it in the end."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
