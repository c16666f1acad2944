"""The gain of following the drift: `make bench-drift DATA=clicks.parquet PARTS="local skew"`.

Planners against the best of all plans, and fleets at rest, are a part of `bench.held`.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from bench import parts, report
from bench.drift import (
    compared,
    cost_net,
    gains,
    local,
    moves,
    pays,
    recshard,
    scale,
    skew,
)
from bench.drift.tasks import Source, sources
from bench.report import CONSOLE
from bench.servers import BenchError


def _local(given: argparse.Namespace) -> Iterable[report.Row]:
    if given.data is None:
        raise BenchError("give the news file: DATA=clicks.parquet")
    return local.measure(given.data)


def _sources(given: argparse.Namespace) -> list[Source]:
    for option, file in (("DATA", given.data), ("CRITEO", given.criteo)):
        if file is None:
            CONSOLE.print(f"[yellow]no {option}=file.parquet: no task has its key frequencies")
    return sources(given.data, given.criteo)


def _neuroshard(given: argparse.Namespace) -> Iterable[report.Row]:
    return cost_net.measure(_sources(given), given.repetitions, local.FOLDER / "cost_net.npz")


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", type=Path, help="the news file, for what needs real drift")
    parser.add_argument("--criteo", type=Path, help="Criteo's clicks, for their key frequencies")
    parser.add_argument("--operations", type=Path, default=gains.RECORDED, help="of `pays`")
    parser.add_argument("--repetitions", type=int, default=report.MIN_REPETITIONS)
    return parser


_PARTS: dict[str, parts.Measure] = {
    "local": _local,
    "skew": lambda given: skew.measure(given.repetitions),
    "torchrec": lambda given: compared.measure(_sources(given)),
    "neuroshard": _neuroshard,
    "pays": lambda _: pays.measure(),
    "paced": lambda _: pays.measure_paced(),
    "noise": lambda _: pays.measure_noise(),
    "gains": lambda given: gains.measure(given.operations),
    "moves": lambda given: moves.measure(given.repetitions),
    "recshard": lambda given: recshard.measure(given.data, given.criteo),
    "scale": lambda given: scale.measure(given.repetitions),
}

if __name__ == "__main__":
    # The exit code says whether they ran, not whether targets were reached.
    sys.exit(parts.main("bench.drift", "Following the drift", _PARTS, __doc__, _options()))
