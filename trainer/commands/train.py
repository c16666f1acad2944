"""`train`: learn from a stream of events, publish versions, resume where a run stopped."""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json, print_text, say
from embertide.trainer.commands import event_bar
from embertide.trainer.commands.inputs import (
    Data,
    Demo,
    Events,
    Hours,
    Preset,
    StreamSeed,
    check_model,
    of_presets,
    open_input,
    rates_for,
    run_for,
)
from embertide.trainer.commands.listening import METRICS_HOST, MetricsHost
from embertide.trainer.config import PruneConfig, RunConfig, Sync
from embertide.trainer.config.assign import assigned, values
from embertide.trainer.config.sync import STRATEGIES, parse_sync
from embertide.trainer.data.base import EventSource
from embertide.trainer.data.leaks import REMEDIES, ColumnNote
from embertide.trainer.data.watch import WatchedSource
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.presets import preset_model

log = logging.getLogger(__name__)

# Options that are settings of a run: a run's file has them, or the command line.
_AUTO = Path("auto")  # in place of a plan's file
_PACE = ("publish_every_s", "snapshot_every")
_SETTINGS = (*("seed", "batch_size", "threads", "cpu", "bus_bytes", "sync"),)


def _folder(text: str) -> Path:
    """Return the folder to publish to."""
    if not text:
        raise typer.BadParameter("the folder's name is empty: is a variable not set?")
    if "://" in text:
        raise typer.BadParameter(
            f"{text} is no folder: give one of this machine, and --storage {text} for its copy"
        )
    path = Path(text)
    file = next((each for each in (path, *path.parents) if each.is_file()), None)
    if file is not None:
        raise typer.BadParameter(f"{file} is a file: give a folder to publish to")
    return path


def _sync(text: str) -> Sync:
    """Return the strategy that an option names."""
    try:
        return parse_sync(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _print_config(preset: str | None) -> None:
    if preset is not None:
        from embertide.trainer.commands.run_file import explained

        model = preset_model(preset)
        run = RunConfig(model=model, optimizer=rates_for(model))
        print_text(explained(run))
        raise typer.Exit


def _ask_bus(url: str, as_json: bool) -> None:
    """End here if Redis does not answer: before torch loads, and ranks start again and again."""
    from embertide.trainer.publish.bus import connect

    with report_errors(as_json):
        connect(url).close()


def command(
    context: typer.Context,
    publication: Annotated[
        Path,
        typer.Argument(
            parser=_folder,
            metavar="FOLDER",
            help="The folder to publish to; a run found there goes on.",
        ),
    ],
    data: Data = None,
    events: Events = None,
    demo: Demo = False,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A run's file: Python with run = RunConfig(...), and source = open_events(...) in "
            "place of --data, or schema = EventSchema(...), by which the file of --data is read."
        ),
    ] = None,
    print_config: Annotated[
        str | None,
        typer.Option(
            is_eager=True,
            callback=_print_config,
            help="Print a run's file of that model, with every setting, its default and what it "
            "means; and do no more.",
            **of_presets,
        ),
    ] = None,
    preset: Preset = None,
    bus: Annotated[
        str | None, typer.Option(help="Redis URL for updates; without it, files alone.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Minimum batch size.")] = 256,
    publish_every_s: Annotated[
        int | None,
        typer.Option(
            help="Event time between versions, in seconds.",
            show_default="600, or longer where a file would have few events in it",
        ),
    ] = None,
    snapshot_every: Annotated[
        int | None,
        typer.Option(
            help="Versions between snapshots, each with a checkpoint.",
            show_default="6, or a twentieth of a file's versions",
        ),
    ] = None,
    prune_ratio: Annotated[
        float, typer.Option(help="Compression ratio for pruning; 0 disables it.")
    ] = 0.0,
    prune_within: Annotated[
        float,
        typer.Option(
            help="Loss of AUC that pruning may cost, as 0.001: measured while the run learns, "
            "which needs the bytes of unpruned rows on the trainer, and followed by the ratio; "
            "--prune-ratio says where that begins. 0: not measured.",
        ),
    ] = 0.0,
    bus_bytes: Annotated[
        int,
        typer.Option(help="Bytes of versions in Redis, at most; beyond it they go by files alone."),
    ] = 512 << 20,
    ddr_mib: Annotated[int, typer.Option(help="DDR budget, MiB.")] = 4096,
    ssd_mib: Annotated[int, typer.Option(help="SSD budget, MiB; 0: no SSD tier.")] = 0,
    ssd_directory: Annotated[
        Path | None, typer.Option(help="Where rows beyond DDR lie; default: PUBLICATION/ssd.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of the dense net.")] = 1,
    cpu: Annotated[str, typer.Option(help="Oldest CPU (-march) to run on.")] = "x86-64-v3",
    cache: Annotated[Path | None, typer.Option(help="A folder of compiled dense programs.")] = None,
    dead_letters: Annotated[
        Path | None, typer.Option(help="File for rejected rows, as JSON lines.")
    ] = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting that may differ from the checkpoint's when a run goes on, as "
            "optimizer.sparse_learning_rate; may be given several times."
        ),
    ] = None,
    fork: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Begin with all that the run in FOLDER has learned, and go on from its place in "
            "the same events. Model and settings may differ from its own. Without effect once this "
            "run has a checkpoint.",
        ),
    ] = None,
    warm_start: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Begin with the rows and the net of the run in FOLDER, and read the events from "
            "their beginning. Without effect once this run has a checkpoint.",
        ),
    ] = None,
    change_model: Annotated[
        bool,
        typer.Option(
            "--change-model",
            help="Go on with another model than the checkpoint's: what was learned is carried "
            "over, and the next version is of the new model. A node that `embertide serve` started "
            "takes it beside the old one.",
        ),
    ] = False,
    skip_undone: Annotated[
        bool,
        typer.Option(
            help="After a rollback: pass over the events that only undone versions learned from."
        ),
    ] = False,
    behind_scorer: Annotated[
        bool, typer.Option(help="Learn only from events that `replay` has scored.")
    ] = False,
    keep_after: Annotated[
        int | None, typer.Option(help="Keep a copy of the model after this many events ...")
    ] = None,
    keep_in: Annotated[Path | None, typer.Option(help="... in this folder.")] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve /metrics for Prometheus on this port.", min=1, max=65535),
    ] = None,
    metrics_host: MetricsHost = METRICS_HOST,
    log: Annotated[
        Path | None, typer.Option(help="File to append progress and messages to, as JSON lines.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder of scalars for TensorBoard, if it is installed.")
    ] = None,
    mlflow: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="MLflow server, or database as sqlite:///runs.db, that gets settings and figures.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print progress and the result as JSON lines.")
    ] = False,
    storage: Annotated[
        str | None,
        typer.Option(
            help="URL of object storage, as s3://BUCKET/PREFIX, that gets a copy of the folder: "
            "nodes read it there, and a new folder is filled from it, so that a run goes on on "
            "another machine (docs/training.md)."
        ),
    ] = None,
    storage_behind_s: Annotated[
        float,
        typer.Option(help="With --storage: training waits while it is further behind.", min=1),
    ] = 3600.0,
    storage_end_s: Annotated[
        float,
        typer.Option(help="With --storage: how long the end of the run may wait for it.", min=1),
    ] = 300.0,
    nproc: Annotated[
        int,
        typer.Option(
            min=1,
            help="Ranks to start on this machine: processes that share tables and batches. Under "
            "torchrun, or where kubectl started them, ranks find one another by themselves.",
        ),
    ] = 1,
    restarts: Annotated[
        int,
        typer.Option(min=0, help="With --nproc: times that ranks start again when one is lost."),
    ] = 3,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Sharding plan file; or auto, with --nproc: measure the run's steps, search for a "
            "plan, start the ranks again with it at a checkpoint, and keep it if steps are no "
            "longer.",
            show_default="balanced",
        ),
    ] = None,
    sync: Annotated[
        Any,
        typer.Option(
            parser=_sync,
            metavar="NAME[:SETTING=VALUE,...]",
            help="How ranks bring their dense nets together, as dct or dct:density=0.01: "
            f"{', '.join(STRATEGIES)}.",
        ),
    ] = "all_reduce",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SETTING=VALUE",
            help="Any setting of the run by its path, as optimizer.dense_learning_rate=0.01 or "
            "model.tables[item].dim=32; may be given several times, and goes before a run's file "
            "and the other options. --print-config shows them all.",
        ),
    ] = None,
) -> None:
    """Train on a stream of events and publish as the model learns.

    Every batch is scored before it is trained on, so the AUC shown is that of an honest stream.
    The folder fills with snapshots, deltas and checkpoints; stop at any time and run the same
    command again to go on.

    Example: embertide init clicks.parquet, then embertide train build/clicks --config run.py

    A model and settings of your own: embertide train --print-config news > run.py, change it, and
    embertide train build/mine --config run.py --data 'clicks-*.parquet'

    Made-up news, to try it out: embertide train build/news --demo

    Another setting, by its path: embertide train build/mine --config run.py --set batch_size=512

    By several processes that share the tables: embertide train build/news --demo --nproc 2
    """
    from embertide.trainer.sync.launch import end_with_agent, is_launched, launch

    if is_launched():
        end_with_agent()
    else:
        if bus is not None:
            _ask_bus(bus, as_json)
        if nproc > 1:
            sys.exit(launch(nproc, restarts, sys.argv[1:]))
    from embertide.trainer.commands import reports, result, run_file
    from embertide.trainer.commands.publish_schedule import schedule_of
    from embertide.trainer.data.limit import ScoredGate
    from embertide.trainer.publish.folder import Publication
    from embertide.trainer.publish.storage import Storage
    from embertide.trainer.run.auto_plan import AutoPlan
    from embertide.trainer.run.fork import Fork
    from embertide.trainer.run.loop import Trainer  # torch takes seconds: not for --help
    from embertide.trainer.run.progress import Progress
    from embertide.trainer.sync import verdict
    from embertide.trainer.sync.ranks import Ranks

    with contextlib.ExitStack() as stack:
        stack.enter_context(report_errors(as_json, verdict.is_left))
        ranks = Ranks.join()
        stack.enter_context(ranks.failing())
        stack.enter_context(verdict.leaving(as_json))  # before others know that this one fails
        first = ranks.first  # the others' progress is in what this one shows
        if not first and not as_json:
            note = "rank 0 tells how the run goes; here is only what fails"
            say(f"rank {ranks.rank} of {ranks.size} has joined the run: {note}")
        as_json &= first
        origin = _origin(publication, fork, warm_start)
        if behind_scorer and bus is None:
            raise ConfigurationError(
                "--behind-scorer: give --bus, where `replay` says what it has scored"
            )
        begins_with = None
        if origin is not None:
            begins_with = Fork(publication=Publication(origin), keep_place=fork is not None)
        given = None if config is None else run_file.load(config)
        source = None
        if given is not None:
            source = given.source if data is None else None
            _refuse_both(context, config, source)
        letters = dead_letters if first else None
        if source is not None and letters is not None:
            source.letters_to(letters)
        if source is None:
            group = publication.resolve().name
            source = open_input(
                data,
                events,
                hours if demo else None,
                stream_seed,
                letters,
                group,
                None if given is None else given.data_schema,
                None if given is None else given.source,
            )
        schedule, paths = None, values(settings or ())
        if given is not None:
            run = assigned(given.run, settings or ())
        else:
            run = run_for(
                preset,
                source,
                **{name: context.params[name] for name in _SETTINGS},
                prune=_pruning(prune_ratio, prune_within),
                ddr_budget_bytes=ddr_mib << 20,
                ssd_budget_bytes=ssd_mib << 20,
                ssd_directory=str(ssd_directory or publication / "ssd") if ssd_mib else "",
            )
            run = assigned(run, settings or ())
            every_s = run.publish_every_s if "publish_every_s" in paths else publish_every_s
            every = run.snapshot_every if "snapshot_every" in paths else snapshot_every
            schedule = schedule_of(source, data, every_s, every)
        check_model(run.model, source)
        bar = event_bar("training")
        if first:
            stack.enter_context(bar)
        task = bar.add_task("", total=source.total_events() if first else None, state="starting")

        def show(progress: Progress) -> None:
            if as_json:
                print_json({"progress": dataclasses.asdict(progress)}, line=True)
            bar.update(task, completed=progress.events, state=reports.state_of(progress))

        shows: list[reports.Show] = [show]
        seldom = [reports.Seldom(reports.line)] if bar.disable and not as_json else []
        if metrics_port is not None and first:
            page = reports.metrics_page(metrics_port, source, publication, metrics_host)
            shows.append(stack.enter_context(page))
        json_log = None if log is None or not first else stack.enter_context(reports.json_log(log))
        if json_log is not None:
            seldom.append(json_log.progress)
        if tensorboard is not None and first:
            shows.append(stack.enter_context(reports.tensorboard(tensorboard)))
        tracked = None
        if mlflow is not None and first:
            tracked = stack.enter_context(reports.mlflow(mlflow, run.model.name))
            seldom.append(tracked.progress)

        def show_all(progress: Progress) -> None:
            for each in (*shows, *(each.show for each in seldom)):
                each(progress)

        def idle() -> None:
            for each in seldom:
                each.idle()

        auto = plan == _AUTO
        trainer = Trainer(
            run,
            Publication(publication),
            bus=bus,
            program_cache=cache,
            allow_change=allow_change or (),
            skip_undone=skip_undone,
            ranks=ranks,
            plan_file=None if auto else plan,
            auto_plan=AutoPlan(is_supervised=verdict.is_supervised()) if auto else None,
            fork=begins_with,
            change_model=change_model,
            storage=None if storage is None else Storage(storage),
            max_behind_s=storage_behind_s,
            storage_end_s=storage_end_s,
            publish_schedule=schedule,
        )
        if tracked is not None:
            tracked.begin(dataclasses.asdict(trainer.run))
        signal.signal(signal.SIGTERM, lambda *_: trainer.stop())
        if keep_after is not None and keep_in is not None:
            trainer.versions.keep_copy(keep_after, keep_in)
        watched = WatchedSource(source, _say_note)
        trainer.fit(
            watched if first else source,
            gate=ScoredGate(bus, run.model.name) if bus and behind_scorer else None,
            progress=show_all,
            idle=idle,
        )
        figures = trainer.figures()
        if trainer.replans:  # all ranks are here: the checkpoint is whole
            stack.close()
            sys.exit(verdict.AGAIN)
        if not first:
            _end_if_stopped(trainer.stopped)
            return
        by_day = trainer.state.prequential.daily_summaries()
        monitor = trainer.state.monitor
        found: dict[str, Any] = {
            "events": trainer.state.events,
            "version": trainer.state.number,
            "lineage": trainer.versions.publisher.lineage,
            "changed_settings": trainer.state.changes,
            "forked": None if trainer.forked is None else dataclasses.asdict(trainer.forked),
            "warm_start": trainer.warm_start,
            "auc_by_day": {day: each.auc for day, each in by_day.items()},
            "log_loss_by_day": {day: each.log_loss for day, each in by_day.items()},
            "calibration_by_day": {day: each.calibration for day, each in by_day.items()},
            "normalised_entropy_by_day": {
                day: each.normalised_entropy for day, each in by_day.items()
            },
            "auc_error_by_day": {day: each.auc_error for day, each in by_day.items()},
            "unstable_days": [day for day, each in by_day.items() if each.is_unstable],
            "fifths": [each.as_json() for each in trainer.state.prequential.fifths()],
            "gauc_by_day": monitor.daily_gauc(),
            "hold_out_by_day": {
                day: each.as_json() for day, each in monitor.held.daily_summaries().items()
            },
            "slices": monitor.slices(),
            "auc_by_head_and_day": {
                name: each.daily() for name, each in trainer.state.heads.by_name.items()
            },
            "fifths_by_head": {
                name: [fifth.as_json() for fifth in each.fifths()]
                for name, each in trainer.state.heads.by_name.items()
            },
            "forgotten_users": {
                each.config.name: each.forgotten for each in trainer.state.histories
            },
            "undone_events": trainer.undone_events,
            "column_notes": [dataclasses.asdict(each) for each in watched.notes],
            "rejected": source.dead_letters.by_reason,
            "source": source.counters(),
            "labels": {} if trainer.state.waiting is None else trainer.state.waiting.counters(),
            "unsampled_negatives": trainer.steps.unsampled,
            "set_aside": dataclasses.asdict(trainer.quarantine.stats),
            "checkpoints": dataclasses.asdict(trainer.versions.saver.stats),
            "stopped": trainer.stopped,
            "storage": dataclasses.asdict(trainer.uploader.stats) if trainer.uploader else None,
            **figures,
        }
        if json_log is not None:
            json_log.write({"result": found})
    if as_json:
        print_json({"result": found}, line=True)
        _end_if_stopped(trainer.stopped)
        return
    result.show(
        publication,
        events=trainer.state.events,
        version=trainer.state.number,
        days=by_day,
        fifths=trainer.state.prequential.fifths(),
        rejected=source.dead_letters.by_reason,
        set_aside=trainer.quarantine.stats.events,
        unsampled=trainer.steps.unsampled,
        has_clock=source.schema.has_clock,
        warm_start=trainer.warm_start,
        leaks=[note.columns[0] for note in watched.notes if note.is_leak],
        pruning=(figures["pruning"] or {}).get("within"),
    )
    _end_if_stopped(trainer.stopped)


def _pruning(ratio: float, within: float) -> PruneConfig | None:
    """Return the pruning that the options ask for.

    Raises:
        ConfigurationError: There is no such pruning.
    """
    if ratio <= 0 and within == 0:
        return None
    try:
        return PruneConfig(ratio=max(ratio, 0.0), within=within)
    except ValueError as error:
        raise ConfigurationError(f"--prune-within {within}: {error}") from error


def _say_note(note: ColumnNote) -> None:
    """Say what was found of a column: on stderr, and in the log."""
    log.warning("%s; %s", note.text, REMEDIES[note.kind])


def _origin(publication: Path, fork: Path | None, warm_start: Path | None) -> Path | None:
    """Return the folder of the run whose state this one begins with.

    Raises:
        ConfigurationError: Two are named, or the run's own folder.
    """
    if fork is not None and warm_start is not None:
        raise ConfigurationError("--fork and --warm-start: give one of them")
    folder = fork or warm_start
    if folder is not None and folder.resolve() == publication.resolve():
        raise ConfigurationError(
            f"{folder} is the folder to publish to: a run there goes on by itself; give a new "
            "folder to publish to"
        )
    return folder


def _end_if_stopped(stopped: bool) -> None:
    """End as SIGTERM ends a process, so that whoever started it knows that there is more to do."""
    if stopped:
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _refuse_both(context: typer.Context, config: Path | None, source: EventSource | None) -> None:
    """Refuse options that say what the run's file says.

    Raises:
        ConfigurationError: One was given.
    """
    rest = ("prune_ratio", "prune_within", "ddr_mib", "ssd_mib", "ssd_directory")
    of_source = ("demo", "events", "hours", "stream_seed")
    for name in ("preset", *_SETTINGS, *_PACE, *rest, *(of_source if source is not None else ())):
        origin = context.get_parameter_source(name)
        if origin is not None and origin.name == "COMMANDLINE":
            option = "model" if name == "preset" else name.replace("_", "-")
            raise ConfigurationError(f"--{option}: {config} says it; change it there")
