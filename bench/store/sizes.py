"""How a lookup's cost grows from a million rows to a hundred million: fp16 rows of 16 values.

Bags of 10 keys drawn evenly, one thread. Beside each size a loop that reads single lines at random
from as much memory as the store's rows and index take: what is beyond its growth is ours. 100 M
rows take 6 GB, filling them some 5 GB more and some minutes.
"""

import gc
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from bench import report
from bench.report import CONSOLE
from bench.store import lookup, ours

SIZES = (1_000_000, 10_000_000, 100_000_000)
_DIM, _BAG = 16, 10
_BATCHES = 10  # and one more, first, that does not count
_BAR = 1.3
_CLAIM = "23.6"


def _measure(rows: int) -> tuple[list[float], list[float]]:
    """Return the nanoseconds a key and a random line of each turn."""
    CONSOLE.print(f"cost by rows: {rows:,} rows")
    store = ours.fill(rows, _DIM, "fp16")
    lines = lookup.RandomLines(store.stats()["ddr_payload_bytes"] + store.stats()["index_bytes"])
    side = lookup.Ours(store)
    rng = np.random.default_rng(5)
    batches = ours.draw(rng, rows, 0.0, _BATCHES + 1, lookup.KEYS)
    places = [rng.integers(0, lines.count, lookup.KEYS).astype(np.uint64) for _ in batches]
    ours_s, lines_s = lookup.turns(
        [
            [side.lookup(ours.keys_of(each), _BAG, 1) for each in batches],
            [partial(lines.read, each) for each in places],
        ]
    )
    return [1e9 * s / lookup.KEYS for s in ours_s], [1e9 * s / lookup.KEYS for s in lines_s]


def run(*, sizes: Sequence[int] = SIZES) -> Iterator[report.Row]:
    """Yield each size's cost, and last its growth from the first to the last over a line's."""
    measured = []
    for rows in sizes:
        key_ns, line_ns = _measure(rows)
        gc.collect()
        measured.append((key_ns, line_ns))
        yield report.compare(
            (f"{rows:,} fp16 rows of {_DIM}, bags of {_BAG}", "time a key", "ns"),
            key_ns,
            line_ns,
            peer_name="single lines at random",
            better="lower",
            target=0.0,
        )
    (first_key, first_line), (last_key, last_line) = measured[0], measured[-1]
    yield report.compare(
        (f"{sizes[0]:,} to {sizes[-1]:,} rows", "growth of the time a key", "x"),
        [last / first for first, last in zip(first_key, last_key, strict=True)],
        [last / first for first, last in zip(first_line, last_line, strict=True)],
        peer_name="single lines at random",
        better="lower",
        target=_BAR,
        claim=_CLAIM,
    )
