"""The planner `recshard`: shares of DDR and owners of buckets, by miss curves.

After RecShard (ASPLOS 2022), with shares of a device in place of pinned rows.

Each device has DDR over an SSD. What a table reads from the SSD there follows from the bytes that
its rows may take in DDR; nodes report these curves. Keys are hashed into buckets, so a part of a
table's buckets has the same curve with both axes scaled.

1. Shares. Each device's DDR is shared out among its tables so that the least is read from the SSD,
   by a mixed-integer program (tier_budgets.py).
2. Owners. From today's owners on, the move of some buckets of a table, or the exchange of two
   buckets, that lowers the score most is made while one does, and then from a few owners some
   random moves away (from a fixed seed). Every step is scored with the shares that its devices
   would have. If the score falls by too little, buckets stay where they are.

How much is tried follows from the time limit by fixed rates, not by a clock: the same problem has
the same answer.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.cost import Score, busy_us_D, score_of
from embertide.server.core.plan.instance import (
    Bools,
    Floats,
    Instance,
    by_table,
    instances,
    owners_of,
    rates,
)
from embertide.server.core.plan.layout import Bucket, Place, place_name
from embertide.server.core.plan.layout import devices as devices_of
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.shares import SHARE_BYTES_MIN, ShareKey, tier_budget
from embertide.server.core.plan.tier_budgets import (
    Curve,
    estimate_missed,
    missed,
    share_out,
)
from embertide.server.core.plan.workload import MissCurve
from embertide.v1 import plan_pb2

# Moving buckets must gain this share of the score.
WORTH_MIN = 0.02
# Share of a device's room that tables without a curve get.
_FOR_OTHERS = 0.05
# Scorings of an ownership in a second of the limit, for devices x tables of this number.
_SCORED_A_SECOND = 100_000
_TRIED_MIN = 200
# A table's buckets that may move at once, as parts of those on a device.
_PARTS = (1.0, 0.5, 0.25, 0.125)
_EXCHANGED_MAX = 24  # buckets of a device that are exchanged one for one
_NAMED_SHARES = 6
_ALL_SOURCES = 4  # with more devices, buckets leave the busiest one alone
_KICKS_MAX = 12
_KICK_MOVES = 3


class _Group:
    """A group's devices, their room, and the curves of its tables by bucket."""

    def __init__(self, problem: Problem, instance: Instance) -> None:
        """Read the curves. Tables without one keep out of it."""
        asking = problem.workload.asking
        assert asking is not None
        self.instance, self.prices = instance, problem.prices
        tables = [table.id for table in problem.plan.tables]
        self.room_D = np.array([asking.row_room.get(at, 0.0) for at in instance.places_D])
        self.curve_T = [
            _per_bucket(instance, table, asking.curves, id) for table, id in enumerate(tables)
        ]
        # With every row in DDR; what is read from the SSD is added by the shares.
        self._in_ddr = dataclasses.replace(
            instance,
            tables=tuple(
                traits
                if curve is None
                else traits._replace(
                    tier_share=(traits.tier_share[0], sum(traits.tier_share[1:]), 0.0)
                )
                for traits, curve in zip(instance.tables, self.curve_T, strict=True)
            ),
        )
        self.shared_D = (self.room_D > 0) & instance.open_D

    def curves_of(self, owned_DB: Bools, device: int) -> tuple[list[int], list[Curve]]:
        """Return the tables with a curve that have buckets on a device, and their curves there."""
        return self._curves(*self._counts(owned_DB), device)

    def _counts(self, owned_DB: Bools) -> tuple[Floats, Floats]:
        now = rates(self.instance, owned_DB)
        counts_DT = by_table(self.instance, owned_DB.astype(np.float64))
        return counts_DT, now.here_DT + now.for_peers_DT

    def _curves(
        self, counts_DT: Floats, reads_DT: Floats, device: int
    ) -> tuple[list[int], list[Curve]]:
        tables, curves = [], []
        for table, curve in enumerate(self.curve_T):
            count = counts_DT[device, table]
            if curve is None or not count:
                continue
            scaled = Curve(curve.bytes_P * count, curve.missed_P * reads_DT[device, table])
            tables.append(table)
            # A table that is smaller than the least share takes no more than it has.
            curves.append(scaled.raised_to(min(SHARE_BYTES_MIN, float(scaled.bytes_P[-1]))))
        return tables, curves

    def room(self, device: int, tables: Sequence[int]) -> float:
        """Return what tables with a curve share out on a device."""
        others = len(tables) < len(self.curve_T)
        return float(self.room_D[device]) * (1 - _FOR_OTHERS if others else 1.0)

    def score(self, owned_DB: Bools) -> Score:
        """Return the cost of an ownership with the shares that hulls give."""
        return score_of(self.instance, self.busy_us_D(owned_DB))

    def busy_us_D(self, owned_DB: Bools) -> Floats:
        """Return the time that each device then spends a second."""
        counted = self._counts(owned_DB)
        missed_D = np.zeros(len(self.room_D))
        for device in np.flatnonzero(self.shared_D):
            tables, curves = self._curves(*counted, device)
            least = sum(float(curve.bytes_P[0]) for curve in curves)
            room = self.room(device, tables)
            # Too many tables for the room: every key that may be read from the SSD is.
            missed_D[device] = (
                estimate_missed(curves, room)
                if least <= room
                else sum(float(curve.missed_P[0]) for curve in curves)
            )
        return self._with_missed(owned_DB, missed_D)

    def score_of(self, owned_DB: Bools, missed_D: Floats) -> Score:
        """Return the cost of an ownership under which so many keys are read from the SSDs."""
        return score_of(self.instance, self._with_missed(owned_DB, missed_D))

    def _with_missed(self, owned_DB: Bools, missed_D: Floats) -> Floats:
        extra_us = self.prices.hit_us[2] - self.prices.hit_us[1]
        return busy_us_D(self._in_ddr, owned_DB, self.prices) + extra_us * missed_D


def _per_bucket(
    instance: Instance, table: int, curves: Mapping[tuple[Place, int], MissCurve], id: int
) -> Curve | None:
    """Return a table's curve as that of one bucket and one key a second, mean over its devices."""
    reads_DT = rates(instance, instance.owned_DB)
    weight_D = (reads_DT.here_DT + reads_DT.for_peers_DT)[:, table]
    of_table_B = instance.table_B == table
    found = []
    for device, place in enumerate(instance.places_D):
        curve = curves.get((place, id))
        count = int(instance.owned_DB[device, of_table_B].sum())
        if curve is not None and count and len(curve.bytes_P):
            found.append((max(float(weight_D[device]), 1e-9), count, curve))
    if not found:
        return None
    bytes_P = np.unique(np.concatenate([np.array(c.bytes_P) / n for _, n, c in found]))
    total = sum(weight for weight, _, _ in found)
    missed_P = sum(
        weight / total * np.interp(bytes_P, np.array(c.bytes_P) / n, np.array(c.missed_P))
        for weight, n, c in found
    )
    return Curve(bytes_P, np.minimum.accumulate(np.asarray(missed_P)))


@dataclasses.dataclass(frozen=True, slots=True)
class RecShard:
    """Shares out DDR, and moves buckets where that pays.

    Attributes:
        moves: Whether buckets may move; without, only shares change.
    """

    moves: bool = True

    def propose(self, problem: Problem) -> Proposal:
        """Return the shares, and the owners that they ask for.

        Raises:
            RefusedError: No device has an SSD tier, no node has reported a curve yet, or the room
                of a device is too small for its tables.
        """
        groups = [_Group(problem, each) for each in instances(problem)]
        _check(problem, groups)
        owners: dict[Bucket, tuple[Place, ...]] = {}
        shares: dict[ShareKey, int] = {}
        stories = []
        today = {at: held.owners for at, held in problem.layout.items()}
        limit_s = problem.limit_s / max(1, len(groups))
        for group in groups:
            if not group.shared_D.any():
                continue
            owned_DB = group.instance.owned_DB
            if self.moves:
                owned_DB = _Search(group, limit_s / 2).best()
            given = _shares(problem, group, owned_DB, limit_s / 4)
            owners |= owners_of(group.instance, owned_DB, today)
            shares |= given.shares
            stories.append(_story(problem, group, owned_DB, given))
        return Proposal(owners=owners, explanation="; ".join(stories), tier_shares=shares)


def _check(problem: Problem, groups: Sequence[_Group]) -> None:
    if not any((group.room_D > 0).any() for group in groups):
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            "no device with an SSD tier has reported its room: recshard shares DDR out over an "
            "SSD; give nodes an SSD budget, or use another planner",
        )
    if not any(curve for group in groups for curve in group.curve_T):
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            "no node has reported miss curves yet; they take some minutes of reads",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """Shares of a group's devices, and what they leave to the SSDs."""

    shares: dict[ShareKey, int]
    missed_D: Floats


def _shares(problem: Problem, group: _Group, owned_DB: Bools, limit_s: float) -> _Given:
    shares: dict[ShareKey, int] = {}
    missed_D = np.zeros(len(group.room_D))
    devices = np.flatnonzero(group.shared_D)
    for device in devices:
        place = group.instance.places_D[device]
        tables, curves = group.curves_of(owned_DB, device)
        room = group.room(device, tables)
        if sum(float(curve.bytes_P[0]) for curve in curves) > room:
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED,
                f"device {place_name(problem.plan.topology, place)} has room for {room:,.0f} bytes "
                f"of rows, and {len(tables)} tables need up to {SHARE_BYTES_MIN:,} each; raise "
                "its DDR budget",
            )
        if not tables:
            continue
        given_T = share_out(curves, room, limit_s / len(devices))
        missed_D[device] = missed(curves, given_T)
        budget = tier_budget(devices_of(problem.plan.topology)[place], plan_pb2.TIER_DDR)
        for table, size in zip(tables, _raised_to_min(given_T, budget), strict=True):
            what = ShareKey(place, plan_pb2.TIER_DDR, problem.plan.tables[table].id)
            shares[what] = int(size)
    # Tables with a share on these devices and no curve any more give it back.
    ours = {group.instance.places_D[device] for device in devices}
    for each in problem.plan.tier_shares:
        what = ShareKey(Place(each.device.node, each.device.device), each.tier, each.table_id)
        if what.device in ours:
            shares.setdefault(what, 0)
    return _Given(shares, missed_D)


def _raised_to_min(given_T: Floats, budget: float) -> Floats:
    """Raise small shares to the least that there is; the largest ones make up for it."""
    raised_T = np.maximum(given_T, SHARE_BYTES_MIN)
    beyond = float(raised_T.sum()) - budget
    for table in np.argsort(-raised_T, kind="stable"):
        if beyond <= 0:
            break
        cut = min(beyond, float(raised_T[table]) - SHARE_BYTES_MIN)
        raised_T[table] -= cut
        beyond -= cut
    return raised_T


class _Search:
    """Steps from today's owners on, each of which lowers the score; kicks where none does."""

    def __init__(self, group: _Group, limit_s: float) -> None:
        self._group = group
        self._instance = group.instance
        size = len(group.room_D) * max(1, len(group.curve_T))
        self._left = max(_TRIED_MIN, int(_SCORED_A_SECOND * limit_s / (size + 50)))
        self._rate_B = self._instance.wanted_NB.sum(axis=0)
        self._random = np.random.default_rng(0)

    def best(self) -> Bools:
        """Return the best owners that it meets; today's if those gain too little."""
        today_DB = self._instance.owned_DB
        begun = self._group.score(today_DB).value
        value, best_DB = self._descend(begun, today_DB)
        for _ in range(_KICKS_MAX):
            if self._left <= 0:
                break
            kicked_DB = self._kicked(best_DB)
            tried, found_DB = self._descend(self._group.score(kicked_DB).value, kicked_DB)
            if tried < value * (1 - 1e-6):
                value, best_DB = tried, found_DB
        return best_DB if value < begun * (1 - WORTH_MIN) else today_DB

    def _descend(self, value: float, owned_DB: Bools) -> tuple[float, Bools]:
        """Return the score and the owners where no step lowers the score any more."""
        while self._left > 0:
            best: tuple[float, Bools] | None = None
            for next_DB in self._next(owned_DB):
                self._left -= 1
                tried = self._group.score(next_DB).value
                if best is None or tried < best[0]:
                    best = tried, next_DB
                if self._left <= 0:
                    break
            if best is None or best[0] >= value * (1 - 1e-6):
                break
            value, owned_DB = best
        return value, owned_DB

    def _kicked(self, owned_DB: Bools) -> Bools:
        """Return owners some random moves away."""
        for _ in range(_KICK_MOVES):
            at = int(self._random.integers(owned_DB.shape[1]))
            target = int(self._random.choice(np.flatnonzero(self._instance.open_D)))
            for source in np.flatnonzero(owned_DB[:, at]):
                if source != target:
                    owned_DB = next(self._moved(owned_DB, int(source), target, [at], []), owned_DB)
        return owned_DB

    def _next(self, owned_DB: Bools) -> Iterator[Bools]:
        """Yield ownerships one step away: moves and exchanges, off the busiest device first."""
        open_D = np.flatnonzero(self._instance.open_D)
        busy_D = self._group.busy_us_D(owned_DB)
        sources = sorted(map(int, open_D), key=lambda device: -busy_D[device])
        for source in sources if len(sources) <= _ALL_SOURCES else sources[:1]:
            for target in map(int, open_D):
                if target == source:
                    continue
                for moved in self._sets(owned_DB, source):
                    yield from self._moved(owned_DB, source, target, moved, [])
                pairs = itertools.product(
                    self._hottest(owned_DB, source), self._hottest(owned_DB, target)
                )
                for mine, yours in pairs:
                    yield from self._moved(owned_DB, source, target, [mine], [yours])

    def _hottest(self, owned_DB: Bools, device: int) -> list[int]:
        held = np.flatnonzero(owned_DB[device])
        order = np.argsort(-self._rate_B[held], kind="stable")
        return [int(at) for at in held[order][:_EXCHANGED_MAX]]

    def _sets(self, owned_DB: Bools, source: int) -> Iterator[list[int]]:
        """Yield buckets of one table of a device: parts of them, hottest first, and single ones."""
        for table in range(len(self._group.curve_T)):
            held = np.flatnonzero(owned_DB[source] & (self._instance.table_B == table))
            if not len(held):
                continue
            order = held[np.argsort(-self._rate_B[held], kind="stable")]
            counts = {max(1, int(len(order) * part)) for part in _PARTS}
            for count in sorted(counts):
                yield [int(at) for at in order[:count]]
            for at in order[1:_EXCHANGED_MAX]:
                yield [int(at)]

    def _moved(
        self, owned_DB: Bools, source: int, target: int, there: list[int], back: list[int]
    ) -> Iterator[Bools]:
        """Yield the ownership after a move both ways, if it is allowed and fits."""
        next_DB = owned_DB.copy()
        for begin, end, moved in ((source, target, there), (target, source, back)):
            next_DB[begin, moved] = False
            next_DB[end, moved] = True
        instance = self._instance
        if (next_DB.sum(axis=0) < owned_DB.sum(axis=0)).any():
            return
        for device in (source, target):
            of_node = instance.node_D == instance.node_D[device]
            if (next_DB[of_node].sum(axis=0) > 1).any():
                return
        fits = instance.bytes_D(next_DB) <= np.maximum(
            instance.budget_D, instance.bytes_D(owned_DB)
        )
        if fits.all():
            yield next_DB


def _story(problem: Problem, group: _Group, owned_DB: Bools, given: _Given) -> str:
    """Say what is shared out, and what that is predicted to save."""
    instance = group.instance
    before = group.score_of(instance.owned_DB, _missed_today_D(group))
    after = group.score_of(owned_DB, given.missed_D)
    topology = problem.plan.topology
    names = {table.id: table.name for table in problem.plan.tables}
    moved = int((owned_DB != instance.owned_DB).any(axis=0).sum())
    largest = sorted(
        ((size, what) for what, size in given.shares.items() if size),
        key=lambda each: (-each[0], each[1]),
    )
    named = ", ".join(
        f"{names[what.table]} {size:,} bytes of {place_name(topology, what.device)}"
        for size, what in largest[:_NAMED_SHARES]
    )
    rest = len(largest) - _NAMED_SHARES
    return (
        f"group {instance.group}: {given.missed_D.sum():,.0f} keys/s predicted from the SSDs "
        f"({_missed_today_D(group).sum():,.0f} now), busiest device {before.busiest_us:,.0f} -> "
        f"{after.busiest_us:,.0f} us/s, {moved} buckets move; shares: {named}"
        + (f" and {rest} more" if rest > 0 else "")
    )


def _missed_today_D(group: _Group) -> Floats:
    """Return what is read from the SSDs today, by what nodes found in each tier."""
    instance = group.instance
    now = rates(instance, instance.owned_DB)
    ssd_T = np.array(
        [
            traits.tier_share[2] if curve is not None else 0.0
            for traits, curve in zip(instance.tables, group.curve_T, strict=True)
        ]
    )
    missed_D: Floats = (now.here_DT + now.for_peers_DT) @ ssd_T
    return missed_D
