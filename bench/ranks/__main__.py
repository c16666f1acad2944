"""One run of many ranks: `make bench-ranks DATA=clicks.parquet PARTS=speed,schedule`.

Each part prints a table and writes `build/bench/ranks_PART.json`; those with curves draw them.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rich.console import Console

from bench import report
from bench.held import held
from bench.ranks import curves, kills, pods, quality, schedule, speed, wire
from bench.servers import BUILD, ROOT, BenchError

_FAULTS = "tests/trainer/test_rank_faults.py"
_RANKS = "tests/trainer/test_ranks.py"
_NAMED = "another_configuration or fails_in_any_stage or cannot_be_read or drive_that_is_full"
_CONSOLE = Console(stderr=True, highlight=False)


def _quality(arguments: argparse.Namespace) -> Iterable[report.Row]:
    if arguments.data is None or not arguments.data.is_file():
        raise BenchError("give the news file: DATA=clicks.parquet")
    return quality.measure(arguments.data)


def _pods(arguments: argparse.Namespace) -> Iterable[report.Row]:
    folder = BUILD / "bench" / "pods"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return pods.rows(pods.run(folder, arguments.repetitions, list(pods.FAULTS), pods=2))


def _faults(_: argparse.Namespace) -> Iterable[report.Row]:
    for case, tests, chosen in (
        ("one rank lost in each stage, full drive, full store, wrong clock", _FAULTS, "test_"),
        ("another configuration, a stage that fails, events that cannot be read", _RANKS, _NAMED),
    ):
        yield held(case, tests, chosen, claim="20.9")


_PARTS: Mapping[str, Callable[[argparse.Namespace], Iterable[report.Row]]] = {
    "curves": lambda _: curves.measure(),
    "kills": lambda _: kills.run(),
    "faults": _faults,
    "speed": lambda arguments: speed.measure(arguments.repetitions),
    "wire": lambda arguments: wire.measure(arguments.repetitions),
    "schedule": lambda _: schedule.measure(),
    "quality": _quality,
    "pods": _pods,
}


def main() -> int:
    """Run the parts; the exit code says whether they ran, not whether bars were reached."""
    parser = argparse.ArgumentParser(prog="bench.ranks", description=__doc__)
    parser.add_argument("--parts", default=",".join(_PARTS), help=f"of {', '.join(_PARTS)}")
    parser.add_argument("--data", type=Path, metavar="PATH")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    for part in parts:
        if part not in _PARTS:
            parser.error(f"there is no part {part!r}; there are {', '.join(_PARTS)}")
    try:
        for part in parts:
            rows = list(_PARTS[part](arguments))
            report.write(BUILD / "bench" / f"ranks_{part}.json", ROOT, rows)
            report.show(f"Many ranks: {part}", rows)
    except BenchError as error:
        _CONSOLE.print(f"[red]bench-ranks: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
