"""What DCT sends, costs and learns, against all-reduce, on the news file and Criteo's ads.

A launch's figures are kept in `build/bench/sync` under its arguments, so a part that was stopped
goes on; delete the folder after a change of the trainer.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import plot, report
from bench.ranks.launching import launch
from bench.servers import BUILD
from bench.train.runs import mean_and_error

_FOLDER = BUILD / "bench" / "sync"
_CURVE = BUILD / "bench" / "sync_dct_curve.svg"
_SUM, _HALF, _DCT = "all_reduce", "all_reduce:values=fp16", "dct"
_NO_FEEDBACK = "dct:error_feedback=false"
DENSITIES = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_LEAST_AUC, _MOST_COST = -0.001, 0.03
_NAMES = {"news": "news", "criteo": "Criteo's ads"}

Run = dict[str, Any]


def _runs(
    name: str, data: Path, ranks: int, events: int, seeds: int, syncs: Sequence[str], batch: int = 0
) -> list[Run]:
    arguments = ["--set", name, "--events", str(events), "--seeds", str(seeds)]
    arguments += ["--batch", str(batch)] if batch else []
    for sync in syncs:
        arguments += ["--sync", sync]
    key = "-".join([str(ranks), *arguments[1::2]]).replace(":", "_").replace(".", "")
    path = _FOLDER / f"{key[:200]}.json"
    if not path.is_file() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments += ["--data", str(data.resolve())]
        found = launch("bench.sync.learning", ranks, arguments, timeout_s=3600)
        path.write_text(json.dumps(found) + "\n")
    loaded: list[Run] = json.loads(path.read_text())["runs"]
    return loaded


def _series(runs: Sequence[Run], sync: str, figure: str) -> list[float]:
    return [float(run[figure]) for run in runs if run["sync"] == sync]


def _apart(case: str, mine: Sequence[float], peer: Sequence[float], target: float) -> report.Row:
    """Return the row of how much more AUC one side has; the spread is the standard error."""
    mean, error = mean_and_error([m - p for m, p in zip(mine, peer, strict=True)])
    return report.Row(
        case=f"{case}: AUC {statistics.fmean(mine):.4f}, {statistics.fmean(peer):.4f}",
        metric="AUC more, absolute",
        unit="",
        ours=round(mean, 5),
        peer=0.0,
        peer_name="",
        ratio=0.0,
        better="higher" if target < 0 else "lower",
        n=len(mine),
        spread=round(error, 5),
        target=target,
        claim="D.1",
    )


def rows(name: str, data: Path, ranks: int, events: int, seeds: int) -> Iterator[report.Row]:
    """Yield the rows of bytes and AUC of some ranks."""
    runs = _runs(name, data, ranks, events, seeds, (_SUM, _HALF, _DCT))
    case = f"{_NAMES[name]}, {events:,} events, {ranks} ranks"
    for peer, words, target in ((_SUM, "fp32", 0.01), (_HALF, "fp16", 0.02)):
        yield report.compare(
            (case, "dense gradients on the socket, a step of the 2nd half", "bytes"),
            _series(runs, _DCT, "bytes_per_step"),
            _series(runs, peer, "bytes_per_step"),
            peer_name=f"all-reduce, {words}",
            better="lower",
            target=target,
            claim="D.1",
        )
    mine, peer_auc = _series(runs, _DCT, "auc"), _series(runs, _SUM, "auc")
    yield _apart(f"{case}, DCT and all-reduce", mine, peer_auc, _LEAST_AUC)


def cost(name: str, data: Path, events: int, batch: int) -> Iterator[report.Row]:
    """Yield the row of the CPU time that DCT takes of a step beyond all-reduce."""
    runs = _runs(name, data, 2, events, 1, (_SUM, _DCT), batch)
    for mine, peer, step in zip(
        _series(runs, _DCT, "sync_cpu_ms"),
        _series(runs, _SUM, "sync_cpu_ms"),
        _series(runs, _DCT, "step_cpu_ms"),
        strict=True,
    ):
        yield report.measure(
            (
                f"{_NAMES[name]}, batch {batch:,}, 2 ranks: {mine:.2f} ms of {step:.1f} ms; "
                f"all-reduce {peer:.2f} ms",
                "CPU of a step beyond all-reduce",
                "",
            ),
            [(mine - peer) / step],
            better="lower",
            target=_MOST_COST,
            claim="D.1",
        )


def curve(name: str, data: Path, events: int, seeds: int) -> Iterator[report.Row]:
    """Yield a row a density, and one without error feedback; draw them."""
    syncs = [_SUM, *(f"dct:density={density}" for density in DENSITIES), _NO_FEEDBACK]
    runs = _runs(name, data, 2, events, seeds, syncs)
    base = _series(runs, _SUM, "auc")
    points = []
    for density in DENSITIES:
        sync = f"dct:density={density}"
        lost = [a - b for a, b in zip(_series(runs, sync, "auc"), base, strict=True)]
        sent = statistics.fmean(_series(runs, sync, "bytes_per_step"))
        times = statistics.fmean(_series(runs, _SUM, "bytes_per_step")) / sent
        mean, error = mean_and_error(lost)
        points.append((times, mean, error))
        case = f"{_NAMES[name]}, {events:,} events, density {density:g}: {times:,.0f}x fewer bytes"
        yield _apart(case, _series(runs, sync, "auc"), base, 0.0)
    plot.curves(
        f"DCT on {_NAMES[name]}, 2 ranks",
        ("times fewer bytes of dense gradients than fp32", "AUC more than all-reduce"),
        {"densities 0.0001 to 0.1": points},
        _CURVE,
    )
    without = _series(runs, _NO_FEEDBACK, "auc")
    case = f"{_NAMES[name]}, density 0.001, without error feedback and with"
    yield _apart(case, without, _series(runs, "dct:density=0.001", "auc"), 0.0)
