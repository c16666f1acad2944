"""The planner `oper`: owners and copies of buckets by who asks for them (after OPER, ATC 2024).

The unit is a bucket; it has one owner in a group or several, and who owns it asks nobody for it.
The search starts from today's owners and lowers the score of the cost model:

1. Batches. All changes of all buckets are valued at the slope of the score (changes.py), the best
   one of each bucket is taken, the most valuable first, while devices have room; half as many are
   made until the score falls as it should. Where memory is full, copies worth less a byte make room
   for those worth more. Where owners pool, one bucket less saves next to no sum while others of its
   table are asked for. So this is done twice there, once with a key at what those of its table cost
   in the mean, as if all of them went, and the better end is taken.
   The same is done from today's owners with whole holdings of pairs of devices exchanged, if that
   is better.
2. Single steps. Of a few dozen buckets, on the busiest device and elsewhere, all changes and all
   pairs of changes are scored exactly, and the best is made.

Small problems are searched by pairs alone, from several starts and with kicks from a fixed seed.
Each byte moved counts a little, so of two plans that cost the same the one that moves less wins,
and the search ends where changes do not pay.

How much is tried follows from the time limit by fixed rates, not by a clock: the same problem has
the same answer.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from embertide.server.core.plan.changes import Linear, Terms, terms_of
from embertide.server.core.plan.cost import MEAN_WEIGHT, busy_us_D, score_of
from embertide.server.core.plan.instance import (
    Bools,
    Floats,
    Instance,
    Ints,
    instances,
    owners_of,
    rates,
)
from embertide.server.core.plan.layout import Bucket, Place
from embertide.server.core.plan.owner_options import (
    Aim,
    Options,
    all_sets,
    moved_bytes,
    near_sets,
    weights_B,
)
from embertide.server.core.plan.planner import Problem, Proposal
from embertide.server.core.plan.prices import Prices
from embertide.server.core.plan.validity import OWNERS_MAX

# Moving every bucket once must gain this share of the score.
MOVING_ALL = 0.002
# A batch that gains less of the score is the last one.
_GAIN_MIN = 0.0005
# Less of the score is not worth an operation.
WORTH_MIN = 0.002
# Devices within this share of the busiest one count as busiest too: a wide range first.
_SHARPNESS = (0.3, 0.1, 0.03, 0.01)
# Parts of the changes that are worth something: the next one is made if one is too much.
_PARTS = (1.0, 0.4, 0.15, 0.05, 0.02, 0.007, 0.002, 0.0007)
# Devices x buckets that are looked at a second, the arrays of one evaluation counting once; a core
# that does nothing else manages twice as many.
_LOOKED_AT_A_S = 5_000_000
_BATCHES = 0.6  # of the time; single steps have the rest
# Costs of a single step, an evaluation in a batch and a search by pairs, however small the
# problem.
_STEP_COST_MIN, _BATCH_COST_MIN, _PAIRS_COST_MIN = 400_000, 20_000, 40_000
_FOCUS = 48
_PAIRS = 128
_SMALL_OPTIONS = 200  # buckets x options that are searched by pairs alone
_KICKS = 100
# Devices whose holdings are exchanged with those of others, the busiest first, and the share of the
# time that this may take.
_EXCHANGED_OF, _EXCHANGING = 16, 0.2
_SEED = 1


class _Change(NamedTuple):
    """Buckets that change: each gets `target` and loses `source`; -1: none."""

    at_C: Ints
    source_C: Ints
    target_C: Ints


@dataclasses.dataclass(slots=True)
class Search:
    """The search in one group."""

    instance: Instance
    prices: Prices
    aim: Aim
    limit_s: float
    terms: Terms = dataclasses.field(init=False)
    _left: float = dataclasses.field(init=False)  # devices x buckets to look at

    def __post_init__(self) -> None:
        """Make what does not change."""
        self.terms = terms_of(self.instance, self.prices)
        self._left = self.limit_s * _LOOKED_AT_A_S

    def value(self, owned_DB: Bools) -> float:
        """Return the score of an ownership, with what its moves count."""
        busy_D = busy_us_D(self.instance, owned_DB, self.prices)
        return score_of(self.instance, busy_D).value + self._moving(owned_DB)

    def _moving(self, owned_DB: Bools) -> float:
        return self.aim.byte_us * moved_bytes(self.instance, owned_DB)

    def best(self) -> Bools:
        """Return the best ownership that is found."""
        if self._is_small:
            return self._by_pairs()
        owned_DB = self._batched((1 - _BATCHES) * self._left)
        random = np.random.default_rng(_SEED)
        idle = 0
        while self._left > 0 and idle < 3:
            idle = 0 if self._step(owned_DB, random) else idle + 1
        return owned_DB

    def _batched(self, until: float) -> Bools:
        """Return the best ownership that batches lead to, with `until` of the time left."""
        pooled = any(each.sum_share > 0 and each.bag_keys > 1 for each in self.instance.tables)
        ways = (True, False) if pooled else (False,)
        starts = [self.instance.owned_DB]
        exchanged_DB = self._with_holdings_exchanged()
        if exchanged_DB is not None:
            starts.append(exchanged_DB)
        runs = list(itertools.product(starts, ways))
        found: list[Bools] = []
        for at, (start_DB, far) in enumerate(runs):
            owned_DB = self._filled(start_DB, far=far)
            if self.value(owned_DB) > self.value(start_DB):
                owned_DB = start_DB.copy()
            end = self._left - (self._left - until) / (len(runs) - at)
            self._batches(owned_DB, end, far=far)
            found.append(owned_DB)
        return min(found, key=self.value)

    def _with_holdings_exchanged(self) -> Bools | None:
        """Return today's holdings with pairs of devices exchanged, if that lowers the score.

        Where nodes hold whole tables so as not to need each other, no single bucket is worth
        giving up: who gives up one needs a peer for every request. All at once may be.
        """
        owned_DB = self.instance.owned_DB
        value = self.value(owned_DB)
        busiest_D = np.argsort(-busy_us_D(self.instance, owned_DB, self.prices), kind="stable")
        open_D = [int(device) for device in busiest_D if self.instance.open_D[device]]
        pairs = [
            (first, second)
            for at, first in enumerate(open_D[:_EXCHANGED_OF])
            for second in open_D[at + 1 :]
        ]
        end = (1 - _EXCHANGING) * self._left
        better = True
        while better:
            better = False
            for pair in pairs:
                if self._left <= end:
                    break
                self._left -= max(owned_DB.size, _BATCH_COST_MIN)
                other_DB = owned_DB.copy()
                other_DB[list(pair)] = owned_DB[list(reversed(pair))]
                other = self.value(other_DB) if self._is_possible(other_DB) else np.inf
                if other < (1 - _GAIN_MIN) * value:
                    owned_DB, value, better = other_DB, other, True
        return owned_DB if owned_DB is not self.instance.owned_DB else None

    def _is_possible(self, owned_DB: Bools) -> bool:
        """Whether devices have room, and no node has a bucket twice."""
        instance = self.instance
        fits = bool((instance.bytes_D(owned_DB) <= self.aim.limit_D).all())
        return fits and int(instance.held_NB(owned_DB).sum()) == int(owned_DB.sum())

    def _filled(self, start_DB: Bools, *, far: bool) -> Bools:
        """Return an ownership, and copies that save most a byte while memory remains."""
        instance = self.instance
        count = max(int(instance.open_D.sum()), 1)
        slope_D = np.where(instance.open_D, 1 / count, 0.0)
        owned_DB = start_DB.copy()
        linear = Linear(instance, self.terms, self.prices, owned_DB, slope_D, far=far)
        add_DB = linear.worths().add_DB
        size_B = np.maximum(instance.bytes_B, 1e-9)
        room_D = self.aim.limit_D - instance.bytes_D(owned_DB)
        held_NB, owners_B = instance.held_NB(owned_DB), owned_DB.sum(axis=0)
        # A bucket gets its most valuable copies first: the devices of a node one after another.
        for device in np.argsort(-np.maximum(add_DB, 0).sum(axis=1), kind="stable"):
            node = instance.node_D[device]
            may_B = (add_DB[device] > 0) & ~held_NB[node] & (owners_B < self.aim.owners_max)
            at = np.flatnonzero(may_B)
            at = at[np.argsort(-add_DB[device, at] / size_B[at], kind="stable")]
            at = at[np.cumsum(size_B[at]) <= room_D[device]]
            owned_DB[device, at] = held_NB[node, at] = True
            owners_B[at] += 1
        return owned_DB

    # Batches.

    def _batches(self, owned_DB: Bools, until: float, *, far: bool) -> None:
        """Make batches, each sharpness with its part of the time; end with `until` left."""
        for at, sharpness in enumerate(_SHARPNESS):
            part = (self._left - until) / (len(_SHARPNESS) - at)
            end = self._left - part
            while self._batch(owned_DB, sharpness, far=far) and self._left > end:
                pass

    def _smooth(self, busy_D: Floats, width: float) -> tuple[float, Floats]:
        """Return a smooth stand-in for the score, and its slope by device."""
        open_D = self.instance.open_D
        count = max(int(open_D.sum()), 1)
        top = float(busy_D[open_D].max(initial=0.0))
        near_D = np.where(open_D, np.exp((busy_D - top) / width), 0.0)
        mean = float(busy_D[open_D].sum()) / count
        slope_D = near_D / near_D.sum() + np.where(open_D, MEAN_WEIGHT / count, 0.0)
        return top + width * float(np.log(near_D.sum())) + MEAN_WEIGHT * mean, slope_D

    def _batch(self, owned_DB: Bools, sharpness: float, *, far: bool) -> bool:
        """Make many changes at once; False if they gain next to nothing."""
        busy_D = busy_us_D(self.instance, owned_DB, self.prices)
        width = sharpness * max(float(busy_D.max()), 1e-9)
        before, slope_D = self._smooth(busy_D, width)
        before += self._moving(owned_DB)
        add_DB, drop_DB, wanted = self._worthwhile(owned_DB, slope_D, far=far)
        self._left -= max(3 * owned_DB.size, _BATCH_COST_MIN)
        for part in _PARTS:
            changes = _first(wanted, part)
            changes = self._fitting(owned_DB, changes)
            after_DB = owned_DB.copy()
            self._left -= max(2 * owned_DB.size, _BATCH_COST_MIN)
            _make(after_DB, changes)
            _make(after_DB, self._exchanged(after_DB, add_DB, drop_DB, changes, part))
            busy_D = busy_us_D(self.instance, after_DB, self.prices)
            after = self._smooth(busy_D, width)[0] + self._moving(after_DB)
            if after < before:
                owned_DB[:] = after_DB
                return before - after > _GAIN_MIN * before
        return False

    def _worthwhile(
        self, owned_DB: Bools, slope_D: Floats, *, far: bool
    ) -> tuple[Floats, Floats, _Change]:
        """Return what adding and dropping gains, and of each bucket the best change if it gains.

        Changes come the most valuable first.
        """
        instance = self.instance
        linear = Linear(instance, self.terms, self.prices, owned_DB, slope_D, far=far)
        worths = linear.worths()
        moving_B = self.aim.byte_us * weights_B(instance)
        fresh_DB = np.where(instance.owned_DB, 0.0, moving_B)  # what owning counts
        named_DB = owned_DB | instance.owned_DB
        full_B = named_DB.sum(axis=0) >= self.aim.owners_max
        barred_DB = full_B & ~named_DB
        add_DB = np.where(barred_DB, -np.inf, worths.add_DB - fresh_DB)
        drop_DB = worths.drop_DB + fresh_DB
        back_DB = np.take_along_axis(fresh_DB, worths.source_DB, axis=0)
        move_DB = np.where(barred_DB, -np.inf, worths.move_DB - fresh_DB + back_DB)
        devices = len(slope_D)
        all_XB = np.concatenate([add_DB, drop_DB, move_DB])
        which_B = all_XB.argmax(axis=0)
        gain_B = all_XB[which_B, np.arange(all_XB.shape[1])]
        kind_B, device_B = which_B // devices, which_B % devices
        size_B = weights_B(instance)
        # A copy takes room for good: what counts is its gain a byte.
        key_B = np.where(kind_B == 0, gain_B * (size_B.mean() / np.maximum(size_B, 1e-9)), gain_B)
        at_C = np.flatnonzero(gain_B > 0)
        at_C = at_C[np.argsort(-key_B[at_C], kind="stable")]
        target_B = np.where(kind_B == 1, -1, device_B)
        source_B = np.where(
            kind_B == 0,
            -1,
            np.where(kind_B == 1, device_B, worths.source_DB[device_B, np.arange(len(device_B))]),
        )
        return add_DB, drop_DB, _Change(at_C, source_B[at_C], target_B[at_C])

    def _fitting(self, owned_DB: Bools, wanted: _Change) -> _Change:
        """Return the changes without those for which there is no room, the least valuable gone."""
        size = self.instance.bytes_B[wanted.at_C].tolist()
        source, target = wanted.source_C.tolist(), wanted.target_C.tolist()
        room = (self.aim.limit_D - self.instance.bytes_D(owned_DB)).tolist()
        entering: list[list[int]] = [[] for _ in room]
        for c in range(len(size)):
            if target[c] >= 0:
                room[target[c]] -= size[c]
                entering[target[c]].append(c)
            if source[c] >= 0:
                room[source[c]] += size[c]
        kept = np.ones(len(size), np.bool_)
        over = [device for device, left in enumerate(room) if left < -0.5]
        while over:
            device = over.pop()
            while room[device] < -0.5 and entering[device]:
                c = entering[device].pop()
                kept[c] = False
                room[device] += size[c]
                if source[c] >= 0:
                    room[source[c]] -= size[c]
                    over.append(source[c])
        return _Change(*(each[kept] for each in wanted))

    def _exchanged(
        self, owned_DB: Bools, add_DB: Floats, drop_DB: Floats, others: _Change, part: float
    ) -> _Change:
        """Return copies that go where others are worth more a byte; one change a bucket.

        Args:
            owned_DB: The ownership once the others are made.
            add_DB: Gains of adding, as they were before.
            drop_DB: Gains of dropping, as they were before.
            others: Changes of buckets that are left alone here.
            part: Part of the exchanges that gain to make.
        """
        size_B = np.maximum(self.instance.bytes_B, 1e-9)
        free_B = np.ones(len(size_B), np.bool_)
        free_B[others.at_C] = False
        room_D = self.aim.limit_D - self.instance.bytes_D(owned_DB)
        made: list[tuple[int, int, int]] = []
        for device in range(len(room_D)):
            enter = np.flatnonzero(free_B & (add_DB[device] > 0))
            leave = np.flatnonzero(free_B & np.isfinite(drop_DB[device]))
            if not len(enter) or not len(leave):
                continue
            enter = enter[np.argsort(-add_DB[device, enter] / size_B[enter], kind="stable")]
            leave = leave[np.argsort(-drop_DB[device, leave] / size_B[leave], kind="stable")]
            # The e-th to enter needs the first `needed` to leave.
            freed = np.cumsum(size_B[leave])
            needed = np.searchsorted(freed, np.cumsum(size_B[enter]) - max(room_D[device], 0.0))
            fits = needed < len(leave)
            enter, needed = enter[fits], needed[fits]
            gain = np.cumsum(add_DB[device, enter])
            gain += np.cumsum(drop_DB[device, leave])[needed]
            if not len(gain) or gain.max() <= 0:
                continue
            best = int(part * (gain.argmax() + 1))
            if not best:
                continue
            goes = leave[: needed[best - 1] + 1]
            made += [(int(b), device, -1) for b in goes]
            made += [(int(b), -1, device) for b in enter[:best]]
            free_B[enter[:best]] = free_B[goes] = False
        columns = np.array(made, np.int64).reshape(-1, 3)
        return _Change(columns[:, 0], columns[:, 1], columns[:, 2])

    # Single steps and pairs.

    def _options(
        self, owned_DB: Bools, focus_F: Ints, sets: list[list[tuple[int, ...]]]
    ) -> Options:
        options = Options(self.instance, self.terms, self.prices, self.aim, focus_F, sets, owned_DB)
        self._restart(options, owned_DB)
        return options

    def _restart(self, options: Options, owned_DB: Bools) -> None:
        free = dataclasses.replace(self.prices, call_us=0.0, called_us=0.0, wire_kib_us=0.0)
        options.start(
            busy_us_D(self.instance, owned_DB, free),
            rates(self.instance, owned_DB).asked_of_TNN,
            self.instance.bytes_D(owned_DB),
            moved_bytes(self.instance, owned_DB),
        )

    def _step(self, owned_DB: Bools, random: np.random.Generator) -> bool:
        """Look closely at some buckets; False if nothing gains."""
        instance = self.instance
        self._left -= max(_STEP_COST_MIN, 6 * owned_DB.size)
        busy_D = busy_us_D(instance, owned_DB, self.prices)
        busiest = int(np.where(instance.open_D, busy_D, -1.0).argmax())
        width = 0.005 * max(float(busy_D.max()), 1e-9)
        slope_D = self._smooth(busy_D, width)[1]
        worths = Linear(instance, self.terms, self.prices, owned_DB, slope_D).worths()
        gain_B = np.maximum(worths.add_DB.max(axis=0), worths.move_DB.max(axis=0))
        gain_B = np.maximum(gain_B, worths.drop_DB.max(axis=0))
        few = min(_FOCUS // 3, len(gain_B))
        chosen = set(np.argsort(-gain_B, kind="stable")[:few].tolist())
        there = np.flatnonzero(owned_DB[busiest])
        for among in (there, np.arange(len(gain_B))):
            chosen.update(random.permutation(among)[:few].tolist())
        focus_F = np.array(sorted(chosen), np.int64)
        most = self.aim.owners_max
        sets = [list(near_sets(instance, owned_DB[:, b], most)) for b in focus_F]
        options = self._options(owned_DB, focus_F, sets)
        least = 1e-6 * max(options.value(), 1e-9)
        gained = False
        for _ in range(8):
            if not options.improve(_PAIRS, least):
                break
            gained = True
        options.write(owned_DB)
        return gained

    @property
    def _is_small(self) -> bool:
        sets = 1
        for node in range(len(self.instance.nodes_N)):
            sets *= 1 + int((self.instance.open_D & (self.instance.node_D == node)).sum())
            if sets * len(self.instance.buckets_B) > _SMALL_OPTIONS:
                return False
        return True

    def _starts(self) -> Iterator[Bools]:
        """Yield ownerships to begin a search by pairs from; the first is today's."""
        today_DB = self.instance.owned_DB
        yield today_DB.copy()
        yield self._batched(0.5 * self._left)

    def _by_pairs(self) -> Bools:
        """Search a small problem by pairs of changes, from several starts."""
        instance = self.instance
        focus_F = np.arange(len(instance.buckets_B))
        sets = list(all_sets(instance, self.aim.owners_max))
        random = np.random.default_rng(_SEED)
        options = self._options(instance.owned_DB, focus_F, [sets] * len(focus_F))
        best_value, best_DB = options.value(), instance.owned_DB
        least = 1e-9 * max(best_value, 1e-9)

        def descend() -> None:
            nonlocal best_value, best_DB
            for _ in range(4 * len(focus_F)):
                self._left -= _PAIRS_COST_MIN
                if not options.improve(_PAIRS, least):
                    break
            if options.value() < best_value - least:
                best_value, best_DB = options.value(), best_DB.copy()
                options.write(best_DB)

        for start_DB in self._starts():
            options.choose(start_DB)
            descend()
        for _ in range(_KICKS):
            if self._left <= 0:
                break
            options.choose(best_DB)
            kept_F = options.now_F
            kicked = random.permutation(len(focus_F))[:3]
            for f in kicked:
                kept_F[f] = random.choice(np.flatnonzero(options.valid_FO[f]))
            descend()
        return best_DB


def _first(changes: _Change, part: float) -> _Change:
    """Return the first part of the changes, at least one."""
    count = max(1, int(part * len(changes.at_C)))
    return _Change(*(each[:count] for each in changes))


def _make(owned_DB: Bools, changes: _Change) -> None:
    at_C, source_C, target_C = changes
    owned_DB[source_C[source_C >= 0], at_C[source_C >= 0]] = False
    owned_DB[target_C[target_C >= 0], at_C[target_C >= 0]] = True


def aim_of(problem: Problem, instance: Instance, before: float) -> Aim:
    """Return what a search in a group goes by.

    Args:
        problem: The whole problem.
        instance: The group's.
        before: Score of today's ownership.
    """
    groups = len({node.group for node in problem.plan.topology.nodes})
    today_D = instance.bytes_D(instance.owned_DB)
    return Aim(
        limit_D=np.maximum(instance.budget_D, today_D),
        byte_us=MOVING_ALL * before / max(float(weights_B(instance).sum()), 1e-9),
        # All groups' owners stand in one list, and each group may change.
        owners_max=max(1, OWNERS_MAX // groups),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Oper:
    """Owners and copies of buckets by who asks for them."""

    def propose(self, problem: Problem) -> Proposal:
        """Return the owners that cost least, as far as they are found.

        Raises:
            RefusedError: Nobody has reported what nodes ask for.
        """
        owners: dict[Bucket, tuple[Place, ...]] = {}
        stories = []
        today = {at: held.owners for at, held in problem.layout.items()}
        groups = list(instances(problem))
        for instance in groups:
            before = score_of(
                instance, busy_us_D(instance, instance.owned_DB, problem.prices)
            ).value
            search = Search(
                instance,
                problem.prices,
                aim_of(problem, instance, before),
                problem.limit_s / len(groups),
            )
            owned_DB = search.best()
            after = search.value(owned_DB)
            if not after < before * (1 - WORTH_MIN):
                owned_DB = instance.owned_DB
            owners.update(owners_of(instance, owned_DB, {**today, **owners}))
            stories.append(_story(instance, owned_DB, problem.prices))
        return Proposal(owners=owners, explanation="; ".join(stories))


def _story(instance: Instance, owned_DB: Bools, prices: Prices) -> str:
    """Say what changes and why."""
    before_D = busy_us_D(instance, instance.owned_DB, prices)
    after_D = busy_us_D(instance, owned_DB, prices)
    before, after = score_of(instance, before_D), score_of(instance, after_D)
    name = f"group {instance.group}"
    if (owned_DB == instance.owned_DB).all():
        return f"{name}: score {before.value:,.0f} us/s; nothing that changes would pay"
    asked = [float(rates(instance, each).asked_NT.sum()) for each in (instance.owned_DB, owned_DB)]
    counts = [each.sum(axis=0) for each in (instance.owned_DB, owned_DB)]
    changed = int((owned_DB != instance.owned_DB).any(axis=0).sum())
    return (
        f"{name}: score {before.value:,.0f} -> {after.value:,.0f} us/s, busiest device "
        f"{before.busiest_us:,.0f} -> {after.busiest_us:,.0f}, keys asked of peers "
        f"{asked[0]:,.0f} -> {asked[1]:,.0f} a second; {changed} buckets change, copies of buckets "
        f"{int((counts[0] - 1).sum())} -> {int((counts[1] - 1).sum())}"
    )
