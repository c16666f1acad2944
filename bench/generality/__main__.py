"""The defaults on data that nobody tuned them for: `python -m bench.generality`.

Each set is written to a file, `embertide init` guesses a run, `embertide train` runs it unchanged.
Rated is the AUC of the last fifth of the events, each scored before it is learned. The peer is the
better of two factorisation machines that are told what each column is and tuned on that very
figure: one scores a batch before it learns it, the other one blocks of 128 events. Runs that
are done are kept in build/bench/generality, so what was stopped goes on.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from bench import parts, report
from bench.generality import public, sets
from bench.generality.cases import FOLDER, PEERS, Case, case_of_set, rows_of, trials
from bench.report import CONSOLE
from bench.servers import BenchError
from embertide.trainer.lab.trials import measured

_QUICK = 0.05  # of the rows


def _measure(given: argparse.Namespace) -> Iterator[report.Row]:
    names = [each.name for each in sets.SETS]
    if unknown := [name for name in given.sets if name not in names]:
        raise BenchError(f"there is no set {unknown[0]!r}; there are {', '.join(names)}")
    seeds = (1,) if given.quick else tuple(range(1, given.seeds + 1))
    tables = public.SEEN if given.public else ()
    tables += public.KEPT_BACK if given.kept_back else ()
    wanted = given.sets or ([] if given.file or tables else names)
    files = {path.stem: path.resolve() for path in given.file}
    files |= public.write(tables, FOLDER / "files" / "public")
    share = _QUICK if given.quick else 1.0
    cases = [case_of_set(each, share) for each in sets.SETS if each.name in wanted]
    cases += [Case(name=name, path=path, share=1.0, known=None) for name, path in files.items()]
    for case in cases:
        found = measured(trials(case, seeds), FOLDER, jobs=given.jobs)
        rows = rows_of(case, found)
        yield from rows
        runs = found[PEERS:]
        wrong = runs[0]["misread"]
        took = ", ".join(f"{run['seconds']:.0f}" for run in runs)
        CONSOLE.print(
            f"{case.name}: {rows[0].ours:.4f}, the peer {rows[0].peer:.4f}; "
            f"{runs[0]['versions']} versions; {took} s"
            + (f"; [red]misread: {', '.join(wrong)}" if wrong else "")
        )


if __name__ == "__main__":
    parser = parts.options("generality", __doc__)
    parser.add_argument("sets", nargs="*", metavar="SET", help="of those made; by default all")
    parser.add_argument("--file", type=Path, action="append", default=[], help="one more, of yours")
    parser.add_argument("--public", action="store_true", help="twenty public tables")
    parser.add_argument("--kept-back", action="store_true", help="thirteen kept back")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the rows, one seed")
    parser.add_argument("--jobs", type=int, default=1)
    parts.command("Defaults over data that nobody tuned them for", _measure, parser)
