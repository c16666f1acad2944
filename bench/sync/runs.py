"""The runs of `bench.sync.learning`, each launched once, and their rows.

A launch's figures are kept in `build/bench/sync` under its arguments, so a part that was stopped
goes on; delete the folder after a change of the trainer.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.ranks.launching import launch
from bench.servers import BUILD
from bench.train.runs import difference_row

_FOLDER = BUILD / "bench" / "sync"
NAMES = {"news": "news", "criteo": "Criteo's ads"}

Run = dict[str, Any]


def runs(
    name: str,
    data: Path,
    ranks: int,
    events: int,
    seeds: int,
    syncs: Sequence[str],
    *,
    batch: int = 0,
    kept: float = 1,
) -> list[Run]:
    """Return what `bench.sync.learning` prints of each seed and strategy, in turn."""
    arguments = ["--set", name, "--events", str(events), "--seeds", str(seeds)]
    arguments += ["--batch", str(batch)] if batch else []
    arguments += ["--kept", str(kept)] if kept < 1 else []
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


def series(runs: Sequence[Run], sync: str, figure: str) -> list[float]:
    """Return a figure of a strategy's runs, by seed."""
    return [float(run[figure]) for run in runs if run["sync"] == sync]


def against_all_reduce(
    case: str, rates: Mapping[str, Sequence[float]], barred: str, target: float, claim: str
) -> Iterator[report.Row]:
    """Yield the rates of strategies, events a second in turn, against all-reduce's.

    Args:
        case: The run.
        rates: By strategy, "all-reduce" among them.
        barred: The strategy that has the bar and the claim.
        target: Its bar.
        claim: Its claim.
    """
    for name in [each for each in rates if each != "all-reduce"]:
        yield report.compare(
            (f"{case}, {name}", "rate", "events/s"),
            rates[name],
            rates["all-reduce"],
            peer_name="all-reduce",
            better="higher",
            target=target if name == barred else 0.0,
            claim=claim if name == barred else "",
        )


def apart(case: str, mine: Sequence[float], peer: Sequence[float], target: float) -> report.Row:
    """Return the row of how much more AUC one side has; the spread is the standard error."""
    return difference_row(
        f"{case}: AUC {statistics.fmean(mine):.4f}, {statistics.fmean(peer):.4f}",
        "AUC more, absolute",
        [m - p for m, p in zip(mine, peer, strict=True)],
        better="higher" if target < 0 else "lower",
        target=target,
        claim="D.1",
    )
