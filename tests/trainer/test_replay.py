"""Replay against an in-memory model and trainer: the pace, the records, the proof."""

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from waiting import wait_until

from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.eval.compare import Copy
from embertide.trainer.eval.figures import ProofError, VersionLog, measure
from embertide.trainer.eval.moves import Reshard
from embertide.trainer.eval.records import Records
from embertide.trainer.eval.replay import Replay, ReplayConfig, ReplayProgress
from embertide.trainer.eval.served import Answer, ServedNodes, VersionNotHeldError

EVERY_MS = 600_000
STALENESS_MS = 3 * EVERY_MS
MOVED = Reshard(
    began_ms=0,
    ended_ms=10**9,
    buckets=4,
    buckets_moved=1,
    buckets_moved_to_other_nodes=1,
    bytes_moved=7,
    features=[(2, [1]), *[(0, [])] * 9],
)


class Twin:
    """A served model and its trainer in one: it learns what is scored, and publishes in time.

    Version n has learned from every event before origin + (n - 1) * EVERY_MS, and comes out once
    all of them are scored, as the real trainer's does.
    """

    def __init__(self, source: EventSource, *, published: bool = True) -> None:
        ts = [batch.ts_ms_B for batch in source.batches(batch_size=4096)]
        self.ts_ms = np.concatenate(ts)
        self.origin = int(self.ts_ms[0])
        self.published = published
        self.scored = 0
        self.sizes: list[int] = []
        self.failing: set[int] = set()  # answers, by their number, that needed a second try
        self.lock = threading.Lock()

    def tell(self, end: int) -> None:
        with self.lock:
            self.scored = end

    def watermark(self, version: int) -> int:
        return self.origin + (version - 1) * EVERY_MS - 1

    def version(self) -> int:
        if not self.published:
            return 1
        next_ts = self.ts_ms[min(self.scored, len(self.ts_ms) - 1)]
        return int(1 + (next_ts - self.origin) // EVERY_MS)

    def score(self, batch: Batch) -> Answer:
        with self.lock:
            version = self.version()
            self.sizes.append(len(batch))
        return Answer(
            score_B=np.linspace(0.1, 0.9, len(batch), dtype=np.float32),
            version=version,
            watermark_ms=self.watermark(version),
            plan_epoch=1,
            node="twin",
            failures=int(len(self.sizes) in self.failing),
            sent_ms=1000 * version,
            latency_us=500,
        )

    def log(self, path: Path) -> VersionLog:
        lines = [
            {"number": n, "lineage": 1, "watermark_ms": self.watermark(n), "committed_ms": 1000 * n}
            for n in range(1, 100)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return VersionLog.read(path)


def news(events: int = 20_000) -> EventSource:
    return FirstEvents(NewsSource(NewsConfig(hours=6)), events)


def replayed(tmp_path: Path, *, in_flight: int = 3) -> tuple[Replay, Twin, Records, VersionLog]:
    twin = Twin(news())
    records = Records(tmp_path)
    config = ReplayConfig(in_flight=in_flight, max_staleness_ms=STALENESS_MS)
    model: Any = twin
    replay = Replay(model, records, config, scored=twin)
    replay.run(news())
    return replay, twin, records, twin.log(tmp_path / "versions.jsonl")


@pytest.mark.parametrize("in_flight", [1, 4])
def test_scorer_and_trainer_never_wait_for_each_other(tmp_path: Path, in_flight: int) -> None:
    replay, twin, records, versions = replayed(tmp_path, in_flight=in_flight)
    assert replay.stats.events == len(twin.ts_ms)
    figures = measure(news(), records, versions)
    assert figures["events"] == len(twin.ts_ms)
    for fault in ("missing_rows", "learned_rows", "split_groups", "steps_back"):
        assert figures[fault] == 0
    assert figures["staleness_event_p99_s"] <= STALENESS_MS / 1000
    assert figures["requests"] == replay.stats.requests == len(twin.sizes) - replay.stats.probes


def test_failed_probes_are_no_failed_requests(tmp_path: Path) -> None:
    twin = Twin(news())
    twin.failing = {1}  # the first answer, which only asks for the version
    model: Any = twin
    config = ReplayConfig(max_staleness_ms=STALENESS_MS)
    replay = Replay(model, Records(tmp_path), config, scored=twin)
    replay.run(news())
    assert (replay.stats.failed_probes, replay.stats.failed_requests) == (1, 0)
    assert replay.stats.probes > 0


def test_the_figures_are_those_of_the_replay(tmp_path: Path) -> None:
    replay, _, records, versions = replayed(tmp_path)
    figures = measure(news(), records, versions)
    assert figures["served_auc_by_day"] == {
        str(day): auc for day, auc in replay.prequential.daily().items()
    }
    assert figures["p50_ms"] == 0.5


def test_a_version_that_does_not_come_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embertide.trainer.eval.replay._PATIENCE_S", 0.05)
    twin = Twin(news(), published=False)
    model: Any = twin
    replay = Replay(model, Records(tmp_path), ReplayConfig(max_staleness_ms=STALENESS_MS))
    with pytest.raises(Exception, match="version 1 is still the newest served"):
        replay.run(news())
    assert not list(tmp_path.glob("*.parquet"))
    assert not list(tmp_path.glob(".*.partial"))


def test_a_frozen_model_skips_what_it_has_learned(tmp_path: Path) -> None:
    twin = Twin(news(), published=False)
    twin.origin += 2 * EVERY_MS
    model: Any = twin
    replay = Replay(model, Records(tmp_path), ReplayConfig(max_staleness_ms=None))
    replay.run(news())
    learned = int((twin.ts_ms <= twin.watermark(1)).sum())
    first = pq.read_table(tmp_path / "scores.parquet").column("event")[0].as_py()
    assert replay.stats.skipped + replay.stats.events == len(twin.ts_ms)
    # A batch that has begun in what was learned is skipped whole.
    assert learned <= first < learned + 512


class CopyTwin(Twin):
    """A copy that is loaded for a while, holds what it is asked for or not, and may differ."""

    model, url = "copy", "nowhere"

    def __init__(
        self, source: EventSource, *, off: float = 0.0, gone: bool = False, most: int = 20
    ) -> None:
        super().__init__(source)
        self.off, self.gone, self.asked, self.loaded = off, gone, 0, False
        self.most = most

    def ready(self) -> bool:
        return self.loaded and self.asked < self.most

    def score(self, batch: Batch, *, version: int | None = None) -> Answer:
        self.asked += 1
        if self.gone:
            raise VersionNotHeldError("gone")
        answer = super().score(batch)
        assert version is not None
        return dataclasses.replace(answer, version=version, score_B=answer.score_B + self.off)


@pytest.mark.parametrize(
    ("off", "gone", "changed"), [(0.0, False, 0), (1e-7, False, 0), (1e-4, False, 1), (0, True, 0)]
)
def test_answers_are_compared_while_the_copy_is_loaded(
    off: float, gone: bool, changed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embertide.trainer.eval.compare._LAG_S", 0.0)
    monkeypatch.setattr("embertide.trainer.eval.compare._LOOK_EVERY_S", 0.0)
    twin, copied = Twin(news()), CopyTwin(news(), off=off, gone=gone)
    model: Any = twin
    copy: Any = copied
    config = ReplayConfig(max_staleness_ms=STALENESS_MS, compare_from=8000)
    awaited = []

    def show(progress: ReplayProgress) -> None:
        if progress.awaits_copy:
            awaited.append(progress.events)
            copied.loaded = True

    replay = Replay(model, Records(tmp_path), config, scored=twin, copy=Copy(copy))
    replay.run(news(), progress=show, every_s=0.0)
    stats, requests = replay.stats, pq.read_table(tmp_path / "requests.parquet").to_pydict()
    assert stats.compared == sum(requests["compared"]) >= 20
    assert stats.compared < stats.requests
    assert stats.changed == changed * stats.compared
    first = requests["first"][requests["compared"].index(True)]
    assert 0 <= first - 8000 < 512
    assert awaited == [first]
    differences = [each for each in requests["difference"] if each is not None]
    assert len(differences) == (0 if gone else stats.compared)

    figures = measure(
        news(), Records(tmp_path), twin.log(tmp_path / "versions.jsonl"), reshard=MOVED
    )["reshard"]
    assert figures["answers"] == stats.requests
    assert figures["compared"] == len(differences)
    assert figures["answers_changed"] == stats.changed
    if not gone:
        assert figures["touched"] > 0
        # A quarter of the users' buckets moved, and of no other table.
        assert 0.1 < figures["touched_impressions"] < 0.5


class SlowChecks(Twin):
    """One that answers small questions late."""

    def score(self, batch: Batch) -> Answer:
        late = len(batch) <= 8
        return dataclasses.replace(super().score(batch), latency_us=9000 if late else 500)


def test_checks_go_on_while_scoring_waits_and_count_as_answers_of_a_reshard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embertide.trainer.eval.compare._LOOK_EVERY_S", 0.0)
    twin, copied = SlowChecks(news()), CopyTwin(news(), off=1e-4, most=10**9)
    model: Any = twin
    copy: Any = copied
    copied.loaded = True
    config = ReplayConfig(max_staleness_ms=STALENESS_MS, in_flight=1, checks_per_s=2000)
    replay = Replay(model, Records(tmp_path), config, scored=twin, copy=Copy(copy))
    waited: list[int] = []

    def wait_once(batch: Batch) -> None:
        if batch.first > 8000 and not waited:
            waited.append(len(twin.sizes))
            wait_until(lambda: len(twin.sizes) > waited[0] + 200)

    monkeypatch.setattr(replay, "_wait_fresh", wait_once)
    replay.run(news())
    stats, records = replay.stats, Records(tmp_path)
    checks = pq.read_table(records.checks).to_pydict()
    assert stats.checks == len(checks["first"]) >= 200
    assert stats.check_events == sum(checks["events"])
    assert max(checks["events"]) == 8
    assert stats.changed == stats.compared + stats.checks
    # Each is of events that were scored before.
    assert max(checks["first"]) < stats.events

    versions = twin.log(tmp_path / "versions.jsonl")
    figures = measure(news(), records, versions, reshard=MOVED)
    assert figures["requests"] == stats.requests
    assert (figures["checks"], figures["check_events"]) == (stats.checks, stats.check_events)
    assert figures["reshard"]["answers"] == stats.requests + stats.checks
    assert figures["reshard"]["checks"] == stats.checks
    assert figures["reshard"]["answers_changed"] == stats.changed
    assert figures["reshard"]["p99_ms"] == figures["p99_ms"] == 0.5  # of requests alone
    assert 0.1 < figures["reshard"]["touched_impressions"] < 0.5


def rewrite(path: Path, name: str, change: Any) -> None:
    table = pq.read_table(path)
    index = table.schema.get_field_index(name)
    values = table.column(name).to_numpy().copy()
    change(values)
    column = pa.array(values, table.schema.field(index).type)
    pq.write_table(table.set_column(index, name, column), path)


def test_an_answer_that_knew_its_event_is_found(tmp_path: Path) -> None:
    _, _, records, versions = replayed(tmp_path)

    def newer(values: Any) -> None:
        values[100:110] = 90

    rewrite(records.scores, "version", newer)
    assert measure(news(), records, versions)["learned_rows"] == 10


def test_a_split_group_is_found(tmp_path: Path) -> None:
    _, _, records, versions = replayed(tmp_path)
    version = pq.read_table(records.scores).column("version").to_numpy()
    at = int(np.argmax(version == 3))  # the first row of a group

    def older(values: Any) -> None:
        values[at] = 2

    rewrite(records.scores, "version", older)
    assert measure(news(), records, versions)["split_groups"] == 1


def test_rows_that_are_missing_or_foreign_are_found(tmp_path: Path) -> None:
    _, _, records, versions = replayed(tmp_path)
    table = pq.read_table(records.scores)
    pq.write_table(table.slice(0, len(table) - 7), records.scores)
    assert measure(news(), records, versions)["missing_rows"] == 7
    pq.write_table(table, records.scores)
    with pytest.raises(ProofError, match="of no event of the input"):
        measure(news(10_000), records, versions)


def test_a_version_that_was_never_published_is_found(tmp_path: Path) -> None:
    _, _, records, versions = replayed(tmp_path)

    def unknown(values: Any) -> None:
        values[5] = 1234

    rewrite(records.scores, "version", unknown)
    with pytest.raises(ProofError, match="version 1234 answered"):
        measure(news(), records, versions)


def test_a_line_of_the_log_that_a_kill_cut_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "versions.jsonl"
    whole = '{"number": 3, "lineage": 1, "watermark_ms": 5, "committed_ms": 7}\n'
    path.write_text('{"number": 2, "lin\n' + whole)
    assert dict(VersionLog.read(path).watermark_ms) == {3: 5}
    with pytest.raises(ProofError, match="nowhere is missing"):
        VersionLog.read(tmp_path / "nowhere")


def test_records_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProofError, match=r"scores\.parquet is missing"):
        measure(news(), Records(tmp_path), Twin(news()).log(tmp_path / "versions.jsonl"))


class _Named:
    """A node that answers with its name alone."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked

    def score(self, batch: Batch, *, version: int | None = None) -> None:
        self.asked.append(self.name)


def test_traffic_shifts_to_the_first_node_from_an_event_on() -> None:
    asked: list[str] = []
    nodes = ServedNodes(
        [_Named(name, asked) for name in "abc"],  # type: ignore[misc]
        shift_from=100,
        shift_share=0.75,
    )
    batches = iter(NewsSource(NewsConfig(hours=2)).batches(batch_size=8))
    batch = next(batches)
    for first in range(200):
        nodes.score(dataclasses.replace(batch, first=first))
    assert asked[:100] == (["a", "b", "c"] * 34)[:100]
    later = asked[100:]
    assert later.count("a") == 75
    assert abs(later.count("b") - later.count("c")) <= 1
    assert "a" in later[:4]
    assert later[:4] != ["a"] * 4


def test_a_replay_keeps_to_its_pace(tmp_path: Path) -> None:
    source = FirstEvents(NewsSource(NewsConfig(hours=2)), 600)
    twin = Twin(source)
    config = ReplayConfig(batch_size=100, max_staleness_ms=STALENESS_MS, events_per_s=1500.0)
    began_s = time.monotonic()
    Replay(twin, Records(tmp_path), config, scored=twin).run(source)
    assert 0.3 <= time.monotonic() - began_s < 5  # the last hundred are due after 1/3 s
