"""How often a run publishes where nobody says it: as the input deserves, once a run.

A run that goes on keeps its schedule, for versions are numbered by it, though its files may have
grown. What it was is in its checkpoint, which may be in object storage alone; so the trainer asks
for the schedule once it knows its checkpoint.
"""

from collections.abc import Callable

from embertide.trainer.data import delimiter_of, is_live
from embertide.trainer.data.base import EventSource
from embertide.trainer.data.columns import Files, count_rows, survey_time
from embertide.trainer.data.csv import TextFormat
from embertide.trainer.data.files import matching_files
from embertide.trainer.run.defaults import (
    USUAL_SCHEDULE,
    PublishSchedule,
    schedule_of_clock,
    schedule_of_rows,
)

ChooseSchedule = Callable[[PublishSchedule | None], PublishSchedule]
"""Gives the schedule of a run from that of its checkpoint, if it has one."""


def schedule_of(
    source: EventSource,
    data: str | None,
    publish_every_s: int | None = None,
    snapshot_every: int | None = None,
) -> ChooseSchedule:
    """Return what decides the schedule: what was said, else the checkpoint, else the input.

    Args:
        source: The input.
        data: Where it lies; None: it is made up, or somebody's own source.
        publish_every_s: As the command line says; None: it does not.
        snapshot_every: The same.

    Returns:
        A function that raises DataError if a file cannot be read.
    """

    def choose(saved: PublishSchedule | None) -> PublishSchedule:
        found = USUAL_SCHEDULE
        if publish_every_s is None or snapshot_every is None:
            found = saved or _of_input(source, data)
        return PublishSchedule(
            publish_every_s=found.publish_every_s if publish_every_s is None else publish_every_s,
            snapshot_every=found.snapshot_every if snapshot_every is None else snapshot_every,
        )

    return choose


def _of_input(source: EventSource, data: str | None) -> PublishSchedule:
    if data is None or is_live(data):
        return USUAL_SCHEDULE
    paths = tuple(matching_files(data))
    files = Files(
        paths=paths,
        format="parquet" if _is_parquet(source) else "csv",
        text=TextFormat(delimiter=delimiter_of(paths[0])),
    )
    read, total = source.total_events(), count_rows(files)
    rows = total if read is None else min(total, read)
    ts = source.schema.ts
    if ts is None:
        return schedule_of_rows(rows)
    clock = survey_time(files, ts, unit_ms=source.schema.ts_unit_ms)
    unit_s = source.schema.ts_unit_ms / 1000 if clock.is_number else 1e-3
    share = rows / max(1, clock.rows)
    return schedule_of_clock(rows, max(0.0, clock.last - clock.first) * unit_s * share)


def _is_parquet(source: EventSource) -> bool:
    return source.total_events() is not None
