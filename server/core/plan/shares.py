"""Shares of tiers: bytes of DDR that a table may take on a device, as a plan gives them.

A table without a share on a device takes what the shares of others leave there. In messages that
change a plan, 0 bytes take a share away.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from embertide.server.core.errors import invalid
from embertide.server.core.plan.layout import Place, devices, owner, place, place_name
from embertide.v1 import plan_pb2

# As kMinDdrShareBytes of the store.
SHARE_BYTES_MIN = 64 * 1024


class ShareKey(NamedTuple):
    """The device, tier and table of a share; ascending as in a plan."""

    device: Place
    tier: plan_pb2.Tier.ValueType
    table: int


TierShares = Mapping[ShareKey, int]  # bytes


def tier_budget(device: plan_pb2.Device, tier: plan_pb2.Tier.ValueType) -> int:
    """Return the budget of one tier of a device; 0: it has none."""
    return sum(each.budget_bytes for each in device.budgets if each.tier == tier)


def shares_of(messages: Iterable[plan_pb2.TierShare]) -> dict[ShareKey, int]:
    """Read shares; of one that stands twice the last counts."""
    return {ShareKey(place(each.device), each.tier, each.table_id): each.bytes for each in messages}


def messages_of(shares: TierShares) -> list[plan_pb2.TierShare]:
    """Write shares, ascending."""
    return [
        plan_pb2.TierShare(
            device=owner(each.device), tier=each.tier, table_id=each.table, bytes=shares[each]
        )
        for each in sorted(shares)
    ]


def _fault(plan: plan_pb2.Plan, what: ShareKey, size: int) -> str | None:
    """Return why a device cannot give a share; None: it can, if others leave it room."""
    device = devices(plan.topology).get(what.device)
    if device is None:
        return f"node {what.device.node}, device {what.device.device} does not exist"
    if what.tier != plan_pb2.TIER_DDR:
        name = plan_pb2.Tier.Name(what.tier).removeprefix("TIER_")
        return f"{name} cannot be shared out; only DDR can"
    if size < SHARE_BYTES_MIN:
        return f"{size:,} bytes; at least {SHARE_BYTES_MIN:,}"
    if not tier_budget(device, plan_pb2.TIER_SSD):
        return "the device has no SSD tier, so that no row can leave DDR; give it an SSD budget"
    return None


def _name(plan: plan_pb2.Plan, what: ShareKey) -> str:
    names = {table.id: table.name for table in plan.tables}
    table = repr(names.get(what.table, what.table))
    at = what.device
    known = at in devices(plan.topology)
    where = place_name(plan.topology, at) if known else f"{at.node}/{at.device}"
    return f"share of table {table} on device {where}"


def check_shares(plan: plan_pb2.Plan, messages: Iterable[plan_pb2.TierShare]) -> None:
    """Prove that the tables and devices of a plan can have these shares.

    Raises:
        RefusedError: They cannot; the message names the share, its value and what to change.
    """
    tables = {table.id for table in plan.tables}
    known = devices(plan.topology)
    seen: set[ShareKey] = set()
    shared_out: dict[Place, int] = {}
    for each in messages:
        what = ShareKey(place(each.device), each.tier, each.table_id)
        if what.table not in tables:
            raise invalid(f"share of table {what.table}, which does not exist")
        if what in seen:
            raise invalid(f"{_name(plan, what)} stands twice")
        seen.add(what)
        if fault := _fault(plan, what, each.bytes):
            raise invalid(f"{_name(plan, what)}: {fault}")
        budget = tier_budget(known[what.device], what.tier)
        shared_out[what.device] = shared_out.get(what.device, 0) + each.bytes
        if shared_out[what.device] > budget:
            raise invalid(
                f"{_name(plan, what)}: with the shares before it, {shared_out[what.device]:,} "
                f"bytes exceed the DDR budget of {budget:,}; lower some"
            )


def changed(plan: plan_pb2.Plan, wanted: TierShares) -> dict[ShareKey, int]:
    """Return those of `wanted` that differ from the plan.

    Raises:
        RefusedError: With them the plan would have impossible shares.
    """
    now = shares_of(plan.tier_shares)
    new = {what: size for what, size in wanted.items() if now.get(what, 0) != size}
    if new:
        check_shares(plan, messages_of(_with(now, new)))
    return new


def before(plan: plan_pb2.Plan, of: Iterable[ShareKey]) -> dict[ShareKey, int]:
    """Return what a plan says of shares."""
    now = shares_of(plan.tier_shares)
    return {what: now.get(what, 0) for what in of}


def give(plan: plan_pb2.Plan, wanted: TierShares) -> None:
    """Change a plan's shares."""
    after = _with(shares_of(plan.tier_shares), wanted)
    del plan.tier_shares[:]
    plan.tier_shares.extend(messages_of(after))


def drop_impossible(plan: plan_pb2.Plan) -> None:
    """Take shares away from devices whose budgets no longer hold them, as a topology changes."""
    now = shares_of(plan.tier_shares)
    known = devices(plan.topology)
    total: dict[Place, int] = {}
    for what, size in now.items():
        total[what.device] = total.get(what.device, 0) + size
    kept = {
        what: size
        for what, size in now.items()
        if _fault(plan, what, size) is None
        and total[what.device] <= tier_budget(known[what.device], what.tier)
    }
    del plan.tier_shares[:]
    plan.tier_shares.extend(messages_of(kept))


def _with(now: TierShares, wanted: TierShares) -> dict[ShareKey, int]:
    return {what: size for what, size in {**now, **wanted}.items() if size}
