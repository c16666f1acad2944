"""Benchmarks of several parts, each a module whose function `run` yields rows: how they are run."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench import report
from bench.servers import BUILD, ROOT, BenchError

_CONSOLE = Console(stderr=True, highlight=False)


def _run(package: str, title: str, part: str, options: argparse.Namespace) -> None:
    path = options.out / f"{package.rpartition('.')[2]}_{part}.json"
    module = importlib.import_module(f"{package}.{part}")
    rows: list[report.Row] = []
    for row in module.run(options) if options.passed else module.run():
        rows.append(row)
        report.write(path, ROOT, rows)
    report.show(f"{title}: {part}", rows)
    _CONSOLE.print(f"{len(rows)} rows: {path}")


def main(
    package: str,
    title: str,
    parts: Sequence[str],
    doc: str | None,
    more: argparse.ArgumentParser | None = None,
) -> int:
    """Run the parts that the command names, and return whether one could not run.

    Args:
        package: Of their modules, as `bench.edges`; it names the files of rows, too.
        title: Of the tables.
        parts: That there are.
        doc: What the command says of itself.
        more: Further options; the parts get them.
    """
    parser = argparse.ArgumentParser(
        prog=package, description=doc, parents=[more] if more else [], conflict_handler="resolve"
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; all")
    parser.add_argument("--out", type=Path, default=BUILD / "bench", metavar="FOLDER")
    parser.set_defaults(passed=more is not None)
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in parts]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(parts)}")
    failed = 0
    for part in options.parts or parts:
        _CONSOLE.print(f"== {part}")
        try:
            _run(package, title, part, options)
        except BenchError as error:
            _CONSOLE.print(f"{part}: {error}")
            failed = 1
    return failed
