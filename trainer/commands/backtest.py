"""`backtest`: learn to the end of each day, or of some days, score the next."""

import dataclasses
import functools
import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json
from embertide.trainer.commands import trial_bar
from embertide.trainer.commands.evaluate import show_figures
from embertide.trainer.commands.inputs import Data, Demo, Events, Hours, StreamSeed, Window


def _frozen(
    window: Window, folder: Path, cache: Path | None, begin: int, end: int | None
) -> dict[str, Any]:
    from embertide.trainer.lab.backtest import frozen_block

    run, source = window.open()
    return frozen_block(run, source, folder, begin=begin, end=end, cache=cache)


def _learning(window: Window, folder: Path, cache: Path | None) -> dict[str, Any]:
    from embertide.trainer.lab.backtest import learning_days

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
    days_at_once: Annotated[
        int,
        typer.Option(
            "--days", min=1, help="Days that one version scores before the next is loaded: a block."
        ),
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Draw AUC by block: .png, .svg or .pdf.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="A folder of compiled dense programs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Learn to the end of each day and score the next day with the model frozen.

    Beside it stand the prequential figures of the same day: those of a model that goes on learning.
    The first day is only learned. With --days, blocks of days take the place of days.

    Example: embertide backtest --config run.py --data 'day-*.parquet' --folder build/backtest
    """
    from embertide.trainer.eval.metrics import day_name
    from embertide.trainer.eval.picture import new_picture
    from embertide.trainer.lab.backtest import blocks_of, draw, over_block, over_days
    from embertide.trainer.lab.trials import Trial, measured

    with report_errors(as_json):
        picture = None if plot is None else new_picture(plot)
        window = Window(
            data=data,
            events=events,
            hours=hours if demo else None,
            stream_seed=stream_seed,
            config=config,
        )
        run, source = window.open()
        depends = repr((version("embertide"), dataclasses.asdict(run), window.depends()))
        depends += f", {days_at_once} days" if days_at_once > 1 else ""
        # Other events or settings are another run, in another folder.
        kept = folder / hashlib.sha256(depends.encode()).hexdigest()[:16]
        cache = cache or kept / "programs"  # each block would compile the same net again
        first = blocks_of(source, days_at_once)
        blocks = list(first)
        trials = [
            Trial(
                name=f"day {block}",
                depends=depends,
                measure=functools.partial(
                    _frozen, window, kept / "run", cache, first[block], first.get(after)
                ),
            )
            for block, after in zip(blocks[1:], [*blocks[2:], -1], strict=True)
        ]
        trials.append(
            Trial(
                name="learning",
                depends=depends,
                measure=functools.partial(_learning, window, kept / "run", cache),
            )
        )
        figures: list[dict[str, Any]] = []
        with trial_bar("days" if days_at_once == 1 else "blocks") as bar:
            task = bar.add_task("", total=len(trials))
            for trial in trials:  # in order: each goes on from the one before
                figures += measured([trial], kept, jobs=1)
                bar.update(task, completed=len(figures))
    frozen = dict(zip(blocks[1:], figures[:-1], strict=True))
    by_day = {int(day): each for day, each in figures[-1].items()}
    learning = {
        block: over_block(
            [by_day[day] for day in range(block, block + days_at_once) if day in by_day]
        )
        for block in blocks[1:]
        if any(day in by_day for day in range(block, block + days_at_once))
    }
    of_models = {"frozen": frozen, "prequential": learning}
    said = {
        name: {"by_day": each, "over_days": over_days(each)} for name, each in of_models.items()
    }
    if picture is not None and plot is not None:
        with report_errors(as_json):
            draw(picture, of_models, plot)
    if as_json:
        print_json(said)
        return
    for name, of_blocks in of_models.items():
        rows: dict[str, dict[str, float]] = {day_name(day): of_blocks[day] for day in of_blocks}
        summary = over_days(of_blocks)
        for what in ("mean", "worst", "standard_error"):
            line = {figure: each[what] for figure, each in summary.items()}
            rows["s.e." if what == "standard_error" else what] = line
        show_figures(name, rows)
