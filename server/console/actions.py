"""Forms of operators: what they ask the control plane for. It, and no button, says who may.

A move is shown before it starts: the form is sent as a dry run, its answer is shown by names of
nodes, and the form of that page starts it under the same id.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from embertide._common.quoting import is_name, shown
from embertide.server.adapters.process import UsageError
from embertide.server.cli.control_client import Caller, CallError, new_id, owner_name, table_name
from embertide.server.cli.drift import frozen_until_ms
from embertide.server.cli.drift_view import settings_facts, settings_line
from embertide.server.cli.versions import rollback_plan, start_rollback, version_facts
from embertide.server.core.drift.options import MODES
from embertide.server.core.plan.planners import PLANNERS
from embertide.v1 import control_pb2

GOALS = ("planner", "drain_node", "undo_operation")
STEERINGS = {
    "pause": control_pb2.STEERING_PAUSE,
    "resume": control_pb2.STEERING_RESUME,
    "abort": control_pb2.STEERING_ABORT,
}
FIELDS = ("goal", "planner", "drain_node", "undo_operation", "reason", "mib_per_s", "p99_ms")
MOVES_SHOWN = 200
_REASON_BYTES_MAX = 256
_THINKING_S = 30.0


class FieldError(ValueError):
    """A field of a form cannot be right; the message names it and the remedy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Preview:
    """A move as its page shows it.

    Attributes:
        answer: The control plane's answer.
        moves: The first 200: table, bucket, from, to, reads, bytes.
        devices: All devices that change: name, reads and bytes, each before and after.
        fields: The form's fields, to be sent again.
        operation: Its id.
        epoch: The epoch of the plan that it was made from.
    """

    answer: control_pb2.StartReshardResponse
    moves: list[tuple[str, int, str, str, int, int]]
    devices: list[tuple[str, int, int, int, int]]
    fields: dict[str, str]
    operation: str
    epoch: int


def request_of(form: Mapping[str, str]) -> control_pb2.StartReshardRequest:
    """Return what a form asks for, under a new id, or that of the form.

    Raises:
        FieldError: A field cannot be right.
    """
    goal = form.get("goal", "")
    if goal not in GOALS:
        raise FieldError(f"goal is {shown(goal)}; choose one of {', '.join(GOALS)}")
    value = form.get(goal, "").strip()
    if goal == "planner" and value not in PLANNERS:
        raise FieldError(f"planner is {shown(value)}; choose one of {', '.join(PLANNERS)}")
    if not is_name(value):
        what = "the node to drain" if goal == "drain_node" else "the operation to undo"
        raise FieldError(f"{what} is {shown(value)}; give its name as the pages show it")
    reason = _reason(form)
    id = form.get("operation_id", "") or new_id()
    if not is_name(id):
        raise FieldError(f"the operation's id is {shown(id)}; open the page anew")
    bytes_per_s = _number(form, "mib_per_s", "MiB a second") * (1 << 20)
    request = control_pb2.StartReshardRequest(operation_id=id, reason=reason)
    setattr(request, goal, value)
    request.budget.bytes_per_s = round(bytes_per_s)
    request.budget.p99_us = round(_number(form, "p99_ms", "p99 in ms") * 1000)
    return request


@dataclasses.dataclass(frozen=True, slots=True)
class SettingsChange:
    """Another treatment of drift, as its page shows it.

    Attributes:
        settings: As they would be.
        before: As they are, in words.
        after: As they would be, in words.
        fields: The form's fields, to be sent again.
    """

    settings: control_pb2.DriftSettings
    before: str
    after: str
    fields: dict[str, str]


def settings_change(caller: Caller, form: Mapping[str, str]) -> SettingsChange:
    """Return what a form would make of the treatment of drift, as it is now.

    Raises:
        FieldError: A field cannot be right.
        CallError: The control plane refused, or cannot be reached.
    """
    mode, freeze = form.get("mode", ""), form.get("freeze", "").strip()
    reason = _reason(form)
    if mode not in MODES:
        raise FieldError(f"mode is {shown(mode)}; choose one of {', '.join(MODES)}")
    try:
        until_ms = frozen_until_ms(freeze) if freeze else None
    except UsageError as error:
        raise FieldError(str(error)) from error
    answer = caller.call("ListDecisions", control_pb2.ListDecisionsRequest(page_size=1))
    wanted = control_pb2.DriftSettings()
    wanted.CopyFrom(answer.settings)
    wanted.mode, wanted.reason = MODES[mode], reason
    if until_ms is not None:
        wanted.frozen_until_ms = until_ms
    return SettingsChange(
        wanted,
        settings_line(settings_facts(answer.settings)),
        settings_line(settings_facts(wanted)),
        {"mode": mode, "freeze": freeze, "reason": reason},
    )


def set_drift(caller: Caller, change: SettingsChange) -> None:
    """Make a change of the treatment of drift.

    Raises:
        CallError: The control plane refused, or cannot be reached.
    """
    caller.call("SetDriftSettings", control_pb2.SetDriftSettingsRequest(settings=change.settings))


@dataclasses.dataclass(frozen=True, slots=True)
class RollbackPreview:
    """A rollback as its page shows it.

    Attributes:
        version: The version whose state would be restored.
        plan: What would be done, in words.
        quality: Its figures that are known: names and values.
        fields: The form's fields, to be sent again.
    """

    version: int
    plan: str
    quality: list[tuple[str, float]]
    fields: dict[str, str]


def roll_back(caller: Caller, form: Mapping[str, str], *, dry_run: bool) -> RollbackPreview:
    """Order a rollback; the same form again orders nothing more.

    Raises:
        FieldError: A field cannot be right.
        CallError: The control plane refused, or cannot be reached.
    """
    text, reason = form.get("version", "").strip(), _reason(form)
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:20]) < 1 << 63):
        raise FieldError(f"version is {shown(text)}; give a number, as the page of versions has it")
    id = form.get("id", "") or new_id()
    if not is_name(id):
        raise FieldError(f"the order's id is {shown(id)}; open the page anew")
    version = int(text)
    answer = start_rollback(caller, version, id=id, reason=reason, dry_run=dry_run)
    facts = version_facts(answer.version)
    names = {"auc": "AUC", "log_loss": "Log loss", "calibration": "Calibration"}
    return RollbackPreview(
        version,
        rollback_plan(answer, version),
        [(said, facts[name]) for name, said in names.items() if facts[name] is not None],
        {"version": text, "reason": reason, "id": id},
    )


def _reason(form: Mapping[str, str]) -> str:
    reason = form.get("reason", "").strip()
    if len(reason.encode()) > _REASON_BYTES_MAX:
        raise FieldError(f"the reason has more than {_REASON_BYTES_MAX} bytes; say it shorter")
    return reason


def _number(form: Mapping[str, str], name: str, what: str) -> float:
    text = form.get(name, "").strip() or "0"
    try:
        value = float(text)
    except ValueError as error:
        raise FieldError(f"{what} is {shown(text)}; give a number, or nothing") from error
    if not 0 <= value <= 1e6:
        raise FieldError(f"{what} is {shown(text)}; give 0 to 1,000,000, 0 for no bound")
    return value


def ask(caller: Caller, form: Mapping[str, str], *, dry_run: bool) -> Preview:
    """Ask for a move.

    Raises:
        FieldError: A field cannot be right.
        CallError: The control plane refused, or cannot be reached.
    """
    request = request_of(form)
    request.dry_run = dry_run
    answer: control_pb2.StartReshardResponse = caller.call("StartReshard", request, _THINKING_S)
    plan = caller.plan()
    nodes = answer.nodes or [node.name for node in (*plan.topology.nodes, *answer.added_nodes)]
    return Preview(
        answer,
        moves=[
            (
                table_name(plan, move.table_id),
                move.bucket,
                owner_name(nodes, move.source) if move.HasField("source") else "-",
                owner_name(nodes, move.target) if move.HasField("target") else "-",
                move.reads,
                move.bytes,
            )
            for move in answer.moves[:MOVES_SHOWN]
        ],
        devices=[
            (
                owner_name(nodes, each.device),
                each.reads_before,
                each.reads_after,
                each.bytes_before,
                each.bytes_after,
            )
            for each in answer.devices
            if (each.reads_before, each.bytes_before) != (each.reads_after, each.bytes_after)
        ][:MOVES_SHOWN],
        fields={name: form[name] for name in FIELDS if name in form},
        operation=request.operation_id,
        epoch=plan.epoch,
    )


def is_started(caller: Caller, form: Mapping[str, str]) -> bool:
    """Return whether the operation of a form exists.

    Raises:
        CallError: The control plane refused, or cannot be reached.
    """
    id = form.get("operation_id", "")
    if not is_name(id):
        return False
    try:
        caller.call("GetOperation", control_pb2.GetOperationRequest(id=id))
    except CallError as error:
        if error.code != "NOT_FOUND":
            raise
        return False
    return True


def steer(caller: Caller, operation: str, steering: str) -> Any:
    """Pause, resume or abort an operation; return it as it is then.

    Raises:
        FieldError: There is no such steering.
        CallError: The control plane refused, or cannot be reached.
    """
    if steering not in STEERINGS:
        raise FieldError(f"steering is {shown(steering)}; use one of {', '.join(STEERINGS)}")
    request = control_pb2.SteerOperationRequest(id=operation, steering=STEERINGS[steering])
    return caller.call("SteerOperation", request).operation
