"""`node`: list the nodes of a fleet, drain one, remove one; add and remove groups of them."""

from typing import Annotated

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json, say
from embertide.server.cli.common_options import Json
from embertide.server.cli.control_client import (
    DEFAULT_CONTROL,
    Control,
    TokenFile,
    calling,
    new_id,
)
from embertide.server.cli.fleet_view import fleet_facts, show_nodes
from embertide.server.cli.reshard import DryRun, NewId, Reason, Watch, start
from embertide.v1 import control_pb2

app = typer.Typer(
    help="The nodes of a fleet: list, drain, remove, add-group, remove-group. Example: embertide "
    "node drain node-2 --watch.",
    rich_markup_mode="markdown",
    no_args_is_help=True,
)
Name = Annotated[str, typer.Argument(help="The node's name.")]
Group = Annotated[int, typer.Argument(help="Number of the group.", min=0, max=0xFFFF_FFFF)]
BytesPerS = Annotated[int, typer.Option(help="Bytes of buckets a second; 0: no bound.", min=0)]
P99Ms = Annotated[float, typer.Option(help="Wait while a node's p99 is above it; 0: no.", min=0)]
AtOnce = Annotated[int, typer.Option(help="Buckets on their way at once.", min=1, max=4096)]


@app.command("list")
def list_nodes(
    control: Control = DEFAULT_CONTROL, token_file: TokenFile = None, as_json: Json = False
) -> None:
    """List the nodes and how they are. Example: embertide node list."""
    with report_errors(as_json), calling(control, token_file) as caller:
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
    with report_errors(as_json), calling(control, token_file) as caller:
        request = control_pb2.StartReshardRequest(
            operation_id=id or new_id(), drain_node=node, dry_run=dry_run, reason=reason
        )
        start(caller, request, watch=watch, as_json=as_json)


@app.command("add-group")
def add_group(
    group: Group,
    dry_run: DryRun = False,
    bytes_per_s: BytesPerS = 0,
    p99_ms: P99Ms = 0,
    buckets_at_once: AtOnce = 512,
    id: NewId = None,
    reason: Reason = "",
    watch: Watch = False,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Give the nodes of a new group every bucket. Example: embertide node add-group 1 --watch.

    Start its nodes first, with --group. They say that they are ready once the group owns all.
    """
    with report_errors(as_json), calling(control, token_file) as caller:
        request = control_pb2.StartReshardRequest(
            operation_id=id or new_id(),
            add_group=group,
            dry_run=dry_run,
            reason=reason,
            budget=control_pb2.ReshardBudget(
                bytes_per_s=bytes_per_s,
                p99_us=round(p99_ms * 1000),
                buckets_at_once=buckets_at_once,
            ),
        )
        start(caller, request, watch=watch, as_json=as_json)


@app.command("remove-group")
def remove_group(
    group: Group,
    dry_run: DryRun = False,
    id: NewId = None,
    reason: Reason = "",
    watch: Watch = False,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Take every bucket away from a group. Example: embertide node remove-group 1 --watch.

    Its nodes say at once that they are not ready, and answer on. Stop and remove them afterwards.
    """
    with report_errors(as_json), calling(control, token_file) as caller:
        request = control_pb2.StartReshardRequest(
            operation_id=id or new_id(),
            remove_group=group,
            dry_run=dry_run,
            reason=reason,
            # Nothing is loaded, so nothing is gained by few at once.
            budget=control_pb2.ReshardBudget(buckets_at_once=4096),
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
    with report_errors(as_json), calling(control, token_file) as caller:
        request = control_pb2.RemoveNodeRequest(request_id=new_id(), node=node)
        caller.call("RemoveNode", request)
        if as_json:
            print_json({"removed": node})
        else:
            say(f"{node} is forgotten; its name is free, or will be in a minute if it lives")
