"""One run of many ranks: `make bench-ranks DATA=clicks.parquet PARTS="speed wire"`."""

import argparse
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from bench import parts, report
from bench.held import held
from bench.ranks import pods, quality, speed, wire
from bench.servers import BUILD, BenchError

_RANKS = "tests/trainer/test_ranks.py"
_NAMED = "another_configuration or fails_in_any_stage or cannot_be_read or drive_that_is_full"
# Claims that tests hold: case, tests, the words that choose them, claim.
_HELD = (
    ("a step of 1, 2 and 4 ranks within 1e-5 of fp64", _RANKS, "of_fp64 or bit_for_bit", "20.1"),
    ("ranks killed at random, nodes following", "tests/e2e/test_killed_ranks.py", "test_", "20.3"),
    ("a rank lost in each stage", "tests/trainer/test_rank_faults.py", "test_", "20.9"),
    ("another configuration, a stage that fails", _RANKS, _NAMED, "20.9"),
)


def _quality(given: argparse.Namespace) -> Iterable[report.Row]:
    if given.data is None or not given.data.is_file():
        raise BenchError("give the news file: DATA=clicks.parquet")
    return quality.measure(given.data)


def _pods(given: argparse.Namespace) -> Iterable[report.Row]:
    folder = BUILD / "bench" / "pods"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return pods.rows(pods.run(folder, given.repetitions))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", type=Path, metavar="PATH", help="the news file, of quality")
    parser.add_argument("--repetitions", type=int, default=report.MIN_REPETITIONS)
    return parser


if __name__ == "__main__":
    # The exit code says whether they ran, not whether bars were reached.
    sys.exit(
        parts.main(
            "bench.ranks",
            "Many ranks",
            {
                "faults": lambda _: (held(*each, claim=claim) for *each, claim in _HELD),
                "speed": lambda given: speed.measure(given.repetitions),
                "wire": lambda given: wire.measure(given.repetitions),
                "quality": _quality,
                "pods": _pods,
            },
            __doc__,
            _options(),
        )
    )
