"""Hostile callers: `make bench-edges`, or `python -m bench.edges`.

It prints a table and writes `build/bench/edges_callers.json`. What tests hold of the edges is a
part of `bench.held`.
"""

import sys

from bench import parts

if __name__ == "__main__":
    # The exit code says whether they ran, not whether bars were reached.
    sys.exit(parts.main("bench.edges", "The edges", ("callers",), __doc__))
