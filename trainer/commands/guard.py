"""`guard`: judge published versions by labelled events before ordinary requests see them."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from embertide._common.commands import addresses
from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json, say
from embertide.trainer.commands.calling import TlsFolder, TokenFile, settings_of
from embertide.trainer.commands.inputs import Data, Demo, Events, Hours, StreamSeed, open_input
from embertide.trainer.commands.listening import METRICS_HOST, MetricsHost
from embertide.trainer.errors import ConfigurationError


def command(
    publication: Annotated[Path, typer.Argument(help="The folder that the trainer publishes to.")],
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
    bus: Annotated[
        str | None, typer.Option(help="Redis URL of the updates; nodes hear of decisions there.")
    ] = None,
    data: Data = None,
    config: Annotated[
        Path | None,
        typer.Option(help="The run's file that the model is trained with; its source is read."),
    ] = None,
    events: Events = None,
    demo: Demo = False,
    hours: Hours = 96,
    stream_seed: StreamSeed = 1,
    judge_by: Annotated[int, typer.Option(help="Labelled events a version is judged by.")] = 4000,
    least_events: Annotated[
        int, typer.Option(help="At the end of the input; with fewer there is no decision.")
    ] = 1000,
    auc_loss: Annotated[float, typer.Option(help="AUC that a version may lose.")] = 0.005,
    calibration: Annotated[
        float, typer.Option(help="Mean score over mean label, or its inverse, at most.")
    ] = 1.25,
    sigmas: Annotated[
        float, typer.Option(help="Standard errors beyond which a loss is no chance.")
    ] = 3.0,
    latency_ratio: Annotated[
        float, typer.Option(help="p99 against the served version's, at most.")
    ] = 3.0,
    latency_ms: Annotated[float, typer.Option(help="... and so many ms more.")] = 20.0,
    every_s: Annotated[float, typer.Option(help="Seconds between looks for versions.")] = 0.5,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve /metrics for Prometheus on this port.", min=1, max=65535),
    ] = None,
    metrics_host: MetricsHost = METRICS_HOST,
    as_json: Annotated[bool, typer.Option("--json", help="Print decisions as JSON lines.")] = False,
) -> None:
    """Judge published versions by labelled events before ordinary requests see them.

    Nodes of the model have the parameter guard=on. Each new version is compared with the served
    one by the same events, newer than all that it has learned from; it is promoted, or withdrawn
    for values that are not finite, loss of AUC, calibration or latency. Runs until it is stopped;
    two may run.

    Example: embertide guard build/news --bus redis://127.0.0.1:6379 --data clicks.parquet
    """
    from embertide.trainer.commands.inputs import open_run
    from embertide.trainer.data.history import for_requests
    from embertide.trainer.eval.guard.guard import Guard, GuardConfig, NewestEvents
    from embertide.trainer.eval.guard.judge import Limits
    from embertide.trainer.eval.served import ServedModel, ServedNodes
    from embertide.trainer.publish.folder import Publication
    from embertide.trainer.publish.publisher import promotion_record
    from embertide.trainer.publish.snapshot import read_manifest

    with report_errors(as_json), contextlib.ExitStack() as stack:
        try:
            settings = GuardConfig(
                limits=Limits(
                    auc_loss=auc_loss,
                    calibration=calibration,
                    sigmas=sigmas,
                    latency_ratio=latency_ratio,
                    latency_ms=latency_ms,
                ),
                events=judge_by,
                least_events=least_events,
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        if config is None:
            run, source = (
                None,
                open_input(data, events, hours if demo else None, stream_seed, group="guard"),
            )
        else:
            run, source = open_run(config, data, events, hours if demo else None, stream_seed)
        if run is not None:
            source = for_requests(source, run.model)
        folder = Publication(publication)
        snapshots = folder.snapshots()
        if not snapshots:
            raise ConfigurationError(f"{publication} holds no snapshot yet: start the trainer")
        name = read_manifest(folder.snapshot_path(snapshots[-1]))["model"]
        calling = settings_of(tls, token_file)
        nodes = [
            stack.enter_context(ServedModel(each, model, calling))
            for each in url or ["127.0.0.1:8001"]
        ]
        record = promotion_record(folder, bus=bus, model=name)
        stream = NewestEvents(source.batches(batch_size=256))
        guard = Guard(folder, record, ServedNodes(nodes), stream, settings)
        if metrics_port is not None:
            stack.enter_context(_metrics_page(metrics_port, guard, metrics_host))
        wait = threading.Event()
        while True:
            decision = guard.step()
            if decision is None:
                record.mirror()
                wait.wait(every_s)
                continue
            verdict = decision.verdict
            said: dict[str, Any] = {
                "version": decision.version,
                "withdrawn": verdict.reason,
                "revision": decision.revision,
                **verdict.figures,
            }
            if as_json:
                print_json({"decision": said}, line=True)
            else:
                what = f"withdrawn for {verdict.reason}" if verdict.reason else "promoted"
                say(f"version {decision.version} {what}: {verdict.detail}")


@contextlib.contextmanager
def _metrics_page(port: int, guard: Any, host: str) -> Iterator[None]:
    """Serve the guard's counters while the context lives."""
    from prometheus_client.core import CounterMetricFamily, Metric
    from prometheus_client.registry import Collector

    from embertide.trainer.commands.metrics import served

    class Page(Collector):
        def collect(self) -> Iterator[Metric]:
            stats = dataclasses.asdict(guard.stats)
            withdrawn = CounterMetricFamily(
                "embertide_guard_withdrawn", "Versions withdrawn, by reason.", labels=["reason"]
            )
            for reason, count in stats.pop("withdrawn").items():
                withdrawn.add_metric([reason], count)
            yield withdrawn
            looks = CounterMetricFamily(
                "embertide_guard_events",
                "Versions promoted, and looks without a decision, by event.",
                labels=["event"],
            )
            for event, count in stats.items():
                looks.add_metric([event], count)
            yield looks

    with served(port, Page(), host):
        yield
