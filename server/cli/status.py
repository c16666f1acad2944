"""`status`: what a node serves now, or how a whole fleet is."""

import datetime
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.table
import typer

from embertide.server.adapters.process import ProcessError
from embertide.server.cli.control_client import TokenFile, calling
from embertide.server.cli.fleet_view import fleet_facts, show_fleet
from embertide.server.cli.metrics_page import MetricsPage
from embertide.server.cli.refusals import Json, print_json, refusals

_METRICS = "http://127.0.0.1:8002/metrics"


def _page(url: str) -> MetricsPage:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return MetricsPage(reply.read().decode())
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ProcessError(
            f"no node answers at {url} ({error}): start one with `embertide serve`, or give --url"
        ) from error


_DATES_FROM_MS = 365 * 86_400_000  # below a year after 1970 it is no clock's time


def _text(name: str, value: Any) -> str:
    if name == "watermark_ms":
        if value < _DATES_FROM_MS:
            return f"{value:,} (no date; of a file without a time, its rows)"
        when = datetime.datetime.fromtimestamp(value / 1000, datetime.UTC)
        return f"{value:,} ({when:%Y-%m-%d %H:%M:%S} UTC)"
    if isinstance(value, dict):
        return ", ".join(f"{key} {count:,}" for key, count in value.items() if count) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _fleet(control: str, token_file: Path | None, as_json: bool) -> None:
    with refusals(as_json), calling(control, token_file) as caller:
        facts = fleet_facts(caller)
        if as_json:
            print_json(facts)
        else:
            show_fleet(facts)


def command(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Option(help="The node's metrics.", show_default=_METRICS)
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(
            envvar="EMBERTIDE_CONTROL",
            help="HOST:PORT of a control plane: show its fleet instead. With --url, the variable "
            "and the context in use are not looked at.",
        ),
    ] = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Say what a node serves: versions, rows, bytes and hits by tier, requests.

    With --control, the whole fleet: nodes, devices, buckets, load skew, versions, staleness, plan.
    Example: embertide status --control 127.0.0.1:7070
    """
    origin = context.get_parameter_source("control")
    if url is not None and origin is not None and origin.name == "COMMANDLINE":
        raise typer.BadParameter("--url is of a node, --control of a fleet: give one of them")
    if url is None and control is not None:
        _fleet(control, token_file, as_json)
        return
    url = url or _METRICS
    with refusals(as_json):
        page = _page(url)
        models = {name: page.model(name) for name in page.models()}
        if not models:
            raise ProcessError(f"the server at {url} has no model of ours loaded")
    if as_json:
        print_json(models)
        return
    console = rich.console.Console()
    for name, facts in models.items():
        table = rich.table.Table(title=name, show_header=False, title_justify="left")
        for fact, value in facts.items():
            table.add_row(fact.replace("_", " "), _text(fact, value))
        console.print(table)
