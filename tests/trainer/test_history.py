"""Histories hold what was before an event, no more; and go on exactly where they stopped."""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from embertide import _store
from embertide.trainer.config import SequenceConfig
from embertide.trainer.data.base import (
    MISSING_KEY,
    PADDING_KEY,
    Batch,
    EventSource,
)
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.history import History, HistorySource
from embertide.trainer.embedding.histories import history_rows, items_of_rows
from embertide.trainer.embedding.store import history_layout
from embertide.trainer.errors import DataError
from embertide.trainer.presets import news_history

NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=60, users=20, new_items_per_hour=5))
SEQUENCE = SequenceConfig(name="liked", user="user", item="cand", length=3)
NAMES = [feature.name for feature in NEWS.schema.features]
USER, CAND = NAMES.index("user"), NAMES.index("cand")


def events(rows: Sequence[tuple[int, int, int, int]]) -> Batch:
    """A batch of (ts, user, item, label)."""
    ts_B, user_B, item_B, label_B = np.array(rows, np.int64).T
    return Batch(
        first=0,
        next_offset=len(rows),
        event_B=np.arange(len(rows), dtype=np.int64),
        ts_ms_B=ts_B,
        keys_BF=np.stack([user_B, item_B], 1),
        dense_BD=np.full((len(rows), 1), 7, np.float32),
        label_B=label_B.astype(np.float32),
    )


def history(**changes: Any) -> History:
    return History(dataclasses.replace(SEQUENCE, **changes), ["user", "cand"])


def items(batch: Batch) -> list[list[int]]:
    """The sequence of each event, without padding."""
    return [[key for key in row if key != PADDING_KEY] for row in batch.keys_BF[:, 2:].tolist()]


def expected(source: EventSource, config: SequenceConfig) -> tuple[list[Any], list[Any]]:
    """Each event's keys and dense columns, written down event by event, slowly."""
    liked: OrderedDict[int, list[int]] = OrderedDict()
    waiting: list[tuple[int, int]] = []  # positives of the ts that is being read
    times: dict[int, list[int]] = {}
    keys, last_ms = [], -1
    dense: list[list[Any]] = []
    for batch in source.batches(batch_size=1):
        for ts_ms, key_F, label in zip(
            batch.ts_ms_B.tolist(), batch.keys_BF.tolist(), batch.label_B.tolist(), strict=True
        ):
            if ts_ms != last_ms:
                for user, item in waiting:
                    liked[user] = [item, *liked.get(user, [])][: config.length]
                    times[user] = [last_ms, *times.get(user, [])][: config.length]
                waiting, last_ms = [], ts_ms
            mine = liked.get(key_F[USER], [])
            keys.append([*key_F, *mine, *[PADDING_KEY] * (config.length - len(mine))])
            dense.append([len(mine), key_F[CAND] in mine])
            if config.times:
                at = times.get(key_F[USER], [])
                gaps = [np.float32((at[0] - ms) / 1000) for ms in at]
                dense[-1] += gaps + [0] * (config.length - len(at))
            if label:
                waiting.append((key_F[USER], key_F[CAND]))
    return keys, dense


@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 64, 10_000])
def test_each_event_sees_the_last_positives_before_its_ts(batch_size: int, times: bool) -> None:
    sequence = dataclasses.replace(SEQUENCE, times=times)
    keys, dense = expected(NEWS, sequence)
    batches = list(HistorySource(NEWS, [sequence]).batches(batch_size=batch_size))
    assert np.concatenate([batch.keys_BF for batch in batches]).tolist() == keys
    assert np.concatenate([batch.dense_BD for batch in batches]).tolist() == dense
    assert max(length for length, *_ in dense) == SEQUENCE.length
    assert any(repeat for _, repeat, *_ in dense)
    assert any(len({*row[2:]}) == SEQUENCE.length for row in dense) == times


def test_the_newest_comes_first_and_the_oldest_falls_out() -> None:
    batch = history().extend(events([(t, 5, 10 + t, 1) for t in range(6)]))
    assert items(batch) == [[], [10], [11, 10], [12, 11, 10], [13, 12, 11], [14, 13, 12]]
    assert batch.dense_BD.tolist() == [[7, min(t, 3), 0] for t in range(6)]


def test_a_group_of_one_ts_does_not_see_its_own_labels() -> None:
    group = [(1, 5, 10, 1), (1, 5, 11, 0), (1, 5, 10, 0)]
    batch = history().extend(events([*group, (2, 5, 10, 0)]))
    assert items(batch) == [[], [], [], [10]]
    assert batch.dense_BD[:, 2].tolist() == [0, 0, 0, 1]


def test_users_are_apart_and_those_without_a_key_have_no_history() -> None:
    rows = [(1, 5, 10, 1), (2, 6, 11, 1), (3, MISSING_KEY, 12, 1), (4, 5, 1, 0), (5, 6, 1, 0)]
    batch = history().extend(events([*rows, (6, MISSING_KEY, 12, 0)]))
    assert items(batch)[3:] == [[10], [11], []]


def test_the_user_not_seen_for_longest_is_forgotten_and_counted() -> None:
    # 5 and 6 fill the room; 5 is seen again, so 7 takes the place of 6.
    rows = [(1, 5, 10, 1), (2, 6, 11, 1), (3, 5, 1, 0), (4, 7, 12, 1), (5, 6, 1, 0)]
    bounded = history(users=2)
    batch = bounded.extend(events([*rows, (6, 5, 1, 0), (7, 7, 1, 0)]))
    assert items(batch)[4:] == [[], [10], [12]]
    assert bounded.forgotten == 1
    assert len(bounded.state().user_U) == 2


def test_many_users_fit_though_room_is_made_as_they_come() -> None:
    users, kept = range(5_000), history()
    kept.extend(events([(u, u, 10 + u, 1) for u in users]))
    again = kept.extend(events([(5_000 + u, u, 1, 0) for u in users]))
    assert items(again) == [[10 + u] for u in users]


@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize("users", [1_000, 5])
def test_a_restored_history_goes_on_as_one_never_stopped(users: int, times: bool) -> None:
    config = dataclasses.replace(SEQUENCE, users=users, times=times)
    (whole,) = NEWS.batches(batch_size=10_000)
    unstopped = History(config, NAMES)
    wanted = unstopped.extend(whole)
    parts = list(NEWS.batches(batch_size=50))
    for stop in (3, len(parts) // 2):
        first, second = History(config, NAMES), History(config, NAMES)
        for part in parts[:stop]:
            first.extend(part)
        second.extend(parts[-1])  # restoring drops it
        second.restore(first.state())
        rest = [second.extend(part) for part in parts[stop:]]
        begin = parts[stop].first
        for of_batch in ("keys_BF", "dense_BD"):
            mine = np.concatenate([getattr(batch, of_batch) for batch in rest])
            np.testing.assert_array_equal(mine, getattr(wanted, of_batch)[begin:])
        assert second.forgotten == unstopped.forgotten
        assert (first.forgotten > 0) == (users == 5)


def changes(kept: History) -> dict[int, list[int]]:
    user_U, items_UL, _ = kept.take_changes()
    items = [[key for key in row if key != PADDING_KEY] for row in items_UL.tolist()]
    return dict(zip(user_U.tolist(), items, strict=True))


def test_a_published_history_tells_which_users_changed_and_who_was_forgotten() -> None:
    kept = history(users=2, published=True)
    assert changes(kept) == {}
    kept.extend(events([(1, 5, 10, 1), (2, 6, 11, 1), (3, 5, 12, 1), (4, 8, 1, 0)]))
    assert changes(kept) == {5: [12, 10], 6: [11]}
    kept.extend(events([(5, 6, 1, 0), (6, MISSING_KEY, 9, 1)]))  # seen, and nobody
    assert changes(kept) == {}
    # 7 takes the place of 5, who comes back in place of 6, who was seen before 7.
    kept.extend(events([(7, 7, 13, 1), (8, 5, 14, 1)]))
    assert changes(kept) == {7: [13], 5: [14], 6: []}
    resumed = history(users=2, published=True)
    resumed.restore(kept.state())
    assert changes(resumed) == {}
    resumed.extend(events([(9, 7, 15, 1)]))
    assert changes(resumed) == {7: [15, 13]}


def test_labels_that_come_late_have_the_time_of_their_event() -> None:
    kept = history(times=True)
    kept.extend(events([(7_000, 5, 10, 1), (12_000, 5, 11, 1)]))
    kept.like(events([(9_000, 5, 13, 1), (9_000, 5, 14, 0)]))
    later = kept.extend(events([(20_000, 5, 1, 0)]))
    assert later.keys_BF[0, 2:].tolist() == [13, 11, 10]
    assert later.dense_BD[0].tolist() == [7, 3, 0, 0, -3, 2]


def test_a_history_that_is_not_published_keeps_no_list_of_changes() -> None:
    kept = history()
    kept.extend(events([(1, 5, 10, 1)]))
    assert changes(kept) == {}


def test_a_published_history_must_fit_a_row() -> None:
    with pytest.raises(ValueError, match="length is 497; at most 496 items fit a row"):
        history(length=497, published=True)
    assert history(length=496, published=True).config.table == "liked_of_user"
    with pytest.raises(ValueError, match="length is 321; at most 320 items with times fit a row"):
        history(length=321, published=True, times=True)
    assert history(length=320, published=True, times=True).config.published
    assert len(history(length=512, times=True).config.gap_columns) == 512


@pytest.mark.parametrize("length", [1, 4, 20, 33, 320])
def test_rows_of_a_history_say_when_its_items_came(length: int) -> None:
    config = dataclasses.replace(SEQUENCE, length=length, published=True, times=True)
    layout = history_layout(config)
    rng = np.random.default_rng(length)
    items_UL = rng.integers(-(2**62), 2**62, (length + 1, length))
    gap_UL = rng.normal(scale=1e4, size=items_UL.shape).astype(np.float32)
    for taken in range(length + 1):
        items_UL[taken, taken:], gap_UL[taken, taken:] = PADDING_KEY, 0
    rows_UK = history_rows(layout, items_UL, gap_UL)
    keys_U = np.arange(length + 1, dtype=np.uint64)
    records = _store.encode_key_records(layout, keys_U, rows_UK)
    _, back_UK = _store.decode_key_records(layout, records)
    back = items_of_rows(layout, back_UK, length, timed=True)
    np.testing.assert_array_equal(back[0], items_UL)
    np.testing.assert_array_equal(back[1].view(np.int32), gap_UL.view(np.int32))
    chunk = layout.chunk_dim * 8
    in_chunk = layout.chunk_dim // 3 * 2
    # A chunk without an item takes no bytes.
    live = sum(-(-taken // in_chunk) for taken in range(length + 1))
    assert len(records) == 12 * (length + 1) + live * chunk


def test_what_changed_says_how_long_before_the_newest_each_item_came() -> None:
    kept = history(published=True, times=True)
    kept.extend(events([(1_000, 5, 10, 1), (3_500, 5, 11, 1), (9_000, 6, 12, 1)]))
    user_U, items_UL, gap_UT = kept.take_changes()
    assert user_U.tolist() == [5, 6]
    assert items_UL[:, :2].tolist() == [[11, 10], [12, PADDING_KEY]]
    assert gap_UT.tolist() == [[0, 2.5, 0], [0, 0, 0]]


def test_a_source_read_from_a_start_gives_the_batches_after_it() -> None:
    source = HistorySource(NEWS, [SEQUENCE])
    whole = list(source.batches(batch_size=48))
    for at in (1, len(whole) // 2, len(whole) - 1):
        rest = list(source.batches(batch_size=48, start=whole[at].first))
        assert [batch.first for batch in rest] == [batch.first for batch in whole[at:]]
        for mine, theirs in zip(rest, whole[at:], strict=True):
            np.testing.assert_array_equal(mine.keys_BF, theirs.keys_BF)
            np.testing.assert_array_equal(mine.dense_BD, theirs.dense_BD)
    total = source.total_events() or 0
    assert list(source.batches(batch_size=48, start=total)) == []
    with pytest.raises(DataError, match="beyond"):
        list(source.batches(batch_size=48, start=total + 1))


def test_what_is_said_to_it_is_said_to_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    source, told = HistorySource(NEWS, [SEQUENCE]), list[int]()
    monkeypatch.setattr(NEWS, "checkpointed", told.append)
    monkeypatch.setattr(NEWS, "counters", lambda: {"rereads": 3})
    source.checkpointed(40)
    assert (told, source.counters()) == ([40], {"rereads": 3})


def test_the_schema_names_the_columns_as_the_model_does() -> None:
    model = news_history()
    schema = HistorySource(NEWS, model.sequences).schema
    assert [feature.name for feature in schema.features] == [each.name for each in model.columns]
    assert len(schema.dense) == model.dense_columns == 2
    (batch,) = HistorySource(NEWS, model.sequences).batches(batch_size=10_000)
    assert batch.keys_BF.shape[1] == len(model.columns) == 20
    assert batch.dense_BD.shape[1] == model.dense_columns


def test_a_sequence_of_features_that_the_events_lack_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 'liked' names feature 'who'; the events have"):
        HistorySource(NEWS, [dataclasses.replace(SEQUENCE, user="who")])
    for name in ("length", "users"):
        with pytest.raises(ValueError, match=f"sequence 'liked': {name} is 0; give at least 1"):
            history(**{name: 0})
