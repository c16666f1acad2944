"""`node`: list the nodes of a fleet, drain one, remove one."""

from typing import Annotated

import typer

from embertide.server.cli.control_plane import (
    DEFAULT_CONTROL,
    Control,
    TokenFile,
    calling,
    new_id,
)
from embertide.server.cli.fleet_view import fleet_facts, show_nodes
from embertide.server.cli.refusals import Json, print_json, refusals
from embertide.server.cli.reshard import DryRun, NewId, Reason, Watch, start
from embertide.v1 import control_pb2

app = typer.Typer(
    help="The nodes of a fleet: list, drain, remove. Example: embertide node drain node-2 --watch.",
    rich_markup_mode="markdown",
    no_args_is_help=True,
)
Name = Annotated[str, typer.Argument(help="The node's name.")]


@app.command("list")
def list_nodes(
    control: Control = DEFAULT_CONTROL, token_file: TokenFile = None, as_json: Json = False
) -> None:
    """List the nodes and how they are. Example: embertide node list."""
    with refusals(as_json), calling(control, token_file) as caller:
        facts = fleet_facts(caller)
        if as_json:
            print_json({"nodes": facts["nodes"]})
        else:
            show_nodes(facts)


@app.command("drain")
def drain(
    node: Name,
    dry_run: DryRun = False,
    id: NewId = None,
    reason: Reason = "",
    watch: Watch = False,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Move all buckets away from a node. Example: embertide node drain node-2 --watch."""
    with refusals(as_json), calling(control, token_file) as caller:
        request = control_pb2.StartReshardRequest(
            operation_id=id or new_id(), drain_node=node, dry_run=dry_run, reason=reason
        )
        start(caller, request, watch=watch, as_json=as_json)


@app.command("remove")
def remove(
    node: Name,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Forget a node that holds nothing. Example: embertide node remove node-2."""
    with refusals(as_json), calling(control, token_file) as caller:
        request = control_pb2.RemoveNodeRequest(request_id=new_id(), node=node)
        caller.call("RemoveNode", request)
        if as_json:
            print_json({"removed": node})
        else:
            typer.echo(f"{node} is forgotten; its name is free")
