"""When a plan is valid: the six rules and the limits of plan.proto.

Each check raises a refusal that names the rule, the table and the bucket.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence, Set

import numpy as np

from embertide._common.quoting import check_text, is_name, shown
from embertide.server.core.errors import RefusedError, invalid
from embertide.server.core.plan.hot import check_hot_rows
from embertide.server.core.plan.layout import (
    Bucket,
    Codes,
    Holders,
    LaidPlan,
    bucket_name,
    holders,
)
from embertide.server.core.plan.shares import check_shares
from embertide.v1 import plan_pb2

NODES_MAX = 1024
DEVICES_MAX = 16
OWNERS_MAX = 64
NAME_BYTES_MAX = 64
ADDRESS_BYTES_MAX = 255
BUCKET_BITS_MAX = 17
CHUNKS_MAX = 16
PLAN_BYTES_MAX = 16 << 20  # as one message
PLAN_RUNS_MAX = 1 << 20  # in chunks
_ADDRESS = re.compile(r"[^\s/]+:(\d{1,5})")


def check_name(what: str, name: str) -> None:
    """Prove that a name is 1 to 64 bytes."""
    size = len(name.encode())
    if not 0 < size <= NAME_BYTES_MAX:
        raise invalid(f"{what} {name[:80]!r} is {size} bytes; use 1 to {NAME_BYTES_MAX}")


def check_model_name(name: str) -> None:
    """Prove that a name may be a model's."""
    check_name("model", name)
    try:
        check_text("model", name)
    except ValueError as error:
        raise invalid(str(error)) from error


def check_node_name(what: str, name: str) -> None:
    """Prove that a name may be a node's: it becomes a part of keys, labels and file names."""
    if not is_name(name) or len(name) > NAME_BYTES_MAX:
        raise invalid(
            f"{what} {shown(name)} is no name; use 1 to {NAME_BYTES_MAX} of A-Z a-z 0-9 . _ -"
        )


def check_tables(tables: Sequence[plan_pb2.PlannedTable]) -> None:
    """Prove that tables can be planned for."""
    if not tables:
        raise invalid("tables is empty; name the model's tables")
    for before, table in zip([None, *tables], tables, strict=False):
        check_name("table", table.name)
        if before is not None and before.id >= table.id:
            raise invalid(f"table {table.name!r}: id {table.id} follows {before.id}; sort by id")
        if table.bucket_bits > BUCKET_BITS_MAX:
            raise invalid(
                f"table {table.name!r}: bucket_bits is {table.bucket_bits}; at most "
                f"{BUCKET_BITS_MAX}"
            )
        if not 1 <= table.chunks <= CHUNKS_MAX:
            raise invalid(f"table {table.name!r}: chunks is {table.chunks}; use 1 to {CHUNKS_MAX}")


def check_node(node: plan_pb2.Node) -> None:
    """Prove that a node can be planned for."""
    check_node_name("node", node.name)
    port = _ADDRESS.fullmatch(node.address)
    if len(node.address) > ADDRESS_BYTES_MAX or not port or not 0 < int(port[1]) < 1 << 16:
        raise invalid(f"node {node.name!r}: address is {node.address[:80]!r}; use HOST:PORT")
    if not 0 < len(node.devices) <= DEVICES_MAX:
        raise invalid(f"node {node.name!r} has {len(node.devices)} devices; use 1 to {DEVICES_MAX}")
    for index, device in enumerate(node.devices):
        where = f"node {node.name!r}, device {device.index}"
        if device.index != index:
            raise invalid(f"{where}: stands at position {index}; list devices from 0 on")
        if device.kind not in (plan_pb2.DEVICE_KIND_CPU, plan_pb2.DEVICE_KIND_GPU):
            raise invalid(f"{where}: kind is not said; use CPU or GPU")
        tiers = [budget.tier for budget in device.budgets]
        if not tiers or plan_pb2.TIER_UNSPECIFIED in tiers or len(set(tiers)) < len(tiers):
            raise invalid(f"{where}: budgets name tiers {tiers}; name each used tier once")


@dataclasses.dataclass(frozen=True, slots=True)
class _Machines:
    """The topology as rules 2 and 3 need it. `groups` are those that must own every bucket."""

    device_counts: Sequence[int]
    group_of: Sequence[int]
    groups: Set[int]

    def fault(self, held: Holders) -> tuple[str, str] | None:
        """Return the rule that an assignment breaks, and how; None: none of them."""
        named = [*held.owners, *held.joining, *held.leaving]
        for at in named:
            counts = self.device_counts
            if at.node >= len(counts) or at.device >= counts[at.node]:
                return "rule 2", f"node {at.node}, device {at.device} does not exist"
        if len(set(named)) < len(named):
            return "rule 2", "a device is named twice"
        owning = {at.node for at in held.owners}
        if len(owning) < len(held.owners):
            return "rule 2", "a node stands twice among its owners"
        if len(owning) > OWNERS_MAX:
            return "limit", f"it has {len(owning)} owners; at most {OWNERS_MAX}"
        if not held.owners:
            return "rule 1", "it has no owner"
        missing = self.groups - {self.group_of[node] for node in owning}
        return ("rule 3", f"group {min(missing)} has no owner") if missing else None


def check_run(tables: Sequence[plan_pb2.PlannedTable], assignment: plan_pb2.Assignment) -> None:
    """Prove that an assignment names buckets that exist, whole."""
    table = next((each for each in tables if each.id == assignment.table_id), None)
    if table is None:
        ids = [each.id for each in tables]
        raise invalid(f"table {assignment.table_id} does not exist; the plan has {ids}")
    end = assignment.bucket_begin + assignment.bucket_count
    run = f"table {table.name!r}: buckets {assignment.bucket_begin} to {end - 1}"
    if assignment.bucket_count == 0 or end > 1 << table.bucket_bits:
        last = (1 << table.bucket_bits) - 1
        raise invalid(f"{run} are not among its {last + 1}; use 0 to {last}")
    if assignment.chunk_begin != 0 or assignment.chunk_count not in (0, table.chunks):
        raise invalid(f"{run}: serving holds rows whole; leave chunk_begin and chunk_count at 0")


def _check_cover(plan: plan_pb2.Plan) -> None:
    """Prove rule 1."""
    at, begin = 0, 0
    for each in plan.assignments:
        while at < len(plan.tables) and begin == 1 << plan.tables[at].bucket_bits:
            at, begin = at + 1, 0
        if at == len(plan.tables):
            raise invalid(f"rule 1: table {each.table_id} is assigned twice or out of order")
        table = plan.tables[at]
        if (each.table_id, each.bucket_begin) != (table.id, begin):
            raise invalid(
                f"rule 1: table {table.name!r}: bucket {begin} is not assigned exactly once, in "
                "order"
            )
        begin += each.bucket_count
    if at < len(plan.tables) - 1 or begin != 1 << plan.tables[at].bucket_bits:
        raise invalid(f"rule 1: table {plan.tables[at].name!r}: bucket {begin} has no owner")


def _machines(topology: plan_pb2.Topology) -> _Machines:
    group_of = [node.group for node in topology.nodes]
    whole = frozenset(group_of) - set(topology.partial_groups)
    return _Machines([len(node.devices) for node in topology.nodes], group_of, whole)


def _check_groups(topology: plan_pb2.Topology) -> None:
    """Prove what rule 3 says of partial groups."""
    known, partial = {node.group for node in topology.nodes}, list(topology.partial_groups)
    if partial != sorted(set(partial)) or not known.issuperset(partial):
        raise invalid(
            f"rule 3: partial_groups are {partial}; name groups that have nodes, in order"
        )
    if known == set(partial):
        raise invalid("rule 3: no group owns every bucket; leave one out of partial_groups")


def _check_head(head: plan_pb2.Plan, previous_epoch: int) -> None:
    """Prove all rules but those about assignments."""
    if head.epoch <= previous_epoch:
        raise invalid(f"rule 4: epoch {head.epoch} does not follow {previous_epoch}")
    check_tables(head.tables)
    names = [node.name for node in head.topology.nodes]
    if not 0 < len(names) <= NODES_MAX or len(set(names)) < len(names):
        raise invalid(f"topology has {len(names)} nodes, named once each: 1 to {NODES_MAX}")
    for node in head.topology.nodes:
        check_node(node)
    _check_groups(head.topology)
    try:
        check_hot_rows(head.tables, head.hot_rows)
    except RefusedError as error:
        raise invalid(f"rule 5: {error.message}") from error
    try:
        check_shares(head, head.tier_shares)
    except RefusedError as error:
        raise invalid(f"rule 6: {error.message}") from error


def _check_holders(head: plan_pb2.Plan, machines: _Machines, at: Bucket, held: Holders) -> None:
    fault = machines.fault(held)
    if fault is not None:
        raise invalid(f"{fault[0]}: {bucket_name(head.tables, at)}: {fault[1]}")


def check_laid(after: LaidPlan, before: LaidPlan | None) -> None:
    """Prove that a plan may replace the one before it, which has been proved.

    Looks only at what differs where both have the same machines, tables and kind of codes.

    Raises:
        RefusedError: It may not; the message names the rule.
    """
    head, layout = after
    same = (
        before is not None
        and layout.comparable(before.layout)
        and head.topology == before.head.topology
        and head.tables == before.head.tables
        and head.hot_rows == before.head.hot_rows
        and head.tier_shares == before.head.tier_shares
    )
    if not same or before is None:
        _check_head(head, before.head.epoch if before is not None else 0)
        _check_sizes(after)
    elif head.epoch <= before.head.epoch:
        raise invalid(f"rule 4: epoch {head.epoch} does not follow {before.head.epoch}")
    machines = _machines(head.topology)
    for table, codes in layout.codes.items():
        old = before.layout.codes[table] if same and before is not None else None
        for bucket, code in _firsts(codes, old):
            held = layout.of_codes(codes[bucket : bucket + 1])[0] if code >= 0 else Holders(())
            _check_holders(head, machines, Bucket(table, bucket), held)
    if (runs := layout.run_count()) > PLAN_RUNS_MAX:
        raise invalid(f"the plan has {runs:,} runs of buckets; at most {PLAN_RUNS_MAX:,}")


def _firsts(codes: Codes, old: Codes | None) -> Iterator[tuple[int, int]]:
    """Yield each distinct code among those that changed, with the first bucket that has it."""
    if codes is old:
        return
    at = np.flatnonzero(codes != old) if old is not None else np.arange(len(codes))
    if not len(at):
        return
    values, firsts = np.unique(codes[at], return_index=True)
    order = np.argsort(firsts)
    yield from zip(at[firsts[order]].tolist(), values[order].tolist(), strict=True)


def _check_sizes(plan: LaidPlan) -> None:
    """Prove rule 1 as far as which buckets there are."""
    wanted = {table.id: 1 << table.bucket_bits for table in plan.head.tables}
    for table, codes in plan.layout.codes.items():
        if len(codes) > wanted.get(table, 0):
            at = Bucket(table, wanted.get(table, 0))
            raise invalid(f"rule 1: {bucket_name(plan.head.tables, at)} does not exist")
    for table, count in wanted.items():
        laid = len(plan.layout.codes.get(table, ()))
        if laid < count:
            at = Bucket(table, laid)
            raise invalid(f"rule 1: {bucket_name(plan.head.tables, at)} has no owner")


def check_plan(plan: plan_pb2.Plan, *, previous_epoch: int) -> None:
    """Prove that a whole plan may replace the one of `previous_epoch`.

    Raises:
        RefusedError: It may not; the message names the rule.
    """
    _check_head(plan, previous_epoch)
    machines = _machines(plan.topology)
    for each in plan.assignments:
        try:
            check_run(plan.tables, each)
        except RefusedError as error:
            raise invalid(f"rule 1: {error.message}") from error
        _check_holders(plan, machines, Bucket(each.table_id, each.bucket_begin), holders(each))
    _check_cover(plan)
    if plan.ByteSize() > PLAN_BYTES_MAX:
        raise invalid(f"the plan is {plan.ByteSize()} bytes encoded; at most {PLAN_BYTES_MAX}")
