"""The trainer's benchmarks: `make bench-train DATA=PATH`, or `python -m bench.train PART ...`.

Each part prints a table and writes `build/bench/train_PART.json` and `.svg`. Runs that are done are
kept in `build/bench/train`, so a part that was stopped goes on. `--data` is a news portal's clicks
(docs/results/training.md says which); bars are set for that file. Other parts run when they are
named: `beyond`, a pruned model larger than memory; `budget`, versions under a byte budget;
`labels`, those that come late; `criteo` and `dense`, for a file of Criteo's ads; `speed`, beside
which nothing else should run, and `memory`, which make their own events.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

from bench import plot, report
from bench.report import CONSOLE
from bench.servers import BUILD, ROOT, BenchError
from bench.train.runs import Stream
from embertide.trainer.errors import TrainerError

_PARTS = ("quality", "pruning", "drift")
_OWN = ("speed", "memory")
_KNOWN = (*_PARTS, "beyond", "budget", "criteo", "dense", "labels", *_OWN)
_DAYS = (4, 9)


def _stream(arguments: argparse.Namespace) -> Stream:
    return Stream(
        path=arguments.data.resolve(),
        days=tuple(arguments.days),
        seen_by="cand",
        events=arguments.events,
    )


def main() -> int:
    """Run the parts; the exit code says whether they ran, not whether bars were reached."""
    parser = argparse.ArgumentParser(prog="bench.train", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_KNOWN)}")
    parser.add_argument("--data", type=Path, metavar="PATH")
    parser.add_argument("--events", type=int, help="read the first events alone; no bar holds then")
    parser.add_argument("--days", type=int, nargs=2, default=_DAYS, metavar="DAY")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each case")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--out", type=Path, default=BUILD / "bench", metavar="FOLDER")
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in _KNOWN]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(_KNOWN)}")
    parts = arguments.parts or _PARTS
    has_file = arguments.data is not None and arguments.data.is_file()
    if not has_file and not set(parts) <= set(_OWN):
        parser.error(f"--data is {arguments.data}; give a file of events")
    try:
        for part in parts:
            module = importlib.import_module(f"bench.train.{part}")
            rows = (
                module.run(arguments.events)
                if part in _OWN
                else module.run(_stream(arguments), range(1, arguments.seeds + 1), arguments.jobs)
            )
            report.write(arguments.out / f"train_{part}.json", ROOT, rows)
            report.show(f"The trainer: {part}", rows)
            plot.draw(f"The trainer: {part}", rows, arguments.out / f"train_{part}.svg")
    except (BenchError, TrainerError) as error:
        CONSOLE.print(f"[red]bench-train: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
