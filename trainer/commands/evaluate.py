"""`eval`: the figures of a published version on any file."""

from pathlib import Path
from typing import Annotated

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, say, show_table
from embertide.trainer.commands import event_bar
from embertide.trainer.commands.inputs import Data, Demo, Events, Hours, StreamSeed, open_run

Slices = Annotated[
    list[str] | None,
    typer.Option(
        "--slices",
        help="A feature by whose values figures are given, or hour_of_day; may be given several "
        "times.",
    ),
]
User = Annotated[
    str | None,
    typer.Option(
        help="The feature that says whose an event is, for GAUC.",
        show_default="that of the run's file, or user, where there is one",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(help="The run's file, where events have a schema or columns of their own."),
]
DdrMib = Annotated[int, typer.Option(min=1, help="Memory for the rows of a version, MiB.")]


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def show_figures(title: str, rows: dict[str, dict[str, float]]) -> None:
    """Print figures as a table that fits 80 columns, a line each of `rows`."""
    columns = {
        "events": "events",
        "label_mean": "labels",
        "log_loss": "log loss",
        "normalised_entropy": "NE",
        "auc": "AUC",
        "gauc": "GAUC",
        "calibration": "calibr.",
    }
    shown = [name for name in columns if any(name in figures for figures in rows.values())]
    table = Table(title=title)
    table.add_column("")
    for name in shown:
        table.add_column(columns[name], justify="right")
    for row, figures in rows.items():
        table.add_row(row, *(_cell(figures.get(name)) for name in shown))
    show_table(table)


def command(
    publication: Annotated[
        Path, typer.Argument(help="The folder that a trainer publishes to, or one snapshot's.")
    ],
    data: Data = None,
    config: Config = None,
    events: Events = None,
    demo: Demo = False,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    version: Annotated[
        int | None, typer.Option(help="Number of the version.", show_default="the newest")
    ] = None,
    slices: Slices = None,
    most_values: Annotated[
        int, typer.Option(min=1, help="Values of a slice that are shown apart.")
    ] = 10,
    user: User = None,
    ddr_mib: DdrMib = 4096,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the calibration curve: .png, .svg or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Score a file by a published version, and print how good the scores are.

    Nothing is learned. The scores are those that a node gives that serves the version. Events up
    to the version's watermark are events that it may have learned from; how many is said.

    Example: embertide eval build/news --data day-9.parquet --slices device --slices hour_of_day
    """
    from embertide.trainer.data.history import for_requests
    from embertide.trainer.eval.calibration_plot import draw
    from embertide.trainer.eval.picture import new_picture
    from embertide.trainer.eval.published import PublishedModel
    from embertide.trainer.eval.scored import score_events

    with report_errors(as_json):
        picture = None if plot is None else new_picture(plot)
        run, source = open_run(config, data, events, hours if demo else None, stream_seed)
        if run is not None:
            source = for_requests(source, run.model)
            user = user if user is not None else run.evaluation.user or None
            slices = slices or list(run.evaluation.slices)
        model = PublishedModel.open(publication, version, ddr_budget_bytes=ddr_mib << 20)
        with event_bar("scoring") as bar:
            task = bar.add_task("", total=source.total_events(), state=f"version {model.number}")
            scored = score_events(
                [model],
                source,
                user=user,
                slices=slices or (),
                progress=lambda done: bar.update(task, completed=done),
            )
        figures = scored.figures()
        tables = {name: scored.table(name, most_values).named() for name in slices or ()}
        learned = int((scored.ts_ms_B <= model.watermark_ms).sum())
        if picture is not None and plot is not None:
            draw(picture, scored.label_B, scored.score_MB[0], f"version {model.number}", plot)
    said = {
        "version": model.number,
        "watermark_ms": model.watermark_ms,
        "events_up_to_watermark": learned,
        "rejected": dict(source.dead_letters.by_reason),
        "figures": figures,
        "slices": {
            name: {value: each.as_json() for value, each in table.items()}
            for name, table in tables.items()
        },
    }
    if as_json:
        print_json(said)
        return
    show_figures(f"version {model.number}", {"all": figures})
    say(f"expected calibration error {figures['expected_calibration_error']:.4f}")
    if "gauc_one_class_users" in figures:
        say(
            f"GAUC: {figures.get('gauc_users', 0):,} users; {figures['gauc_one_class_users']:,} "
            "more have labels of one kind"
        )
    for name, table in tables.items():
        show_figures(name, {value: each.as_json() for value, each in table.items()})
    if source.dead_letters.count:
        say(f"rejected rows: {source.dead_letters.by_reason}")
    if learned:
        say(
            f"note: {learned:,} of these events are not after the version's watermark: it may have "
            "learned from them",
            err=True,
        )
