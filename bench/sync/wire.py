"""Criteo's net over a wire of 100 Mb/s: samples a second of DCT and of all-reduce in fp16.

Rows and their gradients travel as fp16 on both sides (`bench.ranks.ours` has the step).
"""

from collections.abc import Iterator

from bench import report
from bench.ranks.wire import over_the_wire

_RATE = "100mbit"
_SAMPLES = 1024
_BAR = 2.0


def measure(repetitions: int) -> Iterator[report.Row]:
    """Yield the row of the rates, measured in turn."""
    rates: dict[str, list[float]] = {"dct:whole_steps=5": [], "all_reduce:values=fp16": []}
    for _ in range(repetitions):
        for sync, found in rates.items():
            arguments = ["--samples", str(_SAMPLES), "--steps", "20", "--windows", "1"]
            arguments += ["--warmup", "20", "--rows", "fp16", "--gradients", "fp16"]
            printed = over_the_wire([*arguments, "--sync", sync], _RATE)
            found += printed["samples_per_s"]
    yield report.compare(
        (f"Criteo DLRM, batch {_SAMPLES:,}, 2 ranks over 100 Mb/s", "rate", "samples/s"),
        rates["dct:whole_steps=5"],
        rates["all_reduce:values=fp16"],
        peer_name="all-reduce, fp16",
        better="higher",
        target=_BAR,
        claim="D.2",
    )
