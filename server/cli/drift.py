"""`drift`: what the control plane has decided about drift, and whether it acts by itself."""

import re
import time
from typing import Annotated

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, say, show_table, time_text
from embertide.server.adapters.process import UsageError
from embertide.server.cli.common_options import Json
from embertide.server.cli.control_client import (
    DEFAULT_CONTROL,
    Caller,
    Control,
    TokenFile,
    calling,
    print_message,
)
from embertide.server.cli.drift_view import (
    drift_facts,
    drift_line,
    outcome_name,
    settings_facts,
    settings_line,
)
from embertide.server.cli.gains import correction_text, corrections_line, model_line
from embertide.server.core.drift.options import MODES
from embertide.v1 import control_pb2

app = typer.Typer(
    help="Decisions of the control plane about drift: list them, set the mode, freeze.",
    rich_markup_mode="markdown",
    invoke_without_command=True,
)
_DURATION = re.compile(r"(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_PAGE = 500
_FREEZE_S_MAX = 90 * 86_400
Reason = Annotated[str, typer.Option(help="Why, for people and the audit log.")]


def _outcome(decision: control_pb2.Decision) -> str:
    return outcome_name(decision.outcome).replace("_", " ")


def _time(at_ms: int) -> str:
    return time_text(at_ms)


def _gain(decision: control_pb2.Decision) -> tuple[str, str, str]:
    """Return the predicted, the expected and the measured gain as people read them."""
    if not decision.HasField("before"):
        return "-", "-", "-"
    expected = f"{decision.expected_gain:.1%}" if decision.HasField("correction") else "-"
    measured = f"{decision.measured_gain:.1%}" if decision.measured_ms else "-"
    return f"{decision.predicted_gain:.1%}", expected, measured


def _list(caller: Caller, *, acted: bool, limit: int) -> control_pb2.ListDecisionsResponse:
    request = control_pb2.ListDecisionsRequest(acted_only=acted, page_size=min(limit, _PAGE))
    answer: control_pb2.ListDecisionsResponse = caller.call("ListDecisions", request)
    return answer


def _show(answer: control_pb2.ListDecisionsResponse) -> None:
    if answer.HasField("status"):
        say(drift_line(drift_facts(answer.status)))
    else:
        say(settings_line(settings_facts(answer.settings)))
    say(model_line(answer.model))
    if line := corrections_line(answer.corrections):
        say(line)
    if not answer.decisions:
        say("no decision yet: the first look comes with the first load reports")
        return
    table = Table(
        *("decision", "last at", "looks", "outcome", "predicted", "expected", "measured", "bytes"),
        "triggers",
        names=("decision", "last at", "outcome", "triggers"),
    )
    for each in answer.decisions:
        table.add_row(
            each.id,
            _time(each.at_ms),
            str(each.looks),
            _outcome(each),
            *_gain(each),
            f"{each.bytes:,}",
            ", ".join(each.triggers),
        )
    show_table(table)
    newest = answer.decisions[0]
    say(f"{newest.id}: {newest.why}")


@app.callback()
def command(
    context: typer.Context,
    acted: Annotated[
        bool, typer.Option("--acted", help="Only those that moved something.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Newest decisions shown.", min=1, max=_PAGE)] = 20,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """List the newest decisions: what was seen, what it would gain, what came of it.

    Example: embertide drift

    Example: embertide drift show look-12

    Example: embertide drift mode auto

    Example: embertide drift freeze 2h --reason "release"
    """
    if context.invoked_subcommand is not None:
        return
    with report_errors(as_json), calling(control, token_file) as caller:
        answer = _list(caller, acted=acted, limit=limit)
        if as_json:
            print_message(answer)
        else:
            _show(answer)


@app.command("show")
def show(
    decision: Annotated[str, typer.Argument(help="The decision's id, as look-12.")],
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show one decision with all its numbers. Example: embertide drift show look-12."""
    with report_errors(as_json), calling(control, token_file) as caller:
        answer = _list(caller, acted=False, limit=_PAGE)
        found = next((each for each in answer.decisions if each.id == decision), None)
        while found is None and answer.next_page_token:
            request = control_pb2.ListDecisionsRequest(
                page_size=_PAGE, page_token=answer.next_page_token
            )
            answer = caller.call("ListDecisions", request)
            found = next((each for each in answer.decisions if each.id == decision), None)
        if found is None:
            raise UsageError(f"no decision {decision!r}; `embertide drift` lists them")
        if as_json:
            print_message(found)
        else:
            _show_one(found)


def _show_one(decision: control_pb2.Decision) -> None:
    correction = decision.correction
    table = Table("", "", header=False)
    rows = {
        "outcome": _outcome(decision),
        "why": decision.why,
        "at": _time(decision.at_ms),
        "looks": f"{decision.looks}, the first at {_time(decision.first_ms or decision.at_ms)}",
        "triggers": ", ".join(decision.triggers) or "none",
        "plan epoch": str(decision.plan_epoch),
        "planner": decision.planner or "not asked",
        "operation": decision.operation_id or "none",
        "gain, predicted / expected / measured": " / ".join(_gain(decision)),
        "correction": f"{correction.kind}: {correction_text(correction)}"
        if decision.HasField("correction")
        else "-",
        "busiest device, us/s": f"{decision.before.busiest_us:,.0f} -> "
        f"{decision.after.busiest_us:,.0f}",
        "mean of the devices, us/s": f"{decision.before.mean_us:,.0f} -> "
        f"{decision.after.mean_us:,.0f}",
        "keys asked of peers a second": f"{decision.before.asked_keys:,.0f} -> "
        f"{decision.after.asked_keys:,.0f}",
        "moves": f"{decision.buckets:,} buckets, {decision.bytes:,} bytes, "
        f"{decision.move_s:,.1f} s",
        "cost of the move, saved by the horizon": f"{decision.move_cost_us / 1e6:,.2f} s, "
        f"{decision.horizon_gain_us / 1e6:,.2f} s of the nodes' time",
        "error of the cost model": f"{decision.model_error:.1%}" if decision.model_error else "-",
    }
    if not decision.HasField("before"):
        for name in list(rows)[8:]:
            del rows[name]
    signals = decision.signals
    rows["signals"] = ", ".join(
        f"{field.name} {getattr(signals, field.name):.3f}" for field in signals.DESCRIPTOR.fields
    )
    for name, value in rows.items():
        table.add_row(name, value)
    show_table(table)
    if decision.explanation:
        say(decision.explanation)


def _set(caller: Caller, settings: control_pb2.DriftSettings, *, as_json: bool) -> None:
    request = control_pb2.SetDriftSettingsRequest(settings=settings)
    now = caller.call("SetDriftSettings", request).settings
    if as_json:
        print_message(now)
    else:
        say(settings_line(settings_facts(now)))


@app.command("mode")
def set_mode(
    mode: Annotated[str, typer.Argument(help="off, advise or auto.")],
    reason: Reason = "",
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Set whether it acts by itself; outlives restarts. Example: embertide drift mode auto."""
    with report_errors(as_json), calling(control, token_file) as caller:
        if mode not in MODES:
            raise UsageError(f"mode is {mode!r}; use {', '.join(MODES)}")
        settings = _list(caller, acted=False, limit=1).settings
        settings.mode, settings.reason = MODES[mode], reason
        _set(caller, settings, as_json=as_json)


def frozen_until_ms(duration: str) -> int:
    """Return until when a freeze of a duration from now on lasts. 0: it ends one.

    Raises:
        UsageError: It is no duration, or too long.
    """
    found = _DURATION.fullmatch(duration)
    if found is None:
        raise UsageError(f"duration is {duration!r}; use a number and s, m, h or d, as 2h")
    seconds = int(found[1]) * _SECONDS[found[2]]
    if seconds > _FREEZE_S_MAX:
        raise UsageError(f"duration is {duration}; at most 90d: use `drift mode advise`")
    return int((time.time() + seconds) * 1000) if seconds else 0


@app.command("freeze")
def freeze(
    duration: Annotated[str, typer.Argument(help="How long, as 30m, 2h or 3d; 0s ends it.")],
    reason: Reason = "",
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Let it begin nothing for a while. Example: embertide drift freeze 2h --reason release."""
    with report_errors(as_json), calling(control, token_file) as caller:
        until_ms = frozen_until_ms(duration)
        settings = _list(caller, acted=False, limit=1).settings
        settings.frozen_until_ms, settings.reason = until_ms, reason
        _set(caller, settings, as_json=as_json)
