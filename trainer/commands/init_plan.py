"""The plan that `init` makes: from files of unknown columns to a run that learns from them."""

import contextlib
import dataclasses
import datetime
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embertide._common.quoting import check_name, shown, terminal_text, without_secrets
from embertide.trainer.config import RunConfig
from embertide.trainer.data.alike import MAX_EVENTS, QUICK_STEPS, alike
from embertide.trainer.data.base import MAX_GROUP, EventSchema, EventTimes
from embertide.trainer.data.clock import TimeFacts
from embertide.trainer.data.columns import (
    ColumnFacts,
    Files,
    Sample,
    count_rows,
    facts,
    input_columns,
    read_rows,
    read_sample,
    sniff,
    survey_time,
    time_values,
)
from embertide.trainer.data.files import matching_files
from embertide.trainer.data.guess import Asked, Guess, check_names, feature_name, guess
from embertide.trainer.data.leaks_of_table import labels_of, table_notes, without_leaks
from embertide.trainer.data.texts import Kind
from embertide.trainer.errors import ConfigurationError, DataError
from embertide.trainer.run import defaults

MAX_SORTED_ROWS = 20_000_000
"""Rows that are sorted in memory."""

_DAY_S = 86_400
_HOUR_S = 3600
_STEPS_OF_A_TIME = 16  # that rows of one time would be, if time did not keep them together
_ALIKE_WITHIN = 16  # events; likeness is looked for within a large step, and within so many
_MAX_JUMP_S = 30 * _DAY_S


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A person's statements about the files, beside those about their columns.

    Attributes:
        data: Paths, globs and URLs.
        names: Column names of text without a header.
        delimiter: Between the fields of text; empty: it is found out.
        encoding: Encoding of text; empty: the same.
    """

    data: tuple[str, ...]
    names: tuple[str, ...] = ()
    delimiter: str = ""
    encoding: str = ""

    @property
    def title(self) -> str:
        """Its name in a line: by its first part, where a shell made many of a glob."""
        more = len(self.data) - 1
        return terminal_text(without_secrets(self.data[0])) + (f" and {more} more" if more else "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of what `init` writes: a run, its events, and remarks on them.

    Attributes:
        files: The input files, and how to read them.
        guess: The guess about each column.
        run: The run.
        schema: The schema of its events.
        kinds: Kinds of text columns, for `open_events`.
        rows: Rows of the files.
        notes: Remarks that a person should read.
    """

    files: Files
    guess: Guess
    run: RunConfig
    schema: EventSchema
    kinds: dict[str, Kind]
    rows: int
    notes: tuple[str, ...]


def plan_of(given: Input, asked: Asked, name: str | None, output: Path) -> Plan:
    """Look at the files, and decide.

    Args:
        given: The files.
        asked: The statements about their columns.
        name: The model's; None: that of the first file.
        output: The run's file; one of sorted rows is written beside it.

    Raises:
        ConfigurationError: A file cannot be read, or does not tell what to learn.
        OSError: The sorted rows cannot be written.
    """
    paths = list(dict.fromkeys(path for each in given.data for path in matching_files(each)))
    files = sniff(paths, names=given.names, encoded=given.encoding, delimiter=given.delimiter)
    sample, all_facts, rows = _look(files, asked)
    with _named(given.title):
        found = guess(all_facts, asked)
        found.schema()
    notes = list(files.notes)
    found, said = without_leaks(found, table_notes(sample.table, found, rows), asked)
    notes += said
    with _named(given.title):
        _check_kept(found)
    batch_size = defaults.batch_size(rows)
    ts, clock, kind = found.named("time"), None, None
    if ts is not None:
        by_name = {each.facts.name: each.facts for each in found.choices}
        kind = _clock_kind(by_name[ts])
        clock = survey_time(files, ts, unit_ms=found.unit_ms, kind=kind)
        if clock.outliers:
            notes.append(_said_outliers(ts, clock, rows, found.unit_ms))
        if clock.backwards or clock.begins_outside:
            files = sort_rows(files, ts, kind, clock, output)
            path = terminal_text(files.paths[0])
            notes.append(
                f"{clock.backwards:,} of {rows:,} rows were not in order of {terminal_text(ts)}: "
                f"sorted into {path}"
            )
            clock = survey_time(files, ts, unit_ms=found.unit_ms, kind=kind)
        if clock.group > MAX_GROUP or not math.isfinite(clock.first):
            notes.append(
                f"{clock.group:,} rows have one {terminal_text(ts)}, more than the {MAX_GROUP:,} "
                "that may be learned as one: the order of rows is time"
            )
            found, ts, clock = _without_time(found), None, None
        elif clock.together > _STEPS_OF_A_TIME * defaults.large_step(rows):
            notes.append(
                f"{terminal_text(ts)} is too coarse for a clock: rows of one time are learned at "
                f"once, {clock.together:,.0f} of them in the mean, up to {clock.group:,}; so their "
                "order is time"
            )
            found, ts, clock = _without_time(found), None, None
    if clock is None or ts is None:
        schedule = defaults.schedule_of_rows(rows, most=defaults.MAX_VERSIONS)
        notes.append(
            "no time: the order of rows is time, and a version comes every "
            f"{1000 * schedule.publish_every_s:,} rows"
        )
        times, hour = EventTimes(), False
    else:
        unit_s = found.unit_ms / 1000
        span_s = (clock.last - clock.first) * unit_s
        schedule = defaults.schedule_of_clock(
            rows, span_s, most=defaults.max_versions(rows, span_s)
        )
        gap_s = math.ceil(clock.gap * unit_s)
        times = EventTimes(max_jump_s=max(_HOUR_S, min(_MAX_JUMP_S, gap_s)))
        hour = span_s > 2 * _DAY_S and not _is_daily(sample, ts, found.unit_ms)
    schema = dataclasses.replace(found.schema(hour=hour), times=times)
    expected = {each.facts.name: each.facts.expected for each in found.choices}
    missing = [each.facts.name for each in found.choices if each.facts.missing]
    name = _name_of(paths[0]) if name is None else check_name("--name", name)
    likeness = _likeness(files, found, ts, kind, defaults.large_step(rows))
    quick = likeness >= QUICK_STEPS
    if likeness:
        slower = ", which takes longer" if batch_size > defaults.FEW_EVENTS else ""
        notes.append(
            f"labels of events that follow each other are alike ({likeness:.2f} more than of those "
            f"nearby): rows learn in steps of {defaults.FEW_EVENTS}"
            f"{', at twice the rate' if quick else ''}{slower}"
        )
        batch_size = defaults.FEW_EVENTS
    run = RunConfig(
        model=defaults.model_of(name, schema, expected, missing),
        optimizer=defaults.rates(batch_size, quick=quick),
        correction=defaults.correction(),
        batch_size=batch_size,
        warmup_events=max(1, min(50_000, rows // 10)),
        publish_every_s=schedule.publish_every_s,
        snapshot_every=schedule.snapshot_every,
    )
    clock_facts = next((each.facts for each in found.choices if each.role == "time"), None)
    kinds = {} if clock_facts is None else {clock_facts.name: _clock_kind(clock_facts)}
    return Plan(
        files=files,
        guess=found,
        run=run,
        schema=schema,
        kinds={column: kind for column, kind in kinds.items() if kind is not None},
        rows=rows,
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _named(title: str) -> Iterator[None]:
    """Say of which file a guess speaks."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{title}: {error}") from error


def _check_kept(found: Guess) -> None:
    """Refuse a guess whose keys were all left out as leaks; `found.schema()` was right before."""
    try:
        found.schema()
    except ConfigurationError as error:
        out = [
            f"{each.facts.name}: {each.why}" for each in found.choices if each.role == "left out"
        ]
        raise ConfigurationError(f"{error}. Left out are {'; '.join(map(shown, out))}") from error


def _look(files: Files, asked: Asked) -> tuple[Sample, list[ColumnFacts], int]:
    """Return the first rows, what each column holds, and how many rows there are."""
    columns = input_columns(files)
    names = [each.name for each in columns]
    with _named(terminal_text(files.paths[0])):
        check_names(asked, names)
    for name, count in Counter(names).items():
        if count > 1 and name not in asked.ignore:
            raise DataError(
                files.paths[0],
                f"column {shown(name)} is there {count} times; rename all but one, or leave them "
                f"out with --ignore {shown(name)}",
            )
    # Columns that no model can read are not read here either.
    read = [each.name for each in columns if each.readable and each.name not in asked.ignore]
    sample = read_sample(files, columns=read) if read else Sample(table=pa.table({}))
    rows = count_rows(files)
    if not rows:
        raise DataError(files.paths[0], "has no row; give a file that has some")
    found = {each.name: each for each in facts(sample, rows)}
    for each in columns:
        if each.name not in found:
            found[each.name] = ColumnFacts(
                name=each.name,
                kind="other",
                rows=rows,
                missing=0,
                distinct=0,
                expected=0,
                type=each.type,
            )
    return sample, [found[name] for name in dict.fromkeys(names)], rows


def _likeness(files: Files, found: Guess, ts: str | None, kind: Kind | None, large: int) -> float:
    """Look at the first labels, in the order of events: rows may have been sorted meanwhile."""
    label = found.named("label")
    assert label is not None
    table = read_rows(files, MAX_EVENTS, [label, *([] if ts is None else [ts])])
    there_N, label_N = labels_of(table.column(label), found.positive)
    ts_N = np.arange(len(table), dtype=np.float64)
    if ts is not None:
        ts_N = time_values(table.column(ts), kind)
    sizes = (large, _ALIKE_WITHIN)
    return max(alike(label_N[there_N], ts_N[there_N], size) for size in sizes)


def _clock_kind(column: ColumnFacts) -> Kind | None:
    """Return the kind of a clock's texts; None: it has a type of its own."""
    if not column.text:
        return None
    return "time" if column.kind == "time" else "float"


def _without_time(found: Guess) -> Guess:
    choices = tuple(
        dataclasses.replace(each, role="left out", why="too coarse for a clock")
        if each.role == "time"
        else each
        for each in found.choices
    )
    return dataclasses.replace(found, choices=choices, unit_ms=1.0, unit="rows")


def _said_outliers(ts: str, clock: TimeFacts, rows: int, unit_ms: float) -> str:
    row, value = clock.outlier
    said = f"{value:g}"
    with contextlib.suppress(OverflowError, OSError, ValueError):
        ms = value * (unit_ms if clock.is_number else 1.0)
        when = datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
        said = f"{when:%Y-%m-%d %H:%M:%S}"
    return (
        f"{clock.outliers:,} of {rows:,} rows have a {terminal_text(ts)} far from all others, "
        f"first in row {row + 1}: {said}; they decide nothing, and are not learned"
    )


def _is_daily(sample: Sample, ts: str, unit_ms: float) -> bool:
    """Whether all times are midnights: a date tells no hour."""
    value_N = time_values(sample.table.column(ts)) * unit_ms
    return bool((value_N[~np.isnan(value_N)] % 86_400_000 == 0).all())


def _name_of(path: str) -> str:
    name = Path(path.rpartition("://")[2]).name.partition(".")[0]
    return feature_name(name)


def sort_rows(files: Files, ts: str, kind: Kind | None, clock: TimeFacts, output: Path) -> Files:
    """Write all rows in order of time beside the run's file; return that file.

    Values stay as they are, texts texts. Rows whose time is no time, or lies far from all others,
    are left out.

    Raises:
        ConfigurationError: They are too many to be sorted in memory.
        OSError: The file cannot be written.
    """
    columns = input_columns(files)
    names = Counter(each.name for each in columns)
    read = [each.name for each in columns if each.readable and names[each.name] == 1]
    table = read_rows(files, MAX_SORTED_ROWS + 1, read)
    if len(table) > MAX_SORTED_ROWS:
        raise ConfigurationError(
            f"rows are not in order of {shown(ts)}, and more than {MAX_SORTED_ROWS:,}: sort "
            "them, or say --no-time if their order is that of the events"
        )
    value_N = time_values(table.column(ts), kind)
    order_N = np.argsort(value_N, kind="stable")
    sorted_N = value_N[order_N]
    order_N = order_N[(sorted_N >= clock.first) & (sorted_N <= clock.last)]
    path = output.parent / f"{output.stem}.sorted.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as partial:
        pq.write_table(table.take(pa.array(order_N)), partial)
    return Files(paths=(str(path.resolve()),), format="parquet")


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the place of another once it is whole.

    Raises:
        OSError: It cannot be written; nothing is left of it.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def options_of(plan: Plan) -> dict[str, object]:
    """Return how `open_events` is called, but for paths and schema."""
    text = plan.files.text
    options: dict[str, object] = {"format": plan.files.format}
    if plan.files.format == "csv":
        usual = type(text)()
        options["delimiter"] = text.delimiter
        for option in ("names", "quoted", "escaped", "encoding", "skip"):
            if getattr(text, option) != getattr(usual, option):
                options[option] = getattr(text, option)
    if plan.kinds:
        options["kinds"] = plan.kinds
    return options


def opened_paths(plan: Plan) -> Sequence[str]:
    """Return the files' paths as they are opened from anywhere."""
    return [path if "://" in path else str(Path(path).resolve()) for path in plan.files.paths]
