"""Samples a second of two ranks: against one process of as many threads, and against TorchRec.

All sides learn the same batches with the same net, one after the other, several times over
(bench.ranks.ours, bench.ranks.torchrec_peer).
"""

import statistics
from collections.abc import Iterator
from typing import Any

from bench import report
from bench.ranks.launching import launch

_OURS, _PEER = "bench.ranks.ours", "bench.ranks.torchrec_peer"
_SAMPLES = (4096, 1024)
_THREADS_BAR, _PEER_BAR = 0.85, 1.0


def _rate(module: str, ranks: int, samples: int, *more: str) -> float:
    found: dict[str, Any] = launch(module, ranks, ["--samples", str(samples), *more])
    return float(statistics.median(found["samples_per_s"]))


def measure(repetitions: int = 5) -> Iterator[report.Row]:
    """Yield the rows of both comparisons; sides take turns."""
    for samples in _SAMPLES:
        two, one, peer = list[float](), list[float](), list[float]()
        for _ in range(repetitions):
            two.append(_rate(_OURS, 2, samples))
            one.append(_rate(_OURS, 1, samples, "--threads", "2"))
            peer.append(_rate(_PEER, 2, samples))
        case = f"Criteo DLRM, batch {samples:,}, 2 ranks of one thread"
        yield report.compare(
            (case, "rate", "samples/s"),
            two,
            one,
            peer_name="one rank of 2 threads",
            better="higher",
            target=_THREADS_BAR,
            claim="20.4",
        )
        yield report.compare(
            (case, "rate", "samples/s"),
            two,
            peer,
            peer_name="TorchRec + FBGEMM, 2 ranks",
            better="higher",
            target=_PEER_BAR,
            claim="20.10",
        )
