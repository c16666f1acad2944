"""The commands of benchmarks: their options, what stops them, and where their rows go.

A benchmark is a function that takes the options and yields rows (bench/report.py), or a package of
several parts. Rows are written as they come, so what was measured before an error is kept.
"""

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import plot, report
from bench.report import CONSOLE
from bench.servers import BUILD, ROOT, BenchError
from embertide._common.errors import OperatingError

_MAX_SHOWN = 60  # of more rows those that have a target are shown
Measure = Callable[[Any], Iterable[report.Row]]  # takes the options


def options(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the options that benchmarks have; NAME.json is where rows go by default."""
    parser = argparse.ArgumentParser(
        prog=f"bench.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=report.MIN_REPETITIONS)
    parser.add_argument("--out", type=Path, default=BUILD / "bench" / f"{name}.json")
    return parser


def command(
    title: str,
    measure: Measure,
    parser: argparse.ArgumentParser,
    *,
    picture: bool = False,
    barred: bool = False,
) -> None:
    """Run a benchmark of one part, and end with whether it could not run.

    Args:
        title: The table's title.
        measure: The benchmark.
        parser: The parser of `options`, with more of its own.
        picture: Whether rows are drawn beside the file.
        barred: Whether a target that is missed is an error, too.
    """
    given = parser.parse_args()
    if given.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    rows, failed = _rows(title, given.out, measure, given, picture=picture)
    sys.exit(failed or int(barred and not all(row.met for row in rows if row.target)))


def main(
    package: str,
    title: str,
    parts: Sequence[str] | Mapping[str, Measure],
    doc: str | None,
    more: argparse.ArgumentParser | None = None,
    *,
    usual: Sequence[str] = (),
    picture: bool = False,
) -> int:
    """Run the parts that the command names, and return whether one could not run.

    Args:
        package: The package of their modules, as `bench.edges`; it names the files of rows, too.
        title: The tables' title.
        parts: That there are: modules with a function `run`, or by name what measures them.
        doc: The command's description of itself.
        more: Further options; modules get options only if there are.
        usual: Those that run where none is named; empty: all.
        picture: Whether rows are drawn beside the file.
    """
    parser = argparse.ArgumentParser(
        prog=package,
        description=doc,
        parents=[more] if more else [],
        conflict_handler="resolve",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}")
    parser.add_argument("--out", type=Path, default=BUILD / "bench", metavar="FOLDER")
    given = parser.parse_args()
    named = [part for words in given.parts for part in words.split(",")]
    unknown = [part for part in named if part not in parts]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(parts)}")
    failed = 0
    for part in named or usual or parts:
        CONSOLE.print(f"== {part}")
        if isinstance(parts, Mapping):
            measure = parts[part]
        else:
            module = importlib.import_module(f"{package}.{part}")
            measure = module.run if more else functools.partial(_without_options, module.run)
        path = given.out / f"{package.rpartition('.')[2]}_{part}.json"
        failed |= _rows(f"{title}: {part}", path, measure, given, picture=picture)[1]
    return failed


def _without_options(run: Callable[[], Iterable[report.Row]], _: object) -> Iterable[report.Row]:
    return run()


def _rows(
    title: str, path: Path, measure: Measure, given: argparse.Namespace, *, picture: bool
) -> tuple[list[report.Row], int]:
    """Return the rows of a measurement, and 1 if it could not be made."""
    rows: list[report.Row] = []
    failed = 0
    try:
        for row in measure(given):
            rows.append(row)
            report.write(path, ROOT, rows)
    except (BenchError, OperatingError) as error:
        CONSOLE.print(f"[red]{title}:", str(error), markup=True)
        failed = 1
    barred = [row for row in rows if row.target]
    shown = barred if barred and len(rows) > _MAX_SHOWN else rows
    if shown:
        report.show(title, shown)
        CONSOLE.print(f"{len(rows)} rows: {path}")
    if shown and picture:
        plot.draw(title, shown, path.with_suffix(".svg"))
    return rows, failed
