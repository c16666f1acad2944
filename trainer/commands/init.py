"""`init`: look at a file of unknown columns, and write a run's file that learns from it."""

import dataclasses
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import rich.box
import rich.console
import rich.table
import typer

from embertide.trainer.commands import print_json, refusals
from embertide.trainer.commands.run_file import brief, changed
from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import EventSchema, EventTimes

_DAY_S = 86_400
_HOUR_S = 3600
_MOST_JUMP_S = 30 * _DAY_S
_COLUMNS = 80
# Settings that the file says anyhow.
_SAID_OF_MODEL = ("name", "tables", "features", "dense")
_SAID = ("model", "optimizer", "publish_every_s", "snapshot_every")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is written: a run, its events, and what to say of them."""

    files: Any  # columns.Files
    guess: Any  # guess.Guess
    run: RunConfig
    schema: EventSchema
    rows: int
    notes: tuple[str, ...]


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
    number_column: Annotated[list[str] | None, typer.Option(help="A column of amounts.")] = None,
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
    from embertide.trainer.data.guess import Asked
    from embertide.trainer.errors import ConfigurationError

    with refusals(as_json):
        if output.exists() and not force:
            raise ConfigurationError(f"{output} exists: name another with -o, or say --force")
        asked = Asked(
            label=label,
            positive=positive,
            time=time,
            no_time=no_time,
            ignore=tuple(ignore or ()),
            lists=tuple(list_column or ()),
            keys=tuple(key_column or ()),
            numbers=tuple(number_column or ()),
        )
        try:
            title = _titled(data)
            plan = _plan(data, asked, name, output)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(run_text(plan, title), encoding="utf-8")
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        except OSError as error:
            raise ConfigurationError(f"{output} cannot be written: {error.strerror}") from error
    if as_json:
        print_json(_facts(plan, output))
        return
    _show(plan, title)
    folder = Path("build") / plan.run.model.name
    typer.echo(f"wrote {output}; next: embertide train {folder} --config {output}")


def _titled(data: Sequence[str]) -> str:
    """Name the input in a line: by its first part, where a shell made many of a glob."""
    return data[0] if len(data) == 1 else f"{data[0]} and {len(data) - 1} more"


def _plan(data: Sequence[str], asked: Any, name: str | None, output: Path) -> _Plan:
    from embertide.trainer import defaults
    from embertide.trainer.data import format_of
    from embertide.trainer.data.columns import (
        count_rows,
        facts,
        read_sample,
        sniff,
        survey_time,
    )
    from embertide.trainer.data.files import matching_files
    from embertide.trainer.data.guess import feature_name, guess

    paths = list(dict.fromkeys(path for each in data for path in matching_files(each)))
    try:
        format = format_of(paths[0])
    except ValueError:
        format = "csv"
    files = sniff(paths, "parquet" if format == "parquet" else "csv")
    sample, rows = read_sample(files), count_rows(files)
    found = guess(facts(sample, rows), asked)
    ts, notes = found.named("time"), []
    clock = None
    if ts is not None:
        clock = survey_time(files, ts)
        unit_s = found.unit_ms / 1000
        span_s = (clock.last - clock.first) * unit_s
        if clock.backwards:
            files = sort_rows(files, ts, output)
            rows_word = f"{clock.backwards:,} of {rows:,} rows"
            notes.append(f"{rows_word} were not in order of {ts}: sorted into {files.paths[0]}")
        from embertide.trainer.data.base import MAX_GROUP

        group = survey_time(files, ts).group if clock.backwards else clock.group
        if group > MAX_GROUP:
            notes.append(
                f"{group:,} rows have one {ts}, more than the {MAX_GROUP:,} that may be learned "
                "as one: the order of rows is time"
            )
            found = dataclasses.replace(
                found,
                choices=tuple(
                    dataclasses.replace(each, role="left out", why="too coarse for a clock")
                    if each.role == "time"
                    else each
                    for each in found.choices
                ),
                unit_ms=1.0,
                unit="rows",
            )
            ts = clock = None
    if clock is None:
        pace = defaults.cadence_of_rows(rows, most=defaults.MOST_VERSIONS)
        notes.append(
            f"no time: the order of rows is time, and a version comes every "
            f"{1000 * pace.publish_every_s:,} rows"
        )
        times, hour = EventTimes(), False
    else:
        pace = defaults.cadence(rows, span_s, most=defaults.most_versions(rows, span_s))
        gap_s = clock.gap * unit_s
        times = EventTimes(max_jump_s=max(_HOUR_S, min(_MOST_JUMP_S, math.ceil(gap_s))))
        hour = span_s > 2 * _DAY_S and not _is_daily(sample.column(ts), found.unit_ms)
    schema = dataclasses.replace(found.schema(hour=hour), times=times)
    expected = {each.facts.name: each.facts.expected for each in found.choices}
    missing = [each.facts.name for each in found.choices if each.facts.missing]
    model = defaults.model_of(name or _name_of(paths[0], feature_name), schema, expected, missing)
    run = RunConfig(
        model=model,
        optimizer=defaults.rates(),
        batch_size=defaults.batch_size(rows),
        warmup_events=max(1, min(50_000, rows // 10)),
        publish_every_s=pace.publish_every_s,
        snapshot_every=pace.snapshot_every,
    )
    return _Plan(files=files, guess=found, run=run, schema=schema, rows=rows, notes=tuple(notes))


def _is_daily(column: Any, unit_ms: float) -> bool:
    """Whether all times are midnights: a date tells no hour."""
    import numpy as np

    from embertide.trainer.data.columns import time_values

    value_N = time_values(column.combine_chunks()) * unit_ms
    return bool((value_N[~np.isnan(value_N)] % 86_400_000 == 0).all())


def _name_of(path: str, feature_name: Any) -> str:
    name = Path(path.rpartition("://")[2]).name.partition(".")[0]
    return str(feature_name(name))


def sort_rows(files: Any, ts: str, output: Path) -> Any:
    """Write all rows in order of time beside the run's file; return that file.

    Raises:
        ConfigurationError: They are too many to be sorted in memory.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from embertide.trainer.data.columns import Files, read_sample, time_values
    from embertide.trainer.errors import ConfigurationError

    table = read_sample(files, MOST_SORTED_ROWS + 1)
    if len(table) > MOST_SORTED_ROWS:
        raise ConfigurationError(
            f"rows are not in order of {ts}, and more than {MOST_SORTED_ROWS:,}: sort them, or "
            "say --no-time if their order is that of the events"
        )
    value_N = time_values(table.column(ts).combine_chunks())
    order_N = np.argsort(value_N, kind="stable")
    path = output.parent / f"{output.stem}.sorted.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.take(pa.array(order_N)), path)
    return Files(paths=(str(path.resolve()),), format="parquet")


MOST_SORTED_ROWS = 20_000_000
"""Rows that are sorted in memory."""


# --- what is said ---------------------------------------------------------------------------------


def _facts(plan: _Plan, output: Path) -> dict[str, Any]:
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
        "notes": list(plan.notes),
    }


def _show(plan: _Plan, data: str) -> None:
    title = f"{data}: {plan.rows:,} rows"
    table = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE)
    for column, width in (("column", 20), ("taken for", 16), ("because", 20)):
        table.add_column(column, overflow="fold", max_width=width)
    table.add_column("values", no_wrap=True, width=21)
    for each in plan.guess.choices:
        role = each.role
        if role == "label" and plan.guess.positive:
            role = f"label: 1 if {plan.guess.positive}"
        values = each.facts.examples or f"{each.facts.least:g} to {each.facts.most:g}"
        table.add_row(each.facts.name, role, each.why, f"{each.facts.distinct:,}: {values}")
    console = rich.console.Console()
    console.print(table, width=min(console.width, _COLUMNS))
    for note in plan.notes:
        typer.echo(note)


def run_text(plan: _Plan, data: str) -> str:
    """Return the run's file."""
    return "\n".join([*_head(plan, data), *_source(plan), "", *_run(plan), ""])


def _head(plan: _Plan, data: str) -> Iterator[str]:
    yield f'"""A run over {data.replace(chr(92), "/")}, as `embertide init` guessed it.'
    yield ""
    yield "Change what is wrong; `embertide train FOLDER --config` with this file's name runs it."
    yield "`embertide train --print-config news` says of every setting what it means."
    yield '"""'
    yield ""
    names = {"ModelConfig", "TableConfig", "FeatureConfig", "OptimizerConfig", "RunConfig"}
    names |= {"DenseConfig"} if plan.run.model.dense else set()
    yield "from embertide.trainer.config import ("
    yield from (f"    {name}," for name in sorted(names))
    yield ")"
    yield "from embertide.trainer.data import open_events"
    yield "from embertide.trainer.data.base import EventSchema, EventTimes, FeatureColumn"
    yield ""


def _source(plan: _Plan) -> Iterator[str]:
    files, schema = plan.files, plan.schema
    why = {each.facts.name: each for each in plan.guess.choices}
    paths = [path if "://" in path else str(Path(path).resolve()) for path in files.paths]
    yield "source = open_events("
    if len(paths) == 1:
        yield f"    {paths[0]!r},"
    else:
        yield "    ["
        yield from (f"        {path!r}," for path in paths)
        yield "    ],"
    yield f"    format={files.format!r},"
    if files.delimiter != ",":
        yield f"    delimiter={files.delimiter!r},"
    yield "    schema=EventSchema("
    yield "        features=("
    for feature in schema.features:
        if feature.transform == "hour_of_day":
            yield "            # The hour of the day, from the time."
        elif feature.transform == "bin":
            yield f"            # The bin that {feature.column} falls into: a key, with a row."
            yield f"            # Who asks sends {feature.column}; embertide.Client makes the bin."
        else:
            choice = why[feature.column]
            yield f"            # {choice.facts.expected:,} keys: {_said(choice.why)}"
        transform = "" if feature.transform == "key" else f", transform={feature.transform!r}"
        said = f"name={feature.name!r}, column={feature.column!r}{transform}"
        if not feature.edges:
            yield f"            FeatureColumn({said}),"
            continue
        yield "            FeatureColumn("
        yield f"                {said},"
        edges = textwrap.wrap(", ".join(map(repr, feature.edges)), 70)
        yield "                edges=("
        yield from (f"                    {line}" for line in [*edges[:-1], f"{edges[-1]},"])
        yield "                ),"
        yield "            ),"
    yield "        ),"
    yield f"        label={schema.label!r},"
    if schema.positive:
        yield "        # These values of the label are 1, all others 0."
        yield f"        positive={schema.positive!r},"
    if schema.dense:
        yield "        # Amounts, in the order of the model's `dense`."
        yield f"        dense={schema.dense!r},"
    if schema.ts is None:
        yield "        # No time: the order of rows is time. A row counts as a millisecond."
    else:
        yield f"        # {plan.guess.unit[:1].upper()}{plan.guess.unit[1:]}."
        yield f"        ts={schema.ts!r},"
        if plan.guess.unit_ms != 1 or "second" in plan.guess.unit:
            yield f"        ts_unit_ms={schema.ts_unit_ms!r},"
        if schema.times != EventTimes():
            yield "        # As long as the longest silence in the file: no event of it is doubted."
            yield f"        times=EventTimes(max_jump_s={schema.times.max_jump_s:.0f}),"
    if schema.list_columns and schema.list_separator != "|":
        yield f"        list_separator={schema.list_separator!r},"
    yield "    ),"
    yield ")"
    out = [each for each in plan.guess.choices if each.role == "left out"]
    if out:
        yield "# Left out:"
        yield from (f"#   {each.facts.name}: {_said(each.why)}" for each in out)


def _said(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _run(plan: _Plan) -> Iterator[str]:
    run, model = plan.run, plan.run.model
    yield "run = RunConfig("
    yield "    model=ModelConfig("
    yield f"        name={model.name!r},"
    yield "        # A table a feature; of 10^5 rows a bucket, for ever."
    yield "        tables=("
    yield from (f"            {brief(each)}," for each in model.tables)
    yield "        ),"
    yield "        features=("
    yield from (f"            {brief(each)}," for each in model.features)
    yield "        ),"
    if model.dense:
        yield "        # The share of values below, whatever the scale; None is a value of its own."
        yield "        dense=("
        yield from (f"            {brief(each)}," for each in model.dense)
        yield "        ),"
    yield from (f"        {line}," for line in changed(model, _SAID_OF_MODEL))
    yield "    ),"
    yield f"    optimizer={brief(run.optimizer)},"
    yield from (f"    {line}," for line in changed(run, _SAID))
    yield f"    # {_every(plan)}"
    yield f"    publish_every_s={run.publish_every_s},"
    yield "    # Versions from one snapshot, with its checkpoint, to the next."
    yield f"    snapshot_every={run.snapshot_every},"
    yield ")"
    yield from _more(plan)


def _more(plan: _Plan) -> Iterator[str]:
    """Say what the run could have beside, with the names of this input."""
    from embertide.trainer.data.guess import item_and_user

    item, user = item_and_user(plan.schema)
    yield "# What may be worth turning on; docs/training.md says what each costs:"
    if plan.schema.has_clock and item is not None:
        yield f"#   how often {item} came of late, counted in its table:"
        counters = f"counters=CountersConfig(feature={item!r})"
        yield f"#     TableConfig(name={item!r}, chunks=4, {counters})"
    if item is not None and user is not None:
        yield f"#   the last {item} that {user} liked, as a sequence of the model:"
        yield (
            f"#     net='history', sequences=(SequenceConfig(name='hist', user={user!r}, "
            f"item={item!r}, published=True),)"
        )
    ones = [each.name for each in plan.schema.features if each.transform == "key"][:2]
    if len(ones) == 2:
        yield "#   a row for two keys that come together; with a table, behind other features:"
        yield f"#     FeatureConfig(name='pair', table='pair', crossed={tuple(ones)!r})"
    yield "#   a tenth of the bytes, by rows that are worth them: prune=PruneConfig(ratio=10)"


def _every(plan: _Plan) -> str:
    seconds = plan.run.publish_every_s
    if plan.schema.ts is None:
        return f"A version every {1000 * seconds:,} rows, each of which counts as a millisecond."
    for unit, length in (("day", _DAY_S), ("hour", _HOUR_S), ("minute", 60), ("second", 1)):
        if seconds % length == 0:
            count = seconds // length
            return f"A version every {count:,} {unit}{'s' if count > 1 else ''} of event time."
    return ""
