"""Ranking of one user's candidates: `make bench-rank`."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import parts, report, vectors
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
    of_vectors = os.environ.get(vectors.TORCH)
    costs = BUILD / "bench" / f"rank_costs{f'_{of_vectors}' if of_vectors else ''}.json"
    parser.add_argument("--costs", type=Path, default=costs, help="measured before")
    parser.add_argument(
        "--vectors", choices=vectors.LEVELS, help="that all sides are held to; what each chooses"
    )
    return parser


def _held(measure: parts.Measure) -> parts.Measure:
    """Return a part whose rows say which vectors all sides were held to."""

    def rows(given: argparse.Namespace) -> Iterator[report.Row]:
        if given.vectors:
            vectors.check(given.vectors)
        for row in measure(given):
            yield dataclasses.replace(row, vectors=given.vectors or "")

    return rows


def _start_again(level: str) -> None:
    """Start again as a process that is held to these vectors, which libraries choose once."""
    command = [sys.executable, "-m", "bench.rank", *sys.argv[1:]]
    os.execve(sys.executable, command, vectors.environment(level))


_PARTS: dict[str, parts.Measure] = {
    "dense": lambda given: dense.rows(given.candidates, given.repetitions, given.costs),
    "merging": lambda given: merging.rows(given.repetitions, given.costs),
    "served": lambda given: served.rows(given.candidates, given.repetitions),
    "histories": lambda given: histories.rows(given.candidates, given.repetitions),
    "reduced": lambda given: reduced_served.rows(given.repetitions, given.batches),
    "reduced-auc": lambda given: reduced.rows(_criteo(given.criteo)),
    "reduced-curve": lambda given: reduced.curve(_criteo(given.criteo), given.repetitions),
}

if __name__ == "__main__":
    asked = _options().parse_known_args()[0].vectors
    if asked and os.environ.get(vectors.TORCH) != asked:
        _start_again(asked)
    held = {part: _held(measure) for part, measure in _PARTS.items()}
    # The exit code says whether it ran, not whether bars were reached.
    sys.exit(parts.main("bench.rank", "Ranking", held, __doc__, _options()))
