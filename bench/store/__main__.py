"""The store against its peers: `make bench-store`, or `python -m bench.store PART ...`.

Each part prints a table and writes `build/bench/store_PART.json` and `.svg`. The machine should do
nothing else meanwhile; a part says what it measures in its own docstring.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import plot, report
from bench.servers import BUILD, ROOT, BenchError
from bench.store import levels as vector_levels

_CONSOLE = Console(stderr=True, highlight=False)
_PARTS = (
    *("lookup", "training", "sizes", "adagrad", "memory", "growth", "versions", "recovery"),
    *("beyond", "cost"),
)
# Of which each kind of vectors is a process, and single cases may be chosen.
_BY_LEVEL = ("lookup", "training")


def _rows(part: str, levels: Sequence[str], cases: Sequence[str]) -> Iterator[report.Row]:
    module: Any = importlib.import_module(f"bench.store.{part}")
    if part not in _BY_LEVEL:
        yield from module.run()
        return
    unknown = [case for case in cases if case not in module.CASES]
    if unknown:
        raise BenchError(f"{part} has no case {unknown[0]!r}; it has {', '.join(module.CASES)}")
    yield from vector_levels.rows(part, levels, cases or module.CASES)


def _run(part: str, folder: Path, levels: Sequence[str], cases: Sequence[str]) -> None:
    rows: list[report.Row] = []
    for row in _rows(part, levels, cases):
        rows.append(row)
        report.write(folder / f"store_{part}.json", ROOT, rows)
    barred = [row for row in rows if row.target] or rows
    report.show(f"The store: {part}", barred)
    plot.draw(f"The store: {part}", barred, folder / f"store_{part}.svg")
    _CONSOLE.print(f"all {len(rows)} rows: {folder / f'store_{part}.json'}, picture beside it")


def main() -> int:
    """Run the parts; the exit code says whether they ran, not whether bars were reached."""
    parser = argparse.ArgumentParser(prog="bench.store", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}; all")
    parser.add_argument("--out", type=Path, default=BUILD / "bench", metavar="FOLDER")
    parser.add_argument(
        "--vectors",
        nargs="+",
        choices=vector_levels.LEVELS,
        default=vector_levels.here(),
        help="of lookup and training: the vectors of all sides; all that this CPU has",
    )
    parser.add_argument(
        "--cases", nargs="+", default=(), metavar="CASE", help="of lookup or training; all"
    )
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in _PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(_PARTS)}")
    try:
        for part in arguments.parts or _PARTS:
            _run(part, arguments.out, arguments.vectors, arguments.cases)
    except BenchError as error:
        _CONSOLE.print(f"[red]bench-store: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
