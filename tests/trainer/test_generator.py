"""The made-up news stream: it is the same every time, it drifts, and its ceiling is known."""

from pathlib import Path

import numpy as np
import pytest

from embertide.trainer.data.assemble import Ints
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.parquet import ParquetSource
from embertide.trainer.eval.metrics import auc

CAND = 2
HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def news() -> NewsSource:
    return NewsSource(NewsConfig(hours=48))


@pytest.fixture(scope="module")
def whole(news: NewsSource) -> Batch:
    (batch,) = news.batches(batch_size=news.total_events())
    return batch


def hour_of(batch: Batch) -> Ints:
    return batch.ts_ms_B // HOUR_MS


def same(ours: Batch, theirs: Batch) -> bool:
    names = ("event_B", "ts_ms_B", "keys_BF", "dense_BD", "label_B")
    bounds = (ours.first, ours.next_offset) == (theirs.first, theirs.next_offset)
    return bounds and all(np.array_equal(getattr(ours, n), getattr(theirs, n)) for n in names)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(whole: Batch) -> None:
    (again,) = NewsSource(NewsConfig(hours=48)).batches(batch_size=len(whole))
    (other,) = NewsSource(NewsConfig(hours=48, seed=2)).batches(batch_size=len(whole))
    assert same(whole, again)
    assert not np.array_equal(whole.label_B, other.label_B)


def test_a_day_does_not_repeat_the_day_before(whole: Batch) -> None:
    users = whole.keys_BF[:, 0]
    today, yesterday = (users[hour_of(whole) == hour] for hour in (30, 6))
    assert len(today) == len(yesterday)
    assert (today == yesterday).mean() < 0.1


def test_a_late_hour_needs_none_before_it(news: NewsSource, whole: Batch) -> None:
    start = news.first_event(40)
    (late,) = NewsSource(NewsConfig(hours=48)).batches(batch_size=len(whole), start=start)
    assert late.first == start
    assert np.array_equal(late.keys_BF, whole.keys_BF[start:])
    assert np.array_equal(late.label_B, whole.label_B[start:])


def test_resuming_equals_reading_on(news: NewsSource) -> None:
    uninterrupted = list(news.batches(batch_size=50_000))
    for i, batch in enumerate(uninterrupted[:-1]):
        resumed = next(news.batches(batch_size=50_000, start=batch.next_offset))
        assert same(resumed, uninterrupted[i + 1])
    assert uninterrupted[-1].next_offset == news.total_events()


def test_the_impressions_of_a_page_view_share_time_and_reader(whole: Batch) -> None:
    ts = whole.ts_ms_B.reshape(-1, 4)
    assert (ts == ts[:, :1]).all()
    user = whole.keys_BF[:, 0].reshape(-1, 4)
    assert (user == user[:, :1]).all()
    quiet = ts[hour_of(whole).reshape(-1, 4)[:, 0] == 4, 0]
    assert len(np.unique(quiet)) == len(quiet)


def test_the_ceiling_is_high_and_short_of_certainty(news: NewsSource, whole: Batch) -> None:
    assert 0.85 < auc(*news.truth(0, 24)) < 0.92
    assert 0.85 < auc(*news.truth(24, 48)) < 0.92
    assert 0.2 < whole.label_B.mean() < 0.3


def test_the_true_probabilities_are_calibrated(news: NewsSource, whole: Batch) -> None:
    p = np.concatenate([news.true_p(hour) for hour in range(48)])
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        inside = (p >= low) & (p < low + 0.2)
        assert whole.label_B[inside].mean() == pytest.approx(p[inside].mean(), abs=0.01)


def popularity_auc(batch: Batch, lag: int) -> float:
    """Mean AUC over a day's hours of the click rate that items had `lag` hours before."""
    hour, cand = hour_of(batch), batch.keys_BF[:, CAND]
    found = []
    for now in range(24, 48):
        then = hour == now - lag
        shown = np.bincount(cand[then], minlength=int(cand.max()) + 1)
        clicked = np.bincount(cand[then], batch.label_B[then], minlength=len(shown))
        rate = (clicked + 1) / (shown + 4)
        found.append(auc(batch.label_B[hour == now], rate[cand[hour == now]]))
    return float(np.mean(found))


def test_last_hours_popularity_tells_much_and_yesterdays_nothing(whole: Batch) -> None:
    last_hour, earlier, yesterday = (popularity_auc(whole, lag) for lag in (1, 6, 24))
    assert last_hour > 0.7
    assert earlier < last_hour - 0.1
    assert yesterday < 0.55


def test_device_and_hour_of_day_matter_weakly(news: NewsSource, whole: Batch) -> None:
    device = whole.keys_BF[:, 4]
    rates = [whole.label_B[device == d].mean() for d in range(5)]
    assert 0.01 < max(rates) - min(rates) < 0.2


def test_the_parquet_file_reads_as_the_stream_itself(tmp_path: Path) -> None:
    news = NewsSource(NewsConfig(hours=3, views_per_hour=300))
    path = str(tmp_path / "news.parquet")
    news.write_parquet(path)
    read = ParquetSource(path, news.schema)
    assert read.total_events() == news.total_events()
    pairs = zip(read.batches(batch_size=500), news.batches(batch_size=500), strict=True)
    assert all(same(ours, theirs) for ours, theirs in pairs)
    assert read.dead_letters.count == 0


def test_a_swap_changes_the_ids_of_the_popular_and_nothing_else(
    news: NewsSource, whole: Batch
) -> None:
    swapping = NewsSource(NewsConfig(hours=48, swap_hour=30))
    (swapped,) = swapping.batches(batch_size=len(whole))
    before = hour_of(whole) < 30
    assert np.array_equal(swapped.keys_BF[before], whole.keys_BF[before])
    assert np.array_equal(swapped.label_B, whole.label_B)
    assert np.array_equal(swapping.true_p(30), news.true_p(30))
    then = hour_of(whole) == 30
    for column, popular, since in ((0, 500, 0), (1, 100, 29), (CAND, 100, 29)):
        old, new = whole.keys_BF[then, column], swapped.keys_BF[then, column]
        pairs = np.unique(np.stack([old, new]), axis=1)
        assert len(pairs[0]) == len(np.unique(old)) == len(np.unique(new))
        # Those of many events before have, after, those of few.
        of_late = before & (hour_of(whole) >= since)
        seen = np.bincount(whole.keys_BF[of_late, column], minlength=int(pairs.max()) + 1)
        often = pairs[0][np.argsort(-seen[pairs[0]])[:popular]]
        now = pairs[1][np.isin(pairs[0], often)]
        assert seen[now].mean() < seen[often].mean() / 3
    # Items that are born after it have ids of their own.
    born = whole.keys_BF[:, CAND] >= (30 + 24) * 60 + 60
    assert np.array_equal(swapped.keys_BF[born, CAND], whole.keys_BF[born, CAND])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hours": 0}, "hours 0"),
        ({"swap_hour": -1}, "swap_hour -1"),
        ({"seed": -1}, "seed -1"),
        ({"day_swing": 1.0}, "day_swing 1.0"),
        ({"half_life_hours": 0.0}, "half_life_hours 0.0"),
    ],
)
def test_a_config_that_makes_no_stream_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NewsConfig(**wrong)  # type: ignore[arg-type]


def test_an_hour_outside_the_stream_is_refused(news: NewsSource) -> None:
    with pytest.raises(ValueError, match="hour 48"):
        news.true_p(48)
