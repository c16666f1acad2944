"""`init`: look at a file of unknown columns, and write a run's file that learns from it."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, say, show_table

_COLUMNS = 80
_DELIMITERS = {"tab": "\t", "\\t": "\t", "space": " "}


def command(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA",
            help="Events: .parquet, .csv, .tsv (also .gz and such), one file or several of the "
            "same columns, by name or by a glob: 'data/*.parquet'.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The run's file to write.")] = Path(
        "run.py"
    ),
    label: Annotated[
        str | None, typer.Option(help="The column that says what happened: the label.")
    ] = None,
    positive: Annotated[
        str,
        typer.Option(
            help="Which values of the label are 1: '>= 4', '== yes'.", show_default="guessed"
        ),
    ] = "",
    time: Annotated[str | None, typer.Option(help="The column of the events' time.")] = None,
    no_time: Annotated[
        bool, typer.Option("--no-time", help="No column is the time: the order of rows is.")
    ] = False,
    ignore: Annotated[
        list[str] | None, typer.Option(help="A column to leave out; may be given several times.")
    ] = None,
    list_column: Annotated[
        list[str] | None, typer.Option(help="A column of lists of keys, as 'a|b|c'.")
    ] = None,
    key_column: Annotated[
        list[str] | None, typer.Option(help="A column of keys (ids, categories).")
    ] = None,
    text_column: Annotated[
        list[str] | None,
        typer.Option(help="A column of keys that are text, also where most are integers."),
    ] = None,
    number_column: Annotated[list[str] | None, typer.Option(help="A column of amounts.")] = None,
    names: Annotated[
        str, typer.Option(help="The columns of a file without a header: 'user,item,rating'.")
    ] = "",
    delimiter: Annotated[
        str,
        typer.Option(
            help="The delimiter of text fields: ';', '::', 'tab'.", show_default="found out"
        ),
    ] = "",
    encoding: Annotated[
        str,
        typer.Option(help="Encoding of text: cp1252, utf-16, gbk ...", show_default="found out"),
    ] = "",
    name: Annotated[
        str | None, typer.Option(help="The model's name.", show_default="that of the file")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Guess the columns of a file, or of several, and write a run's file that learns from them.

    It reads the first 500,000 rows, and of all rows the time. The table says what each column was
    taken for, and why; the run's file says it again, with every setting that matters, to change.

    Example: embertide init clicks.parquet -o run.py, then embertide train build/clicks --config
    run.py
    """
    from embertide.trainer.commands.init_check import rejected
    from embertide.trainer.commands.init_plan import Input, plan_of, replaced
    from embertide.trainer.commands.init_text import run_text
    from embertide.trainer.data.guess import Asked
    from embertide.trainer.errors import ConfigurationError

    with report_errors(as_json):
        if output.exists() and not force:
            raise ConfigurationError(f"{output} exists: name another with -o, or say --force")
        if len(data) > 1 and data[-1].endswith(".py"):
            raise ConfigurationError(
                f"{data[-1]} is no file of events: to write the run there, say -o "
                f"{shlex.quote(data[-1])}"
            )
        asked = Asked(
            label=label,
            positive=positive,
            time=time,
            no_time=no_time,
            ignore=tuple(ignore or ()),
            lists=tuple(list_column or ()),
            keys=tuple(key_column or ()),
            texts=tuple(text_column or ()),
            numbers=tuple(number_column or ()),
        )
        given = Input(
            data=tuple(data),
            names=tuple(name.strip() for name in names.split(",")) if names else (),
            delimiter=_DELIMITERS.get(delimiter, delimiter),
            encoding=encoding,
        )
        try:
            plan = plan_of(given, asked, name, output)
            written = run_text(plan, given.title)
            output.parent.mkdir(parents=True, exist_ok=True)
            with replaced(output) as partial:
                partial.write_text(written, encoding="utf-8")
                notes = (*plan.notes, *rejected(partial))
        except ValueError as error:
            raise ConfigurationError(f"{given.title}: {error}") from error
    if as_json:
        print_json(_facts(plan, notes, output))
        return
    _show(plan, notes, given.title)
    folder = Path("build") / plan.run.model.name
    following = ("embertide", "train", str(folder), "--config", str(output))
    say(f"wrote {output}; next: {shlex.join(following)}")


def _facts(plan: Any, notes: Sequence[str], output: Path) -> dict[str, Any]:
    return {
        "run": str(output),
        "model": plan.run.model.name,
        "rows": plan.rows,
        "columns": [
            {
                "column": each.facts.name,
                "role": each.role,
                "why": each.why,
                "distinct": each.facts.distinct,
                "missing": each.facts.missing,
            }
            for each in plan.guess.choices
        ],
        "positive": plan.guess.positive,
        "publish_every_s": plan.run.publish_every_s,
        "snapshot_every": plan.run.snapshot_every,
        "notes": list(notes),
    }


def _show(plan: Any, notes: Sequence[str], data: str) -> None:
    table = Table(title=f"{data}: {plan.rows:,} rows")
    for column, width in (("column", 20), ("taken for", 16), ("because", 20)):
        table.add_column(column, overflow="fold", max_width=width)
    table.add_column("values", no_wrap=True, width=21)
    for each in plan.guess.choices:
        role = each.role
        if role == "label" and plan.guess.positive:
            role = f"label: 1 if {plan.guess.positive}"
        values = each.facts.examples or f"{each.facts.least:g} to {each.facts.most:g}"
        table.add_row(each.facts.name, role, each.why, f"{each.facts.distinct:,}: {values}")
    show_table(table, width=_COLUMNS)
    for note in notes:
        say(note)
