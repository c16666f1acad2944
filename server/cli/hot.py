"""`hot`: the keys that are read most, where reads are answered, and how unevenly."""

from typing import Annotated

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, show_table
from embertide.server.cli.common_options import Json
from embertide.server.cli.control_client import (
    DEFAULT_CONTROL,
    Control,
    TokenFile,
    calling,
    table_name,
)
from embertide.server.cli.fleet_view import fleet_facts, show_devices, show_reads, show_serving
from embertide.v1 import control_pb2

_SHOWN = ("reads", "serving", "devices", "skew")


def command(
    keys: Annotated[int, typer.Option(help="Keys to show.", min=1, max=1000)] = 20,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show which keys are hottest, where each node's reads are answered, latency, devices' load.

    Example: embertide hot --keys 50 --json
    """
    with report_errors(as_json), calling(control, token_file) as caller:
        plan = caller.plan()
        load = caller.call("GetFleetLoad", control_pb2.GetFleetLoadRequest(hot_keys=keys), 10.0)
        facts = fleet_facts(caller)
        hot = [
            {
                "table": table_name(plan, each.table_id),
                "key": each.key,
                "reads": each.reads,
                "error": each.error,
            }
            for each in load.hot_keys
        ]
        if as_json:
            print_json({"hot_keys": hot} | {name: facts[name] for name in _SHOWN})
            return
        columns = ("table", "key", "reads (at most)", "may be too large by")
        table = Table(*columns, names=("table",))
        for row in hot:
            table.add_row(row["table"], str(row["key"]), f"{row['reads']:,}", f"{row['error']:,}")
        show_table(table)
        show_reads(facts)
        show_serving(facts)
        show_devices(facts)
