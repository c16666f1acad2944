"""Batches that the first rank has handed out, and what it counts of each once it is learned.

Of ranks that are not at the same step (apart.py). The first rank splits a batch as the loop of one
rank does, into events that are learned and events that are scored alone, hands both out, and takes
the reports in the order of the batches: what it counts is what one rank would count.

Shapes: B events of a batch.
"""

import dataclasses
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.limit import where
from embertide.trainer.data.sampling import is_kept, weighed
from embertide.trainer.run.hand_out import HandOut, Report
from embertide.trainer.run.quarantine import Quarantine
from embertide.trainer.run.state import RunState


@dataclasses.dataclass(frozen=True, slots=True)
class _Handed:
    """A batch that a rank learns.

    Attributes:
        batch: With all its events.
        held_B: Events that are held out.
        kept_B: Events that are learned; the others are scored.
    """

    batch: Batch
    held_B: NDArray[np.bool_]
    kept_B: NDArray[np.bool_]


class HandedBatches:
    """The batches without a report, in order. Used by the first rank's training thread.

    Args:
        run: The configuration.
        state: The run's state, which learned batches change.
        hand_out: Where batches go.
        quarantine: The quarantine for batches that are not learned.
        scored: Told events, and their scores from before they were learned.
        left_out: Told how many negatives `negative_rate` left out.
    """

    def __init__(
        self,
        run: RunConfig,
        state: RunState,
        hand_out: HandOut,
        quarantine: Quarantine,
        *,
        scored: Callable[[Batch, NDArray[np.float32]], None],
        left_out: Callable[[int], None],
    ) -> None:
        """Begin with none."""
        self._run, self._state = run, state
        self._hand_out, self._quarantine = hand_out, quarantine
        self._scored, self._left_out = scored, left_out
        self._out: deque[_Handed] = deque()

    def put(self, batch: Batch) -> None:
        """Have a rank learn a batch, and take what was reported of those before it.

        Raises:
            RankLostError: A rank is gone.
        """
        run = self._run
        held_B = self._state.monitor.is_held_out(batch)
        kept_B = ~held_B
        if run.negative_rate < 1:
            kept_B &= is_kept(batch, run.negative_rate, run.seed)
        learn = batch if kept_B.all() else where(batch, kept_B) if kept_B.any() else None
        if learn is not None and run.negative_rate < 1:
            learn = weighed(learn, run.negative_rate)
        score = None if kept_B.all() else where(batch, ~kept_B)
        self._out.append(_Handed(batch, held_B, kept_B))
        while not self._hand_out.put(learn, score):
            self.take()
        self.take()

    def take(self, *, all_of_them: bool = False) -> None:
        """Take the reports that are there; or wait for those of all batches.

        Raises:
            RankLostError: A rank is gone.
        """
        for report in self._hand_out.take(all_of_them=all_of_them):
            self._take(self._out.popleft(), report)

    def _take(self, handed: _Handed, report: Report) -> None:
        """Count what a rank has learned and scored, as the loop of one rank does."""
        batch, held_B, kept_B = handed.batch, handed.held_B, handed.kept_B
        self._state.done = batch.next_offset
        score_B = np.empty(len(batch), np.float32)
        score_B[~kept_B] = report.scored
        if held_B.any():
            self._state.monitor.hold_out(where(batch, held_B), score_B[held_B])
        if kept_B.any() and not report.reason:
            self._quarantine.learned()
            self._state.events += int(kept_B.sum())
            self._state.learner.missing += report.missing
            self._state.learner.count(batch if kept_B.all() else where(batch, kept_B))
        elif kept_B.any():
            self._quarantine.add(where(batch, kept_B), report.reason)
        left_B = ~(held_B | kept_B)
        if left_B.any():
            self._state.learner.count(where(batch, left_B))
            self._left_out(int(left_B.sum()))
        if report.reason or held_B.all():
            return
        if kept_B.all():
            self._scored(batch, report.learned)
        elif self._run.model.outputs > 1:  # no negatives are left out of a model of several heads
            self._scored(where(batch, kept_B), report.learned)
        else:
            score_B[kept_B] = report.learned
            self._scored(where(batch, ~held_B), score_B[~held_B])
