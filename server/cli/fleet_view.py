"""The fleet in facts and tables: nodes, devices, buckets, load skew, versions, staleness."""

import collections
from typing import Any

import rich.console
import typer

from embertide.server.cli.control_client import Caller, CallError, enum_name
from embertide.server.cli.tables import folding
from embertide.server.core.plan.layout import Place, layout_of, place_name
from embertide.server.core.plan.workload import device_work, measured, skew
from embertide.v1 import control_pb2


def fleet_facts(caller: Caller) -> dict[str, Any]:
    """Ask for everything that the view shows."""
    status = caller.call("GetStatus", control_pb2.ControlServiceGetStatusRequest())
    nodes = [
        {
            "node": each.node.name,
            "address": each.node.address,
            "group": each.node.group,
            "state": enum_name(control_pb2.NodeState, each.state).lower(),
            "versions": [each.versions.oldest.number, each.versions.newest.number],
            "plan_epoch": each.plan_epoch,
            "staleness_ms": each.staleness_ms,
            "last_beat_ms": each.last_beat_ms,
        }
        for each in status.nodes
    ]
    newest = [node["versions"][1] for node in nodes if node["versions"][1]]
    known = status.HasField("newest_committed")
    committed = status.newest_committed.number if known else None
    return {
        "plan_epoch": status.plan_epoch,
        "open": caller.open,
        "nodes": nodes,
        "newest_committed": committed,
        "versions_behind": max(*newest, committed or 0) - min(newest) if newest else 0,
        **_devices(caller),
    }


def _devices(caller: Caller) -> dict[str, Any]:
    """Return the devices of the plan with what they own and read, and the skew of each group."""
    try:
        plan = caller.plan()
    except CallError as error:
        if error.code != "NOT_FOUND":
            raise
        return {"devices": [], "skew": {}, "reads": []}
    load = caller.call("GetFleetLoad", control_pb2.GetFleetLoadRequest(hot_keys=1), 10.0)
    workload = measured(plan.topology, {each.node: each.load for each in load.nodes})
    layout = layout_of(plan.assignments)
    work = device_work(plan.topology, layout, workload)
    owned: collections.Counter[Place] = collections.Counter()
    moving: collections.Counter[Place] = collections.Counter()
    for held in layout.values():
        owned.update(held.owners)
        moving.update((*held.joining, *held.leaving))
    groups: dict[int, list[int]] = collections.defaultdict(list)
    for at, each in work.items():
        groups[plan.topology.nodes[at.node].group].append(each.reads)
    return {
        "devices": [
            {
                "device": place_name(plan.topology, at),
                "group": plan.topology.nodes[at.node].group,
                "buckets": owned[at],
                "moving": moving[at],
                "reads": each.reads,
                "bytes": each.bytes,
            }
            for at, each in sorted(work.items())
        ],
        "skew": {str(group): round(skew(reads), 3) for group, reads in sorted(groups.items())},
        "reads": [_reads(each) for each in load.nodes],
    }


def _reads(node: control_pb2.NodeLoad) -> dict[str, Any]:
    """Return where a node's own requests were answered in the last load window."""
    buckets = node.load.buckets
    here = sum(each.reads - each.peer_reads for each in buckets)
    hot = sum(each.hot_reads for each in buckets)
    asked = sum(each.asked for each in buckets)
    calls = sum(each.calls for each in node.load.peers)
    round_trips_us = sum(each.round_trip_us for each in node.load.peers)
    return {
        "node": node.node,
        "own": here + hot + asked,
        "here": here,
        "hot": hot,
        "asked": asked,
        "for_peers": sum(each.peer_reads for each in buckets),
        "peer_calls": calls,
        "peer_round_trip_us": round(round_trips_us / calls) if calls else 0,
    }


def _committed(facts: dict[str, Any]) -> str:
    newest = facts["newest_committed"]
    return f"version {newest:,} committed" if newest else "newest commit not known"


def show_nodes(facts: dict[str, Any]) -> None:
    """Print the nodes, and below them their addresses, whole."""
    table = folding(
        *("node", "group", "state", "versions", "plan", "staleness", "last beat"), names=("node",)
    )
    for node in facts["nodes"]:
        oldest, newest = node["versions"]
        table.add_row(
            node["node"],
            str(node["group"]),
            node["state"],
            f"{oldest}-{newest}" if newest else "none",
            str(node["plan_epoch"]),
            f"{node['staleness_ms'] / 1000:.1f} s",
            f"{node['last_beat_ms']} ms ago",
        )
    rich.console.Console().print(table)
    for node in facts["nodes"]:  # of a cluster's they have 60 characters and more
        typer.echo(f"{node['node']} is at {node['address']}")


def show_devices(facts: dict[str, Any]) -> None:
    """Print the devices, and how unevenly they are read."""
    table = folding(
        *("device", "group", "buckets", "on their way", "reads", "bytes"), names=("device",)
    )
    for each in facts["devices"]:
        numbers = (each["group"], each["buckets"], each["moving"], each["reads"], each["bytes"])
        table.add_row(each["device"], *(f"{number:,}" for number in numbers))
    if facts["devices"]:
        rich.console.Console().print(table)
    for group, value in facts["skew"].items():
        typer.echo(f"group {group}: max/mean of reads {value:.2f}")


def show_reads(facts: dict[str, Any]) -> None:
    """Print where the nodes' own requests were answered."""
    table = folding(
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
        rich.console.Console().print(table)


def show_fleet(facts: dict[str, Any]) -> None:
    """Print all of it."""
    epoch = facts["plan_epoch"]
    typer.echo(
        (f"plan {epoch}" if epoch else "no plan yet: it waits for nodes to register")
        + f", {_committed(facts)}, nodes at most {facts['versions_behind']} versions behind"
        + ("; OPEN: the control plane asks nobody for a token" if facts["open"] else "")
    )
    show_nodes(facts)
    show_devices(facts)
