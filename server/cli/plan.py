"""`plan`: what the plan says, who holds a bucket, and how two plans differ."""

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, say, show_table
from embertide.server.adapters.process import ProcessError, UsageError
from embertide.server.cli.common_options import Json
from embertide.server.cli.control_client import (
    DEFAULT_CONTROL,
    Caller,
    Control,
    TokenFile,
    calling,
    message_facts,
    new_id,
    owner_name,
    print_message,
    share_line,
    table_name,
    table_of,
)
from embertide.server.cli.fleet_view import fleet_facts, show_devices
from embertide.server.cli.gains import corrections_line, gain_facts, model_line, show_gain
from embertide.server.cli.processes import show_trainer
from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.layout import Bucket, Holders, layout_of, place_name
from embertide.server.core.plan.names import NamedHolders, changes, names_of
from embertide.server.core.plan.ranks import FORMAT, for_ranks
from embertide.v1 import control_pb2, node_pb2, plan_pb2

app = typer.Typer(
    help="Plans: which devices hold which buckets. Example: embertide plan explain user/3.",
    rich_markup_mode="markdown",
    no_args_is_help=True,
)
_SHOWN = 100
Elsewhere = Annotated[
    bool, typer.Option("--elsewhere", help="The profile is of another machine, as the run will be.")
]
_ADOPT_S = 30.0


def _option(name: str, value: Path | None) -> list[str]:
    return [] if value is None else [name, str(value)]


def _plan_search(words: list[str], *, elsewhere: bool, as_json: bool) -> NoReturn:
    """Have the trainer search for a plan of its ranks, or explain one; and end as it ends."""
    words += ["--elsewhere"] * elsewhere + ["--json"] * as_json
    raise typer.Exit(show_trainer("plan-search", words))


def _names(plan: plan_pb2.Plan, held: Holders) -> dict[str, list[str]]:
    return {
        what: [place_name(plan.topology, at) for at in places]
        for what, places in zip(Holders._fields, held, strict=True)
    }


def _texts(held: NamedHolders) -> dict[str, list[str]]:
    return {
        what: list(map(str, devices))
        for what, devices in zip(NamedHolders._fields, held, strict=True)
    }


def _text(names: dict[str, list[str]]) -> str:
    said = " ".join(names["owners"]) or "nobody"
    for what in ("joining", "leaving"):
        if names[what]:
            said += f", {what} {' '.join(names[what])}"
    return said


@app.command("show")
def show(
    epoch: Annotated[int, typer.Option(help="Epoch; 0: the newest.", min=0)] = 0,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show a plan. Example: embertide plan show --epoch 7."""
    with report_errors(as_json), calling(control, token_file) as caller:
        plan = caller.plan(epoch)
        if as_json:
            print_message(plan)
            return
        nodes = names_of(plan.topology)
        made = f"operation {plan.operation_id}" if plan.operation_id else "no operation"
        say(
            f"plan {plan.epoch} by {plan.planner or 'nobody'} ({made}): "
            f"{len(plan.topology.nodes)} nodes, {len(plan.assignments)} assignments"
        )
        columns = ("table", "buckets", "owners", "joining", "leaving")
        table = Table(*columns, names=set(columns) - {"buckets"})
        for each in plan.assignments[:_SHOWN]:
            last = each.bucket_begin + each.bucket_count - 1
            table.add_row(
                table_name(plan, each.table_id),
                f"{each.bucket_begin}-{last}" if each.bucket_count > 1 else str(last),
                *(
                    " ".join(owner_name(nodes, at) for at in places)
                    for places in (each.owners, each.joining, each.leaving)
                ),
            )
        show_table(table)
        if len(plan.assignments) > _SHOWN:
            say(f"and {len(plan.assignments) - _SHOWN} more; --json lists all")
        for group in plan.topology.partial_groups:
            say(f"group {group} is being added or removed: it does not own every bucket")
        for hot in plan.hot_rows:
            say(f"hot rows of {table_name(plan, hot.table_id)}: {hot.rows:,} a node")
        for share in plan.tier_shares:
            say(share_line(plan, nodes, share))


@app.command("explain")
def explain(
    where: Annotated[
        str | None, typer.Argument(help="TABLE/BUCKET, as user/3; without it, the whole plan.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Profile of a training step to explain in place of a fleet's plan.", dir_okay=False
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="With --profile: ranks of the trainer.", min=1)] = 1,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="With --profile: the trainer's plan; else the usual.", dir_okay=False
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With --profile: draw the step here.", dir_okay=False)
    ] = None,
    elsewhere: Elsewhere = False,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show what a plan costs and why it is so, or who holds a bucket and how it is read.

    Example: embertide plan explain

    Example: embertide plan explain user/3

    What bounds a training step: embertide plan explain --profile profile.json --ranks 2
    """
    if profile is not None:
        words = [str(profile), str(ranks), *_option("--plan", plan_file), *_option("--plot", plot)]
        _plan_search(words, elsewhere=elsewhere, as_json=as_json)
    with report_errors(as_json), calling(control, token_file) as caller:
        plan = caller.plan()
        if where is None:
            _explain_plan(caller, plan, as_json=as_json)
            return
        name, _, number = where.rpartition("/")
        table = table_of(plan, name)
        if not number.isdecimal() or int(number) >= 1 << table.bucket_bits:
            raise UsageError(
                f"bucket is {number!r}; table {name!r} has buckets 0 to "
                f"{(1 << table.bucket_bits) - 1}"
            )
        at = Bucket(table.id, int(number))
        wanted = control_pb2.BucketOfTable(table_id=at.table, bucket=at.bucket)
        figures = _figures(caller, control_pb2.GetFleetFiguresRequest(bucket=wanted))
        loads = {each.node: each.load for each in figures.bucket_loads}
        nothing = node_pb2.BucketLoad()
        held = layout_of(plan.assignments)[at]
        owners = [plan.topology.nodes[each.node].name for each in held.owners]
        here = {name: loads.get(name, nothing) for name in owners}
        read = {
            name: {"reads": each.reads, "bytes": each.resident_bytes} for name, each in here.items()
        }
        asked = {each.node: _asked(loads.get(each.node, nothing)) for each in figures.nodes}
        facts: dict[str, Any] = {
            "table": name,
            "bucket": at.bucket,
            "plan_epoch": plan.epoch,
            "operation": plan.operation_id,
            **_names(plan, held),
            "work": read,
            "wanted": asked,
        }
        if as_json:
            print_json(facts)
            return
        say(f"bucket {at.bucket} of table {name!r}, plan {plan.epoch}: {_text(facts)}")
        for node, work in read.items():
            say(f"  {node}: {work['reads']:,} reads, {work['bytes']:,} bytes")
        for node, keys in asked.items():
            if any(keys.values()):
                say(
                    f"  wanted by {node}: {keys['here']:,} keys answered there, {keys['hot']:,} by "
                    f"copies of hot rows, {keys['asked']:,} asked of peers"
                )


def _figures(
    caller: Caller, request: control_pb2.GetFleetFiguresRequest
) -> control_pb2.GetFleetFiguresResponse:
    figures: control_pb2.GetFleetFiguresResponse = caller.call("GetFleetFigures", request, 10.0)
    return figures


def _asked(load: node_pb2.BucketLoad) -> dict[str, int]:
    """Return where a node's own requests for a bucket were answered in the last window."""
    return {"here": load.reads - load.peer_reads, "hot": load.hot_reads, "asked": load.asked}


def _explain_plan(caller: Caller, plan: plan_pb2.Plan, *, as_json: bool) -> None:
    """Say what each device does and holds, which limits there are, and what made the plan."""
    facts: dict[str, Any] = {
        "plan_epoch": plan.epoch,
        "planner": plan.planner,
        "operation": plan.operation_id,
        "devices": fleet_facts(caller)["devices"],
        "hot_rows": {table_name(plan, hot.table_id): hot.rows for hot in plan.hot_rows},
    }
    decisions = caller.call("ListDecisions", control_pb2.ListDecisionsRequest(acted_only=True))
    if plan.operation_id:
        asked = control_pb2.GetOperationRequest(id=plan.operation_id)
        operation = caller.call("GetOperation", asked).operation
        if operation.HasField("before"):
            facts["predicted"] = gain_facts(operation.before, operation.after)
        for decision in decisions.decisions:
            if decision.operation_id == plan.operation_id and decision.measured_ms:
                facts["predicted_gain"] = round(decision.predicted_gain, 4)
                if decision.HasField("correction"):
                    facts["expected_gain"] = round(decision.expected_gain, 4)
                facts["measured_gain"] = round(decision.measured_gain, 4)
    if as_json:
        corrections = [message_facts(each) for each in decisions.corrections]
        model = message_facts(decisions.model)
        print_json(facts | {"model": model, "corrections": corrections})
        return
    made = f"operation {plan.operation_id}" if plan.operation_id else "no operation"
    say(f"plan {plan.epoch} by {plan.planner or 'nobody'} ({made})")
    show_devices(facts | {"skew": {}})
    for table, rows in facts["hot_rows"].items():
        say(f"hot rows of {table}: {rows:,} a node")
    if "predicted" in facts:
        show_gain(operation.before, operation.after)
    if "measured_gain" in facts:
        gains = [
            f"{name} {100 * facts[f'{name}_gain']:.1f} %"
            for name in ("predicted", "expected", "measured")
            if f"{name}_gain" in facts
        ]
        say(f"gain {', '.join(gains)}")
    say(model_line(decisions.model))
    if line := corrections_line(decisions.corrections):
        say(line)


@app.command("diff")
def diff(
    before: Annotated[int, typer.Argument(help="Epoch.", min=1)],
    after: Annotated[int, typer.Argument(help="Epoch.", min=1)],
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show which buckets two plans hold elsewhere. Example: embertide plan diff 3 7."""
    with report_errors(as_json), calling(control, token_file) as caller:
        old, new = caller.plan(before), caller.plan(after)
        found: list[dict[str, Any]] = [
            {
                "table": table_name(new, at.table),
                "bucket": at.bucket,
                "before": _texts(was),
                "after": _texts(now),
            }
            for at, (was, now) in changes(old, new).items()
        ]
        if as_json:
            print_json({"before": before, "after": after, "changes": found})
            return
        say(f"{len(found)} buckets differ between plan {before} and plan {after}")
        for each in found[:_SHOWN]:
            say(
                f"  {each['table']}/{each['bucket']}: {_text(each['before'])} -> "
                f"{_text(each['after'])}"
            )
        if len(found) > _SHOWN:
            say(f"and {len(found) - _SHOWN} more; --json lists all")


@app.command("ranks")
def ranks(
    ranks: Annotated[int, typer.Argument(help="Ranks of the trainer.", min=1, max=65_534)],
    output: Annotated[Path, typer.Argument(help="File to write.", dir_okay=False)],
    search: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE",
            help="A file of step-profile: search for the shortest step; no fleet is asked.",
            dir_okay=False,
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="With --search: of one core, at most.", min=0.1, max=600)
    ] = 20.0,
    elsewhere: Elsewhere = False,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Write the plan of a trainer of several ranks, even by what the fleet reads.

    Example: embertide plan ranks 4 plan.json, then embertide train --nproc 4 --plan plan.json ...

    By what steps cost: embertide plan ranks 2 plan.json --search profile.json
    """
    if search is not None:
        words = [str(search), str(ranks), "--output", str(output), "--seconds", str(seconds)]
        _plan_search(words, elsewhere=elsewhere, as_json=as_json)
    with report_errors(as_json), calling(control, token_file) as caller:
        tables = caller.plan().tables
        figures = _figures(caller, control_pb2.GetFleetFiguresRequest(table_reads=True))
        try:
            made = for_ranks(tables, figures.table_reads, ranks)
            said = {"format": FORMAT, "ranks": ranks, "tables": made.owners}
            output.write_text(json.dumps(said) + "\n", encoding="utf-8")
        except RefusedError as error:
            raise UsageError(str(error)) from error
        except OSError as error:
            raise ProcessError(
                f"{output} cannot be written: {error.strerror}; give another path"
            ) from error
        if as_json:
            print_json({"file": str(output), "ranks": ranks, "unevenness": made.unevenness})
            return
        say(
            f"{output}: {sum(map(len, made.owners.values()))} buckets of {len(made.owners)} tables "
            f"over {ranks} ranks; the dearest has {made.unevenness:.2f} times the mean to do"
        )


@app.command("adopt")
def adopt(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the plan would be; write nothing.")
    ] = False,
    reason: Annotated[str, typer.Option(help="Why, for the audit log and people.")] = "",
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Go on from what nodes hold, after the state store lost its keys.

    The control plane asks the live nodes which buckets they hold, and writes a plan that says the
    same, with an epoch above theirs. Operations that were at work end.

    Example: embertide plan adopt --dry-run
    """
    with report_errors(as_json), calling(control, token_file) as caller:
        answer = caller.call(
            "AdoptPlan",
            control_pb2.AdoptPlanRequest(request_id=new_id(), dry_run=dry_run, reason=reason),
            _ADOPT_S,
        )
        if as_json:
            print_message(answer)
            return
        table = Table("node", "acted by plan", "buckets held", names=("node",))
        for each in answer.nodes:
            table.add_row(each.node, str(each.plan_epoch), f"{each.buckets:,}")
        show_table(table)
        lacking = answer.buckets_unheld
        say(
            f"plan {answer.plan_epoch} {'would say' if dry_run else 'says'} what they hold"
            + (f"; {lacking:,} buckets that nobody holds are loaded from files" if lacking else "")
        )
        if answer.operations_ended:
            say(f"ended: {', '.join(answer.operations_ended)}")
        if not dry_run:
            say("drift settings, limits of hot rows and shares of DDR are to be set again")
