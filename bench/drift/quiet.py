"""Whether the control plane leaves a quiet fleet alone: hours of demand that does not drift.

The real core decides in virtual time (virtual.py) about demand whose mix stays the same: an hour
that is stationary, and one day later the same hours of a demand that rises and falls by half with
the time of day. Counts are random. Before each hour that counts the fleet has had time to settle:
what it does then is shown apart.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from bench import report
from bench.drift.virtual import Floats, VirtualFleet, make_nodes, make_tables, zipf_demand
from bench.report import CONSOLE
from embertide.server.core.drift.options import DriftOptions

_SEEDS = (1, 2, 3)
_NODES = 4
_BITS = (5, 5, 4, 4, 3, 2, 0, 0)
_KEYS_PER_S = 20_000.0
_BUCKET_BYTES = 1 << 20
_ROOM = 0.4  # of the model's bytes, on each node
_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S
_SWING = 0.5  # of the mean, by the time of day


def stationary(mean_NB: Floats) -> Callable[[float], Floats]:
    """Return a demand that stays as it is."""
    return lambda seconds: mean_NB


def seasonal(mean_NB: Floats) -> Callable[[float], Floats]:
    """Return a demand that rises and falls with the time of day, its mix unchanged."""

    def demand(seconds: float) -> Floats:
        return mean_NB * (1 + _SWING * math.sin(2 * math.pi * seconds / _DAY_S))

    return demand


def run(demand: Callable[[float], Floats], seed: int, settle_s: float) -> tuple[int, int]:
    """Return the operations while the fleet settled, and those of the hour that counts."""
    buckets = sum(1 << bits for bits in _BITS)
    fleet = VirtualFleet(
        nodes=make_nodes(_NODES, int(buckets * _BUCKET_BYTES * _ROOM)),
        tables=make_tables(_BITS),
        demand=demand,
        bytes_B=np.full(buckets, _BUCKET_BYTES),
        drift=DriftOptions(mode="auto"),
        seed=seed,
    )
    fleet.run(settle_s)
    before = len(fleet.acted())
    fleet.run(_HOUR_S)
    acted = fleet.acted()[before:]
    for each in acted:
        CONSOLE.print(f"[red]acted in a quiet hour: {each.why}; {', '.join(each.triggers)}")
    return before, len(acted)


def measure(seeds: Sequence[int] = _SEEDS) -> list[report.Row]:
    """Return the rows of 19.3."""
    rows = []
    for name, make, settle_s in (
        ("a stationary hour, after one to settle", stationary, _HOUR_S),
        ("the same with daily seasonality, after a day", seasonal, _DAY_S),
    ):
        found = []
        for seed in seeds:
            mean_NB = zipf_demand(make_tables(_BITS), _NODES, _KEYS_PER_S, seed=seed)
            found.append(run(make(mean_NB), seed, settle_s))
            CONSOLE.print(f"[dim]{name}, seed {seed}: {found[-1][0]} before, {found[-1][1]} in it")
        settled = ", ".join(str(before) for before, _ in found)
        rows.append(
            report.measure(
                (f"{name} ({settled} while it settled)", "operations by mode auto, worst", "1"),
                [float(max(acted for _, acted in found))] * len(found),
                better="lower",
                target=0,
                claim="19.3",
            )
        )
        held = [float(acted == 0) for _, acted in found]
        rows.append(
            report.measure(
                (name, "no operation", "1"), held, better="higher", target=1, claim="19.3"
            )
        )
    return rows
