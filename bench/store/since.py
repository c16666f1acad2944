"""The same programs of an older build beside this one's: what else became slower.

    git worktree add ../older COMMIT
    cmake -S ../older -B ../older/build/cpp -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo
    ninja -C ../older/build/cpp readers_and_versions growth_pauses recovery ssd_peer
    python -m bench.store.since ../older

The older checkout takes bench/store/*.cc of this one where these have changed since. Both sides run
by turns, a process each, or with rows loaded once: a reader of whole versions beside their writer,
a table's growth, random reads from the SSD tier, starts after SIGKILL from a seal and from a
snapshot, and a reader beside seals. A ratio is of this build's time over the older one's. About
twelve minutes, 10 GB of disk; RocksDB is in the program of the SSD tier, which needs
librocksdb-dev.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from bench import plot, report
from bench.servers import BUILD, ROOT, BenchError
from bench.store import programs, recovery, ssd

_CONSOLE = Console(stderr=True, highlight=False)
_FOLDER = BUILD / "bench" / "since"
_BAR = 1.05
_CLAIM = "23.7"
_SSD_ROWS, _SSD_BATCHES = 2_000_000, (2048, 1)
_GROWTH = (1_600_000, 4)  # rows, bits of buckets
_VERSIONS_S, _RATES = 3.0, (0, 100_000)
_START_ROWS, _SEAL_ROWS, _SEAL_S = 2_000_000, 1_000_000, 2
_DDR_PERCENTS = (150, 25)

# By metric, what a run of one side took; a metric's name ends in its unit.
Times = Mapping[str, float]
Run = Callable[[], Times]


def _versions(program: Path, _folder: Path, _stack: ExitStack) -> Run:
    def run() -> Times:
        times: dict[str, float] = {}
        for rate in _RATES:
            seen = json.loads(programs.run(program, rate, _VERSIONS_S))
            if seen["mixed"]:
                raise BenchError(f"{seen['mixed']} rows were of another version than the view's")
            case = f"versions of {rate:,} rows/s, a reader's" if rate else "a reader's"
            times |= {f"{case} p50, us": seen["p50_us"], f"{case} p99, us": seen["p99_us"]}
        return times

    return run


def _growth(program: Path, _folder: Path, _stack: ExitStack) -> Run:
    def run() -> Times:
        rows, _ = _GROWTH
        inserts = json.loads(programs.run(program, *_GROWTH))["inserts"]
        return {
            "growth, an insert, ns": inserts["total_ns"] / rows,
            "growth, the longest CPU time of an insert, us": inserts["longest_cpu_ns"] / 1e3,
        }

    return run


def _ssd(program: Path, folder: Path, stack: ExitStack) -> Run:
    peer = stack.enter_context(ssd.load(program, folder, _SSD_ROWS))

    def run() -> Times:
        rates = {b: peer.run("store", "io_uring", batch=b).rows_per_s for b in _SSD_BATCHES}
        return {f"SSD, a row of {batch}, us": 1e6 / rate for batch, rate in rates.items()}

    return run


def _starts(program: Path, folder: Path, _stack: ExitStack) -> Run:
    side = recovery.Recovery(program, folder)
    side.write(_START_ROWS)

    def run() -> Times:
        snapshot, _ = side.start(_START_ROWS, from_seal=False)
        seal, _ = side.start(_START_ROWS, from_seal=True)
        return {
            "start from a snapshot, s": snapshot["seconds"],
            "start from a seal, s": seal["seconds"],
        }

    return run


def _seals(program: Path, folder: Path, _stack: ExitStack) -> Run:
    side = recovery.Recovery(program, folder)

    def run() -> Times:
        times: dict[str, float] = {}
        for percent in _DDR_PERCENTS:
            _, sealing = side.cost(_SEAL_ROWS, percent, 1, _SEAL_S)
            case = f"seals, DDR {percent}%, a reader's"
            times[f"{case} p50, us"] = sealing["read_us_p50"]
            times[f"{case} p99, us"] = sealing["read_us_p99"]
        return times

    return run


# Of each part its program, and what makes one side of it ready in a folder until the stack ends.
_PARTS: Mapping[str, tuple[str, Callable[[Path, Path, ExitStack], Run]]] = {
    "versions": ("readers_and_versions", _versions),
    "growth": ("growth_pauses", _growth),
    "ssd": (ssd.PROGRAM, _ssd),
    "starts": ("recovery", _starts),
    "seals": ("recovery", _seals),
}


def _rows(runs: Sequence[Run], repetitions: int) -> Iterator[report.Row]:
    """Yield the rows of both sides' runs, this build's first in even turns."""
    seen: tuple[list[Times], list[Times]] = ([], [])
    for turn in range(repetitions):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            seen[side].append(runs[side]())
    for name in seen[0][0]:
        case, _, unit = name.rpartition(", ")
        sides = [[times[name] for times in each] for each in seen]
        row = report.compare(
            (case, "time", unit),
            sides[0],
            sides[1],
            peer_name="the older build",
            better="lower",
            target=_BAR,
            claim=_CLAIM,
        )
        _CONSOLE.print(
            f"[dim]{name}: {row.ours:,.3f} now, {row.peer:,.3f} before; least "
            f"{min(sides[0]):,.3f}, {min(sides[1]):,.3f}"
        )
        yield row


def _sides(older: Path, name: str) -> tuple[Path, Path]:
    """Return a program of this build, built if need be, and of the older one."""
    now = ssd.build() if name == ssd.PROGRAM else programs.build(name)
    before = older / "build" / "cpp" / "bench" / "store" / name
    if not before.is_file():
        raise BenchError(f"{before} is missing: build it there first")
    return now, before


def _measure(older: Path, parts: Iterable[str], repetitions: int) -> Iterator[report.Row]:
    sides = {part: _sides(older, _PARTS[part][0]) for part in parts}
    for part, both in sides.items():
        with ExitStack() as stack:
            runs = []
            for program, name in zip(both, ("now", "older"), strict=True):
                folder = stack.enter_context(programs.folder(_FOLDER / name))
                runs.append(_PARTS[part][1](program, folder, stack))
            yield from _rows(runs, repetitions)


def main() -> int:
    """Run the comparison; the exit code says whether it ran, not whether bars were reached."""
    parser = argparse.ArgumentParser(
        prog="bench.store.since",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("older", type=Path, help="a checkout whose build/cpp has the programs")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--repetitions", type=int, default=report.LEAST_REPETITIONS)
    parser.add_argument("--out", type=Path, default=BUILD / "bench" / "store_since.json")
    arguments = parser.parse_args()
    rows: list[report.Row] = []
    try:
        for row in _measure(arguments.older, arguments.parts, arguments.repetitions):
            rows.append(row)
            report.write(arguments.out, ROOT, rows)
    except BenchError as error:
        _CONSOLE.print(f"[red]bench.store.since: {error}")
        return 1
    title = "The store beside an older build"
    plot.draw(title, rows, arguments.out.with_suffix(".svg"))
    report.show(title, rows)
    _CONSOLE.print(f"written to {arguments.out}, and .svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
