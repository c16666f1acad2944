"""Listeners, and what speaks to others over a socket, fuzzed for long (`make fuzz-long`).

C++ targets are backend_cpp/fuzz's, in processes of at most _CHUNK executions, each with a seed of
its own; listeners of real processes are bench.thrown's. What was tried is kept beside the report:
a run that was stopped goes on.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from bench import parts, report
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError
from bench.thrown import BrokenError, Listener, Thrower, listeners

# Shares of all executions, by what they cost: 0.4 ms a connection, 0.1 to 0.8 ms a call, 10 us
# where bytes are parsed in place. A core has one target at a time, the longest first.
_SHARES = {
    "frames": 0.12,
    "infer": 0.3,
    "request": 0.15,
    "identity": 0.25,
    "redis": 0.05,
    "lookup": 0.1,
    "answer": 0.01,
}
_CHEAPEST = "request"  # gets what is left
_THROWN_SHARE = 0.01  # of all of those listeners together
_CHUNK = 250_000
_THROWN_CHUNK = 10_240
_MIB_MAX = 1024  # of a C++ target's process, sanitizers included
_CLAIMS = ("21.4", "B.7")
_CRASHES_MAX = 3  # then a target is given up
_STAT = re.compile(r"^stat::(number_of_executed_units|peak_rss_mb): +(\d+)$", re.MULTILINE)
_WHY = re.compile(
    r"^.*(?:invariant broken|runtime error|SUMMARY|Test unit written).*$", re.MULTILINE
)


@dataclasses.dataclass(kw_only=True, slots=True)
class Tried:
    """The tries of one target so far."""

    name: str
    executions: int = 0
    seconds: float = 0.0
    crashes: int = 0
    peak_mib: float = 0.0
    bound_mib: float = _MIB_MAX
    chunks: int = 0

    def say(self, wanted: int) -> None:
        """Report progress."""
        CONSOLE.print(
            f"{self.name}: {self.executions:,} of {wanted:,}, {self.crashes} crashes, "
            f"{self.executions / max(self.seconds, 1e-9):,.0f}/s"
        )


class _Kept:
    """The tries of each target, kept in a file after each chunk. Thread-safe."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path, self._lock = path, threading.Lock()
        former = json.loads(path.read_text()) if resume and path.is_file() else []
        self._tried = {each["name"]: Tried(**each) for each in former}

    def of(self, name: str) -> Tried:
        """Return what was tried of a target; the caller adds to it."""
        with self._lock:
            return self._tried.setdefault(name, Tried(name=name))

    def save(self) -> None:
        """Write the file."""
        with self._lock:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            held = [dataclasses.asdict(each) for each in self._tried.values()]
            self._path.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


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


def _fuzz(name: str, build: Path, wanted: int, kept: _Kept) -> Tried:
    tried = kept.of(name)
    while tried.executions < wanted and tried.crashes < _CRASHES_MAX:
        tried.chunks += 1
        begun = time.monotonic()
        done = _run(name, build, tried.chunks, min(_CHUNK, wanted - tried.executions))
        tried.seconds += time.monotonic() - begun
        stats = {key: int(value) for key, value in _STAT.findall(done.stderr)}
        tried.executions += stats.get("number_of_executed_units", 0)
        tried.peak_mib = max(tried.peak_mib, stats.get("peak_rss_mb", 0))
        if done.returncode != 0 or not stats:
            tried.crashes += 1
            said = build / "findings" / f"{name}-{tried.chunks}.log"
            said.write_text(done.stderr)
            why = "\n".join(_WHY.findall(done.stderr)) or f"exit status {done.returncode}"
            CONSOLE.print(f"[red]{name}, seed {tried.chunks}: {said}\n{why}")
        tried.say(wanted)
        kept.save()
    return tried


def _throw(listener: Listener, wanted: int, kept: _Kept) -> Tried:
    tried = kept.of(listener.name)
    if tried.executions >= wanted:
        return tried
    thrower = Thrower(listener, seed=int(time.time()))
    try:
        while tried.executions < wanted:
            begun = time.monotonic()
            before = thrower.number
            try:
                thrower.throw(min(_THROWN_CHUNK, wanted - tried.executions))
            finally:
                tried.executions += thrower.number - before
                tried.seconds += time.monotonic() - begun
            tried.peak_mib = max(tried.peak_mib, thrower.most_bytes / 2**20)
            tried.bound_mib = thrower.bound_bytes / 2**20
            tried.say(wanted)
            kept.save()
        thrower.close()
    except BrokenError as error:
        tried.crashes += 1
        CONSOLE.print(f"[red]{error}")
    return tried


def _all(build: Path, executions: int, kept: _Kept) -> Iterator[Tried]:
    with tempfile.TemporaryDirectory() as folder, listeners(Path(folder)) as every:
        each = int(executions * _THROWN_SHARE) // len(every)
        for listener in every:
            yield _throw(listener, each, kept)
    wanted = {name: int(executions * share) for name, share in _SHARES.items()}
    wanted[_CHEAPEST] += executions - each * len(every) - sum(wanted.values())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda name: _fuzz(name, build, wanted[name], kept), wanted)


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
    held = float(not any(each.crashes for each in every))
    memory = max(each.peak_mib / each.bound_mib if each.bound_mib else 2.0 for each in every)
    figures: list[tuple[str, str, float, Literal["higher", "lower"], float]] = [
        ("executions", "1", executions, "higher", wanted),
        ("no crash", "1: yes", held, "higher", 1),
        ("most memory", "of its bound", memory, "lower", 1),
    ]
    for claim in _CLAIMS:
        for metric, unit, value, better, target in figures:
            name = (case, metric, unit)
            yield report.measure(name, [value], better=better, target=target, claim=claim)


def _measure(given: argparse.Namespace) -> Iterator[report.Row]:
    kept = _Kept(given.build / "tried.json", resume=given.resume)
    every = list(_all(given.build, given.executions, kept))
    _show(every)
    yield from _rows(every, given.executions)


if __name__ == "__main__":
    parser = parts.options("fuzz", __doc__)
    parser.add_argument("--executions", type=int, default=10_000_000)
    parser.add_argument("--build", type=Path, default=BUILD / "fuzz")
    parser.add_argument("--resume", action="store_true", help="go on where a run was stopped")
    parts.command("Listeners fuzzed", _measure, parser, barred=True)
