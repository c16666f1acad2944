"""The devices that own a key by a plan."""

from collections.abc import Sequence

from embertide import _store
from embertide.server.core.errors import Code, RefusedError
from embertide.v1 import plan_pb2


def bucket_of_key(key: int, bits: int) -> int:
    """Return the bucket of a key: the top bits of its hash."""
    return (_store.hash_key(key) >> (64 - bits)) if bits else 0


def owners_of_key(plan: plan_pb2.Plan, table: str, key: int) -> Sequence[plan_pb2.Owner]:
    """Return the owners of a key, those to be asked first before others.

    Raises:
        RefusedError: No such table.
    """
    planned = next((each for each in plan.tables if each.name == table), None)
    if planned is None:
        names = ", ".join(each.name for each in plan.tables)
        raise RefusedError(Code.NOT_FOUND, f"no table {table[:80]!r}; the model has {names}")
    bucket = bucket_of_key(key, planned.bucket_bits)
    for each in plan.assignments:
        past = bucket - each.bucket_begin
        if each.table_id == planned.id and 0 <= past < each.bucket_count:
            return each.owners
    return ()
