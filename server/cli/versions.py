"""`versions`: the newest ones, how good they are, what was decided on them, and how to go back."""

import time
from typing import Annotated, Any

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, print_json, say, show_table, time_text
from embertide.server.adapters.process import ProcessError
from embertide.server.cli.common_options import Json
from embertide.server.cli.control_client import (
    DEFAULT_CONTROL,
    Caller,
    Control,
    TokenFile,
    calling,
    new_id,
    print_message,
)
from embertide.v1 import control_pb2, update_pb2

app = typer.Typer(rich_markup_mode="markdown", invoke_without_command=True)
# An order that no trainer takes is dropped after a minute.
_TAKEN_S = 70.0
_LOOK_S = 0.5

_QUALITY = ("auc", "log_loss", "calibration")


def version_facts(version: control_pb2.FleetVersion) -> dict[str, Any]:
    """Return what is known of a version."""
    verdict = control_pb2.VersionVerdict.Name(version.verdict).removeprefix("VERSION_VERDICT_")
    if version.rollback_to:
        verdict = f"restores {version.rollback_to:,}"
    return {
        "number": version.version.number,
        "lineage": version.version.lineage,
        "committed_ms": version.committed_ms,
        "schema_id": version.schema_id,
        "rollback_to": version.rollback_to or None,
        "dense_bytes": version.dense_bytes,
        "partitions": version.partitions,
        "verdict": {"UNSPECIFIED": "not judged"}.get(verdict, verdict.lower()),
        "why": version.why,
        "author": version.author,
        "events": version.quality.events or None,
    } | {name: _figure(version.quality, name) for name in _QUALITY}


def _figure(quality: update_pb2.LiveQuality, name: str) -> float | None:
    value: float = getattr(quality, name)
    return value if quality.HasField(name) else None  # type: ignore[arg-type]


def rollback_line(answer: control_pb2.ListVersionsResponse) -> str:
    """Say what was ordered, or has become of the last order; empty: nothing was, in a week."""
    if answer.HasField("rollback_order"):
        order, what = answer.rollback_order, "waits for the trainer"
    elif answer.HasField("rollback_outcome"):
        outcome = answer.rollback_outcome
        order, what = outcome.order, "is under way"
        if outcome.error:
            what = f"failed: {outcome.error}"
        elif outcome.ended_ms:
            what = f"is done: version {outcome.version:,} has the state"
    else:
        return ""
    by = f" by {order.author}" if order.author else ""
    why = f" ({order.reason})" if order.reason else ""
    at = time_text(order.ordered_ms)
    return f"rollback to version {order.version:,}, ordered {at}{by}{why}, {what}"


def rollback_plan(answer: control_pb2.StartRollbackResponse, version: int) -> str:
    """Say what a rollback would do."""
    sign = answer.trainer.sign
    known = "" if answer.HasField("version") else "; its figures are not known any more"
    facts = version_facts(answer.version)
    if facts["verdict"] == "withdrawn":
        known = f"; NOTE that it was withdrawn ({facts['why']})"
    return (
        f"version {version:,} is restored as version {answer.newest.number + 1:,} or a later one: "
        f"{answer.newest.number - version:,} versions are undone{known}. The trainer on "
        f"{sign.host} (pid {sign.pid}) does it, and ends: started again, it learns later events "
        "anew"
    )


def start_rollback(
    caller: Caller, version: int, *, id: str, reason: str = "", dry_run: bool = False
) -> control_pb2.StartRollbackResponse:
    """Order a version to be restored.

    Raises:
        CallError: The control plane refused, or cannot be reached.
    """
    request = control_pb2.StartRollbackRequest(
        id=id, version=version, reason=reason, dry_run=dry_run
    )
    answer: control_pb2.StartRollbackResponse = caller.call("StartRollback", request)
    return answer


@app.command("rollback")
def roll_back(
    version: Annotated[int, typer.Argument(help="Whose state is to be restored.", min=1)],
    reason: Annotated[str, typer.Option(help="Why, for people and the audit log.")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; order nothing.")
    ] = False,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Have the trainer restore the state of an older version, as a new one; stay until it has.

    Example: embertide versions rollback 118 --reason "labels were wrong"
    """
    with report_errors(as_json), calling(control, token_file) as caller:
        id = new_id()
        answer = start_rollback(caller, version, id=id, reason=reason, dry_run=dry_run)
        if not as_json:
            say(rollback_plan(answer, version))
        if dry_run:
            if as_json:
                print_message(answer)
            return
        outcome = _outcome(caller, id)
        if outcome.error:
            raise ProcessError(
                f"version {version} was not restored: {outcome.error}; nothing has changed, so "
                "name another version, or try again once that is mended"
            )
        if as_json:
            print_message(outcome)
        else:
            say(f"version {outcome.version:,} has the state of version {version:,}")


def _outcome(caller: Caller, id: str) -> update_pb2.RollbackOutcome:
    ends = time.monotonic() + _TAKEN_S
    while True:
        answer = caller.call("ListVersions", control_pb2.ListVersionsRequest())
        outcome: update_pb2.RollbackOutcome = answer.rollback_outcome
        if outcome.order.id == id and outcome.ended_ms:
            return outcome
        if outcome.order.id != id and time.monotonic() > ends:
            raise ProcessError(
                "no trainer has taken the order within a minute, and it is dropped: see that one "
                "runs (`embertide status`), or run `embertide rollback` where the publication is"
            )
        time.sleep(_LOOK_S)


@app.callback()
def command(
    context: typer.Context,
    limit: Annotated[int, typer.Option(help="Newest versions shown.", min=1, max=200)] = 20,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show the newest versions: the trainer's AUC and calibration, the guard's verdicts.

    Example: embertide versions --limit 50

    Example: embertide versions rollback 118
    """
    if context.invoked_subcommand is not None:
        return
    with report_errors(as_json), calling(control, token_file) as caller:
        answer = caller.call("ListVersions", control_pb2.ListVersionsRequest())
    found = [version_facts(each) for each in answer.versions[:limit]]
    if as_json:
        told = {"versions": found, "promoted": answer.promoted or None}
        print_json(told | {"rollback": rollback_line(answer) or None})
        return
    columns = ("version", "committed", "AUC", "log loss", "calibration", "verdict", "why")
    table = Table(*columns, names=("verdict", "why"))
    for each in found:
        figures = ("-" if each[name] is None else f"{each[name]:.4f}" for name in _QUALITY)
        table.add_row(
            f"{each['number']:,}",
            time_text(each["committed_ms"]),
            *figures,
            each["verdict"],
            each["why"] or "-",
        )
    if found:
        show_table(table)
    else:
        say("no version is known: none was published, or `embertide control` has no --bus")
    if line := rollback_line(answer):
        say(line)
