"""Labels that come as a stream of their own: who is learned when, as what, and exactly once."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from killing import CACHE, train, unserved
from late import FEEDBACK, Late, late, write
from snapshots import newest_files

from embertide.trainer.config import LabelJoin, RunConfig
from embertide.trainer.data import joined, open_events
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.labels import DelayedLabelBuffer, Resolved
from embertide.trainer.data.merge import MergedSource
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.presets import news_history, news_model, news_rates
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress

NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5))
LATE_S = 1800.0
RUN = RunConfig(
    model=news_history(),
    optimizer=news_rates(),
    labels=LabelJoin(wait_s=LATE_S),
    batch_size=24,
    publish_every_s=600,
    snapshot_every=2,
)


@pytest.fixture(scope="module")
def events() -> Late:
    return late(NEWS, LATE_S)


@pytest.fixture(scope="module")
def files(events: Late, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write(events, tmp_path_factory.mktemp("late"))


def open_files(events: Late, files: tuple[Path, Path]) -> MergedSource:
    impressions, clicks = files
    return joined(
        open_events(str(impressions), schema=events.schema),
        open_events(str(clicks), schema=FEEDBACK),
    )


# --- the join alone ---------------------------------------------------------------------------


def impressions(*ts_ms: int, first: int = 0) -> Batch:
    n = len(ts_ms)
    ids = np.arange(first, first + n)
    return Batch(
        first=first,
        next_offset=first + n,
        event_B=ids,
        ts_ms_B=np.array(ts_ms),
        keys_BF=ids[:, None] * 10,
        dense_BD=np.empty((n, 0), np.float32),
        label_B=np.zeros(n, np.float32),
        id_B=ids,
    )


def came(waiting: DelayedLabelBuffer, *ts_ms: int, first: int = 0, score: float = 0.25) -> None:
    batch = impressions(*ts_ms, first=first)
    waiting.add(batch, np.full(len(batch), score, np.float32))


def decide(waiting: DelayedLabelBuffer, clicks: list[tuple[int, int]], until_ms: int) -> Resolved:
    ids, times = [np.array(each, np.int64) for each in zip(*clicks, strict=True)] or (
        np.empty(0, np.int64),
        np.empty(0, np.int64),
    )
    return waiting.decide(ids, times, until_ms)


def learned(decided: Resolved) -> list[tuple[int, int, float]]:
    """Event, time and label, in order."""
    batch = decided.learn
    if batch is None:
        return []
    assert (batch.keys_BF[:, 0] == batch.event_B * 10).all()
    return list(
        zip(batch.event_B.tolist(), batch.ts_ms_B.tolist(), batch.label_B.tolist(), strict=True)
    )


def test_each_is_learned_when_its_time_is_over_with_the_label_that_it_has_then() -> None:
    waiting = DelayedLabelBuffer(LabelJoin(wait_s=10))
    came(waiting, 0, 0, 1000, 2000)
    assert learned(decide(waiting, [(1, 9000)], 9000)) == []
    # A click at the last moment counts.
    found = decide(waiting, [(0, 10_000)], 10_000)
    assert learned(found) == [(0, 10_000, 1.0), (1, 10_000, 1.0)]
    assert found.known is not None
    assert found.known.batch.label_B.tolist() == [1.0, 1.0]
    assert found.known.score_R.tolist() == [0.25, 0.25]
    assert learned(decide(waiting, [], 50_000)) == [(2, 11_000, 0.0), (3, 12_000, 0.0)]
    assert len(waiting) == 0
    counts = waiting.counters()
    assert (counts["positives"], counts["negatives"], counts["waiting"]) == (2, 2, 0)


def test_a_click_that_comes_too_late_twice_or_for_nothing_is_counted() -> None:
    waiting = DelayedLabelBuffer(LabelJoin(wait_s=10))
    came(waiting, 0, 1000)
    found = decide(waiting, [(7, 500), (1, 2000), (1, 3000), (0, 10_001)], 11_000)
    assert learned(found) == [(0, 10_000, 0.0), (1, 11_000, 1.0)]
    counts = waiting.counters()
    assert (counts["unmatched"], counts["repeated"]) == (2, 1)


def test_a_later_click_corrects_and_negatives_are_weighed_by_what_is_false_among_them() -> None:
    waiting = DelayedLabelBuffer(LabelJoin(wait_s=10, correct_s=30))
    came(waiting, 0, 0, 0, 0, score=0.5)
    first = decide(waiting, [(0, 5000)], 10_000)
    assert [label for _, _, label in learned(first)] == [1.0, 0.0, 0.0, 0.0]
    assert first.learn is not None
    assert first.learn.weight_B is None
    assert first.known is None  # they may change still
    second = decide(waiting, [(1, 30_000), (0, 30_000)], 30_000)
    assert learned(second) == [(1, 30_000, 1.0)]
    assert second.known is not None
    assert second.known.batch.label_B.tolist() == [1.0, 1.0, 0.0, 0.0]
    came(waiting, 31_000, first=10, score=0.5)
    late = decide(waiting, [], 41_000).learn
    assert late is not None
    # Half of the positives come late: (1 - p) / (1 - p / 2) at p = 1/2.
    assert late.weight_B is not None
    assert late.weight_B.tolist() == pytest.approx([0.5 / 0.75])
    counts = waiting.counters()
    assert (counts["corrected"], counts["repeated"]) == (1, 1)


def test_each_impression_weighs_1_on_the_average_however_late_its_click() -> None:
    rng, p, late, n = np.random.default_rng(3), 0.3, 0.4, 6000
    waiting = DelayedLabelBuffer(LabelJoin(wait_s=10, correct_s=100))
    clicked_N = rng.random(n) < p
    delay_N = np.where(rng.random(n) < late, 50_000, 1)
    clicks = sorted((1000 * k + int(delay_N[k]), k) for k in np.flatnonzero(clicked_N).tolist())
    weight = {0.0: 0.0, 1.0: 0.0}
    plain = 0
    for k in range(n):
        came(waiting, 1000 * k, first=k, score=p)
        now_ms = 1000 * k + 999
        due = [(id, ts_ms) for ts_ms, id in clicks if now_ms - 1000 < ts_ms <= now_ms]
        learn = decide(waiting, due, now_ms).learn
        if learn is None or k < n // 2:  # the share of late ones is known by then
            continue
        weight_B = np.ones(len(learn)) if learn.weight_B is None else learn.weight_B
        for label in weight:
            weight[label] += float(weight_B[learn.label_B == label].sum())
        plain += int((learn.label_B == 0).sum())
    # As many as would have been learned, had every label been there at once.
    assert weight[1.0] == pytest.approx(p * n / 2, rel=0.06)
    assert weight[0.0] == pytest.approx((1 - p) * n / 2, rel=0.02)
    assert plain > 1.1 * weight[0.0]


def test_when_it_is_full_the_oldest_goes_and_is_counted() -> None:
    waiting = DelayedLabelBuffer(LabelJoin(wait_s=1000, most_waiting=2))
    came(waiting, 0, 1, 2, 3)
    assert learned(decide(waiting, [(3, 4)], 4)) == [(0, 4, 0.0), (1, 4, 0.0)]
    counts = waiting.counters()
    assert (counts["decided_early"], counts["waiting"]) == (2, 2)
    assert len(waiting) == 2


def test_what_is_held_goes_into_a_checkpoint_and_back() -> None:
    config = LabelJoin(wait_s=10, correct_s=20)
    once, twice = DelayedLabelBuffer(config), DelayedLabelBuffer(config)
    for waiting in (once, twice):
        came(waiting, 0, 1000, 2000)
        decide(waiting, [(1, 3000)], 10_000)
    restored = DelayedLabelBuffer(config)
    restored.restore(twice.state())
    clicks = [(0, 12_000), (2, 12_500)]
    assert learned(decide(restored, clicks, 50_000)) == learned(decide(once, clicks, 50_000))
    assert restored.counters() == once.counters()


def test_an_id_that_is_held_already_makes_no_second_impression() -> None:
    waiting = DelayedLabelBuffer(LabelJoin(wait_s=10))
    came(waiting, 0, 0)
    again = impressions(5, 5, 5)
    fresh_B = waiting.fresh(again)
    assert fresh_B.tolist() == [False, False, True]
    assert waiting.counters()["repeated_ids"] == 2


# --- a run over two files -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def once(
    events: Late, files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Trainer:
    """A run that nothing stopped."""
    publication = unserved(tmp_path_factory.mktemp("whole") / "pub")
    return train(RUN, open_files(events, files), publication)


@pytest.fixture
def fresh(tmp_path: Path) -> Publication:
    """An empty publication."""
    return unserved(tmp_path / "pub")


def test_each_impression_is_learned_once_and_killed_runs_end_with_the_same_bytes(
    events: Late, files: tuple[Path, Path], once: Trainer, fresh: Publication
) -> None:
    counts = once.state.waiting.counters() if once.state.waiting else {}
    assert counts["positives"] + counts["negatives"] + counts["waiting"] == events.total
    assert counts["positives"] + counts["waiting_positives"] == events.positives
    assert once.state.events == counts["positives"] + counts["negatives"]
    assert counts["waiting"] > 0
    for batches in (9, 14):
        train(RUN, open_files(events, files), fresh, batches)
    again = train(RUN, open_files(events, files), fresh)
    assert newest_files(fresh) == newest_files(once.publication)
    assert again.state.waiting is not None
    assert again.state.waiting.counters() == counts
    assert again.state.prequential.daily_summaries() == once.state.prequential.daily_summaries()


def test_every_impression_that_is_learned_was_scored_when_it_came(
    once: Trainer,
) -> None:
    summary = once.state.prequential.daily_summaries()
    assert sum(each.events for each in summary.values()) == once.state.events


def test_sigterm_makes_a_checkpoint_of_those_that_wait_though_none_is_learned_yet(
    events: Late, files: tuple[Path, Path], once: Trainer, fresh: Publication
) -> None:
    trainer = Trainer(RUN, fresh, program_cache=CACHE)
    seen = itertools.count(1)

    def stop_at_the_third(_progress: Progress) -> None:
        if next(seen) == 3:
            trainer.stop()

    trainer.fit(open_files(events, files), progress=stop_at_the_third, every_s=0)
    assert trainer.stopped
    assert trainer.state.waiting is not None
    held = trainer.state.waiting.counters()
    assert held["waiting"] > 48
    again = Trainer(RUN, fresh, program_cache=CACHE)
    assert again.state.waiting is not None
    assert again.state.waiting.counters() == held
    assert (again.state.cursor, again.state.done) == (trainer.state.cursor, trainer.state.done)
    again.fit(open_files(events, files))
    assert once.state.waiting is not None
    assert again.state.waiting.counters() == once.state.waiting.counters()


def test_a_run_without_the_setting_and_events_without_feedback_are_refused(
    events: Late, files: tuple[Path, Path], fresh: Publication, tmp_path: Path
) -> None:
    plain = dataclasses.replace(RUN, labels=None)
    trainer = Trainer(plain, fresh, program_cache=CACHE)
    with pytest.raises(ConfigurationError, match="LabelJoin"):
        trainer.fit(open_files(events, files))
    other = dataclasses.replace(RUN, model=news_model())
    with pytest.raises(ConfigurationError, match="do not come with feedback"):
        Trainer(other, Publication(tmp_path / "two"), program_cache=CACHE).fit(NEWS)
