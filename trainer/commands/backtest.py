"""`backtest`: learn to the end of each day, score the next."""

import dataclasses
import functools
import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import rich.progress
import typer

from embertide.trainer.commands import print_json, progress_bar, refusals
from embertide.trainer.commands.evaluate import show_figures
from embertide.trainer.commands.inputs import Data, Demo, Events, Hours, StreamSeed, Window


def _frozen(
    window: Window, folder: Path, cache: Path | None, begin: int, end: int | None
) -> dict[str, Any]:
    from embertide.trainer.eval.backtest import frozen_day

    run, source = window.open()
    return frozen_day(run, source, folder, begin=begin, end=end, cache=cache)


def _learning(window: Window, folder: Path, cache: Path | None) -> dict[str, Any]:
    from embertide.trainer.eval.backtest import learning_days

    run, source = window.open()
    return learning_days(run, source, folder, cache=cache)


def command(
    folder: Annotated[
        Path,
        typer.Option(help="Where the run and its days are kept; the same command again goes on."),
    ],
    data: Data = None,
    config: Annotated[Path | None, typer.Option(help="A run's file, as for train.")] = None,
    events: Events = None,
    demo: Demo = False,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    cache: Annotated[Path | None, typer.Option(help="A folder of compiled dense programs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Learn to the end of each day and score the next day with the model frozen.

    Beside it stand the prequential figures of the same day: those of a model that goes on learning.
    The first day is only learned.

    Example: embertide backtest --config run.py --data 'day-*.parquet' --folder build/backtest
    """
    from embertide.trainer.eval.backtest import days_of, over_days
    from embertide.trainer.eval.trials import Trial, measured

    with refusals(as_json):
        window = Window(
            data=data,
            events=events,
            hours=hours if demo else None,
            stream_seed=stream_seed,
            config=config,
        )
        run, source = window.open()
        depends = repr((version("embertide"), dataclasses.asdict(run), window.depends()))
        # Of other events or settings, another run.
        kept = folder / hashlib.sha256(depends.encode()).hexdigest()[:16]
        first = days_of(source)
        days = list(first)
        trials = [
            Trial(
                name=f"day {day}",
                depends=depends,
                measure=functools.partial(
                    _frozen, window, kept / "run", cache, first[day], first.get(after)
                ),
            )
            for day, after in zip(days[1:], [*days[2:], -1], strict=True)
        ]
        trials.append(
            Trial(
                name="learning",
                depends=depends,
                measure=functools.partial(_learning, window, kept / "run", cache),
            )
        )
        columns = (
            rich.progress.TextColumn("days"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
        )
        figures: list[dict[str, Any]] = []
        with progress_bar(*columns) as bar:
            task = bar.add_task("", total=len(trials))
            for trial in trials:  # in order: each goes on from the one before
                figures += measured([trial], kept, jobs=1)
                bar.update(task, completed=len(figures))
    frozen = dict(zip(days[1:], figures[:-1], strict=True))
    learning = {day: figures[-1][str(day)] for day in days[1:] if str(day) in figures[-1]}
    said = {
        "frozen": {"by_day": frozen, "over_days": over_days(frozen)},
        "prequential": {"by_day": learning, "over_days": over_days(learning)},
    }
    if as_json:
        print_json(said)
        return
    for name, of_days in (("frozen", frozen), ("prequential", learning)):
        rows: dict[str, dict[str, float]] = {f"day {day}": each for day, each in of_days.items()}
        summary = over_days(of_days)
        for what in ("mean", "worst", "standard_error"):
            line = {figure: each[what] for figure, each in summary.items()}
            rows["s.e." if what == "standard_error" else what] = line
        show_figures(name, rows)
