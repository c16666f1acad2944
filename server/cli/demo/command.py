"""`demo`: run it, watch it, and afterwards let it prove itself."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.box
import rich.live
import rich.progress_bar
import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, console, print_json, say, show_table
from embertide.server.adapters.process import ProcessError
from embertide.server.cli.common_options import (
    DEFAULT_BACKENDS,
    DEFAULT_CACHE,
    Backends,
    Json,
    Triton,
)
from embertide.server.cli.demo.figures import (
    auc_text,
    event_time,
    faults,
    headline,
    hit_share,
    plan_text,
)
from embertide.server.cli.demo.options import (
    MADE_STALENESS_MIN,
    STALENESS_MIN,
    VERSIONS,
    DemoOptions,
    load_demo,
)
from embertide.server.cli.demo.proof import check
from embertide.server.cli.demo.run import Demo, State

_EVERY_S = 5.0


def _rows(state: State) -> list[tuple[str, str]]:
    replay, trainer, nodes = state.replay, state.trainer, state.nodes
    hits: Mapping[str, int] = nodes.get("hits", {})
    shares = " · ".join(
        f"{name} {hit_share(hits, name):.1%}"
        for name in ("hbm", "ddr", "ssd", "hot", "remote", "default")
    )
    resident: Mapping[str, int] = nodes.get("resident_bytes", {})
    held = " · ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in resident.items() if size)
    rows = [("stage", state.stage), ("event time", event_time(replay.get("ts_ms")))]
    if state.console:
        rows.insert(0, ("console", state.console))
    if replay:
        rows += [
            (f"{state.scored} AUC of the day", auc_text(replay["auc"])),
            ("trainer's AUC of the day", auc_text(trainer.get("auc"))),
            ("version", f"{replay['version']:,}"),
            ("age of the model (event time)", f"{replay['staleness_s'] / 60:.1f} min"),
            ("request p50 / p99", f"{replay['p50_ms']:.1f} / {replay['p99_ms']:.1f} ms"),
            ("impressions a second", f"{replay['events_per_s']:,.0f}"),
        ]
    if trainer.get("plan"):
        rows.append(("plan of the ranks", plan_text(trainer["plan"])))
    if nodes:
        rows += [
            ("rows of both nodes", f"{nodes['rows']:,}"),
            ("lookups from", shares),
            ("bytes in", held),
            ("failed requests", f"{nodes['failed_requests']:,}"),
            ("plan", f"{nodes['plan_epoch']}"),
        ]
    if state.reshard:
        rows.append(("reshard", _reshard_text(state.reshard)))
    return rows


def _reshard_text(reshard: Mapping[str, Any]) -> str:
    if reshard["phase"] == "waiting":
        return "half way through the stream"
    if reshard["phase"] == "watching":
        return "the traffic has shifted to node-0; the control plane has not decided yet"
    why = f"{reshard['why']} · " if reshard["why"] else ""
    return why + (
        f"{reshard['phase']} · {reshard['buckets_done']} of {reshard['buckets_total']} buckets · "
        f"{reshard['compared']:,} answers compared, {reshard['changed']} changed"
    )


def _view(state: State) -> Table:
    done, total = state.replay.get("events", 0), state.stream.get("events")
    table = Table(
        *("", ""),
        title="Embertide: a model that learns while it is served",
        box=rich.box.ROUNDED,
        header=False,
        width=88,
    )
    for name, value in _rows(state):
        table.add_row(name, value)
    if total:
        bar = rich.progress_bar.ProgressBar(total=total, completed=done, width=40)
        table.add_row(f"{done:,} of {total:,}", bar)
    return table


_SHOWN_PHASES = ("comparing", "watching", "moving", "settling", "measuring")


class _Lines:
    """The output for a log or a pipe, in place of the live view: a line now and then."""

    def __init__(self) -> None:
        self._said, self._stage, self._console = 0.0, "", ""

    def __call__(self, state: State) -> None:
        now = time.monotonic()
        if state.console not in (self._console, "starting"):
            self._console = state.console
            say(f"   console: {state.console}", err=True)
        if state.stage == self._stage and now - self._said < _EVERY_S:
            return
        if state.stage != self._stage:
            say(f"== {state.stage}", err=True)
        elif state.replay:
            replay = state.replay
            say(
                f"   {event_time(replay['ts_ms'])}: {replay['events']:,} scored, "
                f"version {replay['version']}, AUC {auc_text(replay['auc'])}, "
                f"p99 {replay['p99_ms']:.1f} ms",
                err=True,
            )
            if state.reshard.get("phase", "waiting") in _SHOWN_PHASES:
                say(f"   reshard: {_reshard_text(state.reshard)}", err=True)
        self._said, self._stage = now, state.stage


def _run(options: DemoOptions) -> dict[str, Any]:
    if not sys.stderr.isatty():
        with Demo(options, _Lines()) as demo:
            return demo.run()
    with (
        rich.live.Live(_view(State()), console=console(err=True), refresh_per_second=8) as live,
        Demo(options, lambda state: live.update(_view(state))) as demo,
    ):
        return demo.run()


def _summary(report: Mapping[str, Any], directory: Path) -> None:
    table = Table("", "", header=False)
    for name, value in headline(report):
        table.add_row(name, value)
    show_table(table)
    first, last = report["window_days"]
    days = f"days {first} to {last}" if last > first else f"day {first}"
    say(f"AUC: mean of the daily AUC over {days} of the stream.")
    say(f"Page: {directory / 'report.html'}   figures: {directory / 'report.json'}")
    say("Proof: `embertide demo --verify` makes every figure again from the records.")


def _verify(directory: Path, as_json: bool) -> None:
    options, report = load_demo(directory)
    checks = list(check(options, report))
    wrong = [each for each in checks if not each.holds]
    if as_json:
        print_json({"checks": len(checks), "wrong": [each.name for each in wrong]})
    else:
        say(
            f"{report['events']:,} rows: every one scored, by a version that had not seen its "
            "event; no click split over two versions; no step back"
        )
        say(f"{len(checks) - len(wrong)} of {len(checks)} figures of the report hold")
    for each in wrong:
        say(f"error: {each.name}: reported {each.reported}, found {each.found}", err=True)
    if wrong:
        raise typer.Exit(1)


def command(
    model: Annotated[
        Literal["news", "news-history", "news-counters", "news-crossed"],
        typer.Option(
            help="The model to train. Whichever it is, a request carries an event's own columns; "
            "nodes make the others."
        ),
    ] = "news",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Events in time order, Parquet or CSV with the news columns; without it, a seeded "
            "news stream is generated.",
        ),
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            help="Processes that train together; two and more look for a plan of their rows.", min=1
        ),
    ] = 1,
    events: Annotated[int | None, typer.Option(help="The first events alone.", min=1)] = None,
    hours: Annotated[int, typer.Option(help="Length of the generated stream.", min=1)] = 96,
    max_staleness: Annotated[
        float | None,
        typer.Option(
            help="Scoring waits while the served version is older, in minutes of event time. "
            f"Default: as fresh as {VERSIONS:,} versions of the stream are, a minute at best, "
            f"{STALENESS_MIN:.0f} at most; {MADE_STALENESS_MIN:.0f} for models whose columns nodes "
            "make, since those are as old as the version.",
            min=0.1,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of everything that it writes.")] = Path(
        "build/demo"
    ),
    verify: Annotated[
        bool, typer.Option("--verify", help="Prove the report of the last run instead.")
    ] = False,
    grpc_port: Annotated[
        int,
        typer.Option(help="The first node's gRPC; the second takes free ports.", min=1, max=65535),
    ] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Its metrics.", min=1, max=65535)] = 8002,
    control_port: Annotated[int, typer.Option(help="The control plane.", min=1, max=65535)] = 7070,
    console_port: Annotated[
        int, typer.Option(help="Pages of the fleet, for your browser.", min=1, max=65535)
    ] = 7080,
    bus: Annotated[
        str | None, typer.Option(help="URL of a Redis that runs already, instead of its own.")
    ] = None,
    backends: Backends = DEFAULT_BACKENDS,
    triton: Triton = None,
    as_json: Json = False,
) -> None:
    """Watch a model learn from a drifting news stream while Triton serves it.

    Starts Redis, a trainer, a control plane, two nodes of two CPU devices that share the model, and
    a client; every impression is scored by the served model before the trainer sees it. Half way
    half of the buckets move to other devices while they are served, and each answer meanwhile is
    compared with an unmoved copy's. Pages of the fleet are at http://127.0.0.1:7080 meanwhile.
    Ctrl-C ends all of them.

    Example: embertide demo --data clicks.parquet --events 1000000, then embertide demo --verify

    The best model of the news: embertide demo --model news-crossed --data clicks.parquet
    """
    with report_errors(as_json):
        if verify:
            _verify(out, as_json)
            return
        fresh_min = STALENESS_MIN if model == "news" else MADE_STALENESS_MIN
        options = DemoOptions(
            directory=out,
            backends=backends,
            triton=triton,
            cache=DEFAULT_CACHE,
            ranks=ranks,
            model=model,
            data=data,
            events=events,
            hours=hours,
            max_staleness_min=max_staleness or fresh_min,
            versions=None if max_staleness else VERSIONS,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            control_port=control_port,
            console_port=console_port,
            bus=bus,
        )
        try:
            report = _run(options)
        except OSError as error:
            raise ProcessError(f"{error.filename or out}: {error.strerror or error}") from error
    if as_json:
        print_json({name: value for name, value in report.items() if name != "samples"})
    else:
        _summary(report, out)
    wrong = faults(report)
    for each in wrong:
        say(f"error: {each}", err=True)
    if wrong:
        raise typer.Exit(1)
