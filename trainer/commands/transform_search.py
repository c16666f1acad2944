"""`transform-search`: what to do to each dense feature, by trials over a window."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import rich.progress
import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, say, show_table
from embertide.trainer.commands import trial_bar
from embertide.trainer.commands.inputs import Data, Events, Window
from embertide.trainer.commands.run_file import brief
from embertide.trainer.config import DenseConfig

_MINUTE_S = 60


def _measure(
    window: Window, cut: Any, dense: tuple[DenseConfig, ...], seed: int, share: int
) -> dict[str, Any]:
    from embertide.trainer.lab import transform_search  # torch takes seconds: not for --help

    run, source = window.open()
    model = dataclasses.replace(run.model, dense=dense)
    run = dataclasses.replace(run, model=model, seed=seed)
    return transform_search.measure(run, source, cut, share=share)


class _Trials:
    """Measures what the search asks for, in files, and stops it at the bounds.

    Attributes:
        passes: The cost of the trials so far, in passes over the events that one learns.
    """

    def __init__(
        self,
        window: Window,
        cut: Any,
        folder: Path,
        *,
        jobs: int,
        most: int,
        most_s: float,
        bar: rich.progress.Progress,
    ) -> None:
        self._window, self._cut, self._folder = window, cut, folder
        self._depends = (version("embertide"), window.depends(), cut)
        self._jobs, self._most, self._most_s = jobs, most, most_s
        self._bar, self._task = bar, bar.add_task("", total=0)
        self._files: set[Path] = set()
        self._began = time.monotonic()
        self._taken, self._taken_s = 0, 0.0
        self.passes = 0.0

    @property
    def count(self) -> int:
        """Trials that the search asked for, those of before included."""
        return len(self._files)

    def figures(self, choices: Sequence[Any], seeds: int, share: int) -> list[Any]:
        """See `transform_search.search`."""
        from embertide.trainer.lab.transform_search import OutOfBoundsError
        from embertide.trainer.lab.trials import Trial, measured

        trials = [
            Trial(
                name=f"transforms seed {seed}",
                depends=repr((*self._depends, dense, seed, share)),
                measure=functools.partial(_measure, self._window, self._cut, dense, seed, share),
            )
            for dense in choices
            for seed in range(1, seeds + 1)
        ]
        files = {trial.file(self._folder) for trial in trials}
        todo = sum(not path.exists() for path in files)
        passed_s = time.monotonic() - self._began
        if todo and self._taken:
            passed_s += todo * self._taken_s / self._taken
        if len(self._files | files) > self._most or (todo and passed_s > self._most_s):
            raise OutOfBoundsError
        self._bar.update(self._task, total=len(self._files | files), completed=len(self._files))
        known, began = len(self._files & files), time.monotonic()
        self.passes += (len(files) - known) / share
        found = measured(
            trials,
            self._folder,
            jobs=self._jobs,
            done=lambda count: self._bar.update(
                self._task, completed=len(self._files) - known + min(count, len(files))
            ),
        )
        self._files |= files
        self._taken += todo
        self._taken_s += time.monotonic() - began if todo else 0.0
        return [found[at : at + seeds] for at in range(0, len(found), seeds)]


def command(
    folder: Annotated[
        Path, typer.Argument(help="Where trials are kept; the same command again goes on.")
    ],
    config: Annotated[
        Path,
        typer.Option(help="A run's file, as for train; its transforms are what is compared with."),
    ],
    data: Data = None,
    events: Events = None,
    clusters: Annotated[
        int,
        typer.Option(min=1, help="Clusters of features at most; 1: all features are one."),
    ] = 4,
    least_gain: Annotated[
        float, typer.Option(min=0, help="Log loss that a change has to save to be taken.")
    ] = 0.0005,
    seeds: Annotated[int, typer.Option(min=2, help="Trials of what comes to the last round.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Trials at a time, each on one core.")] = 1,
    max_trials: Annotated[
        int, typer.Option(min=1, help="Trials at most, those of before included.")
    ] = 300,
    max_minutes: Annotated[
        float,
        typer.Option(min=0.1, help="No round begins that would end later, by what trials took."),
    ] = 120.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw what each pipeline saves: .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find transforms of dense features (DenseConfig.steps) that lower the log loss.

    Features that are distributed alike share their steps, and one cluster is searched after the
    other. The first 60 % of the events are learned, the next 20 % choose, and the last 20 %, which
    chose nothing, confirm. What is not confirmed, by two standard errors, stays as it is.

    Example: embertide transform-search build/transforms --config run.py --events 1000000
    """
    from embertide.trainer.eval.picture import new_picture
    from embertide.trainer.lab import transform_search
    from embertide.trainer.lab.dense_clusters import clusters as clusters_of
    from embertide.trainer.lab.transform_plot import draw

    with report_errors(as_json):
        picture = None if plot is None else new_picture(plot)
        window = Window(data=data, events=events, hours=None, stream_seed=1, config=config)
        run, source = window.open()
        cut = transform_search.look_at(run, source)
        began = time.monotonic()
        with trial_bar("trials") as bar:
            trials = _Trials(
                window,
                cut,
                folder,
                jobs=jobs,
                most=max_trials,
                most_s=max_minutes * _MINUTE_S,
                bar=bar,
            )
            outcome = transform_search.search(
                run.model.dense,
                cut.found,
                clusters_of(list(cut.found), most=clusters),
                trials.figures,
                seeds=seeds,
                least_gain=least_gain,
            )
        seconds = time.monotonic() - began
        if picture is not None and plot is not None:
            draw(picture, outcome, plot)
    if as_json:
        _print_json(outcome, trials, seconds)
    else:
        _show(outcome, trials, least_gain)
        _say_what_to_do(outcome, config)


def _lines(outcome: Any) -> list[str]:
    return ["dense=(", *(f"    {brief(each)}," for each in outcome.dense), "),"]


def _verdict(outcome: Any) -> str:
    if not outcome.searched:
        return "not searched"
    return "better" if outcome.better else "tie"


def _print_json(outcome: Any, trials: _Trials, seconds: float) -> None:
    print_json(
        {
            "verdict": _verdict(outcome),
            **dataclasses.asdict(outcome),
            "lines": _lines(outcome),
            "trials": trials.count,
            "passes": round(trials.passes, 1),
            "seconds": round(seconds, 1),
        }
    )


def _signed(gain: Any) -> str:
    return "failed" if gain is None else f"{gain.loss:+.5f} ± {gain.error:.5f}"


def _show(outcome: Any, trials: _Trials, least_gain: float) -> None:
    title = f"{trials.count} trials, {trials.passes:.0f} passes over what is learned"
    table = Table(title=f"{title}; a change saves {least_gain:g} at least")
    for name in ("features", "best steps", "tried", "log loss saved", "taken"):
        table.add_column(name, justify="left" if name in ("features", "best steps") else "right")
    for each in outcome.searched:
        table.add_row(
            " ".join(each.features),
            str(each.best),
            str(len(each.tried)),
            _signed(each.gain),
            "yes" if each.taken else "no",
        )
    for names in outcome.left:
        table.add_row(" ".join(names), "not searched", "", "", "no")
    show_table(table)
    if outcome.left:
        say("the bounds ended the search: raise --max-trials or --max-minutes to go on")


def _say_what_to_do(outcome: Any, config: Path) -> None:
    gain = outcome.confirmed
    if gain is not None:
        say(
            f"on events that chose nothing: log loss saved {_signed(gain)}, "
            f"AUC {gain.auc:+.5f} ± {gain.auc_error:.5f}"
        )
    if not outcome.searched:
        return  # the bounds were said
    if not outcome.better:
        say("a tie: no other transforms are better by more than chance; keep those there are")
    else:
        say(f"put these lines into the model of {config}:")
        say("\n".join(_lines(outcome)))
