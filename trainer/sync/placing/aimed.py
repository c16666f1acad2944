"""Proposals that aim: at the ranks that bound a step, and at owners that are even at once.

A proposal that draws what it moves takes many to even out sixteen ranks, for most do not touch the
rank that bounds the step. `relieved` takes buckets from a rank by whose share the step is bound;
`respread` gives one rank another share of all keys and deals all buckets out anew.

Shapes: T tables, P buckets of a table, R ranks.
"""

import dataclasses
import heapq
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.sync.plan import EVERYWHERE, Owners, Ownership

_RELIEVED = (0.5, 0.2, 0.05, 0.0)  # of a rank's buckets; 0: one of them
_SHARES = (0.0, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0)  # times what a rank has
_FIRST_SHARES = (0.1, 0.3, 1.0)  # of the mean, for a rank that has next to nothing
_NEXT_TO_NOTHING = 0.02
_FLOOR = 1e-9  # that any rank may give, whatever bounds the step


def moved(owner_P: Owners, giver: int, taker: int, part: float, chance: random.Random) -> Owners:
    """Return owners of whom one gives another a part of its buckets; 0: one bucket."""
    places = np.flatnonzero(owner_P == giver).tolist()
    if not places:
        return owner_P
    count = max(1, round(part * len(places)))
    changed = owner_P.copy()
    changed[chance.sample(places, count)] = taker
    return changed


def relieved(owners: Ownership, pull_R: Sequence[float], chance: random.Random) -> Ownership:
    """Return owners of whom one that bounds the step owns less, of a table or of all.

    Args:
        owners: Those of two ranks or more.
        pull_R: What each rank's share adds to the step, as of `StepModel.pulls`.
        chance: Where choices come from.
    """
    ranks = range(owners.ranks)
    giver = chance.choices(ranks, [max(pull, 0.0) + _FLOOR for pull in pull_R])[0]
    least = min(pull for rank, pull in enumerate(pull_R) if rank != giver)
    taker = chance.choice([r for r in ranks if r != giver and pull_R[r] <= least + _FLOOR])
    has_T = [t for t, owner_P in enumerate(owners.owners_T) if (owner_P == giver).any()]
    if has_T and chance.random() < 0.5:
        has_T = [chance.choice(has_T)]
    owners_T, part = list(owners.owners_T), chance.choice(_RELIEVED)
    for t in has_T:
        owners_T[t] = moved(owners_T[t], giver, taker, part, chance)
    return dataclasses.replace(owners, owners_T=tuple(owners_T))


def respread(
    owners: Ownership, cost_TP: Sequence[NDArray[np.float64]], chance: random.Random
) -> Ownership:
    """Return owners of whom one has another share, and all others as much to each other as before.

    Buckets of tables that are not everywhere are dealt out anew, the dearest first.

    Args:
        owners: Those of two ranks or more.
        cost_TP: What each bucket costs its owner.
        chance: Where choices come from.
    """
    open_T = [t for t, owner_P in enumerate(owners.owners_T) if owner_P[0] != EVERYWHERE]
    share_R = np.zeros(owners.ranks)
    for t in open_T:
        share_R += np.bincount(owners.owners_T[t], cost_TP[t], owners.ranks)
    mean = share_R.mean()
    rank = chance.randrange(owners.ranks)
    if share_R[rank] > _NEXT_TO_NOTHING * mean:
        share_R[rank] *= chance.choice(_SHARES)
    else:
        share_R[rank] = chance.choice(_FIRST_SHARES) * mean
    least = [(0.0, r) for r in range(owners.ranks) if share_R[r] > _NEXT_TO_NOTHING * mean / 10]
    if not open_T or not least:
        return owners
    flat = np.concatenate([cost_TP[t] for t in open_T])
    cost_of, share_of = flat.tolist(), share_R.tolist()
    has_R, owner = [0.0] * owners.ranks, np.empty(len(flat), np.uint16)
    for item in np.argsort(-flat, kind="stable").tolist():
        _, to = least[0]
        owner[item] = to
        has_R[to] += cost_of[item]
        heapq.heapreplace(least, (has_R[to] / share_of[to], to))
    owners_T = list(owners.owners_T)
    ends = np.cumsum([len(cost_TP[t]) for t in open_T])[:-1]
    for t, owner_P in zip(open_T, np.split(owner, ends), strict=True):
        owners_T[t] = owner_P
    return dataclasses.replace(owners, owners_T=tuple(owners_T))
