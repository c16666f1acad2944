"""Loss curves of 1, 2 and 4 ranks over seeds, and whether a repeat ends with the same bits.

What a single step is worth against one written out in fp64, tests/trainer/test_ranks.py says.
"""

import statistics
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bench import plot, report
from bench.held import held
from bench.ranks.launching import launch
from bench.servers import BUILD

_RANKS = (1, 2, 4)
_SEEDS = (1, 2, 3)
_CLAIM = "20.1"
_STEPS = ("tests/trainer/test_ranks.py", "of_fp64 or bit_for_bit")


def measure(seeds: Sequence[int] = _SEEDS) -> Iterator[report.Row]:
    """Yield how far curves lie apart, against how far seeds do; and what repeats."""
    runs = {
        ranks: [launch("bench.ranks.loss", ranks, ["--seed", str(seed)]) for seed in seeds]
        for ranks in _RANKS
    }
    loss = {ranks: np.array([each["loss"] for each in of]) for ranks, of in runs.items()}
    _draw(loss, runs[1][0]["events_a_point"])
    for ranks in _RANKS[1:]:
        # Of the second half: what is learned at first is mostly how rows begin.
        half = loss[1].shape[1] // 2
        apart = np.abs(loss[ranks].mean(axis=0) - loss[1].mean(axis=0))[half:]
        seeds_apart = loss[1].std(axis=0, ddof=1)[half:] / np.sqrt(len(seeds))
        yield report.compare(
            (f"DLRM, {ranks} ranks, made-up news", "loss from that of 1 rank, mean of seeds", ""),
            [1000 * float(apart.mean())],
            [1000 * float(np.sqrt(2) * seeds_apart.mean())],
            peer_name="standard error of the difference, over seeds (both x 1,000)",
            better="lower",
            target=2,
            claim=_CLAIM,
        )
        again = launch("bench.ranks.loss", ranks, ["--seed", str(seeds[0])])
        same = (
            again["digest"] == runs[ranks][0]["digest"] and again["loss"] == runs[ranks][0]["loss"]
        )
        yield report.measure(
            (f"a repeat by {ranks} ranks", "ends with the same bits", "1: yes"),
            [float(same)],
            better="higher",
            target=1,
            claim=_CLAIM,
        )
    yield held("a step of 1, 2 and 4 ranks within 1e-5 of fp64", *_STEPS, claim=_CLAIM)


def _draw(loss: dict[int, NDArray[np.float64]], events: int) -> None:
    lines = {
        f"{ranks} {'rank' if ranks == 1 else 'ranks'}": [
            (events * (at + 1), statistics.fmean(of), 0.0) for at, of in enumerate(losses.T)
        ]
        for ranks, losses in loss.items()
    }
    path = BUILD / "bench" / "ranks_curves.svg"
    title = "Loss of a DLRM on made-up news, mean of three seeds"
    plot.curves(title, ("events", "log loss"), lines, path, in_time=True, coincide=True)
