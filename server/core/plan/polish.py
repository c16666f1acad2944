"""Improves a placement by single changes: buckets of a table move, are copied, dropped, exchanged.

Each round looks at one device, the busiest first, and makes the change that lowers the value most.
When the busiest device has none, the others are looked at; when none has any, it is done. Letters
of shapes are those of shard_costs.py; K candidates of all tables together.
"""

from typing import NamedTuple

import numpy as np

from embertide.server.core.plan.cost_net import Singles
from embertide.server.core.plan.instance import Bools, Floats, Instance
from embertide.server.core.plan.shard_costs import ShardCosts

_TABLES = 16  # looked at a round
_BETTER = 1 - 1e-5
_BYTE = 1.0  # buckets' bytes are measured, and sums of them rounded
_TARGETS = 4  # devices with which buckets are exchanged


class Placement(NamedTuple):
    """A placement and its value by the cost net; less is better, infinite if it does not fit."""

    owned_DB: Bools
    value: float


class _Change(NamedTuple):
    """One candidate's change of a table."""

    table: int
    owned_DB: Bools  # of the table's buckets
    parts_DS: Singles


def pinned(instance: Instance) -> Bools:
    """Return which buckets stay as they are: those of which a device that gets nothing has some."""
    stays_B: Bools = instance.owned_DB[~instance.open_D].any(axis=0)
    return stays_B


def fits(instance: Instance, owned_DB: Bools, owners_max: int) -> bool:
    """Whether all buckets have owners, one a node at most, within budgets and limits."""
    copies_B = owned_DB.sum(axis=0)
    if not copies_B.all() or (copies_B > owners_max).any():
        return False
    nodes_NB = np.add.reduceat(
        owned_DB.astype(np.int64), np.flatnonzero(np.diff(instance.node_D, prepend=-1)), axis=0
    )
    over_D = instance.bytes_D(owned_DB) > instance.budget_D + _BYTE
    return bool((nodes_NB <= 1).all() and not over_D[instance.open_D].any())


def polished(
    instance: Instance, costs: ShardCosts, placed: Placement, until: float, owners_max: int
) -> Placement:
    """Return the placement improved until nothing does, or `until` has been spent."""
    polish = _Polish(instance, costs, placed.owned_DB, owners_max)
    polish.run(until)
    return Placement(polish.owned_DB, polish.value)


class _Polish:
    def __init__(
        self, instance: Instance, costs: ShardCosts, owned_DB: Bools, owners_max: int
    ) -> None:
        self._instance, self._costs, self._owners_max = instance, costs, owners_max
        self.owned_DB = owned_DB.copy()
        self._parts_TDS = costs.all_contributions(owned_DB)
        self._sum_DS = self._parts_TDS.sum(axis=0)
        self._bytes_D = instance.bytes_D(owned_DB)
        self._open = np.flatnonzero(instance.open_D)
        self.value = float(costs.values(self._sum_DS[None])[0])
        self._free_B = ~pinned(instance)
        self._round = 0

    def run(self, until: float) -> None:
        """Make changes."""
        while self._costs.spent_us < until:
            costs_D = self._costs.costs(self._sum_DS)
            busiest_first = self._open[np.argsort(-costs_D[self._open], kind="stable")]
            if not any(self._improve(int(device), costs_D) for device in busiest_first):
                return

    def _improve(self, device: int, costs_D: Singles) -> bool:
        """Make the best change of a device; False if none pays."""
        changes = [
            change for table in self._tables_of(device) for change in self._changes(table, device)
        ]
        if changes and self._take_best(changes):
            return True
        targets = self._open[np.argsort(costs_D[self._open], kind="stable")][:_TARGETS]
        return any(self._exchange(device, int(target)) for target in targets if target != device)

    def _tables_of(self, device: int) -> list[int]:
        """Return tables that the device works for, the costliest, and others in turn."""
        width = self._sum_DS.shape[1] - 2
        parts_TS = self._parts_TDS[:, device]
        costs_T = self._costs.costs(self._sum_DS[device]) - self._costs.costs(
            self._sum_DS[device] - parts_TS
        )
        works_T = (parts_TS[:, :width] != 0).any(axis=1)
        order = np.argsort(-np.where(works_T, costs_T, -np.inf), kind="stable")
        order = order[: int(works_T.sum())]
        rest = order[_TABLES // 2 :]
        self._round += 1
        turn = np.roll(rest, -self._round * (_TABLES // 2))[: _TABLES // 2]
        return [*order[: _TABLES // 2].tolist(), *turn.tolist()]

    def _changes(self, table: int, device: int) -> list[_Change]:
        """Return what may be done with the buckets of a table that a device owns."""
        at = self._costs.buckets_of(table)
        owned_DB = self.owned_DB[:, at]
        some_SB, may_DB = self._subsets(table, device), self._may_own(owned_DB, device)
        targets = self._open[self._open != device]
        # Each subset to each target: as a move, and as a copy.
        gained_STB = some_SB[:, None] & may_DB[targets]
        copied_STDB = np.tile(owned_DB, (len(some_SB), len(targets), 1, 1))
        copied_STDB[:, np.arange(len(targets)), targets] |= gained_STB
        moved_STDB = copied_STDB.copy()
        moved_STDB[:, :, device] &= ~gained_STB
        elsewhere = self._instance.node_D[targets] != self._instance.node_D[device]
        dropped_SDB = np.tile(owned_DB, (len(some_SB), 1, 1))
        dropped_SDB[:, device] &= ~some_SB | (owned_DB.sum(axis=0) < 2)
        shape = (-1, *owned_DB.shape)
        return self._evaluated(
            table,
            np.concatenate(
                [
                    moved_STDB.reshape(shape),
                    copied_STDB[:, elsewhere].reshape(shape),
                    dropped_SDB,
                ]
            ),
            self._instance.budget_D,
        )

    def _moves(self, device: int, target: int) -> list[_Change]:
        """Return moves of buckets from one device to another, whether there is room or not."""
        moves = []
        for table in self._tables_of(device):
            owned_DB = self.owned_DB[:, self._costs.buckets_of(table)]
            gained_SB = self._subsets(table, device) & self._may_own(owned_DB, device)[target]
            moved_SDB = np.tile(owned_DB, (len(gained_SB), 1, 1))
            moved_SDB[:, target] |= gained_SB
            moved_SDB[:, device] &= ~gained_SB
            moves += self._evaluated(table, moved_SDB, np.full(len(self._bytes_D), np.inf))
        return moves

    def _evaluated(self, table: int, owned_KDB: Bools, budget_D: Floats) -> list[_Change]:
        """Return as changes those that change something and do not exceed budgets further."""
        at = self._costs.buckets_of(table)
        owned_DB = self.owned_DB[:, at]
        after_KD = self._bytes_D + self._added(at, owned_DB, owned_KDB)
        keep_K = (after_KD <= np.maximum(budget_D, self._bytes_D) + _BYTE).all(axis=1)
        keep_K &= (owned_KDB != owned_DB).any(axis=(1, 2))
        keep_K &= (owned_KDB.sum(axis=1) <= self._owners_max).all(axis=1)
        if not keep_K.any():
            return []
        kept_KDB = owned_KDB[keep_K]
        parts_KDS = self._costs.contributions(table, kept_KDB)
        return [_Change(table, *each) for each in zip(kept_KDB, parts_KDS, strict=True)]

    def _subsets(self, table: int, device: int) -> Bools:
        """Return all buckets that a device owns of a table, half of them, the hottest, the coolest.

        Returns:
            S x B; a table with few buckets has fewer subsets.
        """
        at = self._costs.buckets_of(table)
        has = np.flatnonzero(self.owned_DB[device, at] & self._free_B[at])
        load = self._instance.wanted_NB[:, at].sum(axis=0)[has]
        order = has[np.argsort(-load, kind="stable")]
        subsets = [has, order[::2], order[:1], order[-1:]][: len(has)]
        some_SB = np.zeros((len(subsets), at.stop - at.start), np.bool_)
        for subset, which in enumerate(subsets):
            some_SB[subset, which] = True
        return some_SB

    def _may_own(self, owned_DB: Bools, leaving: int) -> Bools:
        """Return who may own what: those whose node has it on no device, or on `leaving`."""
        nodes = self._instance.node_D
        others_DB = owned_DB.copy()
        others_DB[leaving] = False
        first_D = np.flatnonzero(np.diff(nodes, prepend=-1))
        may: Bools = ~np.logical_or.reduceat(others_DB, first_D, axis=0)[nodes]
        return may

    def _added(self, at: slice, before_DB: Bools, after_XDB: Bools) -> Floats:
        added_XD: Floats = (after_XDB.astype(np.float64) - before_DB) @ self._instance.bytes_B[at]
        return added_XD

    def _take_best(self, changes: list[_Change]) -> bool:
        tables = [change.table for change in changes]
        parts_KDS = np.array([change.parts_DS for change in changes])
        values_K = self._costs.values(self._sum_DS - self._parts_TDS[tables] + parts_KDS)
        best = int(values_K.argmin())
        if not values_K[best] < self.value * _BETTER:
            return False
        self._make(changes[best])
        self.value = float(values_K[best])
        return True

    def _make(self, change: _Change) -> None:
        at = self._costs.buckets_of(change.table)
        self._bytes_D += self._added(at, self.owned_DB[:, at], change.owned_DB)
        self.owned_DB[:, at] = change.owned_DB
        self._sum_DS = self._sum_DS - self._parts_TDS[change.table] + change.parts_DS
        self._parts_TDS[change.table] = change.parts_DS

    def _exchange(self, device: int, target: int) -> bool:
        """Exchange buckets of two tables between two devices, if any exchange pays."""
        there, here = self._moves(device, target), self._moves(target, device)
        if not there or not here:
            return False
        (there_IDS, there_ID), (here_JDS, here_JD) = self._deltas(there), self._deltas(here)
        after_IJD = self._bytes_D + there_ID[:, None] + here_JD
        limit_D = np.maximum(self._instance.budget_D, self._bytes_D) + _BYTE
        may_IJ = (after_IJD <= limit_D).all(axis=-1)
        may_IJ &= np.not_equal.outer([each.table for each in there], [each.table for each in here])
        i, j = np.nonzero(may_IJ)
        if not len(i):
            return False
        values_K = self._costs.values(self._sum_DS + there_IDS[i] + here_JDS[j])
        best = int(values_K.argmin())
        if not values_K[best] < self.value * _BETTER:
            return False
        self._make(there[i[best]])
        self._make(here[j[best]])
        self.value = float(values_K[best])
        return True

    def _deltas(self, changes: list[_Change]) -> tuple[Singles, Floats]:
        """Return what changes add to the contributions and to the bytes of devices."""
        parts_KDS = np.array([each.parts_DS - self._parts_TDS[each.table] for each in changes])
        bytes_KD = []
        for each in changes:
            at = self._costs.buckets_of(each.table)
            bytes_KD.append(self._added(at, self.owned_DB[:, at], each.owned_DB))
        return parts_KDS, np.array(bytes_KD)
