"""The front door: `make bench-front`, or `python -m bench.front PART ...`.

Each part is a module with `run(options)`, which yields rows. It prints a table and writes
`build/bench/front_PART.json`. A part says what it tries in its own docstring. `--target` names
whom (bench/front/targets.py); the first is the peer of the others where two are compared. What
tests hold is a part of `bench.held`.
"""

import argparse
import sys

from bench import parts, report
from bench.front import speed, targets

PARTS = ("storm", "hostile", "speed", "conformance")


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--target",
        nargs="+",
        choices=targets.TARGETS,
        default=["stock", "own"],
        metavar="NAME",
        help=f"of {', '.join(targets.TARGETS)}; peers and node serve no models, for a storm alone",
    )
    parser.add_argument("--calls", type=int, default=1_000_000, help="of a storm, all callers'")
    parser.add_argument("--chunk", type=int, default=100_000, help="calls that are kept at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="forget the chunks of before")
    parser.add_argument("--repetitions", type=int, default=report.MIN_REPETITIONS)
    parser.add_argument("--rows", type=int, default=200_000, help="of each table, of speed")
    parser.add_argument(
        "--kind", nargs="+", choices=speed.KINDS, default=speed.KINDS, help="of speed"
    )
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8], help="of speed")
    return parser


if __name__ == "__main__":
    # The exit code says whether they ran, not whether bars were reached.
    sys.exit(parts.main("bench.front", "The front door", PARTS, __doc__, _options()))
