"""What following the drift is worth: `make bench-drift DATA=clicks.parquet PARTS=local,skew`."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import report
from bench.drift import (
    compared,
    cost_net,
    flexshard,
    local,
    metering,
    moves,
    pays,
    planners,
    quiet,
    recshard,
    refusals,
    scale,
    schedules,
    skew,
)
from bench.drift.local import FOLDER
from bench.drift.tasks import Source, sources
from bench.report import CONSOLE
from bench.servers import BUILD, ROOT, BenchError
from embertide.server.adapters.process import ProcessError
from embertide.trainer.errors import TrainerError


def _local(arguments: argparse.Namespace) -> list[report.Row]:
    if arguments.data is None:
        raise BenchError("give the news file: DATA=clicks.parquet")
    return local.measure(arguments.data)


def _skew(arguments: argparse.Namespace) -> list[report.Row]:
    return skew.measure(arguments.repetitions)


def _metering(arguments: argparse.Namespace) -> list[report.Row]:
    return metering.measure(arguments.repetitions)


def _planners(arguments: argparse.Namespace) -> list[report.Row]:
    return planners.measure(arguments.repetitions)


def _quiet(arguments: argparse.Namespace) -> list[report.Row]:
    return quiet.measure()


def _pays(arguments: argparse.Namespace) -> list[report.Row]:
    return pays.measure()


def _refusals(arguments: argparse.Namespace) -> list[report.Row]:
    return refusals.measure(arguments.repetitions)


def _recshard(arguments: argparse.Namespace) -> list[report.Row]:
    return recshard.measure(arguments.data, arguments.criteo)


def _flexshard(arguments: argparse.Namespace) -> list[report.Row]:
    return flexshard.measure(arguments.repetitions)


def _schedules(arguments: argparse.Namespace) -> list[report.Row]:
    return schedules.measure(arguments.schedules)


def _moves(arguments: argparse.Namespace) -> list[report.Row]:
    return moves.measure(arguments.repetitions)


def _sources(arguments: argparse.Namespace) -> list[Source]:
    for option, file in (("DATA", arguments.data), ("CRITEO", arguments.criteo)):
        if file is None:
            CONSOLE.print(f"[yellow]no {option}=file.parquet: no task has its key frequencies")
    return sources(arguments.data, arguments.criteo)


def _torchrec(arguments: argparse.Namespace) -> list[report.Row]:
    return compared.measure(_sources(arguments))


def _neuroshard(arguments: argparse.Namespace) -> list[report.Row]:
    return cost_net.measure(_sources(arguments), arguments.repetitions, FOLDER / "cost_net.npz")


def _scale(arguments: argparse.Namespace) -> list[report.Row]:
    return scale.measure(arguments.repetitions)


_PARTS: Mapping[str, Callable[[argparse.Namespace], list[report.Row]]] = {
    "local": _local,
    "skew": _skew,
    "torchrec": _torchrec,
    "neuroshard": _neuroshard,
    "metering": _metering,
    "quiet": _quiet,
    "pays": _pays,
    "refusals": _refusals,
    "moves": _moves,
    "planners": _planners,
    "recshard": _recshard,
    "flexshard": _flexshard,
    "scale": _scale,
    "schedules": _schedules,
}


def main() -> int:
    """Run the benchmark; the exit code says whether it ran, not whether targets were reached."""
    parser = argparse.ArgumentParser(prog="bench.drift", description=__doc__)
    parser.add_argument("--data", type=Path, help="the news file, for what needs real drift")
    parser.add_argument("--criteo", type=Path, help="Criteo's clicks, for their key frequencies")
    parser.add_argument("--parts", default=",".join(_PARTS), help="of " + ", ".join(_PARTS))
    parser.add_argument("--repetitions", type=int, default=report.LEAST_REPETITIONS)
    parser.add_argument("--schedules", type=int, default=schedules.SCHEDULES)
    arguments = parser.parse_args()
    rows: list[report.Row] = []
    try:
        for part in arguments.parts.split(","):
            if part not in _PARTS:
                raise BenchError(f"no part {part!r}; there are {', '.join(_PARTS)}")
            found = _PARTS[part](arguments)
            report.write(BUILD / "bench" / f"drift_{part}.json", ROOT, found)
            rows += found
    except (BenchError, ProcessError, TrainerError) as error:
        CONSOLE.print(f"[red]bench-drift: {error}")
        return 1
    report.show("Following the drift", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
