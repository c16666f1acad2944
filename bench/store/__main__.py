"""The store against its peers: `make bench-store`, or `python -m bench.store PART ...`.

The machine should do nothing else meanwhile; a part says what it measures in its own docstring.
`ssd`, which needs 7 GB of disk, runs when it is named (`make bench-ssd`).
"""

import argparse
import functools
import importlib
import sys
from collections.abc import Iterator

from bench import parts, report, vectors
from bench.servers import BenchError
from bench.store import levels

# Parts that run a process for each kind of vectors, and whose single cases may be chosen.
_BY_LEVEL = ("lookup", "training")
_ALONE = ("sizes", "adagrad", "memory", "growth", "versions", "recovery", "beyond")


def _by_level(part: str, given: argparse.Namespace) -> Iterator[report.Row]:
    known = importlib.import_module(f"bench.store.{part}").CASES
    unknown = [case for case in given.cases if case not in known]
    if unknown:
        raise BenchError(f"{part} has no case {unknown[0]!r}; it has {', '.join(known)}")
    return levels.rows(part, given.vectors, given.cases or known)


def _alone(part: str, given: argparse.Namespace) -> Iterator[report.Row]:
    module = importlib.import_module(f"bench.store.{part}")
    rows: Iterator[report.Row] = module.run(given) if part == "ssd" else module.run()
    return rows


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--vectors",
        nargs="+",
        choices=vectors.LEVELS,
        default=vectors.here(),
        help="of lookup and training: the vectors of all sides; all that this CPU has",
    )
    parser.add_argument(
        "--cases", nargs="+", default=(), metavar="CASE", help="of lookup or training; all"
    )
    parser.add_argument("--repetitions", type=int, default=report.MIN_REPETITIONS, help="of ssd")
    parser.add_argument("--rows", type=int, default=5_760_000, help="of ssd")
    return parser


if __name__ == "__main__":
    # The exit code says whether they ran, not whether bars were reached.
    every: dict[str, parts.Measure] = {
        **{part: functools.partial(_by_level, part) for part in _BY_LEVEL},
        **{part: functools.partial(_alone, part) for part in (*_ALONE, "ssd")},
    }
    usual = (*_BY_LEVEL, *_ALONE)
    sys.exit(
        parts.main(
            "bench.store", "The store", every, __doc__, _options(), usual=usual, picture=True
        )
    )
