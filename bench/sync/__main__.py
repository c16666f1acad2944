"""Strategies of synchronisation: `make bench-sync NEWS=clicks.parquet CRITEO=ads.parquet`."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import parts, report
from bench.servers import BenchError
from bench.sync import dct, pods, ranks, virtual, wire

_CURVE_EVENTS = 30_000
_COST_BATCH = 1024


def _dct(given: argparse.Namespace) -> Iterator[report.Row]:
    sets = {"news": given.news, "criteo": given.criteo}
    named = {name: path for name, path in sets.items() if path is not None}
    if not named or not all(path.is_file() for path in named.values()):
        raise BenchError("give the news file, Criteo's ads, or both: NEWS=... CRITEO=...")
    events = {"news": given.events, "criteo": min(given.events, 60_000)}
    for name, path in named.items():
        for count in given.ranks:
            yield from dct.rows(name, path, count, events[name], given.seeds)
    name, path = list(named.items())[-1]
    yield from dct.cost(name, path, events[name], _COST_BATCH)
    yield from dct.curve(name, path, _CURVE_EVENTS, given.seeds)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--news", type=Path, metavar="PATH", help="the news file, of dct, ranks and virtual"
    )
    parser.add_argument("--criteo", type=Path, metavar="PATH", help="Criteo's ads, of dct")
    parser.add_argument("--events", type=int, default=200_000, help="of a run of dct, at most")
    parser.add_argument("--seeds", type=int, default=3, help="of each case of dct")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="of dct")
    parser.add_argument("--kubeconfig", default="", help="of a cluster's administrator, of pods")
    parser.add_argument("--repetitions", type=int, default=report.LEAST_REPETITIONS)
    return parser


if __name__ == "__main__":
    # The exit code says whether they ran, not whether bars were reached.
    sys.exit(
        parts.main(
            "bench.sync",
            "Strategies of synchronisation",
            {
                "dct": _dct,
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
