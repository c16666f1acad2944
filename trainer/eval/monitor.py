"""Figures of a run's quality beside the prequential ones: by user, slice, hold-out.

All of it is of the current day of event time, but for the hold-out, which has figures by day as the
prequential ones are. It is part of a checkpoint, so that a run that goes on has the same figures;
nothing that is learned depends on it, but which events are held out.

Shapes: B events of a batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import EvalConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.keys import hash_keys
from embertide.trainer.data.limit import blocks
from embertide.trainer.eval.grouped import UserSample
from embertide.trainer.eval.metrics import DAY_HOURS, HOUR_MS, Array
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.eval.slices import StreamSlice, slice_column

_DAY_MS = DAY_HOURS * HOUR_MS
# Its own hash of a key, so that what is held out has nothing to do with buckets.
_HOLD_OUT_SEED = np.uint64(0x68656C646F757421)

Figures = dict[str, float]


class Monitor:
    """Figures of a run by user and slice, and its hold-out. Used by one thread.

    Attributes:
        config: The figures to measure.
        held: The figures of events that are held out.
        gauc_by_day: GAUC of the days before the current one.
    """

    def __init__(self, config: EvalConfig, features: Sequence[str]) -> None:
        """Begin with no events; `features` names the first columns of KEYS."""
        self.config = config
        self.held = Prequential()
        self.gauc_by_day: dict[int, float] = {}
        self._features = list(features)
        self._day: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._users = UserSample()
        self._slices = {name: StreamSlice() for name in self.config.slices}

    def is_held_out(self, batch: Batch) -> NDArray[np.bool_]:
        """Return which events the run must not learn from: the same in every run of the config."""
        if not self.config.hold_out:
            return np.zeros(len(batch), np.bool_)
        by = self.config.hold_out_by
        key_B = batch.keys_BF[:, self._features.index(by)] if by else batch.event_B
        hash_B = hash_keys(hash_keys(key_B.astype(np.uint64) ^ _HOLD_OUT_SEED))
        return np.asarray(hash_B < np.uint64(int(self.config.hold_out * 2**64)))

    def add(self, batch: Batch, score_B: Array) -> None:
        """Add events that were scored, and then learned."""
        if not self.config.user and not self.config.slices:
            return
        begin = 0
        for day, part in blocks(batch, origin_ms=0, every_ms=_DAY_MS):
            scores_B = score_B[begin : begin + len(part)]
            begin += len(part)
            if day != self._day:
                self._end_day()
                self._day = day
            if self.config.user:
                user_B = part.keys_BF[:, self._features.index(self.config.user)]
                self._users.add(user_B, part.label_B, scores_B)
            for name, each in self._slices.items():
                each.add(slice_column(name, self._features, part), part.label_B, scores_B)

    def _end_day(self) -> None:
        if self._day is not None and self.config.user:
            self.gauc_by_day[self._day] = self._users.gauc(exact=True).gauc
        self._begin()

    def hold_out(self, batch: Batch, score_B: Array) -> None:
        """Add events that were scored, and are not learned."""
        self.held.add(batch.ts_ms_B, batch.label_B, score_B)

    def daily_gauc(self) -> dict[int, float]:
        """Return the GAUC by day, the current day as far as it went."""
        if self._day is None or not self.config.user:
            return dict(self.gauc_by_day)
        return self.gauc_by_day | {self._day: self._users.gauc(exact=True).gauc}

    def quality(self, prequential: Prequential) -> dict[str, Figures]:
        """Return the figures of the current day that exist, by whose they are.

        "prequential" are those of all events before they were learned, "hold_out" those of events
        that are held out.
        """
        said = {"prequential": prequential.live().as_json()}
        if self.config.user and self._day is not None:
            found = self._users.gauc()
            if found.users:
                said["prequential"] |= {
                    "gauc": found.gauc,
                    "gauc_users": found.users,
                    "gauc_one_class_users": found.one_class_users,
                    "gauc_sampled_share": 0.5**self._users.level,
                }
        if self.config.hold_out:
            said["hold_out"] = self.held.live().as_json()
        return said

    def slices(self) -> dict[str, dict[str, Figures]]:
        """Return the figures of the current day by slice and value, "rest" those of all others."""
        return {
            name: {
                value: figures.as_json()
                for value, figures in each.table(self.config.most_values).named().items()
            }
            for name, each in self._slices.items()
        }

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return what `restore` takes: numbers, for JSON, and arrays by name."""
        held, held_arrays = self.held.state()
        users, user_arrays = self._users.state()
        parts = {"held": held_arrays, "users": user_arrays}
        parts |= {f"slice.{name}": each.state() for name, each in self._slices.items()}
        numbers = {
            "day": self._day,
            "held": held,
            "users": users,
            "user": self.config.user,
            "gauc_by_day": list(self.gauc_by_day.items()),
        }
        return numbers, {f"{p}/{n}": array for p, of in parts.items() for n, array in of.items()}

    def restore(self, numbers: dict[str, Any], arrays: dict[str, Array]) -> None:
        """Hold what `state` said, but for slices and a user that this run has not.

        What it said nothing of begins with no events.
        """
        if not numbers:
            return

        def part(name: str) -> dict[str, Array]:
            prefix = f"{name}/"
            return {
                key.removeprefix(prefix): array
                for key, array in arrays.items()
                if key.startswith(prefix)
            }

        self._day = numbers["day"]
        self.held = Prequential.from_state(numbers["held"], part("held"))
        if numbers["user"] == self.config.user:
            self._users = UserSample.from_state(numbers["users"], part("users"))
            self.gauc_by_day = dict(numbers["gauc_by_day"])
        for name in self._slices:
            if saved := part(f"slice.{name}"):
                self._slices[name] = StreamSlice.from_state(saved)
