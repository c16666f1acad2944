"""`hot`: the keys that are read most, where reads are answered, and how unevenly."""

from typing import Annotated, Any

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, show_table
from embertide.server.adapters.process import ProcessError
from embertide.server.cli.common_options import Json
from embertide.server.cli.control_client import (
    DEFAULT_CONTROL,
    Control,
    TokenFile,
    calling,
    message_facts,
)
from embertide.server.cli.fleet_view import (
    FleetAnswers,
    ask_fleet,
    facts_of,
    show_devices,
    show_reads,
    show_serving,
)

_RANGES_SHOWN = 20
_SHOWN = ("reads", "serving", "devices", "skew")


def command(
    keys: Annotated[int, typer.Option(help="Keys to show.", min=1, max=1000)] = 20,
    ranges: Annotated[
        int,
        typer.Option(help="Show reads by so many ranges of each table's buckets.", min=0, max=1024),
    ] = 0,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show which keys are hottest, where each node's reads are answered, latency, devices' load.

    With --ranges, also which ranges of neighbouring buckets are read most.
    Example: embertide hot --keys 50 --ranges 64 --json
    """
    with report_errors(as_json), calling(control, token_file) as caller:
        answers = ask_fleet(caller, hot_keys=keys, ranges=ranges)
        facts = facts_of(answers)
        if "no_plan" in facts:
            raise ProcessError(facts["no_plan"])
        hot = [
            {
                "table": answers.table_name(each.table_id),
                "key": each.key,
                "reads": each.reads,
                "error": each.error,
            }
            for each in answers.figures.hot_keys
        ]
        if as_json:
            shown = {name: facts[name] for name in _SHOWN}
            cut = {"ranges": _ranges(answers)} if ranges else {}
            print_json({"hot_keys": hot} | cut | shown)
            return
        columns = ("table", "key", "reads (at most)", "may be too large by")
        table = Table(*columns, names=("table",))
        for row in hot:
            table.add_row(row["table"], str(row["key"]), f"{row['reads']:,}", f"{row['error']:,}")
        show_table(table)
        if ranges:
            _show_ranges(answers)
        show_reads(facts)
        show_serving(facts)
        show_devices(facts)


def _ranges(answers: FleetAnswers) -> list[dict[str, Any]]:
    """Return the ranges, most read first."""
    found = sorted(answers.figures.ranges, key=lambda each: -each.reads)
    return [message_facts(each) | {"table": answers.table_name(each.table_id)} for each in found]


def _show_ranges(answers: FleetAnswers) -> None:
    numbers = {
        "reads": "reads",
        "busiest bucket": "max_reads",
        "asked of peers": "asked",
        "from SSD": "in_ssd",
        "bytes": "bytes",
    }
    table = Table("table", "buckets", *numbers, names=("table",))
    for each in _ranges(answers)[:_RANGES_SHOWN]:
        first = each["bucket_begin"]
        last = first + each["bucket_count"] - 1
        values = (f"{int(each[name]):,}" for name in numbers.values())
        table.add_row(each["table"], f"{first}-{last}" if last > first else f"{first}", *values)
    show_table(table)
