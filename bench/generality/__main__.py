"""The defaults on data that nobody tuned them for: `python -m bench.generality`.

Each set is written to a file, `embertide init` guesses a run, `embertide train` runs it unchanged.
Rated is the AUC of the last fifth of the events, each scored before it is learned; the peer is a
factorisation machine that is told what each column is and is tuned on that very figure. Runs that
are done are kept in build/bench/generality, so what was stopped goes on.
"""

import argparse
import sys
from pathlib import Path

from bench import report
from bench.generality import sets
from bench.generality.cases import FOLDER, Case, case_of_set, rows_of, trials
from bench.report import CONSOLE
from bench.servers import BUILD, ROOT, BenchError
from embertide.trainer.errors import TrainerError
from embertide.trainer.lab.trials import measured

_QUICK = 0.05  # of the rows


def main() -> int:
    """Run the sets; the exit code says whether they ran, not whether the peer was reached."""
    parser = argparse.ArgumentParser(prog="bench.generality", description=__doc__)
    parser.add_argument("sets", nargs="*", metavar="SET", help="of those made; by default all")
    parser.add_argument("--file", type=Path, action="append", default=[], help="one more, of yours")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the rows, one seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=BUILD / "bench" / "generality.json")
    arguments = parser.parse_args()
    names = [each.name for each in sets.SETS]
    unknown = [name for name in arguments.sets if name not in names]
    if unknown:
        parser.error(f"there is no set {unknown[0]!r}; there are {', '.join(names)}")
    seeds = (1,) if arguments.quick else tuple(range(1, arguments.seeds + 1))
    wanted = arguments.sets or ([] if arguments.file else names)
    rows: list[report.Row] = []
    try:
        share = _QUICK if arguments.quick else 1.0
        cases = [case_of_set(each, share) for each in sets.SETS if each.name in wanted]
        cases += [
            Case(name=path.stem, path=path.resolve(), share=1.0, known=None)
            for path in arguments.file
        ]
        for case in cases:
            found = measured(trials(case, seeds), FOLDER, jobs=arguments.jobs)
            rows += rows_of(case, found)
            wrong = found[1]["misread"]
            took = ", ".join(f"{run['seconds']:.0f}" for run in found[1:])
            CONSOLE.print(
                f"{rows[-1].case}: {rows[-2].ours:.4f}, the peer {rows[-2].peer:.4f}; "
                f"{found[1]['versions']} versions; {took} s"
                + (f"; [red]misread: {', '.join(wrong)}" if wrong else "")
            )
    except (BenchError, TrainerError) as error:
        CONSOLE.print(f"[red]bench-generality: {error}")
        return 1
    report.write(arguments.out, ROOT, rows)
    report.show("Defaults over data that nobody tuned them for", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
