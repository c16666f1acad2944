"""Versions under a byte budget: what matters most goes first, and nobody loses a row."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from killing import CACHE, Killed, train
from serving import flip_byte
from snapshots import snapshot_files

from embertide import _store
from embertide.trainer.config import PruneConfig, PublishBudget, RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.image import PublishedImage
from embertide.trainer.publish.snapshot import read_manifest
from embertide.trainer.publish.snapshot_rows import read_buckets
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress

# About a tenth of what this stream changes; small enough that rows wait at every version.
BUDGET = PublishBudget(bytes_per_s=2, max_age_versions=6, image_bytes=64 << 20)
# So few bytes that rows go and come back at every pass.
PRUNE = PruneConfig(bytes=10_000, half_life=20, first=(3,), every=5, least=2)
RUN = RunConfig(
    model=news_model(),
    prune=PRUNE,
    batch_size=24,
    publish_every_s=600,
    snapshot_every=4,
    publish_budget=BUDGET,
)
NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    publication = Publication(tmp_path_factory.mktemp("budget") / "pub")
    trainer = Trainer(
        dataclasses.replace(RUN, keep_snapshots=100), publication, program_cache=CACHE
    )
    trainer.fit(NEWS)
    return trainer


@pytest.fixture
def fresh(whole: Trainer, tmp_path: Path) -> Publication:
    (tmp_path / "pub").mkdir()
    shutil.copyfile(whole.publication.program, tmp_path / "pub" / "program.pt2")
    return Publication(tmp_path / "pub")


def replayed(trainer: Trainer) -> Iterator[tuple[int, list[bytes]]]:
    """Give each version and the buckets of a node that followed every delta."""
    publication, tables = trainer.publication, trainer.state.rows.tables
    node = _store.ServingStore(tables=tables, ddr_budget_bytes=64 << 20)
    node.commit(1)  # version 1 is the untrained model, without rows
    ordinals = {table.id: t for t, table in enumerate(tables)}
    for version in publication.deltas():
        for batch in publication.read_batches(version):
            node.stage_records(
                version.number, ordinals[batch.table_id], batch.bucket, batch.records
            )
        node.commit(version.number)
        yield (
            version.number,
            [node.export_bucket(t, bucket) for t, _, bucket in trainer.state.rows.places()],
        )


def test_a_node_by_snapshot_equals_a_node_by_deltas_byte_for_byte(whole: Trainer) -> None:
    by_deltas = dict(replayed(whole))
    snapshots = [v for v in whole.publication.snapshots() if v.number > 1]
    assert len(snapshots) >= 4
    for version in snapshots:
        by_snapshot = [
            records
            for *_, records in read_buckets(
                whole.state.rows, whole.publication.snapshot_path(version)
            )
        ]
        assert by_snapshot == by_deltas[version.number], version


def test_versions_keep_to_the_budget_and_the_last_leaves_nothing_out(whole: Trainer) -> None:
    publication = whole.publication
    sent = {
        version.number: sum(len(batch.records) for batch in publication.read_batches(version))
        for version in publication.deltas()
    }
    *bounded, last = sorted(sent)
    assert whole.versions.image is not None
    stats = whole.versions.image.stats
    assert stats.deferred_rows > 100
    # Beside the budget go tombstones, and rows whose turn it is.
    tombstones = sum(
        batch.tombstones
        for version in publication.deltas()
        for batch in publication.read_batches(version)
    )
    assert tombstones > 0
    row_bytes = 12 + 4 * whole.state.rows.tables[0].layout.dim
    bound = len(bounded) * BUDGET.bytes_per_s * RUN.publish_every_s
    bound += stats.overdue_rows * row_bytes + tombstones * 12
    assert sum(sent[number] for number in bounded) <= bound
    assert whole.versions.image.waiting_rows == 0
    trained = [whole.state.rows.store.export_bucket(t, b) for t, _, b in whole.state.rows.places()]
    assert dict(replayed(whole))[last] == trained


def test_a_changed_row_waits_for_a_bounded_number_of_versions() -> None:
    rows = EmbeddingStore(RUN.model, optimizer=RUN.optimizer)
    tight = dataclasses.replace(BUDGET, bytes_per_s=1)
    image = PublishedImage(rows, tight, publish_every_s=1)  # no row fits
    image.apply(1, ())
    rows.store.ensure_rows(0, np.arange(300))
    sent = dict[int, int]()
    for number in range(2, 2 + BUDGET.max_age_versions):
        chosen = image.choose(number, everything=False)
        for table, _, records in chosen:
            for key in _store.record_keys(table.layout, records).tolist():
                assert sent.setdefault(key, number) == number
        image.apply(number, chosen)
    assert sorted(sent) == list(range(300))
    assert len(set(sent.values())) == BUDGET.max_age_versions, "turns are spread over versions"
    assert image.stats.overdue_rows == 300


def test_the_rows_that_moved_farthest_go_first() -> None:
    rows = EmbeddingStore(RUN.model, optimizer=RUN.optimizer)
    budget = dataclasses.replace(BUDGET, bytes_per_s=10 * 76, max_age_versions=1 << 40)
    image = PublishedImage(rows, budget, publish_every_s=1)
    image.apply(1, ())
    keys = np.arange(50)
    rows.store.ensure_rows(0, keys)
    gradients = np.outer(np.arange(50), np.ones(16)).astype(np.float32)
    rows.store.apply_gradients([(0, keys, None, gradients)], learning_rate=0.1)

    def choose(number: int) -> list[int]:
        chosen = image.choose(number, everything=False)
        image.apply(number, chosen)
        return sorted(
            key for table, _, records in chosen for key in _store.record_keys(table.layout, records)
        )

    before = rows.store.lookup(0, keys)[0]
    far = np.argsort(-np.square(before).sum(1), kind="stable")
    assert choose(2) == sorted(far[:10].tolist())
    assert choose(3) == sorted(far[10:20].tolist())
    assert image.waiting_rows == 30


def test_what_nodes_hold_already_is_not_sent_again(whole: Trainer) -> None:
    rows = EmbeddingStore(RUN.model, optimizer=RUN.optimizer)
    image = PublishedImage(rows, BUDGET, publish_every_s=1_000_000)
    image.apply(1, ())
    rows.store.ensure_rows(0, np.arange(20))
    rows.store.ensure_rows(0, np.array([99]))
    rows.store.set_live(0, 99, 0)  # gone before any node had it

    def take() -> int:
        chosen = image.choose(2, everything=False)
        image.apply(2, chosen)
        return sum(len(_store.record_keys(table.layout, records)) for table, _, records in chosen)

    assert take() == 20
    bucket_keys = np.arange(20, dtype=np.uint64)
    for bucket in range(1 << rows.tables[0].bucket_bits):
        here = _store.record_keys(rows.tables[0].layout, rows.store.export_bucket(0, bucket))
        rows.store.mark_changed(0, bucket, np.intersect1d(here, bucket_keys))
    assert take() == 0


def test_what_a_damaged_file_held_goes_out_again(fresh: Publication) -> None:
    run = dataclasses.replace(RUN, snapshot_every=1000, keep_snapshots=9)
    killed = train(run, NEWS, fresh, 14)
    taken = dict(replayed(killed))  # by a node that had the versions from the bus
    before = fresh.deltas()[-1]
    flip_byte(min((fresh.path / "deltas" / before.folder).glob("*.delta")), 30)
    trainer = Trainer(run, fresh, program_cache=CACHE)
    assert trainer.versions.publisher.stats.damaged_partitions == 1

    def until_published(_progress: Progress) -> None:
        if fresh.deltas()[-1] > before:
            raise Killed

    with pytest.raises(Killed):
        trainer.fit(NEWS, progress=until_published, every_s=0)
    (first,) = (version for version in fresh.deltas() if version > before)
    node = _store.ServingStore(tables=trainer.state.rows.tables, ddr_budget_bytes=64 << 20)
    places = list(trainer.state.rows.places())
    for (t, _, bucket), records in zip(places, taken[before.number], strict=True):
        node.stage_records(1, t, bucket, records)
    node.commit(1)
    for batch in fresh.read_batches(first):
        node.stage_records(2, batch.table_id, batch.bucket, batch.records)
    node.commit(2)
    assert trainer.versions.image is not None
    images = [records for *_, records in trainer.versions.image.buckets()]
    assert images == [node.export_bucket(t, bucket) for t, _, bucket in places]


@pytest.mark.parametrize("batches", [1, 9, 16, 22])
def test_a_run_killed_under_a_budget_publishes_the_same_bytes(
    whole: Trainer, fresh: Publication, batches: int
) -> None:
    train(RUN, NEWS, fresh, batches)
    trainer = train(RUN, NEWS, fresh)
    newest = fresh.snapshots()[-1]
    theirs = whole.publication
    assert newest.number == theirs.snapshots()[-1].number
    assert snapshot_files(fresh.snapshot_path(newest)) == snapshot_files(
        theirs.snapshot_path(theirs.snapshots()[-1])
    )
    deltas = {version.number: version for version in theirs.deltas()}
    compared = 0
    for version in fresh.deltas():
        mine = [(b.table_id, b.bucket, b.records) for b in fresh.read_batches(version)]
        other = [
            (b.table_id, b.bucket, b.records) for b in theirs.read_batches(deltas[version.number])
        ]
        assert mine == other, version
        compared += 1
    assert compared >= 3
    assert trainer.versions.image is not None
    manifest = read_manifest(fresh.snapshot_path(newest))
    assert manifest["version"] == newest.number
