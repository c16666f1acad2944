"""Listeners, and what speaks to others over a socket, fuzzed for long (`make fuzz-long`).

C++ targets are backend_cpp/fuzz's, in processes of at most _CHUNK executions, each with a seed of
its own; Python's listeners are bench.thrown's.
"""

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import report
from bench.servers import BUILD, ROOT, BenchError
from bench.thrown import BrokenError, Listener, Thrower, listeners

_CONSOLE = Console(stderr=True, highlight=False)
# Shares of all executions, by what they cost: 0.4 ms a connection, 0.1 to 0.8 ms a call, 10 us
# where bytes are parsed in place. A core has one target at a time, the longest first.
_SHARES = {
    "frames": 0.12,
    "request": 0.45,
    "identity": 0.25,
    "redis": 0.05,
    "lookup": 0.1,
    "answer": 0.01,
}
_CHEAPEST = "request"  # gets what is left
_PYTHON_SHARE = 0.02  # of all four listeners together
_CHUNK = 250_000
_THROWN_CHUNK = 10_240
_MIB_MAX = 1024  # of a C++ target's process, sanitizers included
_CRASHES_MAX = 3  # then a target is given up
_STAT = re.compile(r"^stat::(number_of_executed_units|peak_rss_mb): +(\d+)$", re.MULTILINE)
_WHY = re.compile(
    r"^.*(?:invariant broken|runtime error|SUMMARY|Test unit written).*$", re.MULTILINE
)


@dataclasses.dataclass(kw_only=True, slots=True)
class Tried:
    """What was tried of one target."""

    name: str
    executions: int = 0
    seconds: float = 0.0
    crashes: int = 0
    peak_mib: float = 0.0
    bound_mib: float = _MIB_MAX

    def say(self, wanted: int) -> None:
        """Report progress."""
        _CONSOLE.print(
            f"{self.name}: {self.executions:,} of {wanted:,}, {self.crashes} crashes, "
            f"{self.executions / max(self.seconds, 1e-9):,.0f}/s"
        )


def _run(name: str, build: Path, seed: int, runs: int) -> "subprocess.CompletedProcess[str]":
    binary = build / "backend_cpp" / "fuzz" / f"{name}_fuzz"
    if not binary.exists():
        raise BenchError(f"{binary} is not there: run make fuzz-long, which builds it")
    command = [
        # By a fork of a small process: Linux would count this one's memory as the target's.
        *("sh", "-c", '"$@"; exit $?', "sh"),
        *(str(binary), f"-runs={runs}", f"-seed={seed}", "-timeout=90", "-max_len=8192"),
        *(f"-rss_limit_mb={_MIB_MAX}", "-detect_leaks=0", "-verbosity=0"),
        *("-print_final_stats=1", f"-artifact_prefix={build / 'findings' / name}-"),
    ]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def _fuzz(name: str, build: Path, wanted: int) -> Tried:
    tried = Tried(name=name)
    seed = 1
    while tried.executions < wanted and tried.crashes < _CRASHES_MAX:
        begun = time.monotonic()
        done = _run(name, build, seed, min(_CHUNK, wanted - tried.executions))
        tried.seconds += time.monotonic() - begun
        stats = {key: int(value) for key, value in _STAT.findall(done.stderr)}
        tried.executions += stats.get("number_of_executed_units", 0)
        tried.peak_mib = max(tried.peak_mib, stats.get("peak_rss_mb", 0))
        if done.returncode != 0 or not stats:
            tried.crashes += 1
            said = build / "findings" / f"{name}-{seed}.log"
            said.write_text(done.stderr)
            why = "\n".join(_WHY.findall(done.stderr)) or f"exit status {done.returncode}"
            _CONSOLE.print(f"[red]{name}, seed {seed}: {said}\n{why}")
        tried.say(wanted)
        seed += 1
    return tried


def _throw(listener: Listener, wanted: int) -> Tried:
    thrower = Thrower(listener, seed=int(time.time()))
    tried = Tried(name=listener.name)
    begun = time.monotonic()
    try:
        while thrower.number < wanted:
            thrower.throw(min(_THROWN_CHUNK, wanted - thrower.number))
            tried.executions, tried.seconds = thrower.number, time.monotonic() - begun
            tried.say(wanted)
        thrower.close()
    except BrokenError as error:
        tried.crashes += 1
        _CONSOLE.print(f"[red]{error}")
    tried.executions, tried.seconds = thrower.number, time.monotonic() - begun
    tried.peak_mib = thrower.most_bytes / 2**20
    tried.bound_mib = thrower.bound_bytes / 2**20
    return tried


def _all(build: Path, executions: int) -> Iterator[Tried]:
    with tempfile.TemporaryDirectory() as folder, listeners(Path(folder)) as every:
        each = int(executions * _PYTHON_SHARE) // len(every)
        for listener in every:
            yield _throw(listener, each)
    wanted = {name: int(executions * share) for name, share in _SHARES.items()}
    wanted[_CHEAPEST] += executions - each * len(every) - sum(wanted.values())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda name: _fuzz(name, build, wanted[name]), wanted)


def _show(every: list[Tried]) -> None:
    table = Table(title="Fuzzed")
    for column in ("target", "executions", "executions/s", "crashes", "peak RSS, MiB", "bound"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for each in every:
        table.add_row(
            each.name,
            f"{each.executions:,}",
            f"{each.executions / max(each.seconds, 1e-9):,.0f}",
            str(each.crashes),
            f"{each.peak_mib:,.0f}",
            f"{each.bound_mib:,.0f}",
        )
    Console(width=120).print(table)


def _rows(every: list[Tried], wanted: int) -> Iterator[report.Row]:
    case = f"listeners fuzzed: {len(every)} targets"
    executions = float(sum(each.executions for each in every))
    crashes = sum(each.crashes for each in every)
    memory = max(each.peak_mib / each.bound_mib if each.bound_mib else 2.0 for each in every)
    yield report.measure(
        (case, "executions", "1"), [executions], better="higher", target=wanted, claim="21.4"
    )
    yield report.measure(
        (case, "no crash", "1: yes"), [float(crashes == 0)], better="higher", target=1, claim="21.4"
    )
    yield report.measure(
        (case, "most memory", "of its bound"), [memory], better="lower", target=1, claim="21.4"
    )


def main() -> int:
    """Fuzz; the exit code says whether nothing broke."""
    parser = argparse.ArgumentParser(prog="bench.fuzz", description=__doc__)
    parser.add_argument("--executions", type=int, default=10_000_000)
    parser.add_argument("--build", type=Path, default=BUILD / "fuzz")
    parser.add_argument("--out", type=Path, default=BUILD / "bench" / "fuzz.json")
    arguments = parser.parse_args()
    try:
        every = list(_all(arguments.build, arguments.executions))
    except BenchError as error:
        _CONSOLE.print(f"[red]fuzz-long: {error}")
        return 1
    _show(every)
    rows = list(_rows(every, arguments.executions))
    report.write(arguments.out, ROOT, rows)
    report.show("Listeners fuzzed", rows)
    _CONSOLE.print(f"written to {arguments.out}")
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
