"""The table that `train` prints at its end: readable however many days there were."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embertide._common.terminal import Table, show_table
from embertide.trainer.data.csv import listed
from embertide.trainer.eval.metrics import Summary, day_name

MIN_EVENTS = 200
"""Events of a day whose AUC is told: fewer make it a matter of chance."""

_COLUMNS = 80


def days_told(days: Mapping[int, Summary]) -> dict[int, Summary]:
    """Return the days that have an AUC worth telling; if none has, those that have one."""
    known = {day: each for day, each in days.items() if not math.isnan(each.auc)}
    large = {day: each for day, each in known.items() if each.events >= MIN_EVENTS}
    return large or known


def mean_of(days: Mapping[int, Summary], figure: str) -> float:
    """Return the mean of a figure over days, each by its events; nan without any."""
    weighed = [
        (each.events, getattr(each, figure))
        for each in days.values()
        if math.isfinite(getattr(each, figure))
    ]
    total = sum(events for events, _ in weighed)
    return sum(events * value for events, value in weighed) / total if total else math.nan


def show(
    folder: Path,
    *,
    events: int,
    version: int,
    days: Mapping[int, Summary],
    fifths: Sequence[Summary],
    rejected: Mapping[str, int],
    set_aside: int,
    unsampled: int,
    has_clock: bool,
    warm_start: str = "",
    leaks: Sequence[str] = (),
    pruning: Mapping[str, Any] | None = None,
) -> None:
    """Print the result of a run.

    `warm_start` is the folder that it began with; `leaks` are columns that tell the label;
    `pruning` is what `PruneTwin.figures` says of a run with a bound.
    """
    table = Table(header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, text in _lines(
        folder, events, version, days, fifths, rejected, set_aside, unsampled, has_clock=has_clock
    ):
        table.add_row(name, text)
        if name == "AUC" and warm_start:
            table.add_row("", f"the run in {warm_start} may have learned these events before")
        if name == "AUC" and leaks:
            said = "no AUC to expect of serving: the label is told by"
            table.add_row("", f"{said} {listed(leaks)}")
        if name == "version" and pruning is not None:
            for place, said in enumerate(of_pruning(pruning)):
                table.add_row("" if place else "pruning", said)
    show_table(table, width=_COLUMNS)


def of_pruning(figures: Mapping[str, Any]) -> Iterator[str]:
    """Say what pruning costs, against its bound, and what it saves."""
    factor = figures["factor"]
    saved = "" if factor is None else f"{factor:.1f} times fewer bytes than unpruned"
    if figures["loss"] is None:
        yield f"{saved}; its loss of AUC is not known: too few events"
        return
    bound = f"bound {figures['bound']:g}"
    if not figures["is_held"]:
        bound = f"NOT within {figures['bound']:g}" if figures["exceeds"] else f"at its {bound}"
    yield f"loss of AUC {figures['loss']:.5f} ± {figures['error']:.5f}, {bound}"
    yield saved


def _lines(
    folder: Path,
    events: int,
    version: int,
    days: Mapping[int, Summary],
    fifths: Sequence[Summary],
    rejected: Mapping[str, int],
    set_aside: int,
    unsampled: int,
    *,
    has_clock: bool,
) -> Iterator[tuple[str, str]]:
    yield "events", f"{events:,} learned, {sum(rejected.values()):,} rejected"
    for reason, count in sorted(rejected.items(), key=lambda each: -each[1]):
        yield "", f"{count:,}: {reason}"
    if unsampled:
        yield "", f"{unsampled:,} of label 0 scored and left out (negative_rate)"
    if set_aside:
        yield "put aside", f"{set_aside:,} events, in {folder}"
    yield "version", f"{version:,}"
    told = days_told(days)
    if told:
        yield "AUC", _auc(told, has_clock=has_clock)
        yield "log loss", f"{mean_of(told, 'log_loss'):.4f}"
        yield "calibration", f"{mean_of(told, 'calibration'):.3f} (mean score over mean label)"
        left = len(days) - len(told)
        if left and has_clock:
            yield "", f"{left:,} days of few events, or of one label, are left out"
        unstable = sum(each.is_unstable for each in told.values())
        if unstable and has_clock:
            yield "", f"{unstable:,} of the {len(told):,} days are unstable: a matter of chance"
        yield from _of_fifths(fifths)
    else:
        yield "AUC", "not known: all labels are the same"
    yield "publication", str(folder)
    yield "next", shlex.join(("embertide", "serve", str(folder)))


def _of_fifths(fifths: Sequence[Summary]) -> Iterator[tuple[str, str]]:
    last = fifths[-1]
    if not math.isnan(last.auc):
        yield (
            "last fifth",
            f"AUC {last.auc:.4f}{_interval(last)}, log loss {last.log_loss:.4f}, "
            f"calibration {last.calibration:.3f}",
        )
    said = " ".join(
        "-" if math.isnan(each.calibration) else f"{each.calibration:.3f}" for each in fifths
    )
    yield "by fifths", f"calibration {said}"


def _interval(of: Summary) -> str:
    """Say in which interval 95 of 100 such AUCs lie, where it is known."""
    if math.isnan(of.auc_error):
        return " (unstable)"
    return f" ± {of.auc_interval:.{4 if of.auc_interval < 0.001 else 3}f}"


def _auc(days: Mapping[int, Summary], *, has_clock: bool) -> str:
    if len(days) == 1 or not has_clock:
        (only,) = days.values() if len(days) == 1 else (None,)
        interval = "" if only is None else _interval(only)
        return f"{mean_of(days, 'auc'):.4f}{interval}, each event scored before it was learned"
    last, worst = max(days), min(days, key=lambda day: days[day].auc)
    return (
        f"{days[last].auc:.4f}{_marked(days[last])} on the last day ({day_name(last)}), "
        f"{mean_of(days, 'auc'):.4f} mean of {len(days):,} days, "
        f"{days[worst].auc:.4f}{_marked(days[worst])} worst ({day_name(worst)})"
    )


def _marked(day: Summary) -> str:
    """Mark the AUC of a day of few events, or of few of one label."""
    return _interval(day) if day.is_unstable else ""
