"""What it costs a lookup that its node counts what it reads."""

import json

from bench import report
from bench.store import programs

_SECONDS = 2


def measure(repetitions: int) -> list[report.Row]:
    """Return the row of a lookup in a store with a load meter against one without.

    Raises:
        BenchError: The program does not build or run.
    """
    program = programs.build("metering")
    found = json.loads(programs.run(program, repetitions, _SECONDS))
    case = f"1,664 keys of 16 values, {100 * found['told']:.2f} % of the reads told"
    return [
        report.compare(
            (case, "time of a key in the store, counted / not", "ns"),
            found["metered_ns"],
            found["plain_ns"],
            peer_name="not counted",
            better="lower",
            target=0,
        )
    ]
