"""Ranking of one user's candidates: `make bench-rank`."""

import argparse
import sys
from pathlib import Path

from bench import parts, report
from bench.rank import dense, served
from bench.servers import BUILD


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--repetitions", type=int, default=report.MIN_REPETITIONS)
    parser.add_argument("--candidates", type=int, nargs="+", default=[64, 256, 1024])
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
                "served": lambda given: served.rows(given.candidates, given.repetitions),
            },
            __doc__,
            _options(),
        )
    )
