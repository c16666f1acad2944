"""The figures of a fleet that people look at: one source for commands, the console and metrics."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from embertide.server.core.errors import Code, RefusedError, invalid
from embertide.server.core.loads import hottest
from embertide.server.core.plan.bucket_columns import BucketColumns, FleetColumns
from embertide.server.core.plan.fleet_figures import (
    device_figures,
    range_figures,
    table_reads,
    unowned_buckets,
)
from embertide.server.core.plan.layout import PackedLayout
from embertide.v1 import control_pb2, node_pb2, plan_pb2

RANGES_MAX = 1024
SLOW_MAX = 1000
ALL_RANGES_MAX = 4096
_Slow = TypeVar("_Slow", node_pb2.SlowRequest, node_pb2.SlowLookup)


class FleetSnapshot(NamedTuple):
    """A fleet at one time. Nothing in it changes any more.

    Attributes:
        plan: Its plan without assignments; None: there is none.
        layout: Who owns what.
        no_plan: Why there is no plan; empty: there is one.
        living: Names of the nodes that live.
        loads_version: Of the loads (loads.py).
        loads: The last loads, by node name.
        columns: What they say of buckets.
    """

    plan: plan_pb2.Plan | None
    layout: PackedLayout
    no_plan: str
    living: frozenset[str]
    loads_version: int
    loads: Mapping[str, node_pb2.NodeServiceGetLoadResponse]
    columns: Mapping[str, BucketColumns]

    def same_plan(self, other: "FleetSnapshot") -> bool:
        """Whether nothing is different but loads."""
        return (
            self.layout is other.layout
            and self.plan is other.plan
            and (self.no_plan, self.living) == (other.no_plan, other.living)
        )

    def same(self, other: "FleetSnapshot") -> bool:
        """Whether the figures of both are the same."""
        return self.same_plan(other) and self.loads_version == other.loads_version


class FleetFigures:
    """Answers of one snapshot. Sums over all buckets are made once. Used by one thread at a time.

    Attributes:
        snapshot: What they are made of.
    """

    def __init__(self, snapshot: FleetSnapshot) -> None:
        """Take it; nothing is made yet."""
        self.snapshot = snapshot

    @functools.cached_property
    def _joined(self) -> FleetColumns:
        return FleetColumns.of(self.snapshot.columns)

    @functools.cached_property
    def _of_all(self) -> control_pb2.GetFleetFiguresResponse:
        """The part that every answer has."""
        plan, fleet = self.snapshot.plan, self.snapshot
        if plan is None:
            return control_pb2.GetFleetFiguresResponse(no_plan=fleet.no_plan)
        unowned, in_groups = unowned_buckets(plan.topology, fleet.layout, fleet.living)
        return control_pb2.GetFleetFiguresResponse(
            plan_epoch=plan.epoch,
            tables=plan.tables,
            devices=_devices(plan.topology, fleet.layout, self._joined),
            nodes=sorted(_nodes(fleet.loads, self._joined), key=lambda each: each.node),
            buckets_unowned=unowned,
            unowned_in_groups=[
                control_pb2.UnownedInGroup(group=group, buckets=count)
                for group, count in in_groups.items()
            ],
        )

    def answer(
        self, request: control_pb2.GetFleetFiguresRequest
    ) -> control_pb2.GetFleetFiguresResponse:
        """Return the figures that a request asks for.

        Raises:
            RefusedError: It asks for too much, or for a table that there is not.
        """
        if request.ranges > RANGES_MAX:
            raise invalid(f"ranges is {request.ranges}; at most {RANGES_MAX}")
        fleet, plan = self.snapshot, self.snapshot.plan
        hot_keys = hottest(fleet.loads.values(), request.hot_keys)
        slow = _slow_requests(fleet, request.slow_requests)
        lookups = _slow_lookups(fleet, request.slow_requests)
        answer = control_pb2.GetFleetFiguresResponse()
        answer.CopyFrom(self._of_all)
        if plan is None:
            return answer
        columns = self._joined.columns
        answer.ranges.extend(_ranges(_chosen(plan.tables, request.tables), columns, request.ranges))
        answer.hot_keys.extend(hot_keys)
        answer.slow_requests.extend(slow)
        answer.slow_lookups.extend(lookups)
        answer.bucket_loads.extend(_bucket_loads(fleet, request))
        if request.table_reads:
            answer.table_reads.extend(_table_reads(plan.tables, columns))
        return answer


def _devices(
    topology: plan_pb2.Topology, layout: PackedLayout, fleet: FleetColumns
) -> list[control_pb2.DeviceFigures]:
    figures = device_figures(topology, layout, fleet)
    return [
        control_pb2.DeviceFigures(
            node=topology.nodes[at.node].name,
            device=at.device,
            group=topology.nodes[at.node].group,
            buckets=each.buckets,
            moving=each.moving,
            reads=each.reads,
            bytes=each.bytes,
        )
        for at, each in sorted(figures.items())
    ]


def _nodes(
    loads: Mapping[str, node_pb2.NodeServiceGetLoadResponse], fleet: FleetColumns
) -> Iterator[control_pb2.NodeFigures]:
    columns = fleet.columns
    sums = (
        columns.reads,
        columns.hot_reads,
        columns.asked,
        columns.peer_reads,
        columns.in_tier.sum(axis=0),
        columns.in_ssd,
    )
    for name, reads, hot, asked, for_peers, in_tiers, in_ssd in zip(
        fleet.names, *map(fleet.by_node, sums), strict=True
    ):
        load = loads[name]
        yield control_pb2.NodeFigures(
            node=name,
            window_ms=load.window_ms,
            requests=load.requests,
            request_us=load.request_us,
            cpu_us=load.cpu_us,
            here=max(0, reads - for_peers),
            hot=hot,
            asked=asked,
            for_peers=for_peers,
            in_tiers=in_tiers,
            in_ssd=in_ssd,
            peer_calls=sum(each.calls for each in load.peers),
            peer_round_trip_us=sum(each.round_trip_us for each in load.peers),
        )


def _chosen(
    tables: Sequence[plan_pb2.PlannedTable], names: Sequence[str]
) -> list[plan_pb2.PlannedTable]:
    """Return the tables of these names; all, if there are none.

    Raises:
        RefusedError: There is no such table.
    """
    known = {table.name for table in tables}
    if wrong := [name for name in names if name not in known]:
        listed = ", ".join(sorted(known)[:20])
        raise RefusedError(Code.NOT_FOUND, f"no such table: {wrong[0][:80]!r}; there is {listed}")
    return [table for table in tables if not names or table.name in names]


def _ranges(
    tables: Sequence[plan_pb2.PlannedTable], columns: BucketColumns, wanted: int
) -> list[control_pb2.BucketRange]:
    if not wanted or not tables:
        return []
    ranges = min(wanted, max(1, ALL_RANGES_MAX // len(tables)))
    figures = range_figures(tables, columns, ranges)
    return [
        control_pb2.BucketRange(
            table_id=table.id,
            bucket_begin=begin,
            bucket_count=count,
            reads=max(0, reads),
            max_reads=max(0, max_reads),
            asked=asked,
            in_ssd=in_ssd,
            bytes=size,
        )
        for table in tables
        for begin, count, reads, max_reads, asked, in_ssd, size in zip(
            *(column.tolist() for column in figures[table.id]), strict=True
        )
    ]


def _bucket_loads(
    fleet: FleetSnapshot, request: control_pb2.GetFleetFiguresRequest
) -> Iterator[control_pb2.BucketLoadOfNode]:
    """Yield what nodes reported of the bucket that a request names, by node."""
    if not request.HasField("bucket"):
        return
    at = request.bucket
    for name in sorted(fleet.loads):
        columns = fleet.columns[name]
        found = np.flatnonzero((columns.table == at.table_id) & (columns.bucket == at.bucket))
        for index in found[:1].tolist():  # columns are in the order of the load's buckets
            yield control_pb2.BucketLoadOfNode(node=name, load=fleet.loads[name].buckets[index])


def _table_reads(
    tables: Iterable[plan_pb2.PlannedTable], columns: BucketColumns
) -> Iterator[control_pb2.TableReads]:
    """Yield the reads of each bucket of each table, over all nodes."""
    for table, (reads, bytes_read) in table_reads(tables, columns).items():
        yield control_pb2.TableReads(
            table_id=table, reads=reads.tolist(), bytes_read=bytes_read.tolist()
        )


def _slow_requests(fleet: FleetSnapshot, count: int) -> list[control_pb2.SlowRequestOfNode]:
    """Return the slowest requests of all nodes, slowest first.

    Raises:
        RefusedError: More are wanted than are shown.
    """
    if count > SLOW_MAX:
        raise invalid(f"slow_requests is {count}; at most {SLOW_MAX}")
    found = _slowest(
        ((name, each) for name, load in fleet.loads.items() for each in load.slow), count
    )
    return [control_pb2.SlowRequestOfNode(node=name, request=each) for name, each in found]


def _slow_lookups(fleet: FleetSnapshot, count: int) -> list[control_pb2.SlowLookupOfNode]:
    """Return the slowest look-ups that nodes made for peers, slowest first."""
    found = _slowest(
        ((name, each) for name, load in fleet.loads.items() for each in load.slow_lookups), count
    )
    return [control_pb2.SlowLookupOfNode(node=name, lookup=each) for name, each in found]


def _slowest(found: Iterable[tuple[str, _Slow]], count: int) -> list[tuple[str, _Slow]]:
    """Return what took longest, with the names of the nodes."""
    if not count:
        return []
    return sorted(found, key=lambda each: (-each[1].whole_us, each[0]))[:count]
