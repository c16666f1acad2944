"""Strategies of synchronisation: `make bench-sync NEWS=clicks.parquet CRITEO=ads.parquet`."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import parts, report
from bench.servers import BenchError
from bench.sync import activations, dct, pods, ranks, virtual, wire

_COST_BATCH, _ADS = 1024, 60_000


def _sets(given: argparse.Namespace) -> dict[str, tuple[Path, int]]:
    """Return the files that were given and how many of their events are learned."""
    sets = {"news": (given.news, given.events), "criteo": (given.criteo, min(given.events, _ADS))}
    named = {name: each for name, each in sets.items() if each[0] is not None}
    if not named or not all(path.is_file() for path, _ in named.values()):
        raise BenchError("give the news file, Criteo's ads, or both: NEWS=... CRITEO=...")
    return named


def _dct(given: argparse.Namespace) -> Iterator[report.Row]:
    for name, (path, events) in _sets(given).items():
        for count in given.ranks:
            yield from dct.rows(name, path, count, events, given.seeds)


def _curve(given: argparse.Namespace) -> Iterator[report.Row]:
    name, (path, events) = list(_sets(given).items())[-1]
    yield from dct.curve(name, path, events, given.seeds)


def _activations(given: argparse.Namespace) -> Iterator[report.Row]:
    name, (path, events) = list(_sets(given).items())[-1]
    yield from activations.rows(name, path, events, given.seeds)


def _cost(given: argparse.Namespace) -> Iterator[report.Row]:
    name, (path, events) = list(_sets(given).items())[-1]
    yield from dct.cost(name, path, events, _COST_BATCH, given.repetitions)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--news", type=Path, metavar="PATH", help="the news file, of dct, ranks and virtual"
    )
    parser.add_argument(
        "--criteo", type=Path, metavar="PATH", help="Criteo's ads, for all parts of DCT"
    )
    parser.add_argument("--events", type=int, default=300_000, help="of a run of dct, at most")
    parser.add_argument("--seeds", type=int, default=3, help="of each case of dct")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="of dct")
    parser.add_argument("--kubeconfig", default="", help="of a cluster's administrator, of pods")
    parser.add_argument("--repetitions", type=int, default=report.MIN_REPETITIONS)
    return parser


if __name__ == "__main__":
    # The exit code says whether they ran, not whether bars were reached.
    sys.exit(
        parts.main(
            "bench.sync",
            "Strategies of synchronisation",
            {
                "dct": _dct,
                "curve": _curve,
                "activations": _activations,
                "cost": _cost,
                "ranks": lambda given: ranks.rows(given.repetitions, given.news),
                "agree": lambda given: ranks.agreement(given.repetitions),
                "wire": lambda given: wire.measure(given.repetitions),
                "pods": lambda given: pods.rows(given.kubeconfig, given.repetitions),
                "virtual": lambda given: virtual.measure(given.news),
            },
            __doc__,
            _options(),
        )
    )
