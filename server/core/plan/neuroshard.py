"""The planner `neuroshard`: beam search over splits, by a learned cost (NeuroShard, AutoShard).

A state of the beam says into how many pieces each table is cut, and which tables every node copies.
Its children cut one large or costly table in half, or copy one everywhere. A state is judged by
placing its pieces: the costliest first, each on the device that is cheapest with it, under a grid
of caps on what devices send. The best placements are then improved bucket by bucket (polish.py),
beside today's own; of those that are equally good, the one that moves fewer bytes is chosen.

Serving keeps rows whole, so that tables are cut by buckets and not by columns.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan import cost_net
from embertide.server.core.plan.cost_net import CostNet, Singles
from embertide.server.core.plan.fill import filled
from embertide.server.core.plan.instance import (
    Bools,
    Floats,
    Instance,
    Ints,
    instances,
    owners_of,
)
from embertide.server.core.plan.layout import Bucket, Place
from embertide.server.core.plan.owner_options import moved_bytes
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.polish import Placement, fits, pinned, polished
from embertide.server.core.plan.relabel import relabelled
from embertide.server.core.plan.shard_costs import ShardCosts
from embertide.server.core.plan.validity import OWNERS_MAX

_BEAM = 3
_LEVELS = 10
_CANDIDATES = 8  # by size, and as many by cost
_CAPS = (1.0, 1.1, 1.25, 1.5, 1e9)
_FILLED, _POLISHED = 6, 3
# Share of the limit that the search takes, counted in the work of a usual core.
_SPENT = 0.2
_SEARCHED = 0.4  # of that, for the beam; the rest improves what it found
# Values that differ by less are equal: of those, what moves fewer bytes is chosen.
_SAME = 1e-4
_SMALL = 1e-9
# Every piece is evaluated on every device, for what it makes all devices ask and send.
_DEVICES_MAX, _OWNERSHIP_MAX = 32, 1 << 20


class _Cut(NamedTuple):
    """A state of the beam: pieces by table, and whether every node copies it."""

    pieces_T: tuple[int, ...]
    everywhere_T: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Some buckets of a table that go together.

    Attributes:
        table: Their table.
        buckets: Their positions among all buckets.
        bytes: Their resident bytes.
        alone_DDS: Contributions to all devices, by the device that alone owns the piece.
        cost: Unit cost, the mean over the devices that may own it.
    """

    table: int
    buckets: Ints
    bytes: float
    alone_DDS: Singles
    cost: float


class _Beam:
    """Searches the cuts of an instance."""

    def __init__(
        self, instance: Instance, costs: ShardCosts, budget: float, owners_max: int
    ) -> None:
        self._instance, self._costs, self._budget = instance, costs, budget
        self._open = np.flatnonzero(instance.open_D)
        self._free_B = ~pinned(instance)
        # Buckets that stay are owned from the start.
        self._start_DB = instance.owned_DB & ~self._free_B
        room_D = instance.budget_D - instance.bytes_D(self._start_DB)
        self._room_D = np.where(instance.open_D, np.maximum(room_D, 0.0), 0.0)
        self._pieces: dict[tuple[int, int], list[_Piece]] = {}
        tables_B, count = instance.table_B[self._free_B], len(instance.tables)
        self._buckets_T = np.bincount(tables_B, minlength=count)
        self._bytes_T = np.bincount(tables_B, instance.bytes_B[self._free_B], minlength=count)
        self._owners_max = owners_max
        self._may_copy = len(np.unique(instance.node_D[self._open])) <= owners_max
        self.found: dict[_Cut, Placement] = {}

    def search(self) -> list[Placement]:
        """Return the placements of the best states, best first."""
        first = self._necessary()
        beam = self._best(first)
        for _ in range(_LEVELS):
            children = [child for cut in beam for child in self._children(cut)]
            wider = self._best([*beam, *children])
            if wider == beam:
                break
            beam = wider
        ranked = _ranked(self.found.values())[:_FILLED]
        return _ranked([*ranked, *(self._filled(placed) for placed in ranked)])[:_POLISHED]

    def _filled(self, placed: Placement) -> Placement:
        owned_DB = filled(self._instance, placed.owned_DB, self._owners_max)
        return Placement(owned_DB, self._value(owned_DB))

    def _value(self, owned_DB: Bools) -> float:
        contributions_TDS = self._costs.all_contributions(owned_DB)
        return float(self._costs.values(contributions_TDS.sum(axis=0)[None])[0])

    def _best(self, cuts: Sequence[_Cut]) -> list[_Cut]:
        for cut in cuts:
            if cut not in self.found and self._costs.spent_us < self._budget:
                self.found[cut] = self._placed(cut)
        known = dict.fromkeys(cut for cut in cuts if cut in self.found)
        return sorted(known, key=lambda cut: self.found[cut].value)[:_BEAM]

    def _necessary(self) -> list[_Cut]:
        """Return the states to begin with: what cannot stay whole is cut, what pays is copied."""
        largest = max(float(self._room_D.max()) / 4, 1.0)
        costs_T = self.cost_T()
        dear = max(float(costs_T.sum()) / max(1, len(self._open)) / 2, _SMALL)
        pieces_T = [
            min(
                max(1, int(self._buckets_T[table])),
                1 << int(np.ceil(np.log2(max(1.0, size / largest, cost / dear)))),
            )
            for table, (size, cost) in enumerate(zip(self._bytes_T, costs_T, strict=True))
        ]
        spare = float(self._room_D.sum() - self._bytes_T.sum())
        worth_T = costs_T / np.maximum(self._bytes_T, 1.0)
        cuts = []
        for part in (0.0, 0.3, 0.6, 1.0) if self._may_copy else (0.0,):
            left, everywhere_T = spare * part, [False] * len(pieces_T)
            for table in np.argsort(-worth_T, kind="stable"):
                extra = self._bytes_T[table] * (len(self._open) - 1)
                if extra <= left:
                    everywhere_T[table] = True
                    left -= extra
            cuts.append(_Cut(tuple(pieces_T), tuple(everywhere_T)))
        return list(dict.fromkeys(cuts))

    def cost_T(self) -> Floats:
        """Return the unit cost of each table, kept together."""
        return np.array(
            [
                sum(piece.cost for piece in self._pieces_of(table, 1))
                for table in range(len(self._instance.tables))
            ]
        )

    def _children(self, cut: _Cut) -> Iterator[_Cut]:
        """Yield cuts of a large or costly table in half, and copies of one everywhere."""
        pieces_T = np.array(cut.pieces_T)
        cuttable_T = (2 * pieces_T <= self._buckets_T) & ~np.array(cut.everywhere_T)
        size_T = np.where(cuttable_T, self._bytes_T / pieces_T, -1.0)
        cost_T = np.where(cuttable_T, self.cost_T() / pieces_T, -1.0)
        picked = [
            table
            for by in (cost_T, size_T)
            for table in np.argsort(-by, kind="stable")[:_CANDIDATES].tolist()
            if cuttable_T[table]
        ]
        for table in dict.fromkeys(picked):
            pieces = [*cut.pieces_T]
            pieces[table] *= 2
            yield cut._replace(pieces_T=tuple(pieces))
        worth_T = self.cost_T() / np.maximum(self._bytes_T, 1.0)
        worth_T[np.array(cut.everywhere_T) | (not self._may_copy)] = -1.0
        for table in np.argsort(-worth_T, kind="stable")[: _CANDIDATES // 2].tolist():
            if worth_T[table] > 0:
                everywhere = [*cut.everywhere_T]
                everywhere[table] = True
                yield cut._replace(everywhere_T=tuple(everywhere))

    def _pieces_of(self, table: int, count: int) -> list[_Piece]:
        """Cut a table into pieces of about equal load."""
        if (table, count) not in self._pieces:
            at = self._costs.buckets_of(table)
            load_B = self._instance.wanted_NB[:, at].sum(axis=0)
            order = np.argsort(-load_B, kind="stable")
            order = order[self._free_B[at][order]]
            # Dealt out there and back, so that no piece has the hotter bucket of every pair.
            dealt = np.arange(len(order)) % (2 * count)
            hand = np.minimum(dealt, 2 * count - 1 - dealt)
            self._pieces[table, count] = [
                self._piece(table, np.sort(order[hand == piece]) + at.start)
                for piece in range(count)
                if (hand == piece).any()
            ]
        return self._pieces[table, count]

    def _piece(self, table: int, buckets: Ints) -> _Piece:
        devices = len(self._instance.places_D)
        at = self._costs.buckets_of(table)
        owned_DDB = np.zeros((devices, devices, at.stop - at.start), np.bool_)
        for device in range(devices):
            owned_DDB[device, device, buckets - at.start] = True
        alone_DDS = self._costs.contributions(table, owned_DDB)
        own_DS = alone_DDS[self._open, self._open]
        cost = float(self._costs.costs(own_DS).mean())
        return _Piece(
            table,
            buckets,
            float(self._instance.bytes_B[buckets].sum()),
            alone_DDS,
            max(cost, _SMALL),
        )

    def _placed(self, cut: _Cut) -> Placement:
        """Place a state's pieces under each cap; return the best placement."""
        instance, costs = self._instance, self._costs
        owned_DB = self._start_DB.copy()
        everywhere_T = np.array(cut.everywhere_T)
        one_a_node_D = np.zeros(len(instance.places_D), np.bool_)
        for node in range(len(instance.nodes_N)):
            open_here = self._open[instance.node_D[self._open] == node]
            one_a_node_D[open_here[:1]] = True
        owned_DB[np.ix_(one_a_node_D, everywhere_T[instance.table_B] & self._free_B)] = True
        pieces = [
            piece
            for table, count in enumerate(cut.pieces_T)
            if not everywhere_T[table]
            for piece in self._pieces_of(table, count)
        ]
        start_DS = costs.all_contributions(owned_DB).sum(axis=0)
        room_D = self._room_D - instance.bytes_D(owned_DB & self._free_B)
        if (room_D < -_SMALL).any():
            return Placement(owned_DB, np.inf)
        best = Placement(owned_DB, np.inf)
        for order in self._orders(pieces):
            chosen_RP = self._dealt([pieces[at] for at in order], start_DS, room_D)
            for chosen_P in np.unique(chosen_RP[(chosen_RP >= 0).all(axis=1)], axis=0):
                trial_DB = owned_DB.copy()
                for at, device in zip(order, chosen_P, strict=True):
                    trial_DB[device, pieces[at].buckets] = True
                value = self._value(trial_DB)
                if value < best.value:
                    best = Placement(trial_DB, value)
        return best

    def _orders(self, pieces: Sequence[_Piece]) -> list[list[int]]:
        """Return the orders to deal in: the costliest first; the costliest or largest first."""
        cost_P = np.array([piece.cost for piece in pieces])
        size_P = np.array([piece.bytes for piece in pieces])
        cost_P, size_P = cost_P / max(cost_P.sum(), _SMALL), size_P / max(self._room_D.sum(), 1.0)
        by_cost = np.argsort(-cost_P, kind="stable").tolist()
        by_both = np.argsort(-np.maximum(cost_P, size_P), kind="stable").tolist()
        return [by_cost] if by_cost == by_both else [by_cost, by_both]

    def _dealt(
        self, pieces: Sequence[_Piece], start_DS: Singles, room_D: Floats
    ) -> NDArray[np.int64]:
        """Return the device of each piece by cap, R x P; -1 where a run finds no room."""
        runs, width = len(_CAPS), start_DS.shape[1] - 2
        sums_RDS = np.repeat(start_DS[None], runs, axis=0)
        room_RD = np.repeat(room_D[None], runs, axis=0)
        sent_D = sum(piece.alone_DDS[self._open, self._open, width].mean() for piece in pieces)
        cap_R1 = np.array(_CAPS)[:, None] * (
            (float(start_DS[self._open, width].sum()) + float(sent_D)) / max(1, len(self._open))
        )
        chosen_RP = np.full((runs, len(pieces)), -1)
        every = np.arange(runs)
        for at, piece in enumerate(pieces):
            own_DS = np.einsum("dds->ds", piece.alone_DDS)
            costs_RD = self._costs.costs(sums_RDS + own_DS).astype(np.float64)
            over_RD = sums_RDS[..., width] + own_DS[:, width] > cap_R1 + _SMALL
            costs_RD = np.where(over_RD, costs_RD + 1e6, costs_RD)
            costs_RD[room_RD < piece.bytes] = np.inf
            device_R = costs_RD.argmin(axis=1)
            fits_R = np.isfinite(costs_RD[every, device_R])
            chosen_RP[fits_R, at] = device_R[fits_R]
            sums_RDS += np.where(fits_R[:, None, None], piece.alone_DDS[device_R], 0)
            room_RD[every[fits_R], device_R[fits_R]] -= piece.bytes
        return chosen_RP


def _ranked(found: Iterable[Placement]) -> list[Placement]:
    """Return the placements that fit, best first."""
    return sorted((each for each in found if np.isfinite(each.value)), key=lambda each: each.value)


@dataclasses.dataclass(frozen=True, slots=True)
class Neuroshard:
    """Places tables by a learned cost.

    Attributes:
        net: The cost net; None: the one that comes with the package.
    """

    net: CostNet | None = None

    def propose(self, problem: Problem) -> Proposal:
        """Return the owners of the cheapest placement that it finds.

        Raises:
            RefusedError: Nobody has reported what nodes ask for, memory is too small, or a group
                is too large to search.
        """
        owners: dict[Bucket, tuple[Place, ...]] = {}
        stories = []
        today = {at: held.owners for at, held in problem.layout.items()}
        groups = list(instances(problem))
        for instance in groups:
            if not instance.open_D.any():
                continue
            _check_size(instance)
            costs = ShardCosts(instance, self.net or cost_net.shipped())
            budget = problem.limit_s * 1e6 * _SPENT / len(groups)
            owned_DB, story = _planned(instance, costs, budget, OWNERS_MAX // len(groups) // 2)
            changed = owners_of(instance, owned_DB, {**today, **owners})
            owners.update(changed)
            stories.append(f"{story}; {len(changed)} buckets change owners")
        return Proposal(owners=owners, explanation="; ".join(stories))


def _check_size(instance: Instance) -> None:
    """Prove that a search is of use.

    Raises:
        RefusedError: It would take too long, and too much memory.
    """
    devices, buckets = instance.owned_DB.shape
    if devices > _DEVICES_MAX or devices * buckets > _OWNERSHIP_MAX:
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            f"group {instance.group} has {devices} devices and {buckets} buckets; neuroshard "
            f"searches {_DEVICES_MAX} devices and {_OWNERSHIP_MAX // devices} buckets at most; "
            "use oper",
        )


def _planned(
    instance: Instance, costs: ShardCosts, budget: float, owners_max: int
) -> tuple[Bools, str]:
    """Return who shall own what, and the story.

    Args:
        instance: The group's problem.
        costs: Its costs.
        budget: Evaluations that may be spent, as `ShardCosts` counts them.
        owners_max: Owners that a bucket may have; while it moves it has as many again.
    """
    now_DB = instance.owned_DB
    before = float(costs.values(costs.all_contributions(now_DB).sum(axis=0)[None])[0])
    starts = _Beam(instance, costs, budget * _SEARCHED, owners_max).search()
    found = []
    allowed = fits(instance, now_DB, owners_max)
    if allowed:
        until = budget * (_SEARCHED + (1 - _SEARCHED) / 4)
        found.append(polished(instance, costs, Placement(now_DB, before), until, owners_max))
    for at, start in enumerate(starts):
        until = costs.spent_us + (budget - costs.spent_us) / (len(starts) - at)
        better = polished(instance, costs, start, until, owners_max)
        found.append(relabelled(instance, costs, better, owners_max))
    if not found:
        raise RefusedError(
            Code.RESOURCE_EXHAUSTED,
            f"group {instance.group}: {instance.bytes_B.sum():,.0f} bytes of buckets do not fit "
            f"into the budgets of its devices, "
            f"{(instance.budget_D * instance.open_D).sum():,.0f}; raise a budget or add a node",
        )
    least = min(placed.value for placed in found)
    near = [placed for placed in found if placed.value <= least * (1 + _SAME)]
    best = min(near, key=lambda placed: moved_bytes(instance, placed.owned_DB))
    story = (
        f"group {instance.group}: by the cost net {before * costs.unit_us:,.0f} -> "
        f"{best.value * costs.unit_us:,.0f} us/s (busiest device and a quarter of the mean)"
    )
    return best.owned_DB, story
