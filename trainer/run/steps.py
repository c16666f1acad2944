"""The steps of a run: each event is scored, then learned, in the order of events.

    part of a batch --+-- its label is known --+-- learned at once
                      |                        +-- through the window: its rows have to come first
                      |                        +-- handed out, to ranks that are apart
                      +-- labels come later: scored now, learned once they are decided

What is held out for evaluation is scored alone. Of negatives that `negative_rate` leaves out, rows
and net learn nothing; they are scored and counted.

Shapes: B events of a batch.
"""

import dataclasses
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.history import extend
from embertide.trainer.data.labels import Resolved, split
from embertide.trainer.data.limit import where
from embertide.trainer.data.sampling import is_kept, weighed
from embertide.trainer.model.learner import NotFiniteError, Prepared
from embertide.trainer.model.reduced import PRECISIONS
from embertide.trainer.run.apart import ASK_S, Apart
from embertide.trainer.run.handed import HandedBatches
from embertide.trainer.run.quarantine import Quarantine
from embertide.trainer.run.state import RunState
from embertide.trainer.run.window import Window
from embertide.trainer.sync.channel import Channel
from embertide.trainer.sync.ranks import Ranks


class Steps:
    """Takes the events of one rank, and changes the run's state by them. For the trainer's thread.

    Args:
        run: The configuration.
        state: The run's; its learner takes the steps.
        ranks: Those of the run.
        channel: The one of the trainer's thread.
        quarantine: The place of batches that cannot be learned.
        apart: This rank's part where ranks need not be at the same step; None: they are.
        is_stopping: Whether a rank is to stop, as of what others have told.

    Attributes:
        window: Batches that are read and not learned yet.
        unsampled: Negatives that `negative_rate` left out.
        on_step: Hears of each batch that was learned, and of the seconds that it took with the
            wait for its rows; None: nobody does.

    Raises:
        ConfigurationError: As of `Window`.
    """

    def __init__(
        self,
        run: RunConfig,
        state: RunState,
        *,
        ranks: Ranks,
        channel: Channel,
        quarantine: Quarantine,
        apart: Apart | None,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Begin with no batch."""
        self._run, self._state, self._ranks, self._channel = run, state, ranks, channel
        self._learner, self._quarantine = state.learner, quarantine
        self._is_stopping = is_stopping
        self.window = Window(self._learner, run)
        self.unsampled = 0
        self.on_step: Callable[[Batch, float], None] | None = None
        self._began_s = 0.0  # of the wait for the rows of the batch that is learned next
        # With many ranks every batch's rows are asked for; with one, some may come from an SSD.
        self._waits = ranks.size > 1 or (run.ssd_budget_bytes > 0 and run.negative_rate == 1)
        self._apart = apart
        self._handed: HandedBatches | None = None  # on the first of ranks that are apart
        self._asked_s = 0.0  # when other ranks were asked whether they are to stop
        if apart is not None and apart.hand_out is not None:
            self._handed = HandedBatches(
                run,
                state,
                apart.hand_out,
                quarantine,
                scored=self._scored,
                left_out=self._leave_out,
            )

    def take(self, part: Batch) -> None:
        """Score events, and learn them now, after those before them, or once their labels come.

        Raises:
            RankLostError: A rank is gone.
            StoreError: A row could not be brought.
        """
        if self._state.waiting is not None:
            self._join(part)
            return
        batch = extend(self._state.histories, part)
        if self._apart is not None:
            self._hand_out(self._apart, batch)
        else:
            self._train(batch)

    def finish(self) -> None:
        """Learn all batches that wait."""
        if self._apart is not None:
            assert self._handed is not None
            self._handed.take(all_of_them=True)
            self._apart.settle()
        while len(self.window) > 0:
            self._learn_next()

    def learn_meanwhile(self) -> bool:
        """Learn a batch that waits while none is there to be read; false: none waits.

        Of many ranks each batch waits for the next one, so that all ranks do the same.
        """
        if self._ranks.size > 1 or len(self.window) == 0:
            return False
        self._learn_next()
        return True

    def decide_all(self, until_ms: int) -> None:
        """Learn all whose late labels are decided up to a time: a version ends."""
        if self._state.waiting is not None:
            none = np.empty(0, np.int64)
            self._decide(self._state.waiting.decide(none, none, until_ms), self._state.done)

    # --- labels that are known --------------------------------------------------------------------

    def _train(self, batch: Batch) -> None:
        """Score a batch and learn from it; of many ranks, the one before it while its keys travel.

        So it is where its rows may come from an SSD: of those that are read ahead, the oldest.

        What is asked for has no part in what is learned: the order of learning is that of events.
        """
        self._compare_precisions(batch)
        held_B = self._state.monitor.is_held_out(batch)
        if self._waits and self._ranks.size == 1:
            held = where(batch, held_B) if held_B.any() else None
            learn = None if held_B.all() else batch if held is None else where(batch, ~held_B)
            self.window.enter(batch, learn, held, self._learn_next)
            return
        if held_B.any():
            self.finish()
            self._hold_out(where(batch, held_B))
            if held_B.all():
                self._state.done = batch.next_offset
                return
            batch = where(batch, ~held_B)
        if self._run.negative_rate < 1:
            self._learn_sample(batch)
        elif self._waits:
            self.window.enter(batch, batch, None, self._learn_next)
        else:
            self._learn(self._learner.prepare(batch))

    def _compare_precisions(self, batch: Batch) -> None:
        """Score some batches as nodes do in fp32 and in less, if the run chose that."""
        check = self._state.precision
        if check is None or not check.takes(batch):
            return
        self.finish()
        scores_BH, reduced_BH = self._learner.score_precisions(batch, PRECISIONS[check.type])
        check.add(batch, scores_BH, reduced_BH)

    def _learn_next(self, on_rows_ready: Callable[[], None] = lambda: None) -> None:
        """Learn the oldest batch that waits, once its rows are there.

        Args:
            on_rows_ready: As of `Learner.learn`.
        """
        self._began_s = time.perf_counter()
        oldest = self.window.take()
        ready = oldest.ready.result()
        try:
            if oldest.held_out is not None:
                self._hold_out(oldest.held_out)
            if ready is None:
                self._state.done = oldest.whole.next_offset
                on_rows_ready()
            else:
                self._learn(ready, on_rows_ready)
        finally:
            self.window.done(oldest)

    def _hold_out(self, held: Batch) -> None:
        self._state.monitor.hold_out(held, self._learner.score(held))

    def _learn(self, ready: Prepared, on_rows_ready: Callable[[], None] = lambda: None) -> None:
        """Score a batch, then learn from it."""
        batch = ready.batch
        scores = self._step(ready, on_rows_ready)
        if scores is not None:
            self._scored(batch, scores)

    def _scored(self, batch: Batch, scores: NDArray[np.float32]) -> None:
        """Count events whose labels are known, with the scores from before they were learned."""
        score_B = scores if scores.ndim == 1 else scores[:, 0]
        self._state.heads.add(batch, scores)
        self._state.prequential.add(batch.ts_ms_B, batch.label_B, score_B)
        self._state.monitor.add(batch, score_B)

    def _step(
        self, ready: Prepared, on_rows_ready: Callable[[], None] = lambda: None
    ) -> NDArray[np.float32] | None:
        """Learn a batch and return its scores; or put it aside: nothing but histories have it."""
        batch = ready.batch
        self._state.done = batch.next_offset
        began_s = self._began_s or time.perf_counter()
        self._began_s = 0.0
        try:
            scores = self._learner.learn(ready, on_rows_ready)
        except NotFiniteError as error:
            self._quarantine.add(batch, error.reason, kept=self._ranks.first)
            return None
        self._quarantine.learned()
        self._state.events += len(batch)
        if self.on_step is not None:
            self.on_step(batch, time.perf_counter() - began_s)
        return scores

    # --- a share of the negatives -----------------------------------------------------------------

    def _learn_sample(self, batch: Batch) -> None:
        """Score a batch, then learn from its positives and a share of the others."""
        kept_B = is_kept(batch, self._run.negative_rate, self._run.seed)
        score_B = np.empty(len(batch), np.float32)
        if not kept_B.all():
            score_B[~kept_B] = self._learner.score(where(batch, ~kept_B))
        found_B = self._step_sample(batch, kept_B)
        if found_B is None:
            return
        score_B[kept_B] = found_B
        self._scored(batch, score_B)

    def _step_sample(self, batch: Batch, kept_B: NDArray[np.bool_]) -> NDArray[np.float32] | None:
        """Learn the events of a batch that are kept; the others are counted alone."""
        found_B: NDArray[np.float32] | None = np.empty(0, np.float32)
        self._state.done = batch.next_offset
        if kept_B.any():
            sample = weighed(where(batch, kept_B), self._run.negative_rate)
            found_B = self._step(self._learner.prepare(sample))
        if not kept_B.all():
            self._learner.count(where(batch, ~kept_B))
            self._leave_out(int((~kept_B).sum()) if self._ranks.first else 0)
        return found_B

    def _leave_out(self, negatives: int) -> None:
        self.unsampled += negatives

    # --- ranks that are apart ---------------------------------------------------------------------

    def _hand_out(self, apart: Apart, batch: Batch) -> None:
        """Have a rank learn a batch, and take what was reported of those before it."""
        assert self._handed is not None
        self._handed.put(batch)
        if apart.is_due():
            self.finish()
            apart.command("average", None)
            apart.average(optimizers=False)
        if time.monotonic() >= self._asked_s + ASK_S:
            self._asked_s = time.monotonic()
            self._learner.stopping = self._is_stopping()

    # --- labels that come later -------------------------------------------------------------------

    def _join(self, part: Batch) -> None:
        """Score the impressions that came, and learn those whose labels are known now."""
        waiting, origin = self._state.waiting, part.origin
        assert waiting is not None
        assert origin is not None
        assert part.id_B is not None
        came_B = ~origin.feedback_B
        if came_B.any():
            came = where(part, came_B)
            fresh_B = waiting.fresh(came)
            if fresh_B.any():
                came = extend(self._state.histories, where(came, fresh_B))
                waiting.add(came, self._learner.score(came))
        feedback = part.id_B[origin.feedback_B], part.ts_ms_B[origin.feedback_B]
        decided = waiting.decide(*feedback, part.watermark_ms, self._run.batch_size)
        self._decide(decided, part.next_offset)

    def _decide(self, decided: Resolved, next_offset: int) -> None:
        """Count and learn what is decided; events before `next_offset` are taken then."""
        known, learn, monitor = decided.known, decided.learn, self._state.monitor
        self._state.done = next_offset
        if known is not None:
            self._compare_precisions(known.batch)
            held_B = monitor.is_held_out(known.batch)
            if held_B.any():
                monitor.hold_out(where(known.batch, held_B), known.score_R[held_B])
            if not held_B.all():
                self._scored(where(known.batch, ~held_B), known.score_R[~held_B])
        if learn is not None:
            held_B = monitor.is_held_out(learn)
            learn = None if held_B.all() else where(learn, ~held_B)
        if learn is None:
            # Learning would have asked.
            self._learner.stopping = any(self._channel.gather(self._learner.stops))
            return
        for piece in split(learn, self._run.batch_size):
            piece = dataclasses.replace(piece, next_offset=next_offset)
            if self._run.negative_rate < 1:
                self._step_sample(piece, is_kept(piece, self._run.negative_rate, self._run.seed))
            else:
                self._step(self._learner.prepare(piece))
            for history in self._state.histories:
                history.like(piece)
