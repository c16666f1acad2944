"""Searches for a strategy whose step takes less: Metropolis, with greedy and random beside it.

After FlexFlow (Jia et al., SysML 2019): a proposal changes one thing of the current strategy at
random; it is taken if its step is shorter, and else with probability

    exp((current - proposed) / (temperature x current))

so what is refused depends on the ratio of two steps and not on the unit of time, and on the
current strategy and not on the best one. The temperature falls by the same factor at each
proposal. `greedy` takes a proposal only if its step is shorter; `at_random` draws each strategy
anew. All three count the strategies that they time.

The space is what the runtime can do: each bucket of a table at a rank, or the table everywhere;
the sums of the dense net; codecs of rows and gradients; how many ranks. A `Space` names the sums,
codecs and ranks that a search may choose: sums and codecs that round change what is learned, so
they are chosen only where a caller allows them. A strategy whose rows do not fit is never taken.

Pure: chance comes from a seed, and `used` says how much of the time is gone. For one thread.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator

import numpy as np

from embertide.trainer.config import Codecs
from embertide.trainer.config.sync import AllReduce
from embertide.trainer.sync.placing.profile import Profile
from embertide.trainer.sync.placing.step import StepModel, Strategy, Synchronous, fits
from embertide.trainer.sync.plan import EVERYWHERE, Owners, Ownership, spread

TEMPERATURE = 0.02
"""The first proposals' temperature: a step longer by 2 % is taken with probability 1/e."""
_COOLING = 100.0  # the first temperature over the last
_PARTS = (1.0, 0.5, 0.25, 0.0)  # of the buckets of a rank that move together; 0: one of them


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The choices of a search.

    Attributes:
        profile: The costs of steps.
        ranks: The numbers of ranks that it may choose from.
        syncs: How the dense net's gradients may be added up.
        codecs: The codecs of rows and gradients that it may choose from.
        everywhere: Whether tables may be everywhere.
    """

    profile: Profile
    ranks: tuple[int, ...]
    syncs: tuple[Synchronous, ...] = (AllReduce(),)
    codecs: tuple[Codecs, ...] = (Codecs(),)
    everywhere: bool = True

    def __post_init__(self) -> None:
        """Refuse a space of nothing."""
        for name in ("ranks", "syncs", "codecs"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: there is nothing to choose from")


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        strategy: The best one.
        step_s: The time of its step; infinite: nothing fits.
        evaluations: Strategies that were timed.
        curve: (evaluations, shortest step until then), where it became shorter.
    """

    strategy: Strategy
    step_s: float
    evaluations: int
    curve: tuple[tuple[int, float], ...]


def untimed() -> float:
    """Say that none of the time is used: evaluations alone bound the search."""
    return 0.0


class _Timer:
    """Times strategies and keeps the best."""

    def __init__(self, space: Space, evaluations: int, used: Callable[[], float]) -> None:
        self._space = space
        self._models: dict[int, StepModel] = {}
        self._most, self._used = evaluations, used
        self.evaluations = 0
        self.best: Strategy | None = None
        self.best_s = math.inf
        self.curve: list[tuple[int, float]] = []

    def done(self) -> float:
        """Return the share of the search that is done, from 0 to 1 and above."""
        return max(self.evaluations / self._most, self._used())

    def step_s(self, strategy: Strategy) -> float:
        """Return what a step takes; infinite: its rows do not fit."""
        ranks = strategy.owners.ranks
        if ranks not in self._models:
            self._models[ranks] = StepModel(self._space.profile, ranks)
        model = self._models[ranks]
        self.evaluations += 1
        took = model.step_s(strategy) if fits(model, strategy.owners) else math.inf
        if self.best is None or took < self.best_s:
            self.best, self.best_s = strategy, took
            self.curve.append((self.evaluations, took))
        return took

    def found(self) -> Found:
        assert self.best is not None
        return Found(self.best, self.best_s, self.evaluations, tuple(self.curve))


# --- strategies -----------------------------------------------------------------------------------


def usual(profile: Profile, ranks: int) -> Ownership:
    """Return the owners that a run takes without a plan, by the loads of a profile."""
    costs = [
        np.array(t.load_P)
        / sum(t.load_P)
        * t.distinct_keys(profile.events / ranks)
        # As trainer.sync.plan: a key costs its index entry, and its row's lines there and back.
        * (64 + 3 * 4 * t.row_floats)
        for t in profile.tables
    ]
    owner = np.array(spread(np.concatenate(costs).tolist(), ranks), np.uint16)
    ends = np.cumsum([len(each) for each in costs])[:-1]
    return Ownership(ranks, tuple(np.split(owner, ends)))


def start_of(space: Space) -> Strategy:
    """Return what a run takes without a plan: all ranks, and the first sums and codecs."""
    owners = usual(space.profile, max(space.ranks))
    return Strategy(owners, space.syncs[0], space.codecs[0])


def every_strategy(space: Space) -> Iterator[Strategy]:
    """Return all strategies of a space, which must be a tiny one."""
    for ranks in space.ranks:
        choices_T: list[list[Owners]] = []
        for table in space.profile.tables:
            size = len(table.load_P)
            choices = [
                np.array(owners, np.uint16)
                for owners in itertools.product(range(ranks), repeat=size)
            ]
            if space.everywhere and ranks > 1:
                choices.append(np.full(size, EVERYWHERE, np.uint16))
            choices_T.append(choices)
        for owners_T in itertools.product(*choices_T):
            for sync, codecs in itertools.product(space.syncs, space.codecs):
                yield Strategy(Ownership(ranks, owners_T), sync, codecs)


def draw(space: Space, chance: random.Random) -> Strategy:
    """Draw a strategy: each table whole, spread or everywhere."""
    ranks = chance.choice(space.ranks)
    kinds = ("whole", "spread", "everywhere") if space.everywhere else ("whole", "spread")
    owners_T = tuple(
        _table(space, t, ranks, chance.choice(kinds), chance)
        for t in range(len(space.profile.tables))
    )
    return Strategy(
        Ownership(ranks, owners_T), chance.choice(space.syncs), chance.choice(space.codecs)
    )


def _table(space: Space, t: int, ranks: int, kind: str, chance: random.Random) -> Owners:
    load_P = space.profile.tables[t].load_P
    if kind == "everywhere" and ranks > 1:
        return np.full(len(load_P), EVERYWHERE, np.uint16)
    if kind == "whole":
        return np.full(len(load_P), chance.randrange(ranks), np.uint16)
    turned = chance.sample(range(ranks), ranks)
    return np.array([turned[rank] for rank in spread(load_P, ranks)], np.uint16)


# --- proposals ------------------------------------------------------------------------------------


def propose(space: Space, strategy: Strategy, chance: random.Random) -> Strategy:
    """Return a strategy that differs in one thing, drawn at random; at times it is the same."""
    kinds = ["move"] * 4 + ["shift"] * 2 + ["swap", "spread", "whole"]
    if space.everywhere:
        kinds.append("everywhere")
    for kind, choices in (("sync", space.syncs), ("codecs", space.codecs), ("ranks", space.ranks)):
        if len(choices) > 1:
            kinds.append(kind)
    kind = chance.choice(kinds)
    owners = strategy.owners
    if kind == "sync":
        return dataclasses.replace(strategy, sync=chance.choice(space.syncs))
    if kind == "codecs":
        return dataclasses.replace(strategy, codecs=chance.choice(space.codecs))
    if kind == "ranks":
        return dataclasses.replace(strategy, owners=_with_ranks(space, owners, chance))
    owners_T = list(owners.owners_T)
    ranks = owners.ranks
    if kind == "shift" and ranks > 1:
        giver, taker = chance.sample(range(ranks), 2)
        part = chance.choice(_PARTS)
        for t, owner_P in enumerate(owners_T):
            owners_T[t] = _moved(owner_P, giver, taker, part, chance)
        return dataclasses.replace(strategy, owners=Ownership(ranks, tuple(owners_T)))
    t = chance.randrange(len(owners_T))
    owner_P = owners_T[t]
    if kind in ("move", "swap") and ranks > 1 and owner_P[0] != EVERYWHERE:
        giver = int(owner_P[chance.randrange(len(owner_P))])
        taker = (giver + chance.randrange(1, ranks)) % ranks
        if kind == "move":
            owners_T[t] = _moved(owner_P, giver, taker, chance.choice(_PARTS), chance)
        else:
            owners_T[t] = _moved(owner_P, giver, taker, 0.0, chance)
            other = chance.randrange(len(owners_T))
            if other != t:
                owners_T[other] = _moved(owners_T[other], taker, giver, 0.0, chance)
    elif kind == "move":
        owners_T[t] = _table(space, t, ranks, "spread", chance)
    else:
        owners_T[t] = _table(space, t, ranks, kind, chance)
    return dataclasses.replace(strategy, owners=Ownership(ranks, tuple(owners_T)))


def _moved(owner_P: Owners, giver: int, taker: int, part: float, chance: random.Random) -> Owners:
    """Return owners of whom one gives another a part of its buckets; 0: one bucket."""
    places = np.flatnonzero(owner_P == giver).tolist()
    if not places:
        return owner_P
    count = max(1, round(part * len(places)))
    moved = owner_P.copy()
    moved[chance.sample(places, count)] = taker
    return moved


def _with_ranks(space: Space, owners: Ownership, chance: random.Random) -> Ownership:
    """Return owners of another number of ranks; tables that are everywhere stay so."""
    ranks = chance.choice(space.ranks)
    if ranks == owners.ranks:
        return owners
    fresh = usual(space.profile, ranks)
    owners_T = tuple(
        old if old[0] == EVERYWHERE and ranks > 1 else new
        for old, new in zip(owners.owners_T, fresh.owners_T, strict=True)
    )
    return Ownership(ranks, owners_T)


# --- searches -------------------------------------------------------------------------------------


def metropolis(
    space: Space,
    evaluations: int,
    seed: int,
    *,
    temperature: float = TEMPERATURE,
    used: Callable[[], float] = untimed,
) -> Found:
    """Search by Metropolis from what a run takes without a plan.

    Args:
        space: The choices.
        evaluations: Strategies to time, at most; the first is what it starts from.
        seed: Seed of chance.
        temperature: Temperature of the first proposals, relative to the current step.
        used: Share of the time that is used; from 1 on the search ends.
    """
    chance = random.Random(seed)
    timer = _Timer(space, evaluations, used)
    current = start_of(space)
    current_s = timer.step_s(current)
    while (done := timer.done()) < 1:
        at = temperature * _COOLING**-done
        proposed = propose(space, current, chance)
        proposed_s = timer.step_s(proposed)
        if proposed_s <= current_s or (
            math.isfinite(proposed_s)
            and chance.random() < math.exp((current_s - proposed_s) / (at * current_s))
        ):
            current, current_s = proposed, proposed_s
    return timer.found()


def greedy(
    space: Space, evaluations: int, seed: int, *, used: Callable[[], float] = untimed
) -> Found:
    """Search as `metropolis` does, but take only what is better."""
    chance = random.Random(seed)
    timer = _Timer(space, evaluations, used)
    current = start_of(space)
    current_s = timer.step_s(current)
    while timer.done() < 1:
        proposed = propose(space, current, chance)
        proposed_s = timer.step_s(proposed)
        if proposed_s < current_s:
            current, current_s = proposed, proposed_s
    return timer.found()


def at_random(
    space: Space, evaluations: int, seed: int, *, used: Callable[[], float] = untimed
) -> Found:
    """Time what a run takes without a plan, and then strategies drawn at random."""
    chance = random.Random(seed)
    timer = _Timer(space, evaluations, used)
    timer.step_s(start_of(space))
    while timer.done() < 1:
        timer.step_s(draw(space, chance))
    return timer.found()
