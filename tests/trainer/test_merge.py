"""Several inputs read as one: files by time, streams that fall silent, cursors to go on from."""

import dataclasses
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from late import FEEDBACK, Late, late

from embertide.trainer.data.base import Batch, DeadLetters, EventSchema, EventSource, FeatureColumn
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.journal import SILENCES
from embertide.trainer.data.limit import take
from embertide.trainer.data.merge import MergedSource
from embertide.trainer.data.shared import packed, unpacked
from embertide.trainer.errors import ConfigurationError

SCHEMA = EventSchema(
    features=(FeatureColumn(name="item", column="item"),), label=None, ts="ts", id="impression"
)
NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=60, users=80, new_items_per_hour=5))
SILENT_S = 0.6


class Listed(EventSource):
    """Batches from a list, cut again as they are asked for; live ones wait for more at the end."""

    def __init__(
        self, schema: EventSchema, batches: Sequence[Batch], *, live: bool = False
    ) -> None:
        self.schema = schema
        self.dead_letters = DeadLetters()
        self.acknowledged = 0
        self._batches = list(batches)
        self._live = live
        self.more: Queue[Batch | None] = Queue()

    @property
    def live(self) -> bool:
        return self._live

    def total_events(self) -> int | None:
        return None

    def checkpointed(self, offset: int) -> None:
        self.acknowledged = offset

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        for batch in self._batches:
            if batch.next_offset > start:
                yield _from(batch, start)
        while self._live and (more := self.more.get()) is not None:
            yield more


def _from(batch: Batch, start: int) -> Batch:
    begin = int(np.searchsorted(batch.event_B, start))
    if begin == 0:
        return batch
    return dataclasses.replace(
        batch,
        first=start,
        event_B=batch.event_B[begin:],
        ts_ms_B=batch.ts_ms_B[begin:],
        keys_BF=batch.keys_BF[begin:],
        dense_BD=batch.dense_BD[begin:],
        label_B=batch.label_B[begin:],
        id_B=None if batch.id_B is None else batch.id_B[begin:],
    )


def rows(first: int, *ts_ms: int, features: int = 1) -> Batch:
    n = len(ts_ms)
    event_B = np.arange(first, first + n)
    return Batch(
        first=first,
        next_offset=first + n,
        event_B=event_B,
        ts_ms_B=np.array(ts_ms),
        keys_BF=np.repeat(event_B[:, None], features, axis=1),
        dense_BD=np.empty((n, 0), np.float32),
        label_B=np.zeros(n, np.float32),
        id_B=event_B,
    )


@pytest.fixture(scope="module")
def events() -> Late:
    return late(NEWS, 600)


def merged(events: Late) -> MergedSource:
    return MergedSource(
        [Listed(events.schema, events.impressions)], [Listed(FEEDBACK, events.clicks)]
    )


def said(batch: Batch) -> tuple[object, ...]:
    origin = batch.origin
    assert origin is not None
    arrays = (batch.event_B, batch.ts_ms_B, batch.keys_BF, batch.id_B, origin.part_B)
    return (batch.first, batch.next_offset, *(np.asarray(each).tolist() for each in arrays))


def test_rows_of_two_files_come_in_order_of_time_impressions_first(events: Late) -> None:
    batches = list(merged(events).batches(batch_size=50))
    times = np.concatenate([batch.ts_ms_B for batch in batches])
    parts = np.concatenate([batch.origin.part_B for batch in batches if batch.origin])
    assert (np.diff(times) >= 0).all()
    assert (np.diff(parts)[np.diff(times) == 0] >= 0).all()
    assert [(parts == p).sum() for p in (0, 1)] == [events.total, events.positives]
    ids = np.concatenate([batch.event_B for batch in batches])
    assert ids.tolist() == list(range(events.total + events.positives))
    # A group of one time is in one batch.
    ends = {int(batch.ts_ms_B[-1]) for batch in batches}
    begins = {int(batch.ts_ms_B[0]) for batch in batches}
    assert not ends & begins


def test_reading_from_any_batch_with_its_cursor_gives_those_after_it(events: Late) -> None:
    whole = list(merged(events).batches(batch_size=50))
    for k in range(0, len(whole), 3):
        source, origin = merged(events), whole[k].origin
        assert origin is not None
        source.seek(origin.next_cursor)
        after = list(source.batches(batch_size=50, start=whole[k].next_offset))
        assert [said(batch) for batch in after] == [said(batch) for batch in whole[k + 1 :]]


def test_the_cursor_of_a_part_of_a_batch_is_that_of_its_rows(events: Late) -> None:
    batch = list(merged(events).batches(batch_size=50))[3]
    ends = np.flatnonzero(np.diff(batch.ts_ms_B)) + 1
    end = int(ends[len(ends) // 2])
    part = take(batch, 0, end)
    source = merged(events)
    assert part.origin is not None
    source.seek(part.origin.next_cursor)
    first = next(source.batches(batch_size=5, start=part.next_offset))
    assert first.ts_ms_B[0] == batch.ts_ms_B[end]
    assert first.first == batch.event_B[end]


def test_what_ranks_get_is_what_was_read(events: Late) -> None:
    batch = next(merged(events).batches(batch_size=50))
    again = unpacked(packed(batch))
    assert said(again) == said(batch)
    assert again.origin is not None
    assert batch.origin is not None
    assert again.origin.next_cursor == batch.origin.next_cursor
    assert (again.origin.feedback_B == batch.origin.feedback_B).all()


def test_each_input_is_told_of_its_own_place_when_a_checkpoint_is_there(events: Late) -> None:
    source = merged(events)
    batches = source.batches(batch_size=50)
    found = [next(batches) for _ in range(3)]
    source.checkpointed(found[1].next_offset)
    assert found[1].origin is not None
    told = [part.acknowledged for part in source.parts if isinstance(part, Listed)]
    assert tuple(told) == found[1].origin.next_cursor


class Reading:
    """A merged source that a thread reads; what it gives comes out of `batch`."""

    def __init__(self, source: MergedSource, start: int = 0, batch_size: int = 4) -> None:
        self.out: Queue[Batch | Exception] = Queue()
        self._batches = source.batches(batch_size=batch_size, start=start)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for batch in self._batches:
                self.out.put(batch)
        except Exception as error:
            self.out.put(error)

    def batch(self) -> Batch:
        found = self.out.get(timeout=20)
        if isinstance(found, Exception):
            raise found
        return found


def live(folder: Path, *of: Sequence[Batch]) -> tuple[MergedSource, list[Listed]]:
    parts = [Listed(SCHEMA, batches, live=True) for batches in of]
    source = MergedSource(parts, silent_s=SILENT_S)
    source.remember_in(folder)
    return source, parts


def test_a_silent_input_holds_nobody_up_and_what_it_brings_later_is_not_lost(
    tmp_path: Path,
) -> None:
    source, parts = live(tmp_path, [rows(0, 10, 20, 30, 40)], [rows(0, 5)])
    reading = Reading(source)
    first = reading.batch()
    assert first.ts_ms_B.tolist() == [5, 10, 20, 30]
    rest = reading.batch()
    assert rest.ts_ms_B.tolist() == [40]
    parts[1].more.put(rows(1, 7))  # late, and nothing comes after it
    late = reading.batch()
    assert late.ts_ms_B.tolist() == [41]
    parts[1].more.put(rows(2, 50))
    more = reading.batch()
    assert more.ts_ms_B.tolist() == [50]
    assert source.counters()["late_after_silence"] == 1
    lines = [json.loads(line) for line in (tmp_path / SILENCES).read_bytes().splitlines()]
    assert {"part": 1, "at": 1, "ts_ms": 40} in lines
    # Read again, all is there at once and nobody is silent; it comes as it came.
    again, _ = live(tmp_path, [rows(0, 10, 20, 30, 40)], [rows(0, 5), rows(1, 7, 50)])
    repeated = Reading(again)
    for batch in (first, rest, late, more):
        assert said(repeated.batch()) == said(batch)
    # From a checkpoint, too.
    third, _ = live(tmp_path, [rows(0, 10, 20, 30, 40)], [rows(0, 5), rows(1, 7, 50)])
    assert first.origin is not None
    third.seek(first.origin.next_cursor)
    resumed = Reading(third, start=first.next_offset)
    for batch in (rest, late, more):
        assert said(resumed.batch()) == said(batch)


def test_an_input_without_a_thread_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system starts no thread for the second one: others wait, and its rows keep their time."""
    begin = threading.Thread.start
    refused: list[float] = []
    readers: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if thread.name == "merged":
            readers.append(thread)
            if len(readers) > 1 and (not refused or time.monotonic() < refused[0] + 3 * SILENT_S):
                refused.append(time.monotonic())
                raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    source, _ = live(tmp_path, [rows(0, 10, 20, 30, 40)], [rows(0, 5, 15)])
    reading = Reading(source)
    assert reading.batch().ts_ms_B.tolist() == [5, 10, 15, 20]
    assert len(refused) > 1
    assert source.counters()["late_after_silence"] == 0


def test_a_line_that_a_kill_cut_short_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / SILENCES).write_bytes(b'{"part": 0, "at": 0, "ts_ms": 1}\n{"part": 1, "at"')
    source, _ = live(tmp_path, [rows(0, 1, 2)], [rows(0, 1, 5)])
    # Those of the first input come after its silence.
    assert Reading(source).batch().ts_ms_B.tolist() == [1, 2, 2, 5]


def test_an_error_of_an_input_comes_to_the_reader() -> None:
    class Broken(Listed):
        def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
            yield rows(0, 1)
            raise OSError("gone")

    source = MergedSource([Broken(SCHEMA, ()), Listed(SCHEMA, [rows(0, 5)])])
    with pytest.raises(OSError, match="gone"):
        list(source.batches(batch_size=4))


def test_what_does_not_fit_is_refused(events: Late) -> None:
    labelled = dataclasses.replace(SCHEMA, label="y")
    with pytest.raises(ConfigurationError, match="label=None"):
        MergedSource([Listed(labelled, ())], [Listed(FEEDBACK, ())])
    with pytest.raises(ConfigurationError, match="feedback_schema"):
        MergedSource([Listed(SCHEMA, ())], [Listed(SCHEMA, ())])
    with pytest.raises(ConfigurationError, match="differ in schema"):
        MergedSource([Listed(SCHEMA, ()), Listed(events.schema, ())])
    with pytest.raises(ConfigurationError, match="2 inputs, and 1 are given"):
        MergedSource([Listed(SCHEMA, ())]).seek((1, 2))
