"""Four real ranks: what one that is slower, or stops, costs the others; what stale rows cost.

Compute is emulated by sleeping (bench/sync/apart.py), so that four ranks of two cores are four.
All-reduce learns a batch of all ranks together, and the others one batch a rank, so an event takes
a rank as long in all cases.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import plot
from bench.ranks.launching import launch
from bench.report import Row, measure
from bench.servers import BUILD, BenchError
from bench.sync.clock import Link, ring
from bench.sync.runs import against_all_reduce
from bench.sync.virtual import Strategy, predict

_RANKS = 4
_WIDE = "max_row_staleness=1000,max_batches_apart=1000"
_PARTIAL = f"partial_all_reduce:{_WIDE}"
_STRATEGIES = {
    "all-reduce": "all_reduce",
    "partial all-reduce": _PARTIAL,
    "LocalSGD": f"local_sgd:{_WIDE}",
}
_EVENT_MS = "4"
# A strategy of real ranks, and the same on the virtual clock.
_FORETOLD: Mapping[str, tuple[str, Strategy]] = {
    "partial all-reduce": (_PARTIAL, lambda clock: clock.partial_all_reduce(2, seed=1, max_lag=4)),
    "LocalSGD": (_STRATEGIES["LocalSGD"], lambda clock: clock.local_sgd(8)),
    "Hop": (f"hop:{_WIDE}", lambda clock: clock.hop(ring(_RANKS), max_ig=4)),
    "Hop that skips": (
        f"hop:backup=1,max_jump=4,{_WIDE}",
        lambda clock: clock.hop(ring(_RANKS), max_ig=4, backup=1, max_jump=4),
    ),
}
_STOP_S = 10.0
_STALENESS = (0, 1, 4, 16)
_SEEDS = 3


def _run(sync: str, *flags: str, **options: object) -> dict[str, Any]:
    words = list(flags)
    for name, value in options.items():
        words += (f"--{name.replace('_', '-')}", str(value))
    return launch("bench.sync.apart", _RANKS, ["--sync", sync, *words])


def _uneven(repetitions: int) -> Iterator[Row]:
    for case, slow, events, least in (
        ("one of four five times slower", 5, 5000, 2.5),
        ("four equal", 1, 2600, 0.95),
    ):
        rates: dict[str, list[float]] = {name: [] for name in _STRATEGIES}
        for _ in range(repetitions):
            for name, sync in _STRATEGIES.items():
                found = _run(sync, slow=slow, event_ms=_EVENT_MS, events=events)
                rates[name].append(found["events_per_s"])
        yield from against_all_reduce(case, rates, "partial all-reduce", least, "D.3")


def kept_rate(ends: list[list[tuple[float, int]]], stop_s: float) -> float:
    """Return what part of their events a second all ranks but the last keep while that one stops.

    Args:
        ends: By rank, when each batch was learned, in s, and its events.
        stop_s: For how long the last rank stopped.

    Raises:
        BenchError: The last rank did not stop, or the others had ended before.
    """
    *others, last = ends
    pauses = [(b[0] - a[0], a[0]) for a, b in itertools.pairwise(last)]
    longest, begin = max(pauses, default=(0.0, 0.0))
    end = begin + stop_s
    learned = sorted((at, n) for each in others for at, n in each)
    if longest < stop_s or not learned or learned[-1][0] < end:
        raise BenchError(f"the last rank paused for {longest:.1f} s, or the run ended meanwhile")
    during = sum(n for at, n in learned if begin < at <= end) / stop_s
    before = sum(n for at, n in learned if at <= begin) / begin
    return during / before


def _stopped(case: str, repetitions: int, *flags: str) -> Iterator[Row]:
    kept = []
    for _ in range(repetitions):
        found = _run(_PARTIAL, *flags, stop_s=_STOP_S, event_ms=_EVENT_MS, events=6000, after=12)
        kept.append(kept_rate(found["ends"], _STOP_S))
    name = (f"{case} for {_STOP_S:.0f} s", "rate of the others", "of before")
    yield measure(name, kept, better="higher", target=0.9, claim="D.6")


def _stale(news: Path | None) -> Iterator[Row]:
    """Yield the AUC over the bound: one of the ranks is slow, so that bounds are reached."""
    data: dict[str, object] = {"events": 20_000, "data": news} if news else {"events": 4000}
    points: list[tuple[float, float, float]] = []
    for staleness in _STALENESS:
        sync = f"partial_all_reduce:max_row_staleness={staleness},max_batches_apart=1000"
        found = [
            _run(sync, event_ms=0.5, slow=5, seed=seed, **data)["auc"] for seed in range(_SEEDS)
        ]
        error = statistics.stdev(found) / len(found) ** 0.5
        points.append((1 + staleness, statistics.fmean(found), error))
        of = "the news file" if news else "generated news"
        case = f"{of}, rows at most {staleness} batches stale, one of four five times slower"
        yield measure((case, "AUC", "1"), found, better="higher", target=0, claim="D.6")
        yield measure(
            (case, "its standard error", "1"), [error], better="lower", target=0, claim="D.6"
        )
    plot.curves(
        "AUC over the bound of staleness, one of four ranks five times slower",
        ("1 + batches whose gradients rows may lack", "AUC"),
        {"partial all-reduce": points},
        BUILD / "bench" / "sync_staleness.svg",
    )


def rows(repetitions: int, news: Path | None) -> Iterator[Row]:
    """Yield what four ranks do together and apart; `news` is the news file."""
    yield from _uneven(repetitions)
    yield from _stopped("one of four takes no step", repetitions)
    yield from _stopped("one of four, without rows, is stopped by SIGSTOP", repetitions, "--signal")
    yield from _stale(news)


def off_by(found: Mapping[str, Any], strategy: Strategy) -> float:
    """Return by what part a run's batches a second differ from what the virtual clock foretells.

    Args:
        found: The figures of a run, as bench/sync/apart.py prints them.
        strategy: The strategy that it ran.
    """
    steps_s: list[list[float]] = found["steps_s"]
    took_s: float = found["took_s"]
    sent = [found["traffic"][kind] for kind in ("models", "net") if kind in found["traffic"]]
    messages = sum(each["messages"] for each in sent)
    transfer = sum(each["waits_s"] for each in sent) / messages if messages else 0.001
    mean_s = statistics.fmean(statistics.fmean(each) for each in steps_s)
    link = Link(latency=0.0005, transfer=transfer)
    foretold = predict(strategy, steps_s, link, steps=round(took_s / mean_s))
    return abs(sum(map(len, steps_s)) / took_s / foretold - 1)


def agreement(repetitions: int) -> Iterator[Row]:
    """Yield how well the virtual clock foretells four real ranks."""
    for case, slow in (("four equal", 1), ("one of four five times slower", 5)):
        for name, (sync, strategy) in _FORETOLD.items():
            off = [
                off_by(_run(sync, slow=slow, event_ms=_EVENT_MS, events=2600), strategy)
                for _ in range(repetitions)
            ]
            metric = "batches a second, off what the virtual clock foretells"
            yield measure(
                (f"{case}, {name}", metric, "of it"), off, better="lower", target=0.1, claim="D.5"
            )
