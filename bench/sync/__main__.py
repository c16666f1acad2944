"""Strategies of synchronisation: `python -m bench.sync virtual --news clicks.parquet`."""

import argparse
import sys
from pathlib import Path

from bench import parts
from bench.sync import virtual


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--news", type=Path, metavar="PATH", help="the news file; else synthetic")
    return parser


if __name__ == "__main__":
    # The exit code says whether they ran, not whether bars were reached.
    sys.exit(
        parts.main(
            "bench.sync",
            "Strategies of synchronisation",
            {"virtual": lambda given: virtual.measure(given.news)},
            __doc__,
            _options(),
        )
    )
