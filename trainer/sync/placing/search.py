"""Searches for a strategy whose step takes less: Metropolis, with greedy and random beside it.

After FlexFlow (Jia et al., SysML 2019): a proposal changes one thing of the current strategy at
random; it is taken if its step is shorter, and else with probability

    exp((current - proposed) / (temperature x current))

so what is refused depends on the ratio of two steps and not on the unit of time, and on the
current strategy and not on the best one. The temperature falls by the same factor at each
proposal. Before that and after it a search takes only what is no longer (`_STAGES`): first it comes
down from what a run takes without a plan, and in the end to the bottom of where Metropolis got.
Half of its proposals aim (trainer.sync.placing.aimed), and it times no strategy twice: where all
around is known, as in a tiny space, it goes on from one that is drawn anew.

`greedy` takes a proposal only if its step is shorter, and `at_random` draws each strategy anew:
they are what the search is compared with. All three count the strategies that they time.

The space is what the runtime can do: each bucket of a table at a rank, or the table everywhere; a
bounded set of hot rows, or none; the sums of the dense net; codecs of rows and gradients; how many
ranks. A `Space` names the sums, codecs, ranks and hot rows that a search may choose: sums and
codecs that round change what is learned, so they are chosen only where a caller allows them. A
strategy whose rows do not fit is never taken.

Pure: chance comes from a seed, and `used` says how much of the time is gone. For one thread.
"""

import dataclasses
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import Codecs
from embertide.trainer.config.sync import AllReduce
from embertide.trainer.sync.placing.aimed import moved, relieved, respread
from embertide.trainer.sync.placing.profile import Profile
from embertide.trainer.sync.placing.step import (
    StepModel,
    Strategy,
    Synchronous,
    fits,
    hot_bytes,
    is_possible,
)
from embertide.trainer.sync.plan import EVERYWHERE, Owners, Ownership, homes_in_turn, spread

_COOLING = 100.0  # a stage's first temperature over its last
_MISSES = 200  # proposals that are known, one after the other, after which one is drawn anew
_LOOKED_AT = 0.2  # of a search, at most, for the few choices that are not owners
_AIMED = (0.3, 0.25)  # of the proposals: those that relieve a rank, and those that deal out anew
_DRAWN_COLUMNS = 0.25  # of strategies that are drawn
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
        hot_rows: How many rows may be hot, at most; 0: none.
        columns: Whether tables whose profile has chunks may be column-wise.
    """

    profile: Profile
    ranks: tuple[int, ...]
    syncs: tuple[Synchronous, ...] = (AllReduce(),)
    codecs: tuple[Codecs, ...] = (Codecs(),)
    everywhere: bool = True
    hot_rows: tuple[int, ...] = (0,)
    columns: bool = True

    def __post_init__(self) -> None:
        """Refuse a space of nothing."""
        for name in ("ranks", "syncs", "codecs", "hot_rows"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: there is nothing to choose from")

    @property
    def chunked_T(self) -> list[int]:
        """Return the tables that may be column-wise."""
        tables = enumerate(self.profile.tables) if self.columns else ()
        return [t for t, table in tables if table.chunks > 1]


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


class _Stage(NamedTuple):
    """A part of a search, from the best strategy found before it.

    Attributes:
        until: Share of the search at which it ends.
        temperature: Of its first proposals: a step longer by that part is taken with probability
            1/e. 0: none is.
    """

    until: float
    temperature: float


_STAGES = (_Stage(0.35, 0.0), _Stage(0.7, 0.005), _Stage(1.0, 0.0))


def untimed() -> float:
    """Say that none of the time is used: evaluations alone bound the search."""
    return 0.0


class _Timer:
    """Times strategies and keeps the best."""

    def __init__(self, space: Space, evaluations: int, used: Callable[[], float]) -> None:
        self._space = space
        self._models: dict[int, StepModel] = {}
        self._most, self._used = evaluations, used
        self._known: set[bytes] = set()
        self.evaluations = 0
        self.best: Strategy | None = None
        self.best_s = math.inf
        self.curve: list[tuple[int, float]] = []

    def done(self) -> float:
        """Return the share of the search that is done, from 0 to 1 and above."""
        return max(self.evaluations / self._most, self._used())

    def step_s(self, strategy: Strategy) -> float:
        """Return what a step takes; infinite: its rows do not fit, or no run could be so."""
        ranks = strategy.owners.ranks
        if ranks not in self._models:
            self._models[ranks] = StepModel(self._space.profile, ranks)
        model = self._models[ranks]
        self.evaluations += 1
        self._known.add(_digest(strategy))
        can_be = is_possible(strategy) and fits(model, strategy.owners)
        took = model.step_s(strategy) if can_be else math.inf
        if self.best is None or took < self.best_s:
            self.best, self.best_s = strategy, took
            self.curve.append((self.evaluations, took))
        return took

    def knows(self, strategy: Strategy) -> bool:
        """Whether a strategy was timed."""
        return _digest(strategy) in self._known

    def pulls(self, ranks: int) -> list[float]:
        """Return what bounds the strategy of so many ranks that was timed last, by rank."""
        return self._models[ranks].pulls()

    def found(self) -> Found:
        assert self.best is not None
        return Found(self.best, self.best_s, self.evaluations, tuple(self.curve))


def _digest(strategy: Strategy) -> bytes:
    owners = strategy.owners
    named = (owners.ranks, owners.hot_rows, owners.ranks_TC, strategy.sync, strategy.codecs)
    words = repr(named).encode()
    return hashlib.blake2b(
        words + b"".join(owner_P.astype(np.uint16).tobytes() for owner_P in owners.owners_T),
        digest_size=16,
    ).digest()


# --- strategies -----------------------------------------------------------------------------------


def usual(profile: Profile, ranks: int) -> Ownership:
    """Return the owners that a run takes without a plan, by the loads of a profile."""
    costs = _bucket_costs(profile, ranks)
    owner = np.array(spread(np.concatenate(costs).tolist(), ranks), np.uint16)
    ends = np.cumsum([len(each) for each in costs])[:-1]
    return Ownership(ranks, tuple(np.split(owner, ends)))


def _bucket_costs(profile: Profile, ranks: int) -> list[NDArray[np.float64]]:
    """Return what each bucket costs its owner, by table."""
    return [
        np.array(t.load_P)
        / sum(t.load_P)
        * t.distinct_keys(profile.events / ranks)
        # As trainer.sync.plan: a key costs its index entry, and its row's lines there and back.
        * (64 + 3 * 4 * t.row_floats)
        for t in profile.tables
    ]


def hot_choices(profile: Profile, now: int = 0) -> tuple[int, ...]:
    """Return how many rows a run may have hot: as many as now, none, or all that were counted."""
    row_bytes = hot_bytes(profile, 1) - hot_bytes(profile, 0)
    room = max(0, int((profile.budget_bytes / 2 - hot_bytes(profile, 0)) / row_bytes))
    return tuple(dict.fromkeys((now, 0, min(len(profile.hot), room))))


def start_of(space: Space) -> Strategy:
    """Return what a run takes without a plan: all ranks, and the first sums and codecs."""
    owners = usual(space.profile, max(space.ranks))
    owners = dataclasses.replace(owners, hot_rows=space.hot_rows[0])
    return Strategy(owners, space.syncs[0], space.codecs[0])


def every_strategy(space: Space) -> Iterator[Strategy]:
    """Return all strategies of a space, which must be a tiny one without column-wise tables."""
    assert not space.chunked_T
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
            for sync, codecs, hot in itertools.product(space.syncs, space.codecs, space.hot_rows):
                yield Strategy(Ownership(ranks, owners_T, hot_rows=hot), sync, codecs)


def draw(space: Space, chance: random.Random) -> Strategy:
    """Draw a strategy: each table whole, spread or everywhere."""
    ranks = chance.choice(space.ranks)
    kinds = ("whole", "spread", "everywhere") if space.everywhere else ("whole", "spread")
    owners_T = tuple(
        _table(space, t, ranks, chance.choice(kinds), chance)
        for t in range(len(space.profile.tables))
    )
    owners = Ownership(ranks, owners_T, hot_rows=chance.choice(space.hot_rows))
    if space.chunked_T and ranks > 1 and chance.random() < _DRAWN_COLUMNS:
        owners = _with_columns(space, owners, chance)
    return Strategy(
        owners,
        chance.choice(space.syncs),
        chance.choice(space.codecs),
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
    if space.chunked_T and strategy.owners.ranks > 1:
        kinds.append("columns")
    few = {
        "sync": space.syncs,
        "codecs": space.codecs,
        "ranks": space.ranks,
        "hot": space.hot_rows,
    }
    for kind, choices in few.items():
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
    if kind == "hot":
        hot = dataclasses.replace(owners, hot_rows=chance.choice(space.hot_rows))
        return dataclasses.replace(strategy, owners=hot)
    if kind == "columns":
        return dataclasses.replace(strategy, owners=_with_columns(space, owners, chance))
    owners_T = list(owners.owners_T)
    ranks = owners.ranks
    if kind == "shift" and ranks > 1:
        giver, taker = chance.sample(range(ranks), 2)
        part = chance.choice(_PARTS)
        for t, owner_P in enumerate(owners_T):
            owners_T[t] = moved(owner_P, giver, taker, part, chance)
        return _with_owners(strategy, owners_T)
    t = chance.randrange(len(owners_T))
    owner_P = owners_T[t]
    if kind in ("move", "swap") and ranks > 1 and owner_P[0] != EVERYWHERE:
        giver = int(owner_P[chance.randrange(len(owner_P))])
        taker = (giver + chance.randrange(1, ranks)) % ranks
        if kind == "move":
            owners_T[t] = moved(owner_P, giver, taker, chance.choice(_PARTS), chance)
        else:
            owners_T[t] = moved(owner_P, giver, taker, 0.0, chance)
            other = chance.randrange(len(owners_T))
            if other != t:
                owners_T[other] = moved(owners_T[other], taker, giver, 0.0, chance)
    elif kind == "move":
        owners_T[t] = _table(space, t, ranks, "spread", chance)
    else:
        owners_T[t] = _table(space, t, ranks, kind, chance)
    return _with_owners(strategy, owners_T)


def _with_owners(strategy: Strategy, owners_T: Sequence[Owners]) -> Strategy:
    owners = dataclasses.replace(strategy.owners, owners_T=tuple(owners_T))
    return dataclasses.replace(strategy, owners=_settled(owners))


def _settled(owners: Ownership) -> Ownership:
    """Return owners with homes of column-wise tables as a run has them, who reads the plan."""
    if not any(owners.ranks_TC):
        return owners
    owners_T, ranks_TC = list(owners.owners_T), list(owners.ranks_TC)
    for t, ranks_C in enumerate(ranks_TC):
        if owners.everywhere(t):
            ranks_TC[t] = ()
        elif ranks_C:
            owners_T[t] = homes_in_turn(t, len(owners_T[t]), owners.ranks)
    kept = tuple(ranks_TC) if any(ranks_TC) else ()
    return dataclasses.replace(owners, owners_T=tuple(owners_T), ranks_TC=kept)


def _with_columns(space: Space, owners: Ownership, chance: random.Random) -> Ownership:
    """Return owners of whom a table is column-wise at other ranks, or is not any more."""
    t = chance.choice(space.chunked_T)
    ranks_TC = [*owners.ranks_TC, *[()] * (len(owners.owners_T) - len(owners.ranks_TC))]
    owners_T = list(owners.owners_T)
    chunks = space.profile.tables[t].chunks
    parts = chance.randint(1, min(chunks, owners.ranks))
    ranks_TC[t] = ()
    if parts > 1:
        at = chance.sample(range(owners.ranks), parts)
        divided = np.array_split(np.arange(chunks), parts)
        ranks_TC[t] = tuple(at[n] for n, part in enumerate(divided) for _ in part)
        owners_T[t] = homes_in_turn(t, len(owners_T[t]), owners.ranks)
    kept = tuple(ranks_TC) if any(ranks_TC) else ()
    return dataclasses.replace(owners, owners_T=tuple(owners_T), ranks_TC=kept)


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
    return Ownership(ranks, owners_T, hot_rows=owners.hot_rows)


# --- searches -------------------------------------------------------------------------------------


def metropolis(
    space: Space, evaluations: int, seed: int, *, used: Callable[[], float] = untimed
) -> Found:
    """Search by Metropolis from what a run takes without a plan.

    Args:
        space: The choices.
        evaluations: Strategies to time, at most; the first is what it starts from.
        seed: Seed of chance.
        used: Share of the time that is used; from 1 on the search ends.
    """
    chance = random.Random(seed)
    timer = _Timer(space, evaluations, used)
    for strategy in _few(space):
        if not timer.knows(strategy):
            timer.step_s(strategy)
        if timer.done() >= _LOOKED_AT:
            break
    costs = {ranks: _bucket_costs(space.profile, ranks) for ranks in space.ranks}
    begin = timer.done()
    for stage in _STAGES:
        if timer.done() >= stage.until:
            continue
        assert timer.best is not None
        current = timer.best
        current_s, pull_R = timer.step_s(current), timer.pulls(current.owners.ranks)
        misses = 0
        while (done := timer.done()) < stage.until and misses < 2 * _MISSES:
            is_lost = misses >= _MISSES  # all around is known
            proposed = (
                draw(space, chance) if is_lost else _aimed(space, current, pull_R, costs, chance)
            )
            misses += 1
            if timer.knows(proposed):
                continue
            misses = 0
            proposed_s = timer.step_s(proposed)
            at = stage.temperature * _COOLING ** -((done - begin) / (stage.until - begin))
            if (
                is_lost
                or proposed_s <= current_s
                or (
                    at
                    and math.isfinite(proposed_s)
                    and chance.random() < math.exp((current_s - proposed_s) / (at * current_s))
                )
            ):
                current, current_s = proposed, proposed_s
                pull_R = timer.pulls(current.owners.ranks)
        begin = stage.until
    return timer.found()


def _few(space: Space) -> Iterator[Strategy]:
    """Return what a run takes without a plan, with each of the choices that are not owners."""
    yield start_of(space)
    for ranks in sorted(space.ranks, reverse=True):
        owners = usual(space.profile, ranks)
        for sync, codecs, hot in itertools.product(space.syncs, space.codecs, space.hot_rows):
            yield Strategy(dataclasses.replace(owners, hot_rows=hot), sync, codecs)


def _aimed(
    space: Space,
    current: Strategy,
    pull_R: Sequence[float],
    costs: Mapping[int, Sequence[NDArray[np.float64]]],
    chance: random.Random,
) -> Strategy:
    """Return a proposal, of which some aim at what bounds the current step."""
    drawn, owners = chance.random(), current.owners
    if owners.ranks == 1 or drawn >= sum(_AIMED):
        return propose(space, current, chance)
    if drawn < _AIMED[0]:
        aimed = relieved(owners, pull_R, chance)
    else:
        aimed = respread(owners, costs[owners.ranks], chance)
    return dataclasses.replace(current, owners=_settled(aimed))


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
