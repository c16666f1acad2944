"""`train`: learn from a stream of events, publish versions, resume where a run stopped."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from embertide.trainer.commands import event_bar, refusals
from embertide.trainer.commands.inputs import (
    Data,
    Events,
    Hours,
    StreamSeed,
    model_for,
    open_input,
    rates_for,
)


def command(
    publication: Annotated[
        Path, typer.Argument(help="The folder to publish to; a run found there goes on.")
    ],
    data: Data = None,
    events: Events = None,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    bus: Annotated[
        str | None, typer.Option(help="Redis URL for updates; without it, files alone.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Events of a step, at least.")] = 256,
    publish_every_s: Annotated[
        int, typer.Option(help="Event time between versions, in seconds.")
    ] = 600,
    snapshot_every: Annotated[
        int, typer.Option(help="Versions between snapshots, each with a checkpoint.")
    ] = 6,
    threads: Annotated[int, typer.Option(help="Threads of the dense net.")] = 1,
    cpu: Annotated[str, typer.Option(help="Baseline of the dense program.")] = "x86-64-v3",
    cache: Annotated[Path | None, typer.Option(help="A folder of compiled dense programs.")] = None,
    dead_letters: Annotated[
        Path | None, typer.Option(help="File for rejected rows, as JSON lines.")
    ] = None,
    behind_scorer: Annotated[
        bool, typer.Option(help="Learn only from events that `replay` has scored.")
    ] = False,
    keep_after: Annotated[
        int | None, typer.Option(help="Keep a copy of the model after this many events ...")
    ] = None,
    keep_in: Annotated[Path | None, typer.Option(help="... in this folder.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print progress and the result as JSON lines.")
    ] = False,
) -> None:
    """Train on a stream of events and publish as the model learns.

    Every batch is scored before it is trained on, so the AUC shown is that of an honest stream.
    The folder fills with snapshots, deltas and checkpoints; stop at any time and run the same
    command again to go on.

    Example: embertide train build/news --bus redis://127.0.0.1:6379 --data clicks.parquet
    """
    from embertide.trainer.config import RunConfig  # torch takes seconds: not for --help
    from embertide.trainer.data.limit import ScoredGate
    from embertide.trainer.loop import Progress, Trainer
    from embertide.trainer.publish.folder import Publication

    with refusals(as_json), event_bar("training") as bar:
        source = open_input(data, events, hours, stream_seed, dead_letters, publication.name)
        try:
            model = model_for(source)
            run = RunConfig(
                model=model,
                optimizer=rates_for(model),
                seed=seed,
                batch_size=batch_size,
                publish_every_s=publish_every_s,
                snapshot_every=snapshot_every,
                threads=threads,
                cpu=cpu,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        task = bar.add_task("", total=source.total_events(), state="starting")

        def show(progress: Progress) -> None:
            if as_json:
                print(json.dumps({"progress": dataclasses.asdict(progress)}), flush=True)
            state = f"version {progress.version} · AUC {progress.auc:.4f}"
            rate = f" · {progress.events_per_s:,.0f} events/s"
            bar.update(task, completed=progress.events, state=state + rate)

        trainer = Trainer(run, Publication(publication), bus=bus, program_cache=cache)
        if keep_after is not None and keep_in is not None:
            trainer.keep_copy(keep_after, keep_in)
        trainer.fit(
            source,
            gate=ScoredGate(bus) if behind_scorer and bus else None,
            progress=show,
        )
        by_day = trainer.prequential.daily_summaries()
        result: dict[str, Any] = {
            "events": trainer.events,
            "version": trainer.number,
            "lineage": trainer.publisher.lineage,
            "auc_by_day": {day: each.auc for day, each in by_day.items()},
            "log_loss_by_day": {day: each.log_loss for day, each in by_day.items()},
            "calibration_by_day": {day: each.calibration for day, each in by_day.items()},
            "forgotten_users": {each.config.name: each.forgotten for each in trainer.histories},
            "rejected": source.dead_letters.by_reason,
            "published": dataclasses.asdict(trainer.publisher.stats),
            "store": trainer.rows.stats(),
        }
    if as_json:
        print(json.dumps({"result": result}), flush=True)
        return
    days = ", ".join(
        f"day {day}: {each.auc:.4f} ({each.calibration:.3f})" for day, each in by_day.items()
    )
    # Calibration: the mean score over the mean label; 1 promises what comes true.
    typer.echo(f"{trainer.events:,} events, version {trainer.number}; AUC (calibration) {days}")
    if source.dead_letters.count:
        typer.echo(f"rejected rows: {source.dead_letters.by_reason}")
