"""The trainer's benchmarks: `make bench-train DATA=PATH`, or `python -m bench.train PART ...`.

Runs that are done are kept in `build/bench/train`, so a part that was stopped goes on. `--data` is
a news portal's clicks (docs/results/training.md says which); bars are set for that file. Parts but
`quality` and `pruning` run when they are named: `beyond`, a pruned model larger than memory;
`budget`, versions under a byte budget; `labels`, those that come late; `criteo`, for a file of
Criteo's ads; `quantised`, rows learned in fp32 and served in fewer bits; `sequences`, nets that
look back, with equally many parameters; `speed`, beside which nothing else should run, and
`memory`, which make their own events.
"""

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from bench import parts, report
from bench.servers import BenchError
from bench.train.runs import Stream

_OF_EVENTS = (
    "quality",
    "pruning",
    "beyond",
    "budget",
    "criteo",
    "labels",
    "quantised",
    "sequences",
)
_OWN = ("speed", "memory")


def _of_events(part: str, given: argparse.Namespace) -> Iterable[report.Row]:
    if given.data is None or not given.data.is_file():
        raise BenchError(f"--data is {given.data}; give a file of events")
    days, path = tuple(given.days), given.data.resolve()
    stream = Stream(path=path, days=days, seen_by="cand", events=given.events)
    run = importlib.import_module(f"bench.train.{part}").run
    rows: Iterable[report.Row] = run(stream, range(1, given.seeds + 1), given.jobs)
    return rows


def _own(part: str, given: argparse.Namespace) -> Iterable[report.Row]:
    rows: Iterable[report.Row] = importlib.import_module(f"bench.train.{part}").run(given.events)
    return rows


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", type=Path, metavar="PATH")
    parser.add_argument("--events", type=int, help="read the first events alone; no bar holds then")
    parser.add_argument("--days", type=int, nargs=2, default=(4, 9), metavar="DAY")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each case")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    return parser


if __name__ == "__main__":
    # The exit code says whether they ran, not whether bars were reached.
    every: dict[str, parts.Measure] = {
        **{part: functools.partial(_of_events, part) for part in _OF_EVENTS},
        **{part: functools.partial(_own, part) for part in _OWN},
    }
    usual = ("quality", "pruning")
    title = "The trainer"
    sys.exit(
        parts.main("bench.train", title, every, __doc__, _options(), usual=usual, picture=True)
    )
