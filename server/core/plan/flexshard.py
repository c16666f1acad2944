"""The planner `flexshard`: rows of sequences where they cross nodes least (after FlexShard, 2023).

Every row of a sequence must reach the asker, so no sum makes its traffic less. Inside a node it is
cheap, across nodes it is not. A row of such a table lies in one of three ways, by how often it is
read:

1. copied: each node keeps a copy (room for hot rows, docs/design/0013);
2. held by every node: its bucket has an owner on each node of the group, on one of its devices;
3. owned once in the group.

Rows are copied in the order of the traffic that they save for a byte, over all tables, until the
bytes that a node has for copies are used: the first cut. Buckets are then held by every node, where
that lowers the busiest link most, until the budgets of devices are used: the second cut. Small
problems choose these buckets by a mixed-integer program (HiGHS). Each choice depends on the other,
so both are made twice, from either side. Tables whose owners answer with sums keep what they have.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import scipy

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.instance import (
    Bools,
    Floats,
    Instance,
    Ints,
    instances,
    owners_of,
)
from embertide.server.core.plan.layout import Bucket, Place
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.row_reads import RowReads
from embertide.server.core.plan.validity import OWNERS_MAX

Copies = Mapping[int, float]  # rows a node, by table

# The bytes for copies that `embertide serve` gives a node; a node keeps no more than its own budget
# holds.
COPY_BYTES = 32 << 20
# Beside its payload, a copy takes its key, its place in the set and its part of a page.
COPY_OVERHEAD = 96
# Below it, a table's keys are read one by one: as sequences.
SUMS_MAX = 0.5
# Less of the busiest link is not worth an operation.
WORTH_MIN = 0.02
# Buckets x devices up to which they are chosen exactly.
_EXACT_MAX = 400
_FEW = 6  # buckets of which every choice is tried
_STARTS_MAX = 8  # tables that a choice begins with
_WEIGHED = 12  # times that nodes are weighed anew
_ROUNDS = 60  # of halving the interval of a price


class _Group:
    """A group's sequence tables: their traffic, and how reads fall to their rows."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.sequence_T = [
            at for at, table in enumerate(instance.tables) if table.sum_share < SUMS_MAX
        ]
        self.law = {at: RowReads(instance.tables[at]) for at in self.sequence_T}
        self.copy_bytes = {
            at: instance.tables[at].row_bytes + COPY_OVERHEAD for at in self.sequence_T
        }

    def away_NT(self, owned_DB: Bools) -> Floats:
        """Return the bytes a second of rows that a node reads and does not hold, before copies."""
        instance = self.instance
        held_NB = instance.held_NB(owned_DB)
        away_NB = np.where(held_NB, 0.0, instance.wanted_NB)
        starts_T = np.searchsorted(instance.table_B, np.arange(len(instance.tables)))
        wire_T = np.array([table.wire_bytes for table in instance.tables])
        away: Floats = np.add.reduceat(away_NB, starts_T, axis=1) * wire_T
        return away

    def left_T(self, copies: Copies) -> Floats:
        """Return the part of each table's reads that copies leave."""
        left = np.ones(len(self.instance.tables))
        for table, rows in copies.items():
            left[table] = 1 - self.law[table].first(rows)
        return left

    def link_N(self, owned_DB: Bools, copies: Copies) -> Floats:
        """Return the bytes a second that each node's sequences bring over its link."""
        left_T = self.left_T(copies)
        away_NT = self.away_NT(owned_DB)[:, self.sequence_T]
        link: Floats = away_NT @ left_T[self.sequence_T]
        return link

    def busiest(self, owned_DB: Bools, copies: Copies) -> float:
        """Return what the busiest link carries."""
        return float(self.link_N(owned_DB, copies).max())


@dataclasses.dataclass(frozen=True, slots=True)
class FlexShard:
    """Copies hot rows of sequences, and lets every node hold buckets, within budgets.

    Attributes:
        copy_bytes: Bytes that each node has for copies.
    """

    copy_bytes: float = COPY_BYTES

    def propose(self, problem: Problem) -> Proposal:
        """Return room for hot rows, and the owners of buckets that every node is to hold.

        Raises:
            RefusedError: No table is read as sequences, or no group has two nodes.
        """
        groups = [_Group(each) for each in instances(problem)]
        _check(groups)
        owners: dict[Bucket, tuple[Place, ...]] = {}
        hot_rows: dict[int, int] = {}
        stories = []
        today = {at: held.owners for at, held in problem.layout.items()}
        for group in groups:
            if len(group.instance.nodes_N) < 2 or not group.sequence_T:
                continue
            copies, owned_DB = self._best(group, problem.limit_s / 4 / len(groups))
            links = group.busiest(group.instance.owned_DB, {}), group.busiest(owned_DB, copies)
            if links[1] > links[0] * (1 - WORTH_MIN):
                stories.append(f"group {group.instance.group}: nothing would save {WORTH_MIN:.0%}")
                continue
            owners |= owners_of(group.instance, owned_DB, today)
            # One limit holds for the nodes of all groups.
            for table, rows in copies.items():
                id = problem.plan.tables[table].id
                hot_rows[id] = max(hot_rows.get(id, 0), int(rows))
            stories.append(_story(problem, group, owned_DB, copies, links))
        return Proposal(owners=owners, explanation="; ".join(stories), hot_rows=hot_rows)

    def _best(self, group: _Group, limit_s: float) -> tuple[Copies, Bools]:
        """Return the copies and owners under which the busiest link is least."""
        today_DB = group.instance.owned_DB
        starts: list[Copies] = [self._copies(group, today_DB), {}]
        for table in group.sequence_T[:_STARTS_MAX]:
            starts.append(self._copies(group, today_DB, [table]))
        found: list[tuple[Copies, Bools]] = []
        for copies in starts:
            for _ in range(2):
                owned_DB = _held_by_all(group, copies, limit_s / len(starts))
                copies = self._copies(group, owned_DB)
                found.append((copies, owned_DB))
        for owned_DB in _few(group):
            found.append((self._copies(group, owned_DB), owned_DB))
        return min(found, key=lambda each: group.busiest(each[1], each[0]))

    def _copies(
        self, group: _Group, owned_DB: Bools, tables: Sequence[int] | None = None
    ) -> Copies:
        """Return how many rows of each table each node copies.

        All nodes copy as many. What each node wants is weighed, a busy link the more the longer it
        stays the busiest (multiplicative weights).

        Args:
            group: The group.
            owned_DB: The owners.
            tables: The tables that count; None: all.
        """
        away_NT = group.away_NT(owned_DB)
        kept = group.sequence_T if tables is None else tables
        keep_T = np.isin(np.arange(away_NT.shape[1]), kept)
        away_NT = np.where(keep_T, away_NT, 0.0)
        weight_N = np.ones(len(away_NT)) / len(away_NT)
        best: tuple[float, Copies] | None = None
        for _ in range(_WEIGHED):
            copies = self._copies_by(group, weight_N @ away_NT)
            link_N = group.link_N(owned_DB, copies)
            if best is None or link_N.max() < best[0]:
                best = float(link_N.max()), copies
            weight_N = weight_N * np.exp(link_N / max(float(link_N.max()), 1e-9))
            weight_N /= weight_N.sum()
        return best[1] if best else {}

    def _copies_by(self, group: _Group, away_T: Floats) -> Copies:
        """Return the copies that save the most of such traffic.

        A row of a rank is copied while what it saves for a byte is at least a price, which is the
        lowest one at which all copies fit.
        """
        wanted = [table for table in group.sequence_T if away_T[table] > 0]
        if not wanted:
            return {}

        def at_price(price: float) -> Copies:
            return {
                table: group.law[table].rank_of(price * group.copy_bytes[table] / away_T[table])
                for table in wanted
            }

        def size(copies: Copies) -> float:
            return sum(rows * group.copy_bytes[table] for table, rows in copies.items())

        if size(at_price(0.0)) <= self.copy_bytes:
            return at_price(0.0)
        low = 0.0
        # Above what the hottest row is worth: nothing is copied.
        high = 1.001 * max(
            away_T[table] * group.law[table].of_rank(1) / group.copy_bytes[table]
            for table in wanted
        )
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            if size(at_price(middle)) > self.copy_bytes:
                low = middle
            else:
                high = middle
        return self._filled(group, at_price(high), away_T)

    def _filled(self, group: _Group, copies: Copies, away_T: Floats) -> Copies:
        """Give what is left to the table whose next row saves most: rows alike come all at once."""
        room = self.copy_bytes - sum(
            rows * group.copy_bytes[table] for table, rows in copies.items()
        )
        order = sorted(
            copies,
            key=lambda table: (
                -away_T[table]
                * group.law[table].of_rank(copies[table] + 1)
                / group.copy_bytes[table],
                table,
            ),
        )
        filled = dict(copies)
        for table in order:
            more = min(group.law[table].rows - copies[table], room / group.copy_bytes[table])
            filled[table] += max(0.0, more)
            room -= max(0.0, more) * group.copy_bytes[table]
        return filled


def _check(groups: Sequence[_Group]) -> None:
    if not any(group.sequence_T for group in groups):
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            "no table is read as sequences: owners answer all with sums; use another planner",
        )
    if not any(len(group.instance.nodes_N) > 1 for group in groups):
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            "no group has two nodes, so nothing crosses nodes; use another planner",
        )


def _few(group: _Group) -> Iterator[Bools]:
    """Yield every choice of buckets that fits, where there are few."""
    saved_NB, candidates = _candidates(group, {})
    if len(candidates) > _FEW:
        return
    for count in range(1, len(candidates) + 1):
        for chosen in itertools.combinations(candidates, count):
            owned_DB = _by_worth(group.instance, saved_NB, np.array(chosen))
            held_NB = group.instance.held_NB(owned_DB)
            if held_NB[:, list(chosen)].all():
                yield owned_DB


def _held_by_all(group: _Group, copies: Copies, limit_s: float) -> Bools:
    """Return the owners with further ones on every node, for the traffic that copies leave."""
    instance = group.instance
    saved_NB, candidates = _candidates(group, copies)
    if 0 < len(candidates) * len(instance.node_D) <= _EXACT_MAX:
        exact_DB = _by_milp(instance, saved_NB, candidates, limit_s)
        if exact_DB is not None:
            return exact_DB
    return _by_worth(instance, saved_NB, candidates)


def _candidates(group: _Group, copies: Copies) -> tuple[Floats, Ints]:
    """Return what holding each bucket would save each node, and the buckets that all may hold."""
    instance = group.instance
    left_T = group.left_T(copies)
    wire_T = np.array([table.wire_bytes for table in instance.tables])
    held_NB = instance.held_NB(instance.owned_DB)
    saved_NB = np.where(held_NB, 0.0, instance.wanted_NB)
    saved_NB = saved_NB * (left_T * wire_T)[instance.table_B]
    saved_NB[:, ~np.isin(instance.table_B, group.sequence_T)] = 0
    open_N = np.array([instance.open_D[instance.node_D == n].any() for n in range(len(held_NB))])
    owners_B = instance.owned_DB.sum(axis=0) + (~held_NB).sum(axis=0)
    may_B = (saved_NB.sum(axis=0) > 0) & (held_NB | open_N[:, None]).all(axis=0)
    may_B &= owners_B <= OWNERS_MAX
    return saved_NB, np.flatnonzero(may_B)


def _by_worth(instance: Instance, saved_NB: Floats, candidates: Ints) -> Bools:
    """Return owners with further ones, of the buckets that save most for a byte first."""
    owned_DB = instance.owned_DB.copy()
    held_NB = instance.held_NB(owned_DB)
    used_D = instance.bytes_D(owned_DB)
    worth_C = (saved_NB.sum(axis=0) / np.maximum(instance.bytes_B, 1.0))[candidates]
    for at in candidates[np.argsort(-worth_C, kind="stable")]:
        places = _places(instance, held_NB[:, at], used_D, float(instance.bytes_B[at]))
        if len(places) < int((~held_NB[:, at]).sum()):
            continue  # held by every node, or as today
        owned_DB[places, at] = True
        used_D[places] += instance.bytes_B[at]
    return owned_DB


def _by_milp(
    instance: Instance, saved_NB: Floats, candidates: Ints, limit_s: float
) -> Bools | None:
    """Return the same so that the busiest link is least; None: not found.

    Variables: for each candidate whether every node holds it, then for each candidate and device
    whether that device comes to own it, then the traffic of the busiest link.
    """
    count, devices, nodes = len(candidates), len(instance.node_D), len(saved_NB)
    held_NC = instance.held_NB(instance.owned_DB)[:, candidates]
    link_N, saved_NC = saved_NB.sum(axis=1), saved_NB[:, candidates]
    scale = max(float(link_N.max()), 1e-9)
    size = count + count * devices + 1
    rows: list[Floats] = []
    low: list[float] = []
    high: list[float] = []
    for n in range(nodes):
        row = np.zeros(size)
        row[:count], row[-1] = saved_NC[n] / scale, 1
        rows.append(row)
        low.append(float(link_N[n]) / scale)
        high.append(np.inf)
    of_device_CD = count + np.arange(count * devices).reshape(count, devices)
    for c, n in np.argwhere(~held_NC.T):
        row = np.zeros(size)
        row[c] = -1
        row[of_device_CD[c, instance.node_D == n]] = 1
        rows.append(row)
        low.append(0)
        high.append(0)
    used_D = instance.bytes_D(instance.owned_DB)
    for device in range(devices):
        row = np.zeros(size)
        budget = max(float(instance.budget_D[device]), 1.0)
        row[of_device_CD[:, device]] = instance.bytes_B[candidates] / budget
        rows.append(row)
        low.append(-np.inf)
        high.append(max(0.0, 1 - float(used_D[device]) / budget))
    most = np.ones(size)
    most[-1] = np.inf
    takes_CD = ~held_NC.T[:, instance.node_D] & instance.open_D
    most[count:-1] = takes_CD.reshape(-1)
    cost = np.zeros(size)
    cost[-1] = 1
    cost[:count] = -1e-3 * saved_NC.sum(axis=0) / scale / nodes
    found = scipy.optimize.milp(
        cost,
        integrality=np.concatenate([np.ones(size - 1), [0]]),
        bounds=scipy.optimize.Bounds(0, most),
        constraints=scipy.optimize.LinearConstraint(np.array(rows), low, high),
        options={"node_limit": 500, "mip_rel_gap": 0.005, "time_limit": limit_s},
    )
    if found.x is None:
        return None
    owned_DB = instance.owned_DB.copy()
    comes_CD = found.x[count:-1].reshape(count, devices) > 0.5
    owned_DB[:, candidates] |= comes_CD.T
    return owned_DB


def _places(instance: Instance, held_N: Bools, used_D: Floats, size: float) -> list[int]:
    """Return a device on each node that lacks a bucket, that with the most room, if it has some."""
    places = []
    room_D = np.where(instance.open_D, instance.budget_D - used_D, -np.inf)
    for node in np.flatnonzero(~held_N):
        of_node_D = np.where(instance.node_D == node, room_D, -np.inf)
        device = int(np.argmax(of_node_D))
        if of_node_D[device] >= size:
            places.append(device)
    return places


def _story(
    problem: Problem,
    group: _Group,
    owned_DB: Bools,
    copies: Copies,
    links: tuple[float, float],
) -> str:
    names = [table.name for table in problem.plan.tables]
    instance = group.instance
    held_by_all = instance.held_NB(owned_DB).all(axis=0)
    parts = []
    for table in group.sequence_T:
        law = group.law[table]
        rows = copies.get(table, 0)
        buckets_B = instance.table_B == table
        parts.append(
            f"{names[table]} {int(rows):,} rows copied ({law.first(rows):.0%} of reads, fitted "
            f"exponent {law.exponent:.2f}), {int(held_by_all[buckets_B].sum())} of "
            f"{int(buckets_B.sum())} buckets on every node"
        )
    return (
        f"group {instance.group}: busiest link {links[0]:,.0f} -> {links[1]:,.0f} bytes/s; "
        + ", ".join(parts)
    )
