"""Predictions against real steps of two ranks, and what the plan that is found saves of a step.

Each setting is one launch of `bench.search.real`: ranks sleep as long as their work is to take, so
they differ by what the setting says, and not by what else the machine does. A slow link is two
network namespaces with a wire of that rate (bench/ranks/wire.py; needs root, `ip` and `tc`).

What a launch found is kept in `build/bench/search`, so a part that was stopped goes on; delete the
folder after a change of the trainer.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from scipy.stats import spearmanr

from bench import report
from bench.ranks.launching import launch
from bench.ranks.wire import over_the_wire
from bench.servers import BUILD

_REAL = "bench.search.real"
_TIMEOUT_S = 1200.0
_BURST = "8kb"  # more would carry what a step sends past the wire
_SLOWER = 0.97  # of the default: a plan that is found is slower below it, and above it alike


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """Two ranks that differ.

    Attributes:
        name: What is special of it.
        arguments: Those of `bench.search.real`.
        wire: Rate of the wire between them, for `tc`; empty: there is none.
    """

    name: str
    arguments: Sequence[str]
    wire: str = ""


SETTINGS = (
    Setting("rows of rank 1 take six times as long", ("--row-us", "2,12", "--event-us", "10,10")),
    Setting("net of rank 1 takes three times as long", ("--row-us", "4,4", "--event-us", "10,30")),
    Setting("a wire of 50 Mb/s", ("--row-us", "2,2", "--event-us", "10,10"), "50mbit"),
    Setting(
        "tables of a bucket, every other one large",
        (
            *("--row-us", "8,8", "--event-us", "10,10", "--buckets", "1"),
            *("--rows", "200000,20,200000,20,200000,20,200000,20"),
        ),
    ),
    Setting(
        "rows of rank 1 take six times as long, a wire of 100 Mb/s",
        ("--row-us", "2,12", "--event-us", "10,10"),
        "100mbit",
    ),
)


def _measured(setting: Setting) -> list[dict[str, Any]]:
    name = "".join(letter if letter.isalnum() else "_" for letter in setting.name)
    path = BUILD / "bench" / "search" / f"{name}.json"
    if path.is_file() and path.stat().st_size:
        kept: list[dict[str, Any]] = json.loads(path.read_text())["plans"]
        return kept
    if setting.wire:
        found = over_the_wire(setting.arguments, setting.wire, _REAL, _BURST)
    else:
        found = launch(_REAL, 2, setting.arguments, timeout_s=_TIMEOUT_S)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n")
    plans: list[dict[str, Any]] = found["plans"]
    return plans


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    return float(spearmanr(predicted, measured).statistic)


def errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Return by what part of what was measured each prediction is off."""
    return [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]


def run(_: object) -> Iterator[report.Row]:
    """Yield the rows of each setting."""
    gains: list[float] = []
    for setting in SETTINGS:
        plans = _measured(setting)
        took = [statistics.median(plan["took_s"]) for plan in plans]
        predicted = [plan["predicted_s"] for plan in plans]
        case = f"{setting.name}, {len(plans)} plans of {min(took):.3f} to {max(took):.3f} s"
        yield report.measure(
            (case, "Spearman of predicted and measured steps", "1"),
            [rank_correlation(predicted, took)],
            better="higher",
            target=0.9,
            claim="E.4",
        )
        yield report.measure(
            (case, "error of a prediction, median", "of what was measured"),
            [statistics.median(errors(predicted, took))],
            better="lower",
            target=0.15,
            claim="E.4",
        )
        default, found = plans[0]["took_s"], plans[1]["took_s"]
        gain = statistics.median(default) / statistics.median(found)
        gains.append(gain)
        yield report.measure(
            (setting.name, "predicted: step of a fresh run / of the plan found", "times"),
            [predicted[0] / predicted[1]],
            better="higher",
            target=0,
        )
        yield report.compare(
            (setting.name, "step of a fresh run / of the plan found", "s"),
            default,
            found,
            peer_name="the plan found",
            better="higher",
            target=_SLOWER,
            claim="E.5",
        )
    yield report.measure(
        (f"{len(gains)} settings", "in which the plan found is 1.2 times as fast", "settings"),
        [float(sum(gain >= 1.2 for gain in gains))],
        better="higher",
        target=3,
        claim="E.5",
    )
