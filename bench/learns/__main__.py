"""The results without a setting: `make bench-learns`, or `python -m bench.learns PART`.

It prints a table a part and writes `build/bench/learns_PART.json`.
"""

import argparse
import sys
from pathlib import Path

from bench import parts


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--tables", type=int, default=200, help="of either kind, for `leaks`")
    parser.add_argument("--seeds", type=int, default=3, help="of each set of `priors`, and of news")
    parser.add_argument("--news", type=Path, help="file of clicks, for all but `leaks`, `priors`")
    parser.add_argument("--jobs", type=int, default=1, help="runs of news at a time, a core each")
    parser.add_argument("--events", type=int, help="of that file, at most")
    return parser


if __name__ == "__main__":
    # The exit code says whether they ran, not whether bars were reached.
    sys.exit(
        parts.main(
            "bench.learns",
            "Learning",
            ("leaks", "priors", "presets", "fresh", "served", "prune"),
            __doc__,
            _options(),
            usual=("leaks", "priors"),
        )
    )
