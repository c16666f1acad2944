"""A model's life as rows of claims, by the tests that show it: `python -m bench.model`.

What a feature costs that comes later is a row of `bench.change`, what late labels cost one of
`python -m bench.train labels`.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from bench import report
from bench.held import held
from bench.servers import BUILD, ROOT, BenchError

_CONSOLE = Console(stderr=True, highlight=False)
# Case, tests, the words that choose them, claim.
_CLAIMS = (
    (
        "a net of one's own, killed, ends with the same bytes",
        "tests/e2e/test_killed_training.py",
        "own",
        "22.3",
    ),
    (
        "a net of one's own is served as it scores",
        "tests/e2e/test_net_serving.py",
        "own and scores",
        "22.3",
    ),
    (
        "nodes take another schema under traffic",
        "tests/e2e/test_schema_switch.py",
        "test_",
        "22.4",
    ),
    (
        "a change leaves scores as they were, and is killed",
        "tests/trainer/test_forking.py",
        "change or comes",
        "22.4",
    ),
    (
        "labels that come late are learned once, through kills",
        "tests/e2e/test_killed_training.py",
        "late",
        "22.5",
    ),
    (
        "1,000 steps as TorchRec's",
        "tests/trainer/test_torchrec_page.py",
        "test_",
        "22.7",
    ),
    (
        "every page: snippets, links, messages, words",
        "tests/docs",
        "test_",
        "22.8",
    ),
)


def main() -> int:
    """Run the tests; the exit code says whether they ran, not whether they passed."""
    parser = argparse.ArgumentParser(prog="bench.model", description=__doc__)
    parser.add_argument("--out", type=Path, default=BUILD / "bench" / "model.json")
    arguments = parser.parse_args()
    try:
        rows = [held(case, tests, words, claim=claim) for case, tests, words, claim in _CLAIMS]
        report.write(arguments.out, ROOT, rows)
    except BenchError as error:
        _CONSOLE.print(f"[red]bench-model: {error}")
        return 1
    report.show("A model's life", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
