"""`verify`: make the figures of a replay again from its records and the input."""

import json
from pathlib import Path
from typing import Annotated

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json, say
from embertide.trainer.commands.inputs import Data, Demo, Events, Hours, StreamSeed, open_input


def command(
    scores: Annotated[Path, typer.Argument(help="The folder that `replay` wrote.")],
    versions: Annotated[Path, typer.Argument(help="versions.jsonl of the publication.")],
    data: Data = None,
    events: Events = None,
    demo: Demo = False,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    frozen: Annotated[
        Path | None, typer.Option(help="The folder of the frozen copy's `replay`.")
    ] = None,
    reshard: Annotated[
        Path | None, typer.Option(help="JSON of a reshard that ran meanwhile.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Compute every figure of a replay from its records and the input, and look for faults.

    Faults are rows without a score, rows answered by a version that had learned from the event,
    groups of one ts split over versions, and answers older than one given before they were asked
    for. Any of them gives exit status 1.
    """
    from embertide.trainer.eval.figures import VersionLog, measure
    from embertide.trainer.eval.moves import Reshard
    from embertide.trainer.eval.records import Records

    with report_errors(as_json):
        source = open_input(data, events, hours if demo else None, stream_seed)
        copy = Records(frozen) if frozen else None
        moved = Reshard.read(reshard) if reshard else None
        figures = measure(source, Records(scores), VersionLog.read(versions), copy, moved)
    faults = {
        name: figures[name]
        for name in ("missing_rows", "learned_rows", "split_groups", "steps_back")
        if figures[name]
    }
    if as_json:
        print_json(figures)
    else:
        for name in ("events", "served_auc", "frozen_auc", "requests", "p50_ms", "p99_ms"):
            say(f"{name:12s} {json.dumps(figures[name])}")
    for name, count in faults.items():
        say(f"error: {count} {name.replace('_', ' ')}", err=True)
    if faults:
        raise typer.Exit(1)
