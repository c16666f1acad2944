"""`prune-search`: the fewest bytes whose loss of AUC is within a bound."""

import dataclasses
import functools
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import rich.progress
import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, say, show_table
from embertide.trainer.commands import trial_bar
from embertide.trainer.commands.inputs import Data, Demo, Events, Hours, StreamSeed, Window


def _measure(window: Window, seed: int, ratio: float) -> dict[str, Any]:
    from embertide.trainer.lab import prune_search  # torch takes seconds: not for --help

    run, source = window.open()
    run = prune_search.pruned_at(dataclasses.replace(run, seed=seed), ratio)
    return prune_search.measure(run, source)


def command(
    folder: Annotated[
        Path, typer.Argument(help="Where trials are kept; the same command again goes on.")
    ],
    data: Data = None,
    events: Events = None,
    demo: Demo = False,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    config: Annotated[
        Path | None, typer.Option(help="A run's file, as for train; its prune says all but bytes.")
    ] = None,
    max_auc_loss: Annotated[
        float, typer.Option(min=0, help="That may be lost, a standard error included.")
    ] = 0.001,
    max_ratio: Annotated[float, typer.Option(min=1.25, help="Where the search begins.")] = 64.0,
    seeds: Annotated[int, typer.Option(min=2, help="Trials of each ratio.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Trials at a time, each on one core.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the fewest bytes, as a --prune-ratio for train, whose loss of AUC is within a bound.

    Every ratio that is tried learns the events once a seed, pruned as train would, and is compared
    with the unpruned run of the same seed. A tenth of a day to some days of events are a window;
    what is lost depends on it, as rows of rare keys only pay in long ones.

    Example: embertide prune-search build/search --data clicks.parquet --events 1000000
    """
    from embertide.trainer.lab import prune_search
    from embertide.trainer.lab.trials import Trial, measured

    found: list[prune_search.Tried] = []
    with report_errors(as_json):
        window = Window(
            data=data,
            events=events,
            hours=hours if demo else None,
            stream_seed=stream_seed,
            config=config,
        )
        window.open()  # what is wrong with it is said at once
        depends = (version("embertide"), window.depends())
        with trial_bar("ratio {task.fields[ratio]:g}") as bar:
            task = bar.add_task("", total=seeds, ratio=1.0)

            def figures(ratio: float) -> list[dict[str, Any]]:
                bar.update(task, ratio=ratio)
                trials = [
                    Trial(
                        name=f"ratio {ratio:g} seed {seed}",
                        depends=repr((*depends, seed, ratio)),
                        measure=functools.partial(_measure, window, seed, ratio),
                    )
                    for seed in range(1, seeds + 1)
                ]
                done = functools.partial(_show_done, bar, task)
                return measured(trials, folder, jobs=jobs, done=done)

            best = prune_search.search(
                figures, max_lost=max_auc_loss, max_ratio=max_ratio, tried=found.append
            )
    _print(found, best, max_auc_loss, as_json)


def _show_done(bar: rich.progress.Progress, task: rich.progress.TaskID, count: int) -> None:
    bar.update(task, completed=count)


def _print(found: list[Any], best: Any, max_auc_loss: float, as_json: bool) -> None:
    if as_json:
        chosen = None if best is None else dataclasses.asdict(best)
        print_json({"chosen": chosen, "tried": [dataclasses.asdict(each) for each in found]})
        return
    table = Table(title=f"loss of AUC of at most {max_auc_loss:g}")
    for name in ("ratio", "loss", "standard error", "rows", "within"):
        table.add_column(name, justify="right")
    for each in sorted(found, key=lambda one: one.ratio):
        within = "yes" if each.within else "no"
        table.add_row(
            f"{each.ratio:g}", f"{each.loss:.5f}", f"{each.error:.5f}", f"{each.rows:,}", within
        )
    show_table(table)
    if best is None:
        say("no ratio that was tried is within it: give more events, or do not prune")
    else:
        say(f"embertide train ... --prune-ratio {best.ratio:g}")
