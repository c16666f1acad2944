"""Speed of strategies on a virtual clock of 4 to 256 ranks, and quality at equal samples.

Rates are batches a second of all ranks, against all-reduce with the same compute times and links.
A step takes 1 s within 10 %, a net 0.15 s over a link, a message 0.5 ms.
"""

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import plot, report
from bench.servers import BUILD
from bench.sync.clock import Clock, Compute, Link, equal, one_slow, random_slow, ring
from bench.sync.replicas import Replicas, read
from bench.train.runs import difference_row

_RANKS = (4, 16, 64, 256)
_TIMES: Mapping[str, Compute] = {
    "equal": equal,
    "one 5x slower": one_slow(5),
    "random sixfold": random_slow,
}
_MAX_LAG = 4
_MAX_IG = 8
_SEEDS = (1, 2, 3)
_EVENTS = 80_000
Strategy = Callable[[Clock], Clock]


def _partial(ranks: int, **options: Any) -> Strategy:
    given = {"max_lag": _MAX_LAG, **options}
    return lambda clock: clock.partial_all_reduce(2 if ranks == 4 else 4, seed=1, **given)


def _hop(ranks: int, **options: int) -> Strategy:
    return lambda clock: clock.hop(ring(ranks), **{"max_ig": _MAX_IG, **options})


def _rows_apart(clock: Clock) -> Clock:
    return clock.all_reduce(rows_apart=True)


def strategies(ranks: int) -> dict[str, Strategy]:
    """Return what is compared with all-reduce, by name."""
    return {
        "groups": _partial(ranks),
        "groups, no filter": _partial(ranks, max_lag=0),
        "groups, no division": _partial(ranks, division=False),
        "groups, no buffer": _partial(ranks, buffer=False),
        "random groups alone": _partial(ranks, buffer=False, division=False, max_lag=0),
        "static groups": lambda clock: clock.static(),
        "Hop": _hop(ranks),
        "Hop, backup 1": _hop(ranks, backup=1),
        "Hop, staleness 4": _hop(ranks, staleness=4),
        "Hop, backup and skipping": _hop(ranks, backup=1, max_jump=_MAX_IG),
        "LocalSGD, every 8": lambda clock: clock.local_sgd(8),
    }


def predict(
    strategy: Strategy, compute_s: Sequence[Sequence[float]], link: Link, steps: int = 2000
) -> float:
    """Return the batches a second of all ranks that the clock foretells for measured times.

    Args:
        strategy: As of `strategies`, or any that calls one method of the clock.
        compute_s: Measured seconds of steps of each rank; steps draw from them.
        link: Measured.
        steps: About as many steps of a rank are run.
    """

    def compute(rank: int, choose: random.Random) -> float:
        return choose.choice(compute_s[rank])

    mean = statistics.fmean(statistics.fmean(times) for times in compute_s)
    clock = Clock(ranks=len(compute_s), compute=compute, link=link, until=steps * mean)
    return strategy(clock).rate


def _rate(strategy: Strategy, ranks: int, compute: Compute, until: float = 0) -> Clock:
    return strategy(
        Clock(ranks=ranks, compute=compute, until=until or max(60, 300 * 16 / max(ranks, 16)))
    )


def _row(
    case: str,
    metric: str,
    ours: float,
    peer: float,
    name: str,
    *,
    target: float = 0,
    claim: str = "",
    better: Any = "higher",
) -> report.Row:
    return report.compare(
        (case, metric, "batches/s"),
        [ours],
        [peer],
        peer_name=name,
        better=better,
        target=target,
        claim=claim,
    )


_TARGETS = {
    ("equal", "groups"): (0.95, "higher"),
    ("equal", "static groups"): (0.95, "higher"),
    ("one 5x slower", "groups"): (2.5, "higher"),
    ("equal", "random groups alone"): (1.0, "lower"),
}


def rates() -> Iterator[report.Row]:
    """Yield every strategy against all-reduce, by ranks and by compute times; draw them."""
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for ranks in _RANKS:
        for times, compute in _TIMES.items():
            base = _rate(lambda clock: clock.all_reduce(), ranks, compute).rate
            for name, strategy in strategies(ranks).items():
                ours = _rate(strategy, ranks, compute).rate
                target, better = _TARGETS.get((times, name), (0.0, "higher"))
                claim = "D.3" if target else "D.5"
                case = f"{ranks} ranks, {times}: {name}"
                yield _row(
                    case,
                    "rate",
                    ours,
                    base,
                    "all-reduce",
                    target=target,
                    claim=claim,
                    better=better,
                )
                if times == "one 5x slower" and not name.startswith("groups, "):
                    lines.setdefault(name, []).append((ranks, ours / base, 0.0))
    plot.curves(
        "One rank five times slower, on a virtual clock",
        ("ranks", "batches/s of all ranks / all-reduce"),
        lines,
        BUILD / "bench" / "sync_virtual.svg",
    )


def claims() -> Iterator[report.Row]:
    """Yield what each part of group creation and of Hop is worth, and what must not gain."""
    full = _rate(_partial(16), 16, one_slow(5)).rate
    for name, options in (
        ("filter", {"max_lag": 0}),
        ("division", {"division": False}),
        ("buffer", {"buffer": False}),
    ):
        less = _rate(_partial(16, **options), 16, one_slow(5)).rate
        yield _row(
            f"16 ranks, one 5x slower: groups with {name}",
            "rate",
            full,
            less,
            f"without {name}",
            target=1.0,
            claim="D.3",
        )
    for ranks in (8, 16):
        standard = _rate(_hop(ranks), ranks, random_slow).rate
        backup = _rate(_hop(ranks, backup=1), ranks, random_slow).rate
        yield _row(
            f"{ranks} ranks, random sixfold: Hop, backup 1",
            "rate",
            backup,
            standard,
            "Hop",
            target=1.3,
            claim="D.4",
        )
        slow = one_slow(4)
        standard = _rate(_hop(ranks), ranks, slow).rate
        skipping = _rate(_hop(ranks, backup=1, max_jump=_MAX_IG), ranks, slow).rate
        yield _row(
            f"{ranks} ranks, one 4x slower: Hop, backup and skipping",
            "rate",
            skipping,
            standard,
            "Hop",
            target=2.0,
            claim="D.4",
        )
        late = _rate(_hop(ranks, staleness=4), ranks, slow, until=1200).late_rate
        yield _row(
            f"{ranks} ranks, one 4x slower: Hop, staleness 4, second half of 1,200 s",
            "rate",
            late,
            ranks / 4,
            "the slow rank's rate at all ranks",
            target=1.05,
            claim="D.4",
            better="lower",
        )


def quality(data: Path | None) -> Iterator[report.Row]:
    """Yield how far the AUC at equal samples is from all-reduce's, of 4 ranks; 3 seeds, paired."""
    skipping = _hop(4, backup=1, max_jump=_MAX_IG)
    cases: list[tuple[str, Strategy, Compute, float, str]] = [
        ("groups, equal", _partial(4), equal, 0.001, "D.3"),
        ("groups, one 5x slower", _partial(4), one_slow(5), 0.001, "D.3"),
        ("Hop, equal", _hop(4), equal, 0.002, "D.4"),
        ("Hop, backup 1, random sixfold", _hop(4, backup=1), random_slow, 0.002, "D.4"),
        ("Hop, backup and skipping, one 4x slower", skipping, one_slow(4), 0.002, "D.4"),
        ("all-reduce, rows take a step a rank", _rows_apart, equal, 0.0, ""),
    ]
    name = "news" if data else "synthetic"

    def learn(strategy: Strategy, compute: Compute, seed: int) -> Replicas:
        learning = Replicas(read(data, _EVENTS, seed), 4, seed)
        strategy(Clock(ranks=4, compute=compute, until=1e9, seed=seed, learning=learning))
        return learning

    base = [learn(lambda clock: clock.all_reduce(), equal, seed).auc() for seed in _SEEDS]
    for case, strategy, compute, most, claim in cases:
        learnt = [learn(strategy, compute, seed) for seed in _SEEDS]
        pairs = [each.auc() - other for each, other in zip(learnt, base, strict=True)]
        about = (
            f"{name}, 4 ranks: {case}; AUC {statistics.fmean(base) + statistics.fmean(pairs):.4f}"
        )
        about += f", all-reduce {statistics.fmean(base):.4f}"
        yield difference_row(
            about,
            "AUC lost",
            pairs,
            shown=lambda mean: max(0.0, -mean),
            better="lower",
            target=most,
            claim=claim,
        )
        yield report.measure(
            (about, "nets apart, largest", "of their length"),
            [each.disagreement for each in learnt],
            better="lower",
            target=0,
            claim=claim,
        )


def measure(data: Path | None) -> Iterator[report.Row]:
    """Yield all rows; `data` is the news file, or None for synthetic events."""
    yield from claims()
    yield from rates()
    yield from quality(data)
