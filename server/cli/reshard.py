"""`reshard`: move buckets while they are served; watch, pause, resume, abort, undo."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import rich.progress
import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import (
    ProgressText,
    Table,
    age_text,
    progress_bar,
    say,
    show_table,
    time_text,
)
from embertide.server.adapters.process import ProcessError, UsageError
from embertide.server.cli.common_options import Json
from embertide.server.cli.control_client import (
    DEFAULT_CONTROL,
    Caller,
    CallError,
    Control,
    TokenFile,
    calling,
    enum_name,
    new_id,
    owner_name,
    print_message,
    share_line,
    table_name,
)
from embertide.server.cli.gains import model_line, show_gain
from embertide.server.cli.target import read_target
from embertide.server.core.demand import PLANNED_BY_S
from embertide.server.core.plan.hot import NO_LIMIT
from embertide.v1 import control_pb2, plan_pb2

app = typer.Typer(rich_markup_mode="markdown", invoke_without_command=True)
_THINKING_S = 30.0
_DAY_S = 24 * 3600.0
_RECONNECT_S = 30.0
_SHOWN = 20

Id = Annotated[str, typer.Argument(help="The operation's id.")]
NewId = Annotated[
    str | None, typer.Option(help="The operation's id; the same id starts nothing anew.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would move; move nothing.")]
Watch = Annotated[bool, typer.Option("--watch", help="Stay until it has ended.")]
Reason = Annotated[str, typer.Option(help="Why, for the audit log and people.")]


def start(
    caller: Caller, request: control_pb2.StartReshardRequest, *, watch: bool, as_json: bool
) -> None:
    """Start an operation, say what it moves, and stay if asked to."""
    answer = caller.call("StartReshard", request, _THINKING_S)
    if not as_json:
        _show(caller.plan(), answer, dry_run=request.dry_run)
    if watch and not request.dry_run:
        follow(caller, request.operation_id, as_json=as_json)
    elif as_json:
        print_message(answer)


def follow(caller: Caller, id: str, *, as_json: bool) -> None:
    """Show an operation's progress to its end.

    Raises:
        ProcessError: It ended short of its goal.
    """
    bar = progress_bar(
        ProgressText("{task.fields[state]}"),
        rich.progress.BarColumn(),
        ProgressText("{task.completed}/{task.total} buckets"),
        ProgressText("{task.fields[eta]}"),
        ProgressText("{task.description}"),
        shown=not as_json,
    )
    operation = control_pb2.Operation(id=id)
    with bar:
        task = bar.add_task("", total=None, state="", eta="")
        for operation in _watched(caller, id):
            state = enum_name(control_pb2.OperationState, operation.state)
            bar.update(
                task,
                completed=operation.buckets_done,
                total=operation.buckets_total,
                description=operation.message,
                state=state,
                eta=f"{operation.eta_ms / 1000:.0f} s left" if operation.eta_ms else "",
            )
            if bar.disable and not as_json:
                say(_line(operation))
    if as_json:
        print_message(operation)
    elif not bar.disable:
        say(_line(operation))
    if operation.state != control_pb2.OPERATION_STATE_SUCCEEDED:
        raise ProcessError(
            f"operation {id} ended short of its goal (see `embertide reshard list`): "
            f"{operation.message}{_next_step(operation)}"
        )


def _watched(caller: Caller, id: str) -> Any:
    """Yield an operation as it changes; a control plane that starts again is waited for."""
    lost_s: float | None = None
    while True:
        try:
            for operation in caller.watch(id, _DAY_S):
                lost_s = None
                yield operation
            return
        except CallError as error:
            now_s = time.monotonic()
            lost_s = lost_s if lost_s is not None else now_s
            gone = error.code not in ("UNAVAILABLE", "ABORTED", "CANCELLED")
            if gone or now_s - lost_s > _RECONNECT_S:
                raise
            time.sleep(1.0)


def _line(operation: control_pb2.Operation) -> str:
    eta = f", {operation.eta_ms / 1000:.0f} s left" if operation.eta_ms else ""
    return (
        f"{operation.id}: {enum_name(control_pb2.OperationState, operation.state)}, "
        f"{operation.buckets_done}/{operation.buckets_total} buckets, "
        f"{operation.bytes_done:,}/{operation.bytes_total:,} bytes{eta}"
        + (f"; {operation.message}" if operation.message else "")
    )


def _next_step(operation: control_pb2.Operation) -> str:
    """Say what to do after an operation that ended short of its goal."""
    if not operation.buckets_done:
        return "; nothing has moved: start it again once that is mended"
    return (
        f"; the {operation.buckets_done:,} buckets that have moved stay: start it again to go on, "
        f"or `embertide reshard undo {shlex.quote(operation.id)}`"
    )


def _show(plan: plan_pb2.Plan, answer: control_pb2.StartReshardResponse, *, dry_run: bool) -> None:
    """Print what an operation moves, and what it is predicted to gain."""
    # A control plane of a build before names nodes by their positions in the plan alone.
    nodes = answer.nodes or [node.name for node in (*plan.topology.nodes, *answer.added_nodes)]
    verb = "would move" if dry_run else "moves"
    say(
        f"operation {answer.operation.id} {verb} {len(answer.moves)} buckets, "
        f"{answer.operation.bytes_total:,} bytes\n{answer.explanation}"
    )
    moves = Table(
        *("table", "bucket", "from", "to", "reads", "bytes"), names=("table", "from", "to")
    )
    for move in answer.moves[:_SHOWN]:
        moves.add_row(
            table_name(plan, move.table_id),
            str(move.bucket),
            owner_name(nodes, move.source) if move.HasField("source") else "-",
            owner_name(nodes, move.target) if move.HasField("target") else "-",
            f"{move.reads:,}",
            f"{move.bytes:,}",
        )
    if answer.moves:
        show_table(moves)
    if len(answer.moves) > _SHOWN:
        say(f"and {len(answer.moves) - _SHOWN} more; --json lists all")
    for hot in answer.hot_rows:
        rows = "as many as fit" if hot.rows == NO_LIMIT else f"{hot.rows:,}"
        say(f"hot rows of {table_name(plan, hot.table_id)}: {rows} a node")
    for share in answer.tier_shares:
        say(share_line(plan, nodes, share))
    devices = Table(*("device", "reads", "reads after", "bytes", "bytes after"), names=("device",))
    for each in answer.devices:
        numbers = (each.reads_before, each.reads_after, each.bytes_before, each.bytes_after)
        devices.add_row(owner_name(nodes, each.device), *(f"{number:,}" for number in numbers))
    show_table(devices)
    if answer.HasField("before"):
        show_gain(answer.before, answer.after)
        say(model_line(answer.model))


@app.callback()
def command(
    context: typer.Context,
    planner: Annotated[
        str | None, typer.Option(help="Planner that makes the target from measured load.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="JSON file that says where buckets shall be.")
    ] = None,
    half_life_s: Annotated[
        int,
        typer.Option(
            help="The planner goes by reads that count half after so long: 60, 600, 3600 or 86400."
        ),
    ] = PLANNED_BY_S,
    dry_run: DryRun = False,
    bytes_per_s: Annotated[
        int, typer.Option(help="Bytes of buckets a second; 0: no bound.", min=0)
    ] = 0,
    p99_ms: Annotated[
        float, typer.Option(help="Wait while a node's p99 is above it; 0: no bound.", min=0)
    ] = 0,
    buckets_at_once: Annotated[
        int, typer.Option(help="Buckets on their way at once.", min=1, max=4096)
    ] = 64,
    id: NewId = None,
    reason: Reason = "",
    watch: Watch = False,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Move buckets between devices while they are served; no request fails for it.

    Example: embertide reshard --planner greedy --dry-run

    Example: embertide reshard --target target.json --bytes-per-s 100000000 --p99-ms 10 --watch

    Example: embertide reshard undo ID --watch
    """
    if context.invoked_subcommand is not None:
        return
    with report_errors(as_json), calling(control, token_file) as caller:
        if (planner is None) == (target is None):
            raise UsageError(
                "give either --planner greedy or --target FILE; `embertide reshard --help` has more"
            )
        request = control_pb2.StartReshardRequest(
            operation_id=id or new_id(),
            dry_run=dry_run,
            reason=reason,
            budget=control_pb2.ReshardBudget(
                bytes_per_s=bytes_per_s,
                p99_us=round(p99_ms * 1000),
                buckets_at_once=buckets_at_once,
            ),
        )
        if target is not None:
            request.target.CopyFrom(read_target(target, caller.plan()))
        else:
            request.planner = planner or ""
            request.half_life_s = half_life_s
        start(caller, request, watch=watch, as_json=as_json)


@app.command("undo")
def undo(
    operation: Id,
    dry_run: DryRun = False,
    reason: Reason = "",
    watch: Watch = False,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Move the buckets of an ended operation back. Example: embertide reshard undo ID --watch."""
    with report_errors(as_json), calling(control, token_file) as caller:
        request = control_pb2.StartReshardRequest(
            operation_id=new_id(), undo_operation=operation, dry_run=dry_run, reason=reason
        )
        start(caller, request, watch=watch, as_json=as_json)


@app.command("watch")
def watch_operation(
    operation: Id,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show an operation's progress to its end. Example: embertide reshard watch ID."""
    with report_errors(as_json), calling(control, token_file) as caller:
        caller.call("GetOperation", control_pb2.GetOperationRequest(id=operation))
        follow(caller, operation, as_json=as_json)


def _steer(steering: "control_pb2.Steering.ValueType", text: str) -> Any:
    def command(
        operation: Id,
        control: Control = DEFAULT_CONTROL,
        token_file: TokenFile = None,
        as_json: Json = False,
    ) -> None:
        with report_errors(as_json), calling(control, token_file) as caller:
            request = control_pb2.SteerOperationRequest(id=operation, steering=steering)
            after = caller.call("SteerOperation", request).operation
            if as_json:
                print_message(after)
                return
            say(_line(after))
            if steering == control_pb2.STEERING_ABORT:
                say(_next_step(after).removeprefix("; "))

    command.__doc__ = text
    return command


app.command("pause")(
    _steer(control_pb2.STEERING_PAUSE, "Halt an operation. Example: embertide reshard pause ID.")
)
app.command("resume")(
    _steer(control_pb2.STEERING_RESUME, "Let it go on. Example: embertide reshard resume ID.")
)
app.command("abort")(
    _steer(
        control_pb2.STEERING_ABORT,
        "End an operation: what has moved stays. Example: embertide reshard abort ID.",
    )
)


@app.command("list")
def list_operations(
    control: Control = DEFAULT_CONTROL, token_file: TokenFile = None, as_json: Json = False
) -> None:
    """List the newest operations. Example: embertide reshard list --json."""
    with report_errors(as_json), calling(control, token_file) as caller:
        answer = caller.call("ListOperations", control_pb2.ListOperationsRequest())
        if as_json:
            print_message(answer)
        elif not answer.operations:
            say("no operation yet: `embertide reshard --planner auto --dry-run` says what one does")
        else:
            show_list(answer.operations)


def show_list(operations: Sequence[control_pb2.Operation]) -> None:
    """Print operations: when, who, why, and what came of them."""
    table = Table(
        *("operation", "began", "took", "state", "buckets", "by"),
        names=("operation", "by"),
    )
    for each in operations:
        table.add_row(
            f"{each.id} ({each.kind})",
            time_text(each.created_ms),
            age_text(each.ended_ms - each.created_ms) if each.ended_ms else "goes on",
            enum_name(control_pb2.OperationState, each.state),
            f"{each.buckets_done:,}/{each.buckets_total:,}",
            each.author or "not asked",
        )
    show_table(table)
    # Sentences of any length, which a column of a narrow terminal would show word by word.
    for at, each in enumerate(operations):
        came = each.message if at == 0 else ""
        if each.reason or came:
            say(f"{each.id}: {'; '.join(filter(None, (each.reason, came)))}")
