"""DCT, model parallel, as an experiment: the largest values of a batch's rows go into the net.

The others are zeros there. A rank that looks rows up would send those values and their positions;
backward, the gradients of those positions, which are known by then. Scores are made with the mask,
too: it is part of the model. Bytes are computed, not measured: fp16, and of positions a bitmap or
16-bit steps, whichever is shorter. Peer: all values in fp16.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

from bench import plot, report
from bench.servers import BUILD
from bench.sync.runs import NAMES, apart, runs, series
from embertide.trainer.config import AllReduce

KEPT = (0.5, 0.35, 0.25, 0.1, 0.05, 0.02)
_PICTURE = BUILD / "bench" / "sync_activations.svg"
_SUM = AllReduce().strategy


def _times_fewer(kept: float) -> float:
    """Return how many times fewer bytes travel forward and backward, of 2 bytes a value."""
    positions = min(2 * kept, 1 / 8)
    return 4 / (4 * kept + positions)


def rows(name: str, data: Path, events: int, seeds: int) -> Iterator[report.Row]:
    """Yield a row for each share of values; draw them."""
    base = series(runs(name, data, 1, events, seeds, (_SUM,)), _SUM, "auc")
    points = []
    for kept in KEPT:
        masked = series(runs(name, data, 1, events, seeds, (_SUM,), kept=kept), _SUM, "auc")
        times = _times_fewer(kept)
        case = f"{NAMES[name]}, {events:,} events, {kept:.0%} of rows' values: {times:.1f}x fewer"
        row = apart(case, masked, base, 0.0)
        points.append((times, row.ours, row.spread))
        yield row
    plot.curves(
        f"Largest values of rows alone, {NAMES[name]}, AUC {statistics.fmean(base):.4f} with all",
        ("times fewer bytes of rows and their gradients than fp16", "AUC more than with all"),
        {"shares of 0.5 to 0.02, one mask for forward, backward and scores": points},
        _PICTURE,
    )
