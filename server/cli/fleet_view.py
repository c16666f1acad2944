"""The fleet in facts and tables: nodes, devices, buckets, load skew, versions, staleness."""

import collections
import dataclasses
import shlex
import time
from typing import Any

from embertide._common.terminal import Table, age_text, say, show_table, time_text
from embertide.server.cli.control_client import Caller, enum_name, message_facts
from embertide.server.cli.drift_view import drift_facts, drift_line
from embertide.server.cli.trainer_view import show_trainer, trainer_facts, trainer_line
from embertide.server.core.plan.layout import budget_bytes
from embertide.server.core.plan.workload import skew
from embertide.v1 import control_pb2, plan_pb2


@dataclasses.dataclass(frozen=True)
class FleetAnswers:
    """A control plane's answers about its fleet.

    Attributes:
        at_ms: Wall clock when it was asked.
        open: Whether it asks nobody for a token.
        status: Its status.
        figures: What it adds up of the last load window, and why it has no plan if it has none.
    """

    at_ms: int
    open: bool
    status: control_pb2.ControlServiceGetStatusResponse
    figures: control_pb2.GetFleetFiguresResponse

    def table_name(self, id: int) -> str:
        """Name a table."""
        return next((each.name for each in self.figures.tables if each.id == id), str(id))


def ask_fleet(
    caller: Caller, *, hot_keys: int = 0, ranges: int = 0, slow_requests: int = 0
) -> FleetAnswers:
    """Ask for everything that the view shows; and for so much more, if it is wanted.

    Raises:
        CallError: The control plane refused, or cannot be reached.
    """
    at_ms = round(time.time() * 1000)
    status = caller.call("GetStatus", control_pb2.ControlServiceGetStatusRequest())
    request = control_pb2.GetFleetFiguresRequest(
        hot_keys=hot_keys, ranges=ranges, slow_requests=slow_requests
    )
    figures = caller.call("GetFleetFigures", request, 10.0)
    return FleetAnswers(at_ms, caller.open, status, figures)


def fleet_facts(caller: Caller) -> dict[str, Any]:
    """Ask for everything that the view shows, and return it."""
    return facts_of(ask_fleet(caller))


def facts_of(answers: FleetAnswers) -> dict[str, Any]:
    """Return everything that the view shows, of what a control plane said."""
    status = answers.status
    nodes: list[dict[str, Any]] = [
        {
            "node": each.node.name,
            "address": each.node.address,
            "group": each.node.group,
            "state": enum_name(control_pb2.NodeState, each.state).lower(),
            "versions": [each.versions.oldest.number, each.versions.newest.number],
            "plan_epoch": each.plan_epoch,
            # The last words of a dead node do not tell its present state.
            "staleness_ms": each.staleness_ms if _lives(each) else None,
            "last_beat_ms": None if each.unheard else each.last_beat_ms,
        }
        for each in status.nodes
    ]
    lives = [_lives(each) for each in status.nodes]
    living = [node for node, alive in zip(nodes, lives, strict=True) if alive]
    newest = [node["versions"][1] for node in living if node["versions"][1]]
    known = status.HasField("newest_committed")
    committed = status.newest_committed.number if known else None
    front = max([*newest, committed or 0])
    for node, alive in zip(nodes, lives, strict=True):
        behind = front - node["versions"][1] if node["versions"][1] else None
        node["versions_behind"] = behind if alive else None
    return {
        "at_ms": answers.at_ms,
        "plan_epoch": status.plan_epoch,
        "open": answers.open,
        "nodes": nodes,
        "newest_committed": committed,
        "versions_behind": front - min(newest) if newest else 0,
        "trainer": trainer_facts(status.trainer) if status.HasField("trainer") else None,
        "tasks": [message_facts(each) for each in status.tasks],
        "refused": [message_facts(each) for each in status.refused],
        "drift": drift_facts(status.drift) if status.HasField("drift") else None,
        **_figures(answers),
    }


def faults(facts: dict[str, Any]) -> list[str]:
    """Return what is wrong with a fleet, a line each with what to do; none: nothing is."""
    found = []
    trainer = facts["trainer"]
    if trainer is not None and trainer["state"] in ("silent", "failed"):
        found.append(trainer_line(trainer))
    for node in facts["nodes"]:
        if node["state"] == "dead":
            since = age_text(node["last_beat_ms"] or 0)
            found.append(
                f"node {node['node']} is dead, its last beat {since} ago: start it again, or "
                f"`embertide node drain {shlex.quote(node['node'])}`"
            )
    ahead = [each for each in facts["nodes"] if each["plan_epoch"] > facts["plan_epoch"]]
    if ahead:
        found.append(
            f"node {ahead[0]['node']} acts by plan {ahead[0]['plan_epoch']}, and `state` has "
            f"{facts['plan_epoch'] or 'none'}: it lost its keys, or is another store than the "
            "nodes'; in the first case `embertide plan adopt`"
        )
    if facts["unowned_buckets"]:
        found.append(
            f"{facts['unowned_buckets']:,} buckets have no live owner, so their keys read as "
            "defaults: start a dead node again, or drain it"
        )
    for group, count in facts["unowned_by_group"].items():
        found.append(
            f"{count:,} buckets have no live owner in group {group}, whose nodes ask another group "
            "for them: start its dead nodes again"
        )
    found += [
        f"the control plane's {task['name']} is {task['state']} since "
        f"{time_text(int(task['since_ms']))}: {task['error']}; its log says more"
        for task in facts["tasks"]
        if task["state"] in ("failing", "no thread")
    ]
    found += [
        f"node {each['node']} at {each['address']} was refused {int(each['count']):,} times, last "
        f"at {time_text(int(each['last_ms']))}: {each['message']}"
        for each in facts["refused"]
    ]
    return found


def _lives(node: control_pb2.FleetNode) -> bool:
    return node.state != control_pb2.NODE_STATE_DEAD


def _figures(answers: FleetAnswers) -> dict[str, Any]:
    """Return the devices of the plan with what they own and read, and the skew of each group."""
    figures = answers.figures
    p99_us = {each.node.name: each.p99_us for each in answers.status.nodes if _lives(each)}
    with_ssd = {
        each.node.name
        for each in answers.status.nodes
        if any(b.tier == plan_pb2.TIER_SSD for d in each.node.devices for b in d.budgets)
    }
    budgets = {
        f"{each.node.name}/{device.index}": budget_bytes(device)
        for each in answers.status.nodes
        for device in each.node.devices
    }
    groups: dict[int, list[int]] = collections.defaultdict(list)
    for each in figures.devices:
        groups[each.group].append(each.reads)
    reads = [_reads(each) for each in figures.nodes]
    facts: dict[str, Any] = {
        "devices": [
            {
                "device": f"{each.node}/{each.device}",
                "group": each.group,
                "buckets": each.buckets,
                "moving": each.moving,
                "reads": each.reads,
                "bytes": each.bytes,
                "budget_bytes": budgets.get(f"{each.node}/{each.device}", 0),
            }
            for each in figures.devices
        ],
        "skew": {str(group): round(skew(reads), 3) for group, reads in sorted(groups.items())},
        "reads": reads,
        "serving": [
            _serving(each, own, p99_us.get(each.node, 0), has_ssd=each.node in with_ssd)
            for each, own in zip(figures.nodes, reads, strict=True)
        ],
        "unowned_buckets": figures.buckets_unowned,
        "unowned_by_group": {str(each.group): each.buckets for each in figures.unowned_in_groups},
    }
    return facts | ({"no_plan": figures.no_plan} if figures.no_plan else {})


def _reads(node: control_pb2.NodeFigures) -> dict[str, Any]:
    """Return where a node's own requests were answered in the last load window."""
    calls = node.peer_calls
    return {
        "node": node.node,
        "own": node.here + node.hot + node.asked,
        "here": node.here,
        "hot": node.hot,
        "asked": node.asked,
        "for_peers": node.for_peers,
        "peer_calls": calls,
        "peer_round_trip_us": round(node.peer_round_trip_us / calls) if calls else 0,
    }


def _serving(
    node: control_pb2.NodeFigures, reads: dict[str, Any], p99_us: int, *, has_ssd: bool
) -> dict[str, Any]:
    """Return how fast a node was in the last load window, and what it read from its SSD."""
    seconds = node.window_ms / 1000 or 1.0
    return {
        "node": node.node,
        "requests_per_s": node.requests / seconds,
        "mean_us": node.request_us / node.requests if node.requests else 0.0,
        "p99_us": p99_us,
        "cores": node.cpu_us / 1e6 / seconds,
        "asked_share": reads["asked"] / max(reads["own"], 1),
        "peer_round_trip_us": reads["peer_round_trip_us"],
        "ssd_share": node.in_ssd / max(node.in_tiers, 1) if has_ssd else 0.0,
    }


def _committed(facts: dict[str, Any]) -> str:
    newest = facts["newest_committed"]
    return f"version {newest:,} committed" if newest else "newest commit not known"


def show_nodes(facts: dict[str, Any]) -> None:
    """Print the nodes, and below them their addresses, whole."""
    table = Table(
        *("node", "group", "state", "versions", "behind", "plan", "staleness", "last beat"),
        names=("node",),
    )
    for node in facts["nodes"]:
        oldest, newest = node["versions"]
        table.add_row(
            node["node"],
            str(node["group"]),
            node["state"],
            f"{oldest}-{newest}" if newest else "none",
            "-" if node["versions_behind"] is None else f"{node['versions_behind']:,}",
            str(node["plan_epoch"]),
            "-" if node["staleness_ms"] is None else age_text(node["staleness_ms"]),
            "none yet" if node["last_beat_ms"] is None else f"{age_text(node['last_beat_ms'])} ago",
        )
    show_table(table)
    for node in facts["nodes"]:  # of a cluster's they have 60 characters and more
        say(f"{node['node']} is at {node['address']}")


def show_devices(facts: dict[str, Any]) -> None:
    """Print the devices, and how unevenly they are read."""
    table = Table(
        *("device", "group", "buckets", "on their way", "reads", "bytes", "free"),
        names=("device",),
    )
    for each in facts["devices"]:
        numbers = (each["group"], each["buckets"], each["moving"], each["reads"], each["bytes"])
        budget = each["budget_bytes"]
        free = f"{max(0.0, 1 - each['bytes'] / budget):.0%}" if budget else "-"
        table.add_row(each["device"], *(f"{number:,}" for number in numbers), free)
    if facts["devices"]:
        show_table(table)
    for group, value in facts["skew"].items():
        say(f"group {group}: max/mean of reads {value:.2f}")


def show_reads(facts: dict[str, Any]) -> None:
    """Print where the nodes' own requests were answered."""
    table = Table(
        *("node", "own reads", "here", "hot rows", "asked of peers", "for peers", "round trip"),
        names=("node",),
    )
    for each in facts["reads"]:
        own = max(each["own"], 1)
        table.add_row(
            each["node"],
            f"{each['own']:,}",
            *(f"{100 * each[kind] / own:.1f} %" for kind in ("here", "hot", "asked")),
            f"{each['for_peers']:,}",
            f"{each['peer_round_trip_us']:,} us" if each["peer_calls"] else "-",
        )
    if facts["reads"]:
        show_table(table)


def show_serving(facts: dict[str, Any]) -> None:
    """Print how long nodes took, and what they read from their SSDs."""
    table = Table(
        *("node", "requests/s", "mean", "p99, last second", "cores", "from SSD"), names=("node",)
    )
    for each in facts["serving"]:
        table.add_row(
            each["node"],
            f"{each['requests_per_s']:,.0f}",
            f"{each['mean_us'] / 1000:,.2f} ms",
            f"{each['p99_us'] / 1000:,.2f} ms",
            f"{each['cores']:.2f}",
            f"{each['ssd_share']:.1%}",
        )
    if facts["serving"]:
        show_table(table)


def show_fleet(facts: dict[str, Any]) -> None:
    """Print all of it."""
    epoch = facts["plan_epoch"]
    say(
        f"{time_text(facts['at_ms'])}: "
        + (f"plan {epoch}" if epoch else "no plan yet")
        + f", {_committed(facts)}, nodes at most {facts['versions_behind']} versions behind"
        + ("; OPEN: the control plane asks nobody for a token" if facts["open"] else "")
    )
    if not epoch:
        say(facts["no_plan"])
    show_trainer(facts["trainer"])
    show_nodes(facts)
    show_devices(facts)
    if facts["drift"] is not None:
        say(drift_line(facts["drift"]))
    for fault in faults(facts):
        say(f"wrong: {fault}")
