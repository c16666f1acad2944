"""`cache-sim`: hit rates of the policies of a tier on a recorded trace of keys."""

from pathlib import Path
from typing import Annotated

import rich.progress
import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import ProgressText, Table, print_json, progress_bar, show_table
from embertide._store import CacheTrace
from embertide.trainer.data.trace import read_trace
from embertide.trainer.eval.picture import new_picture
from embertide.trainer.lab import cache

_CURVE_POINTS_PER_DECADE = 4


def _read(path: str, column: str | None, accesses: int | None) -> CacheTrace:
    bar = progress_bar(
        ProgressText("reading {task.completed:,} keys"), rich.progress.SpinnerColumn()
    )
    with bar:
        task = bar.add_task("", total=None)
        keys_N = read_trace(
            path,
            column=column,
            accesses=accesses,
            progress=lambda count: bar.update(task, completed=count),
        )
    return CacheTrace(keys_N)


def _simulate(
    trace: CacheTrace, sizes: list[int], policies: list[str], version_accesses: int
) -> cache.CacheFigures:
    bar = progress_bar(
        rich.progress.BarColumn(),
        ProgressText("{task.description}"),
        rich.progress.TimeRemainingColumn(),
    )
    with bar:
        task = bar.add_task("")

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        return cache.simulate(
            trace, sizes, policies, version_accesses=version_accesses, progress=show
        )


def _cell(figures: cache.PolicyFigures) -> str:
    closed = "" if figures.gap_closed is None else f" ({figures.gap_closed:+.0%})"
    return f"{figures.hit_rate:.4f}{closed}"


def show(figures: cache.CacheFigures, sizes: list[int]) -> None:
    """Print the figures of some sizes as a table."""
    shown = [size for size in figures.sizes if size.capacity in sizes]
    table = Table(
        title=f"{figures.accesses:,} accesses to {figures.distinct:,} keys\n"
        "hit rate (share of the gap from LRU to the optimum)"
    )
    table.add_column("policy")
    for size in shown:
        table.add_column(f"{size.capacity:,} rows\n{100 * size.share:.2g} %", justify="right")
    table.add_row("optimum (Belady)", *(f"{size.optimum:.4f}" for size in shown))
    table.add_row("best fixed set", *(f"{size.best_fixed:.4f}" for size in shown), end_section=True)
    for policy in shown[0].policies:
        table.add_row(policy, *(_cell(size.policies[policy]) for size in shown))
    show_table(table)


def command(
    trace: Annotated[
        str,
        typer.Argument(
            help="Keys in the order in which they were asked for: .parquet or .csv (see --column), "
            ".trace or .trace.xz (big-endian 64-bit keys); also fsspec URLs."
        ),
    ],
    column: Annotated[
        str | None, typer.Option(help="The key column; a file that has but one needs none.")
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Rows that the tier holds: shares of the distinct keys, or numbers.")
    ] = "0.1%,1%,10%",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy, or several times one. An ending :n lets a key enter at its n-th "
            "access, as in lru:2.",
            show_default=f"all of {', '.join(cache.policy_names())}, and lru:2",
        ),
    ] = None,
    accesses: Annotated[
        int | None, typer.Option(min=1, help="Read the first accesses alone.")
    ] = None,
    version_accesses: Annotated[
        int,
        typer.Option(
            min=1,
            help="The policy utility, which no tier can have, knows what training had counted at "
            "the last version; a version has so many accesses.",
        ),
    ] = 50_000,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit-rate curves into this .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Simulate the policies of a tier on a trace of keys.

    Each policy runs from an empty tier, in the code that a store runs. Beside them stand the most
    that any policy could reach (Belady's, which knows the future and may leave a row out) and the
    best set of keys that never changes.

    Example: embertide cache-sim clicks.parquet --column cand --sizes 1%,10% --plot hits.svg
    """
    with report_errors(as_json):
        picture = None if plot is None else new_picture(plot)
        read = _read(trace, column, accesses)
        rows = cache.parse_sizes(sizes, read.distinct)
        points = cache.between(rows, per_decade=_CURVE_POINTS_PER_DECADE) if picture else rows
        names = policy or [*cache.policy_names(), "lru:2"]
        figures = _simulate(read, points, names, version_accesses)
        if picture and plot:
            title = Path(trace).name if column is None else f"{Path(trace).name}, {column}"
            cache.draw(picture, figures, title, plot)
    if as_json:
        print_json(figures.as_json())
    else:
        show(figures, rows)
