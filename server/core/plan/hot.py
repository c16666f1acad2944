"""Room for hot rows: what a plan gives tables, and how an operation changes it.

A table without a limit shares each node's own budget with the others that have none. In messages
that change a plan, NO_LIMIT says that.
"""

from collections.abc import Iterable, Mapping

from embertide.server.core.errors import invalid
from embertide.v1 import plan_pb2

NO_LIMIT = 0xFFFF_FFFF
HotRows = Mapping[int, int]  # rows a node, by table id


def hot_rows_of(messages: Iterable[plan_pb2.HotRows]) -> dict[int, int]:
    """Read limits; of a table that stands twice the last counts."""
    return {each.table_id: each.rows for each in messages}


def messages_of(limits: HotRows) -> list[plan_pb2.HotRows]:
    """Write limits, ascending by table."""
    return [plan_pb2.HotRows(table_id=id, rows=limits[id]) for id in sorted(limits)]


def check_hot_rows(
    tables: Iterable[plan_pb2.PlannedTable], messages: Iterable[plan_pb2.HotRows]
) -> None:
    """Prove that limits are of tables that exist, one each.

    Raises:
        RefusedError: They are not; the message names the table.
    """
    known = {table.id for table in tables}
    seen: set[int] = set()
    for each in messages:
        if each.table_id not in known:
            raise invalid(f"hot rows of table {each.table_id}, which does not exist")
        if each.table_id in seen:
            raise invalid(f"hot rows of table {each.table_id} stand twice")
        seen.add(each.table_id)


def changed(plan: plan_pb2.Plan, wanted: HotRows) -> dict[int, int]:
    """Return those of `wanted` that differ from the plan."""
    now = hot_rows_of(plan.hot_rows)
    return {id: rows for id, rows in wanted.items() if now.get(id, NO_LIMIT) != rows}


def before(plan: plan_pb2.Plan, tables: Iterable[int]) -> dict[int, int]:
    """Return what a plan says of tables."""
    now = hot_rows_of(plan.hot_rows)
    return {id: now.get(id, NO_LIMIT) for id in tables}


def give(plan: plan_pb2.Plan, wanted: HotRows) -> None:
    """Change a plan's limits."""
    limits = {**hot_rows_of(plan.hot_rows), **wanted}
    del plan.hot_rows[:]
    plan.hot_rows.extend(messages_of({id: rows for id, rows in limits.items() if rows != NO_LIMIT}))
