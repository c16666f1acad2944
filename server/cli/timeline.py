"""`timeline`: what happened to a fleet, when, who did it and why."""

import datetime
import re
import time
from typing import Annotated, Any

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import print_json, say, time_text
from embertide.server.adapters.process import UsageError
from embertide.server.cli.common_options import Json
from embertide.server.cli.control_client import (
    DEFAULT_CONTROL,
    Caller,
    Control,
    TokenFile,
    calling,
    message_facts,
)
from embertide.v1 import control_pb2

KINDS = {
    name.removeprefix("EVENT_KIND_").lower(): value
    for name, value in control_pb2.EventKind.items()
    if value
}
_PAGE = 500
_AGO = re.compile(r"(\d{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def kind_name(event: control_pb2.FleetEvent) -> str:
    """Return the name of an event's kind, as people say it."""
    return control_pb2.EventKind.Name(event.kind).removeprefix("EVENT_KIND_").lower()


def list_events(
    caller: Caller, request: control_pb2.ListEventsRequest, limit: int
) -> list[control_pb2.FleetEvent]:
    """Return the newest events that a request asks for, at most `limit`, newest first.

    Raises:
        CallError: The control plane refused, or cannot be reached.
    """
    found: list[control_pb2.FleetEvent] = []
    while len(found) < limit:
        request.page_size = min(limit - len(found), _PAGE)
        answer: control_pb2.ListEventsResponse = caller.call("ListEvents", request)
        found += answer.events
        request.page_token = answer.next_page_token
        if not request.page_token:
            break
    return found


def _time(option: str, text: str | None) -> int:
    """Return a time in ms since the Unix epoch: so long ago, or a date of UTC. 0: none is given."""
    if not text:
        return 0
    if ago := _AGO.fullmatch(text):
        return round(time.time() * 1000) - int(ago[1]) * _SECONDS[ago[2]] * 1000
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(
            f"{option} is {text!r}: give 90s, 30m, 2h or 3d ago, or a time of UTC as "
            "2026-11-29T02:40"
        ) from error
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return round(when.timestamp() * 1000)


def event_line(event: control_pb2.FleetEvent) -> str:
    """Return an event as a line."""
    since = ""
    if event.first_ms and event.first_ms != event.at_ms:
        since = f" (since {time_text(event.first_ms)})"
    author = f", by {event.author}" if event.author else ""
    why = f": {event.why}" if event.why else ""
    return f"{time_text(event.at_ms)}  {kind_name(event)}: {event.text}{since}{author}{why}"


def _facts(event: control_pb2.FleetEvent) -> dict[str, Any]:
    return message_facts(event) | {"kind": kind_name(event)}


def command(
    search: Annotated[
        str, typer.Argument(help="Only events with these letters, as a node's name.")
    ] = "",
    kind: Annotated[str, typer.Option(help=f"Only one kind: {', '.join(KINDS)}.")] = "",
    since: Annotated[
        str | None, typer.Option(help="From then on: 2h ago, or 2026-11-29T02:40 of UTC.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Until then; as --since.")] = None,
    limit: Annotated[int, typer.Option(help="Newest events shown.", min=1, max=5000)] = 50,
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show what happened to a fleet, newest last: what, when, who did it, why.

    Nodes that died and came back, leaders, versions, operations, decisions, refused nodes.

    Example: embertide timeline node-1 --since 2h
    """
    with report_errors(as_json):
        if kind and kind not in KINDS:
            raise UsageError(f"--kind is {kind!r}: choose one of {', '.join(KINDS)}")
        request = control_pb2.ListEventsRequest(
            kind=KINDS.get(kind, control_pb2.EVENT_KIND_UNSPECIFIED),
            text=search,
            since_ms=_time("--since", since),
            until_ms=_time("--until", until),
        )
        with calling(control, token_file) as caller:
            events = list_events(caller, request, limit)
    if as_json:
        print_json({"events": [_facts(each) for each in events]})
        return
    for event in reversed(events):
        say(event_line(event))
    if not events:
        say("no such event: the control plane keeps the newest 500 of each kind")
