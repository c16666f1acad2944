"""The traffic, cost and quality of DCT against all-reduce, on the news file and Criteo's ads."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from bench import plot, report
from bench.servers import BUILD
from bench.sync.runs import NAMES, apart, runs, series
from bench.train.runs import mean_and_error
from embertide.trainer.config import DCT

_CURVE = BUILD / "bench" / "sync_dct_curve.svg"
_SUM, _HALF, _DCT = "all_reduce", "all_reduce:values=fp16", "dct"
_NO_FEEDBACK = "dct:error_feedback=false"
DENSITIES = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.1)
_THRESHOLDED = "dct:whole_steps=10"
_MIN_AUC, _MAX_COST = -0.001, 0.03


def rows(name: str, data: Path, ranks: int, events: int, seeds: int) -> Iterator[report.Row]:
    """Yield the rows of bytes and AUC of some ranks."""
    # A launch each: what was stopped goes on there.
    found = [
        run
        for sync in (_SUM, _HALF, _DCT)
        for run in runs(name, data, ranks, events, seeds, (sync,))
    ]
    case = f"{NAMES[name]}, {events:,} events, {ranks} ranks"
    for peer, words, target in ((_SUM, "fp32", 0.01), (_HALF, "fp16", 0.02)):
        yield report.compare(
            (case, "dense gradients on the socket, a step of the 2nd half", "bytes"),
            series(found, _DCT, "bytes_per_step"),
            series(found, peer, "bytes_per_step"),
            peer_name=f"all-reduce, {words}",
            better="lower",
            target=target,
            claim="D.1",
        )
    mine, peer_auc = series(found, _DCT, "auc"), series(found, _SUM, "auc")
    yield apart(f"{case}, DCT and all-reduce", mine, peer_auc, _MIN_AUC)


def cost(name: str, data: Path, events: int, batch: int, repetitions: int) -> Iterator[report.Row]:
    """Yield the row of the CPU time that DCT takes of a step beyond all-reduce, in turn."""
    found = runs(name, data, 2, events, repetitions, (_SUM, _THRESHOLDED), batch=batch)
    mine, peer = (series(found, sync, "sync_cpu_ms") for sync in (_THRESHOLDED, _SUM))
    steps = series(found, _SUM, "step_cpu_ms")
    own, other, step = map(statistics.median, (mine, peer, steps))
    case = f"{NAMES[name]}, batch {batch:,}, 2 ranks, of {step:.1f} ms"
    yield report.measure(
        (
            f"{case}: {own:.2f} ms, all-reduce {other:.2f} ms",
            "CPU of a step beyond all-reduce",
            "",
        ),
        [(a - b) / whole for a, b, whole in zip(mine, peer, steps, strict=True)],
        better="lower",
        target=_MAX_COST,
        claim="D.1",
    )


def curve(name: str, data: Path, events: int, seeds: int) -> Iterator[report.Row]:
    """Yield a row a density, and one without error feedback; draw them."""
    syncs = [_SUM, *(f"dct:density={density}" for density in DENSITIES), _NO_FEEDBACK]
    found = [run for sync in syncs for run in runs(name, data, 2, events, seeds, (sync,))]
    base = series(found, _SUM, "auc")
    points = []
    for density in DENSITIES:
        sync = f"dct:density={density}"
        lost = [a - b for a, b in zip(series(found, sync, "auc"), base, strict=True)]
        sent = statistics.fmean(series(found, sync, "bytes_per_step"))
        times = statistics.fmean(series(found, _SUM, "bytes_per_step")) / sent
        mean, error = mean_and_error(lost)
        points.append((times, mean, error))
        case = f"{NAMES[name]}, {events:,} events, density {density:g}: {times:,.0f}x fewer bytes"
        yield apart(case, series(found, sync, "auc"), base, 0.0)
    plot.curves(
        f"DCT on {NAMES[name]}, 2 ranks",
        ("times fewer bytes of dense gradients than fp32", "AUC more than all-reduce"),
        {"densities 0.0001 to 0.1 after 400 whole steps": points},
        _CURVE,
    )
    without = series(found, _NO_FEEDBACK, "auc")
    usual = DCT().density_of(2)
    case = f"{NAMES[name]}, density {usual:g}, without error feedback and with"
    yield apart(case, without, series(found, f"dct:density={usual}", "auc"), 0.0)
