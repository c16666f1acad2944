"""Rollback: a new version with the state of an older one, checked byte for byte."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checker import CONFIG, DIM, TABLES, bucket_of, dense_tensors
from killing import CACHE

from embertide import _store
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.config import RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication, PublicationError, VersionId
from embertide.trainer.publish.promotion import (
    Promotion,
    PromotionError,
    PromotionRecord,
    StaleDecisionError,
)
from embertide.trainer.publish.publisher import (
    Change,
    Publisher,
    SupersededError,
    promotion_record,
)
from embertide.trainer.publish.rollback import RollbackError, roll_back
from embertide.trainer.publish.snapshot import (
    DensePart,
    SnapshotInfo,
    schema_id,
    write_snapshot,
)
from embertide.trainer.run.checkpoint.checkpoint import CheckpointError
from embertide.trainer.run.loop import Trainer

MODEL = CONFIG.name
EMPTY = SnapshotInfo.of(CONFIG, lineage=0, version=0, watermark_ms=0)
DEFAULT = 4  # SOURCE of a key without a row, and what is above it
Rows = dict[tuple[int, int], float]
"""(table, key) to the value of every dimension."""


def change(rows: Rows, gone: tuple[tuple[int, int], ...] = ()) -> list[Change]:
    """Records of rows, and tombstones, by bucket."""
    records: dict[tuple[int, int], dict[int, bytes]] = {}
    for (t, key), value in rows.items():
        table = TABLES[t]
        payload = _store.encode_payload(table.layout, 1, np.full(DIM, value, np.float32))
        record = _store.encode_record(key, 1, 0, payload)
        records.setdefault((t, bucket_of(table, key)), {})[key] = record
    for t, key in gone:
        record = _store.encode_record(key, 0, 1, b"")
        records.setdefault((t, bucket_of(TABLES[t], key)), {})[key] = record
    return [
        (TABLES[t], bucket, b"".join(by_key[key] for key in sorted(by_key)))
        for (t, bucket), by_key in sorted(records.items())
    ]


class Site:
    """A publication whose first version is a snapshot of 40 rows in two tables."""

    def __init__(self, folder: Path, bus: str | None = None) -> None:
        self.publication = Publication(folder)
        folder.mkdir(parents=True)
        self.publication.program.write_bytes(b"program")
        self.bus = bus
        self.publisher = self.new_publisher()
        self.first: Rows = {(t, key): float(key) for t in range(2) for key in range(20)}
        self.snapshot(1, self.first)
        self.publisher.adopt(1, watermark_ms=10, dense=dense_tensors(1))

    def new_publisher(self) -> Publisher:
        return Publisher(
            self.publication, bus=self.bus, model=MODEL, schema_id=schema_id(EMPTY, TABLES)
        )

    def snapshot(self, number: int, rows: Rows) -> None:
        version = VersionId(number, self.publisher.lineage)
        info = dataclasses.replace(
            EMPTY, lineage=version.lineage, version=number, watermark_ms=10 * number
        )
        part = DensePart(
            program=self.publication.program, cpu="x86-64-v3", tensors=dense_tensors(number)
        )
        held = {(table.id, bucket): data for table, bucket, data in change(rows)}
        places = [(t, b) for t in TABLES for b in range(1 << t.bucket_bits)]
        buckets = [(t, b, held.get((t.id, b), b"")) for t, b in places]
        write_snapshot(self.publication.snapshot_path(version), info, TABLES, buckets, part)

    def publish(self, number: int, changes: list[Change]) -> None:
        dense = dense_tensors(number)
        self.publisher.publish(number, watermark_ms=10 * number, changes=changes, dense=dense)

    def state(self, number: int, start: Rows | None = None) -> Rows:
        """Return the rows that a reader of the files has at a version, by a second way: a dict."""
        rows = dict(self.first if start is None else start)
        for version in self.publication.deltas():
            if version.number > number:
                continue
            for batch in self.publication.read_batches(version):
                table = TABLES[batch.table_id]
                one = _store.TableConfig(name="t", id=0, layout=table.layout)
                store = _store.ServingStore(tables=[one], ddr_budget_bytes=1 << 24)
                store.stage_records(1, 0, 0, batch.records)
                store.commit(1)
                keys = _store.record_keys(table.layout, batch.records).astype(np.int64)
                values, source, _ = store.lookup(0, keys)
                for key, value, found in zip(keys.tolist(), values[:, 0], source, strict=True):
                    rows.pop((table.id, key), None)
                    if found < DEFAULT:
                        rows[table.id, key] = float(value)
        return rows


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Versions 1 to 5: rows change, appear, and go."""
    site = Site(tmp_path / "pub")
    site.publish(2, change({(0, 1): 2.0, (0, 100): 2.0}))
    site.publish(3, change({(0, 1): 3.0, (1, 5): 3.0, (1, 200): 3.0}, gone=((0, 7),)))
    site.publish(4, change({(0, 1): 4.0, (0, 7): 4.0, (1, 300): 4.0}, gone=((0, 100), (1, 6))))
    site.publish(5, change({(0, 2): float("nan"), (1, 200): 5.0}))
    return site


@pytest.mark.parametrize("to", [1, 2, 3, 4])
def test_a_rollback_restores_every_row_and_the_net(site: Site, to: int) -> None:
    wanted = site.state(to)
    restored = roll_back(site.publication, to, bus=None)
    assert (restored.version, restored.to, restored.undone) == (6, to, 5 - to)
    assert site.state(6) == wanted
    commit = site.publication.read_commit(VersionId(6, 2)).commit
    assert (commit.rollback_to, commit.watermark_ms, commit.previous.number) == (to, 10 * to, 5)
    assert site.publication.read_dense(commit) == dense_tensors(to)
    record = promotion_record(site.publication, bus=None, model=MODEL).read()
    assert record.promoted == 6
    assert [n for n in range(1, 7) if record.is_withdrawn(n)] == list(range(to + 1, 6))


@pytest.mark.parametrize("at", [2, 3, 4, 5])
def test_a_rollback_leads_there_from_any_version_since(site: Site, at: int) -> None:
    """A node that was at version `at` takes the rollback's delta alone."""
    wanted, before = site.state(2), site.state(at)
    roll_back(site.publication, 2, bus=None)
    for version in site.publication.deltas()[:-1]:
        (site.publication.path / "deltas" / version.folder / "commit.pb").unlink()
    assert site.state(6, before) == wanted


def test_a_rollback_can_be_rolled_back(site: Site) -> None:
    wanted = site.state(4)
    roll_back(site.publication, 2, bus=None)
    restored = roll_back(site.publication, 4, bus=None)
    assert restored.version == 7
    assert site.state(7) == wanted
    record = promotion_record(site.publication, bus=None, model=MODEL).read()
    assert (record.promoted, record.undone[-1].to) == (7, 4)


def test_the_state_is_found_from_the_newest_snapshot_before_it(site: Site) -> None:
    wanted = site.state(3)
    site.snapshot(3, wanted)
    for version in site.publication.deltas():
        if version.number <= 3:
            (site.publication.path / "deltas" / version.folder / "commit.pb").unlink()
    restored = roll_back(site.publication, 3, bus=None)
    assert site.state(6, wanted) == wanted
    assert restored.rows + restored.tombstones == 7  # keys that 4 and 5 changed


@pytest.mark.parametrize(
    ("to", "why"), [(5, "not older than 5"), (9, "not older"), (0, "no longer keeps")]
)
def test_a_rollback_that_cannot_be_is_refused_before_anything_happens(
    site: Site, to: int, why: str
) -> None:
    with pytest.raises((RollbackError, PublicationError), match=why):
        roll_back(site.publication, to, bus=None)
    assert site.publication.versions()[-1] == VersionId(5, 1)
    site.publish(6, [])  # the trainer still has its lineage


def test_a_corrupt_delta_is_refused_and_nothing_is_published(site: Site) -> None:
    path = next((site.publication.path / "deltas" / VersionId(4, 1).folder).glob("*.delta"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(PublicationError, match="fails its checksum"):
        roll_back(site.publication, 2, bus=None)
    assert site.publication.versions()[-1].number == 5


def test_the_trainer_that_runs_is_superseded_and_told_why(tmp_path: Path) -> None:
    log = tmp_path / "redis.log"
    with RedisServer(RedisOptions(log=log)) as server:
        site = Site(tmp_path / "pub", server.url)
        site.publish(2, change({(0, 1): 2.0}))
        roll_back(site.publication, 1, bus=server.url)
        with pytest.raises(SupersededError, match="rolled back to version 1"):
            site.publish(4, [])
        copy = promotion_record(site.publication, bus=server.url, model=MODEL)
        (site.publication.path / "promoted.json").unlink()
        assert copy.read().promoted == 3  # nodes hear of it from the bus


# --- the record -----------------------------------------------------------------------------------


def test_a_decision_on_an_old_revision_is_refused(tmp_path: Path) -> None:
    first, second = (PromotionRecord(Publication(tmp_path)) for _ in range(2))
    seen = first.read().revision
    first.promote(3, by="one", revision=seen)
    with pytest.raises(StaleDecisionError):
        second.withdraw(3, reason="auc", detail="", by="two", revision=seen)
    record = second.read()
    assert (record.promoted, record.is_withdrawn(3), record.by) == (3, False, "one")
    second.withdraw(4, reason="auc", detail="", by="two", revision=record.revision)
    assert first.read().totals == {"auc": 1}


def test_a_record_that_fails_its_checksum_is_named(tmp_path: Path) -> None:
    record = PromotionRecord(Publication(tmp_path))
    record.promote(3, by="one", revision=0)
    path = tmp_path / "promoted.json"
    path.write_bytes(path.read_bytes().replace(b'"promoted": 3', b'"promoted": 9'))
    with pytest.raises(PromotionError, match=r"promoted\.json fails its checksum"):
        record.read()


def test_the_record_is_bounded(tmp_path: Path) -> None:
    record = PromotionRecord(Publication(tmp_path))
    now = Promotion()
    for number in range(1, 200):
        now = record.withdraw(
            number, reason="auc", detail="x" * 200, by="one", revision=now.revision
        )
    assert len(now.withdrawn) == 64
    assert now.totals == {"auc": 199}
    assert len((tmp_path / "promoted.json").read_bytes()) < 1 << 16


# --- the trainer afterwards -----------------------------------------------------------------------

RUN = RunConfig(
    model=news_model(), batch_size=24, publish_every_s=600, snapshot_every=4, keep_snapshots=9
)
NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned two thirds of the stream."""
    path = tmp_path_factory.mktemp("trained") / "pub"
    trainer = Trainer(RUN, Publication(path), program_cache=CACHE)
    trainer.fit(FirstEvents(NEWS, NEWS.total_events() * 2 // 3))
    return path


@pytest.mark.parametrize("skip", [False, True])
def test_a_trainer_goes_on_from_before_the_versions_that_were_undone(
    trained: Path, tmp_path: Path, skip: bool
) -> None:
    path = tmp_path / "pub"
    shutil.copytree(trained, path)
    publication = Publication(path)
    newest = publication.versions()[-1].number
    snapshots = [version.number for version in publication.snapshots()]
    to = snapshots[-2] - 1
    restored = roll_back(publication, to, bus=None)
    trainer = Trainer(RUN, publication, program_cache=CACHE, skip_undone=skip)
    assert trainer.state.number == snapshots[-3] <= to
    trainer.fit(NEWS)
    log = [json.loads(line)["number"] for line in publication.log.read_text().splitlines()]
    assert log.count(restored.version) == 1
    assert log[log.index(restored.version) + 1 :] == list(range(newest + 2, log[-1] + 1))
    assert len([number for number in log if to < number <= newest]) == newest - to
    assert (trainer.undone_events > 0) == skip
    assert trainer.state.events + trainer.undone_events == NEWS.total_events()


def test_without_a_checkpoint_from_before_the_error_says_so(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "pub"
    shutil.copytree(trained, path)
    publication = Publication(path)
    roll_back(publication, 2, bus=None)
    for version in publication.snapshots():
        if version.number <= 2:
            publication.remove_snapshot(version)
    with pytest.raises(CheckpointError, match="no checkpoint from before the versions"):
        Trainer(RUN, publication, program_cache=CACHE)
