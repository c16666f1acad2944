"""Real ranks of which one is slower, or stops: events a second of all, and what staleness costs.

Compute is emulated by sleeping (bench/sync/apart.py), so that four ranks of two cores are four.
"""

from collections.abc import Iterator
from typing import Any

from bench.ranks.launching import launch
from bench.report import Row, compare

_RANKS = 4
_WIDE = "max_row_staleness=1000,max_batches_apart=1000"
_PARTIAL = f"partial-all-reduce:{_WIDE}"
_STOP_S = 10.0


def _run(sync: str, *options: str) -> dict[str, Any]:
    return launch("bench.sync.apart", _RANKS, ["--sync", sync, *options])


def measure(repetitions: int) -> Iterator[Row]:
    """Yield what four ranks do together and apart."""
    for case, slow, least in (("one rank five times slower", "5", 2.5), ("equal ranks", "1", 0.95)):
        together = [_run("all-reduce", "--slow", slow) for _ in range(repetitions)]
        for name, sync in (("partial all-reduce", _PARTIAL), ("LocalSGD", f"local-sgd:{_WIDE}")):
            apart = [_run(sync, "--slow", slow) for _ in range(repetitions)]
            yield compare(
                (case, name, "events/s"),
                [each["events_per_s"] for each in apart],
                [each["events_per_s"] for each in together],
                peer_name="all-reduce",
                better="higher",
                target=least if name == "partial all-reduce" else 0.0,
                claim="D.3",
            )
