"""Bootstrap: the first plan of a fleet, which no operation makes."""

from collections.abc import Iterable, Mapping, Sequence

from embertide.server.core.plan.layout import Place, budget_bytes, owner
from embertide.server.core.plan.spread import Run, Site, spread
from embertide.v1 import control_pb2, plan_pb2


def sites_of(nodes: Sequence[plan_pb2.Node], group: int) -> list[Site]:
    """Return the devices of a group; positions are those in `nodes`."""
    return [
        Site(
            place=Place(at, device.index),
            name=f"{node.name}/{device.index}",
            bytes=budget_bytes(device),
        )
        for at, node in enumerate(nodes)
        if node.group == group
        for device in node.devices
    ]


def first_plan(
    nodes: Iterable[plan_pb2.Node],
    tables: Sequence[plan_pb2.PlannedTable],
    table_bytes: Mapping[int, int] | None = None,
) -> plan_pb2.Plan:
    """Give each device of each group a share of every table, by its byte budget.

    Raises:
        RefusedError: The tables do not fit into a group's budgets.
    """
    ordered = sorted(nodes, key=lambda node: (node.group, node.name))
    groups = sorted({node.group for node in ordered})
    spreads = [spread(tables, sites_of(ordered, group), table_bytes) for group in groups]
    return plan_pb2.Plan(
        epoch=1,
        tables=tables,
        topology=plan_pb2.Topology(nodes=ordered),
        assignments=[
            assignment
            for table in tables
            for assignment in _assignments(table.id, [each[table.id] for each in spreads])
        ],
        planner="first",
    )


def table_bytes(
    registrations: Iterable[control_pb2.RegisterNodeRequest],
) -> dict[int, int] | None:
    """Return what nodes say that tables take, the largest of each; None: no node says."""
    sizes: dict[int, int] = {}
    for each in registrations:
        for table, size in zip(each.tables, each.table_bytes, strict=False):
            sizes[table.id] = max(size, sizes.get(table.id, 0))
    return sizes if any(sizes.values()) else None


def _assignments(table: int, of_groups: Sequence[Sequence[Run]]) -> Iterable[plan_pb2.Assignment]:
    """Yield the runs of buckets in which the owners of all groups stay the same."""
    begins = sorted({run.begin for runs in of_groups for run in runs})
    end = of_groups[0][-1].begin + of_groups[0][-1].count
    at_run = [0] * len(of_groups)
    for begin, after in zip(begins, [*begins[1:], end], strict=True):
        for group, runs in enumerate(of_groups):
            run = runs[at_run[group]]
            at_run[group] += begin >= run.begin + run.count
        yield plan_pb2.Assignment(
            table_id=table,
            bucket_begin=begin,
            bucket_count=after - begin,
            owners=[owner(runs[at].place) for at, runs in zip(at_run, of_groups, strict=True)],
        )
