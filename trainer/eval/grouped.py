"""GAUC: the AUC within each user's events, averaged over users by their events.

Serving ranks items for one user, so what counts is the order of that user's events; the AUC over
all events also rewards telling active users from others. Zhou et al. 2018, "Deep Interest Network",
section 5.2, weighs users by impressions, as here. Users with events of one class only have no AUC:
they are left out, and counted.

Shapes: B events, G groups of one user's equal scores, U users.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.data.base import MISSING_KEY
from embertide.trainer.data.keys import hash_keys
from embertide.trainer.eval.metrics import Array

Keys = NDArray[np.int64]

SAMPLE_EVENTS = 1 << 16
"""Events that `UserSample` holds at most, 13 bytes each."""

_USER_SHARE = 16
"""One user has at most this part of a sample."""


@dataclasses.dataclass(frozen=True, slots=True)
class UserAucs:
    """Figures by user, ascending by key.

    Attributes:
        user_U: Keys.
        events_U: Events of each.
        auc_U: AUC of each; nan for a user of one class.
    """

    user_U: Keys
    events_U: NDArray[np.int64]
    auc_U: NDArray[np.float64]

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Which users have an AUC."""
        return ~np.isnan(self.auc_U)

    def gauc(self) -> "Gauc":
        """Return the mean, weighed by events."""
        counted_U = self.counted
        events = int(self.events_U[counted_U].sum())
        mean = math.nan
        if events:
            mean = float(np.average(self.auc_U[counted_U], weights=self.events_U[counted_U]))
        users = int(counted_U.sum())
        return Gauc(gauc=mean, users=users, events=events, one_class_users=len(counted_U) - users)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gauc:
    """The figure, and what it was made of.

    Attributes:
        gauc: Mean AUC of users, weighed by events; nan if no user has both classes.
        users: That have both classes.
        events: Theirs.
        one_class_users: Left out, for their events have one label.
    """

    gauc: float
    users: int
    events: int
    one_class_users: int


def user_aucs(user_B: Keys, label_B: Array, score_B: Array) -> UserAucs:
    """Return the exact AUC of each user's events; equal scores count a half.

    Raises:
        ValueError: Lengths differ, or a score is nan.
    """
    if not len(user_B) == len(label_B) == len(score_B):
        raise ValueError(
            f"{len(user_B)} users, {len(label_B)} labels, {len(score_B)} scores; give as many"
        )
    if np.isnan(score_B).any():
        raise ValueError(f"{int(np.isnan(score_B).sum())} scores are nan; the model diverged")
    if not len(user_B):
        return UserAucs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    order_B = np.lexsort((score_B, user_B))
    user_B, score_B = user_B[order_B], score_B[order_B]
    positive_B = (label_B[order_B] != 0).astype(np.int64)
    new_user_B = np.append(True, user_B[1:] != user_B[:-1])
    first_G = np.flatnonzero(new_user_B | np.append(True, score_B[1:] != score_B[:-1]))
    positive_G = np.add.reduceat(positive_B, first_G)
    negative_G = np.diff(np.append(first_G, len(user_B))) - positive_G
    first_U = np.flatnonzero(new_user_B[first_G])  # the first group of each user
    below_G = np.cumsum(negative_G) - negative_G
    below_G -= np.repeat(below_G[first_U], np.diff(np.append(first_U, len(first_G))))
    # In integers, so that no rounding creeps in.
    won_U = np.add.reduceat(positive_G * (2 * below_G + negative_G), first_U)
    positives_U = np.add.reduceat(positive_G, first_U)
    negatives_U = np.add.reduceat(negative_G, first_U)
    pairs_U = positives_U * negatives_U
    auc_U = np.full(len(first_U), math.nan)
    np.divide(won_U, 2 * pairs_U, out=auc_U, where=pairs_U > 0)
    return UserAucs(user_B[first_G[first_U]], positives_U + negatives_U, auc_U)


def gauc(user_B: Keys, label_B: Array, score_B: Array) -> Gauc:
    """Return the exact GAUC; errors as `user_aucs`."""
    return user_aucs(user_B, label_B, score_B).gauc()


class UserSample:
    """GAUC of a stream in bounded memory: all events of a sample of the users. For one thread.

    Users are kept whose hash begins with `level` zeros. When more than `most_events` are held the
    level rises, and half of the users go, so that the others have all their events still. A user
    with more than a sixteenth of the sample keeps the first of them. Events without a user
    (`MISSING_KEY`) have no place here. Equal streams give equal samples.

    Attributes:
        level: One user in 2^level is held.
        left_out: Events of users that are held which were one user's too many.
    """

    def __init__(self, most_events: int = SAMPLE_EVENTS) -> None:
        """Begin with no events."""
        self._most = most_events
        self.level = self.left_out = 0
        self._parts: list[tuple[Keys, Array, Array]] = []
        self._held = 0
        self._gauc: tuple[int, Gauc] | None = None  # at how many events it was computed

    def add(self, user_B: Keys, label_B: Array, score_B: Array) -> None:
        """Add events in the order of the stream."""
        keep_B = self._kept(user_B)
        part = (user_B[keep_B], (label_B[keep_B] != 0).astype(np.uint8), score_B[keep_B])
        self._parts.append((part[0], part[1], part[2].astype(np.float32)))
        self._held += int(keep_B.sum())
        if self._held > self._most:
            self._shrink()

    def _kept(self, user_B: Keys) -> NDArray[np.bool_]:
        known_B: NDArray[np.bool_] = user_B != MISSING_KEY
        if self.level == 0:
            return known_B
        # Hashed twice: a store's buckets go by the hash itself, and hold-outs may.
        hash_B = hash_keys(hash_keys(user_B.astype(np.uint64)))
        known_B &= hash_B >> np.uint64(64 - self.level) == 0
        return known_B

    def _joined(self) -> tuple[Keys, Array, Array]:
        if not self._parts:
            return np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.float32)
        user_B, label_B, score_B = (np.concatenate(each) for each in zip(*self._parts, strict=True))
        self._parts = [(user_B, label_B, score_B)]
        return user_B, label_B, score_B

    def _shrink(self) -> None:
        """Hold half of what may be held, at most."""
        user_B, label_B, score_B = self._joined()
        most = max(1, self._most // _USER_SHARE)
        order_B = np.argsort(user_B, kind="stable")
        sorted_B = user_B[order_B]
        place_B = np.arange(len(order_B)) - np.searchsorted(sorted_B, sorted_B)
        keep_B = np.zeros(len(order_B), np.bool_)
        keep_B[order_B] = place_B < most
        self.left_out += int(len(keep_B) - keep_B.sum())
        while keep_B.sum() > self._most // 2 and self.level < 63:
            self.level += 1
            keep_B &= self._kept(user_B)
        self._parts = [(user_B[keep_B], label_B[keep_B], score_B[keep_B])]
        self._held, self._gauc = int(keep_B.sum()), None

    def gauc(self, *, exact: bool = False) -> Gauc:
        """Return the GAUC of the sample; unless `exact`, of when it was an eighth smaller maybe."""
        if self._gauc is None or exact or self._held > self._gauc[0] * 9 // 8:
            self._gauc = self._held, gauc(*self._joined())
        return self._gauc[1]

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return what `from_state` makes an equal one of: numbers, for JSON, and arrays by name."""
        arrays = dict(zip(("user", "label", "score"), self._joined(), strict=True))
        return {"level": self.level, "left_out": self.left_out, "most": self._most}, arrays

    @classmethod
    def from_state(cls, numbers: dict[str, Any], arrays: dict[str, Array]) -> "UserSample":
        """Make one of what `state` returned."""
        made = cls(numbers["most"])
        made.level, made.left_out = numbers["level"], numbers["left_out"]
        made._parts = [(arrays["user"], arrays["label"], arrays["score"])]
        made._held = len(arrays["user"])
        return made
