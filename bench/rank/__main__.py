"""Ranking of one user's candidates: `make bench-rank`."""

import argparse
import sys
from pathlib import Path

from bench import parts, report
from bench.rank import dense, histories, merging, reduced, reduced_served, served
from bench.servers import BUILD, BenchError


def _criteo(path: Path | None) -> Path:
    if path is None:
        raise BenchError("give Criteo's ads, a Parquet file: --criteo, or CRITEO=")
    return path


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--repetitions", type=int, default=report.MIN_REPETITIONS)
    parser.add_argument("--candidates", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument(
        "--criteo", type=Path, help="Criteo's ads, for reduced-auc and reduced-curve"
    )
    parser.add_argument(
        "--costs", type=Path, default=BUILD / "bench" / "rank_costs.json", help="measured before"
    )
    return parser


if __name__ == "__main__":
    # The exit code says whether it ran, not whether bars were reached.
    sys.exit(
        parts.main(
            "bench.rank",
            "Ranking",
            {
                "dense": lambda given: dense.rows(given.candidates, given.repetitions, given.costs),
                "merging": lambda given: merging.rows(given.repetitions, given.costs),
                "served": lambda given: served.rows(given.candidates, given.repetitions),
                "histories": lambda given: histories.rows(given.candidates, given.repetitions),
                "reduced": lambda given: reduced_served.rows(given.repetitions, given.batches),
                "reduced-auc": lambda given: reduced.rows(_criteo(given.criteo)),
                "reduced-curve": lambda given: reduced.curve(
                    _criteo(given.criteo), given.repetitions
                ),
            },
            __doc__,
            _options(),
        )
    )
