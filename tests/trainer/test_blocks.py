"""Block quality: what is scored has learned the blocks before, and nothing of its own."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import blocks
from embertide.trainer.eval.blocks import BlockQuality
from embertide.trainer.model.learner import Learner, Prepared
from embertide.trainer.presets import news_model

NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=60, users=80, new_items_per_hour=5))
BLOCK_S = 900
CAND = [feature.name for feature in NEWS.schema.features].index("cand")


@dataclasses.dataclass
class Recorder(Learner):
    """A learner that only notes what it is asked."""

    calls: list[tuple[str, Batch]] = dataclasses.field(default_factory=list)
    refreshed_ms: list[int] = dataclasses.field(default_factory=list)

    def warm_up(self, batches: Iterator[Batch], **_: Any) -> Iterator[Batch]:
        """Fit nothing."""
        return batches

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """Score by the key, so that figures are reproducible."""
        self.calls.append(("score", batch))
        return ((batch.keys_BF[:, CAND] % 97) / 97).astype(np.float32)

    def learn(
        self, batch: Batch | Prepared, then: Callable[[], None] = lambda: None
    ) -> NDArray[np.float32]:
        """Learn nothing."""
        assert isinstance(batch, Batch)
        self.calls.append(("learn", batch))
        return np.empty(0, np.float32)

    def refresh(self, now_ms: int) -> None:
        """Note the time."""
        self.refreshed_ms.append(now_ms)


def test_a_block_is_scored_whole_before_any_of_it_is_learned() -> None:
    learner = Recorder()
    quality = BlockQuality(learner, NEWS, seen_by="cand")
    done: list[int] = []
    quality.run(block_s=BLOCK_S, batch_size=50, after_block=done.append)

    origin_ms = int(learner.calls[0][1].ts_ms_B[0])
    what = [(int(b.ts_ms_B[0] - origin_ms) // (1000 * BLOCK_S), name) for name, b in learner.calls]
    assert what == sorted(what, key=lambda call: (call[0], call[1] == "learn"))
    ends_ms = [origin_ms + 1000 * BLOCK_S * (block + 1) - 1 for block in done[:-1]]
    assert learner.refreshed_ms == ends_ms
    assert done == sorted(set(done)) == sorted({block for block, _ in what})
    for name in ("score", "learn"):
        events = np.concatenate([b.event_B for called, b in learner.calls if called == name])
        assert events.tolist() == list(range(NEWS.total_events() or 0))


def test_repeated_leaves_out_the_first_event_of_each_key() -> None:
    quality = BlockQuality(Recorder(), NEWS, seen_by="cand")
    quality.run(block_s=BLOCK_S, batch_size=50)
    (batch,) = NEWS.batches(batch_size=NEWS.total_events() or 1)
    keys = batch.keys_BF[:, CAND]
    assert quality.all.daily_summaries()[0].events == len(keys)
    first = len(np.unique(keys))
    assert quality.repeated.daily_summaries()[0].events == len(keys) - first > 0


def test_fresher_blocks_score_better() -> None:
    news = NewsSource(NewsConfig(hours=10, views_per_hour=400, users=200, new_items_per_hour=4))
    aucs = []
    for block_s in (600, 36_000):
        quality = BlockQuality(Learner(RunConfig(model=news_model())), news, seen_by="cand")
        quality.run(block_s=block_s, batch_size=128)
        aucs.append(quality.all.daily()[0])
    assert aucs[0] > aucs[1] + 0.02, "a block that is the whole stream is scored by no model"


def test_a_feature_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"no feature 'item'; there are user"):
        BlockQuality(Recorder(), NEWS, seen_by="item")


def test_blocks_cut_where_a_block_begins() -> None:
    (batch,) = NEWS.batches(batch_size=NEWS.total_events() or 1)
    origin_ms = int(batch.ts_ms_B[0])
    parts = list(blocks(batch, origin_ms=origin_ms, every_ms=1000 * BLOCK_S))
    assert len(parts) == 8  # of two hours
    assert np.concatenate([part.event_B for _, part in parts]).tolist() == batch.event_B.tolist()
    for block, part in parts:
        assert set((part.ts_ms_B - origin_ms) // (1000 * BLOCK_S)) == {block}
    assert [part.next_offset for _, part in parts[:-1]] == [part.first for _, part in parts[1:]]
