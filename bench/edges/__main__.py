"""The edges: `make bench-edges`, or `python -m bench.edges PART ...`.

Each part is a module with `run()`, which yields rows. It prints a table and writes
`build/bench/edges_PART.json`. A part says what it tries in its own docstring. What tests hold is a
part of `bench.held`.
"""

import sys

from bench import parts

PARTS = ("callers", "threads", "disk", "trainer_disk")


if __name__ == "__main__":
    # The exit code says whether they ran, not whether bars were reached.
    sys.exit(parts.main("bench.edges", "The edges", PARTS, __doc__))
