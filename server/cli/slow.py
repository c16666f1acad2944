"""`slow`: the slowest requests of a fleet or of one node, and where their time went."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import typer

from embertide._common.reporting import report_errors
from embertide._common.terminal import Table, age_text, print_json, say, show_table
from embertide.server.adapters.process import ProcessError
from embertide.server.cli import slow_page
from embertide.server.cli.common_options import Json
from embertide.server.cli.control_client import (
    DEFAULT_CONTROL,
    Control,
    TokenFile,
    calling,
)
from embertide.server.cli.fleet_view import FleetAnswers, ask_fleet
from embertide.v1 import control_pb2

_TRACE_DIGITS = frozenset("0123456789abcdef")


def slow_facts(answers: FleetAnswers, each: control_pb2.SlowRequestOfNode) -> dict[str, Any]:
    """Return a slow request: its node, age, caller's trace, size, and its time by stage."""
    request = each.request
    stages = {name: getattr(request, f"{name}_us") for name in ("peers", "lookup", "net")}
    return {
        "node": each.node,
        "ended_ms": request.ended_ms,
        "ago_ms": max(0, answers.at_ms - request.ended_ms),
        "trace": _trace_of(request.trace),
        "refusal": request.refusal,
        "version": request.version,
        "samples": request.samples,
        "keys": request.keys,
        "requests": request.requests,
        "whole_us": request.whole_us,
        "stages_us": stages,
        "other_us": max(0, request.whole_us - sum(stages.values())),
    }


def lookup_facts(answers: FleetAnswers, each: control_pb2.SlowLookupOfNode) -> dict[str, Any]:
    """Return a slow look-up for a peer: its node, who asked, age, caller's trace, size, time."""
    lookup = each.lookup
    return {
        "node": each.node,
        "asker": lookup.asker,
        "ended_ms": lookup.ended_ms,
        "ago_ms": max(0, answers.at_ms - lookup.ended_ms),
        "trace": _trace_of(lookup.trace),
        "keys": lookup.keys,
        "whole_us": lookup.whole_us,
    }


def _trace_of(said: str) -> str:
    """Return a trace, a node's word: digits of hex, or nothing is shown."""
    return said if _TRACE_DIGITS.issuperset(said) else ""


def command(
    node: Annotated[
        str | None, typer.Argument(help="The node's name; without it, all nodes.")
    ] = None,
    count: Annotated[int, typer.Option(help="Requests to show.", min=1, max=1000)] = 20,
    trace: Annotated[
        str, typer.Option(help="Show only requests of this trace: 32 digits of a traceparent.")
    ] = "",
    url: Annotated[
        str, typer.Option(help="Ask one node's page instead, http://HOST:8002/slow.")
    ] = "",
    span: Annotated[
        Literal["minute", "hour"], typer.Option(help="With --url: the slowest of which span.")
    ] = "minute",
    control: Control = DEFAULT_CONTROL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show the slowest requests of the last minute, and how long each of their stages took.

    A request is found again by the trace that its caller gave (`traceparent`, W3C), and so are the
    look-ups that peers made for it. A node's own page says also how long requests waited, and what
    was slow in the last hour.

    Example: embertide slow node-1

    Example: embertide slow --url http://node-1:8002/slow --span hour
    """
    if url:
        with report_errors(as_json):
            of_page = [each for each in slow_page.read(url, span) if trace in ("", each["trace"])][
                :count
            ]
            if as_json:
                print_json({"slow": of_page})
            else:
                slow_page.show(of_page, span)
        return
    with report_errors(as_json), calling(control, token_file) as caller:
        answers = ask_fleet(caller, slow_requests=1000)
        names = [each.node for each in answers.figures.nodes]
        if node is not None and node not in names:
            raise ProcessError(
                f"node {node!r} has reported no load; give one of those that have: "
                f"{', '.join(names) or 'none'}"
            )
        told = (
            (slow_facts(answers, each) for each in answers.figures.slow_requests),
            (lookup_facts(answers, each) for each in answers.figures.slow_lookups),
        )
        found, lookups = (
            [
                each
                for each in facts
                if node in (None, each["node"]) and trace in ("", each["trace"])
            ][:count]
            for facts in told
        )
        if as_json:
            print_json({"slow": found, "lookups": lookups})
            return
        _show(found)
        if lookups:
            say()
            _show_lookups(lookups)


def _show_lookups(lookups: Iterable[dict[str, Any]]) -> None:
    table = Table("node", "looked up for", "ago", "ms", "keys", names=("node", "looked up for"))
    traced = []
    for each in lookups:
        ms = f"{each['whole_us'] / 1000:.1f}"
        asker = each["asker"] or "unknown"
        table.add_row(each["node"], asker, age_text(each["ago_ms"]), ms, f"{each['keys']:,}")
        if each["trace"]:
            traced.append(f"{ms} ms at {each['node']} for {asker}: {each['trace']}")
    show_table(table)
    for line in traced:
        say(f"trace of {line}")


def _show(found: Iterable[dict[str, Any]]) -> None:
    table = Table(
        *("node", "ago", "ms", "peers", "lookup", "net", "other", "keys", "of", "outcome"),
        names=("node", "outcome"),
    )
    traced = []
    for each in found:
        times = (each["whole_us"], *each["stages_us"].values(), each["other_us"])
        outcome = each["refusal"] or f"version {each['version']}"
        table.add_row(
            each["node"],
            age_text(each["ago_ms"]),
            *(f"{us / 1000:.1f}" for us in times),
            f"{each['keys']:,}",
            str(each["requests"]),
            outcome,
        )
        if each["trace"]:
            traced.append(f"{each['whole_us'] / 1000:.1f} ms at {each['node']}: {each['trace']}")
    if not table.rows:
        say("none of the slowest requests of the last minute is of this node and trace")
        return
    show_table(table)
    for line in traced:
        say(f"trace of {line}")
