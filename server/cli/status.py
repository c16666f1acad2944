"""`status`: what a node serves now, how a whole fleet is, or whether the trainer is alive."""

from pathlib import Path
from typing import Annotated, Any

import redis
import typer

from embertide._common.commands import address
from embertide._common.redis_url import failure
from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, say, show_table, time_text
from embertide.server.adapters.bus import Bus
from embertide.server.adapters.process import ProcessError
from embertide.server.cli.common_options import Json
from embertide.server.cli.context import check_context
from embertide.server.cli.control_client import TokenFile, calling
from embertide.server.cli.fleet_view import faults, fleet_facts, show_fleet
from embertide.server.cli.metrics_page import MetricsPage
from embertide.server.cli.node_page import read_page
from embertide.server.cli.trainer_view import trainer_facts, trainer_line

_METRICS = "http://127.0.0.1:8002/metrics"
_DATES_FROM_MS = 365 * 86_400_000  # below a year after 1970 it is no clock's time


def _text(name: str, value: Any) -> str:
    if name == "watermark_ms":
        if value < _DATES_FROM_MS:
            return f"{value:,} (no date; of a file without a time, its rows)"
        return f"{value:,} ({time_text(value)})"
    if isinstance(value, dict):
        return ", ".join(f"{key} {count:,}" for key, count in value.items() if count) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _fleet(control: str, token_file: Path | None, *, as_json: bool, check: bool) -> None:
    with report_errors(as_json), calling(control, token_file) as caller:
        facts = fleet_facts(caller)
        wrong = faults(facts)
        if as_json:
            print_json(facts | {"faults": wrong})
        else:
            show_fleet(facts)
    if check and wrong:
        raise typer.Exit(1)


def _trainers(url: str, *, as_json: bool, check: bool) -> None:
    with report_errors(as_json):
        try:
            found = {}
            for model in Bus(url, "").models():
                status = Bus(url, model).trainer()
                if status is not None:
                    found[model] = trainer_facts(status)
        except (redis.RedisError, ValueError) as error:
            raise ProcessError(failure("--bus", url, error)) from error
    if as_json:
        print_json({"trainers": found})
    for model, facts in () if as_json else found.items():
        say(f"{model}: {trainer_line(facts)}")
    if not found and not as_json:
        say("no trainer has run on this bus for a week: `embertide train --bus` starts one")
    if check and any(facts["state"] in ("silent", "failed") for facts in found.values()):
        raise typer.Exit(1)


def command(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Option(help="The node's metrics.", show_default=_METRICS)
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(
            callback=address,
            envvar="EMBERTIDE_CONTROL",
            help="HOST:PORT of a control plane: show its fleet instead. With --url or --bus, the "
            "variable and the context in use are not looked at.",
        ),
    ] = None,
    bus: Annotated[
        str | None,
        typer.Option(help="Redis URL of the updates: show whether the trainers there are alive."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit status 1 if the fleet or a trainer has a fault."),
    ] = False,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show what a node serves: versions, rows, bytes and hits by tier, requests.

    With --control, the whole fleet: the trainer, nodes, devices, buckets, load skew, versions,
    staleness, plan, and what is wrong. With --bus, whether the trainers are alive.
    Example: embertide status --control 127.0.0.1:7070
    """
    origin = context.get_parameter_source("control")
    named = origin is not None and origin.name == "COMMANDLINE"
    if (url is not None) + (bus is not None) + named > 1:
        raise typer.BadParameter(
            "--url is of a node, --control of a fleet, --bus of trainers: give one of them"
        )
    if bus is not None:
        _trainers(bus, as_json=as_json, check=check)
        return
    if url is None and control is not None:
        _fleet(control, token_file, as_json=as_json, check=check)
        return
    with report_errors(as_json):
        if url is None:
            check_context()
        url = url or _METRICS
        page = read_page(url, "/metrics", "metrics", MetricsPage)
        models = {name: page.model(name) for name in page.models()}
        if not models:
            raise ProcessError(
                f"the server at {url} has no model of ours loaded: start one with `embertide serve`"
            )
    if as_json:
        print_json(models)
        return
    for name, facts in models.items():
        table = Table("", "", title=name, header=False)
        for fact, value in facts.items():
            table.add_row(fact.replace("_", " "), _text(fact, value))
        show_table(table)
