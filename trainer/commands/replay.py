"""`replay`: score a stream with a served model, in step with the trainer that learns from it."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from embertide._common.commands import addresses
from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json, say
from embertide.trainer.commands import event_bar
from embertide.trainer.commands.calling import TlsFolder, TokenFile, settings_of
from embertide.trainer.commands.inputs import (
    Data,
    Demo,
    Events,
    Hours,
    StreamSeed,
    model_for,
    open_run,
)
from embertide.trainer.errors import TrainerError


def command(
    output: Annotated[
        Path, typer.Argument(help="The folder for scores.parquet and requests.parquet.")
    ],
    url: Annotated[
        list[str] | None,
        typer.Option(
            callback=addresses,
            help="HOST:PORT of a node's gRPC; give it again for each node, to ask them in turn.",
            show_default="127.0.0.1:8001",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="The model's name in Triton.")] = "news",
    tls: TlsFolder = None,
    token_file: TokenFile = None,
    data: Data = None,
    config: Annotated[
        Path | None,
        typer.Option(help="The run's file that the model was trained with; its source is scored."),
    ] = None,
    events: Events = None,
    demo: Demo = False,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    bus: Annotated[
        str | None,
        typer.Option(help="Redis URL by which the trainer is told what is scored."),
    ] = None,
    max_staleness: Annotated[
        float,
        typer.Option(help="Wait while the served version is older, in minutes of event time."),
    ] = 30.0,
    frozen: Annotated[
        bool,
        typer.Option(help="The model does not change: wait for nothing, skip what it has learned."),
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Events of a request, at least.")] = 256,
    in_flight: Annotated[int, typer.Option(help="Requests at a time.")] = 3,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Name of a copy at the first node: while it is loaded, it is asked the same."
        ),
    ] = None,
    compare_from: Annotated[
        int, typer.Option(help="With --compare: wait for the copy before this event.")
    ] = 0,
    checks_per_s: Annotated[
        float,
        typer.Option(
            help="With --compare: ask a few scored events again so many times a second at most, "
            "beside the requests, to compare more answers.",
            min=0,
        ),
    ] = 0.0,
    shift_from: Annotated[
        int | None,
        typer.Option(help="From this event on, the first node gets --shift-share of the requests."),
    ] = None,
    shift_share: Annotated[
        float, typer.Option(help="With --shift-from: that share.", min=0, max=1)
    ] = 0.8,
    events_per_s: Annotated[
        float | None,
        typer.Option(
            help="Send at most so many.",
            show_default="as fast as it goes",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print progress and the result as JSON lines.")
    ] = False,
) -> None:
    """Score every event of a stream with the served model.

    With --bus, a trainer started with --behind-scorer learns only from what is scored here, and
    scoring waits while the served version is older than --max-staleness: an honest rehearsal of a
    live day, faster than life. With --compare, answers are compared with those of a copy at the
    same version.

    Example: replay build/scores --bus redis://127.0.0.1:6379 --data clicks.parquet

    A model of your own, whose requests need its lists and sequences: replay build/scores --model
    mine --config run.py
    """
    from embertide.trainer.data.history import for_requests
    from embertide.trainer.data.limit import ScoredMark
    from embertide.trainer.eval.compare import Copy
    from embertide.trainer.eval.records import Records
    from embertide.trainer.eval.replay import Replay, ReplayConfig, ReplayProgress
    from embertide.trainer.eval.served import ServedModel, ServedNodes

    with report_errors(as_json), event_bar("scoring") as bar:
        run, source = open_run(config, data, events, hours if demo else None, stream_seed)
        if run is not None:
            source = for_requests(source, run.model)
        try:
            pace = ReplayConfig(
                batch_size=batch_size,
                in_flight=in_flight,
                max_staleness_ms=None if frozen else round(max_staleness * 60_000),
                compare_from=compare_from,
                events_per_s=events_per_s,
                checks_per_s=checks_per_s,
            )
        except ValueError as error:
            raise TrainerError(str(error)) from error
        task = bar.add_task("", total=source.total_events(), state="starting")

        def show(progress: ReplayProgress) -> None:
            if as_json:
                print_json({"progress": dataclasses.asdict(progress)}, line=True)
            state = f"version {progress.version} · AUC {progress.auc:.4f}"
            rate = f" · p99 {progress.p99_ms:.1f} ms · {progress.events_per_s:,.0f} events/s"
            bar.update(task, completed=progress.events, state=state + rate)

        trained = model_for(source) if bus and run is None else run and run.model
        mark = ScoredMark(bus, trained.name) if bus and trained else None
        with contextlib.ExitStack() as stack:
            urls = url or ["127.0.0.1:8001"]
            calling = settings_of(tls, token_file)
            nodes = [stack.enter_context(ServedModel(each, model, calling)) for each in urls]
            copy = stack.enter_context(ServedModel(urls[0], compare, calling)) if compare else None
            replay = Replay(
                ServedNodes(nodes, shift_from=shift_from, shift_share=shift_share),
                Records(output),
                pace,
                scored=mark,
                copy=Copy(copy) if copy else None,
            )
            replay.run(source, progress=show)
    stats = dataclasses.asdict(replay.stats)
    if as_json:
        print_json({"result": stats}, line=True)
        return
    days = ", ".join(f"day {day}: {auc:.4f}" for day, auc in replay.prequential.daily().items())
    say(
        f"{stats['events']:,} events in {stats['requests']:,} requests, "
        f"{stats['failed_requests']} failed; AUC {days}"
    )
