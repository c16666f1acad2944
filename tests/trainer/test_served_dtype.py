"""Rows served in a type of fewer bits than the one they are trained in."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from killing import Killed, train, unserved
from serving import flip_byte
from snapshots import newest_files

from embertide import _store
from embertide.trainer.config import (
    CountersConfig,
    ModelConfig,
    PruneConfig,
    PublishBudget,
    RunConfig,
    ServedDtype,
    TableConfig,
)
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.rollback import roll_back
from embertide.trainer.publish.snapshot import manifest_tables, read_manifest
from embertide.trainer.publish.snapshot_rows import read_buckets
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint.checkpoint import CheckpointError, CheckpointWriter
from embertide.trainer.run.fork import Fork
from embertide.trainer.run.loop import Trainer

NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=300, users=900, new_items_per_hour=20))
HALF = NEWS.total_events() // 2


def model(*served: ServedDtype | None, chunks: int = 4) -> ModelConfig:
    """The news model; its first tables are served as named."""
    given = news_model()
    tables = tuple(
        dataclasses.replace(table, chunks=chunks, served_dtype=dtype)
        for table, dtype in zip(given.tables, served, strict=False)
    )
    return dataclasses.replace(given, tables=(*tables, *given.tables[len(tables) :]))


# Rows and chunks go and come back at every pass; the third table is served as it is trained.
PLAIN = RunConfig(
    model=model(None, None, None),
    prune=PruneConfig(bytes=40_000, half_life=20, first=(3,), every=5, least=2),
    batch_size=24,
    publish_every_s=600,
    snapshot_every=2,
    keep_snapshots=100,
)
RUN = dataclasses.replace(PLAIN, model=model("int8", "int4", None))
RUNS = {
    "snapshots of all rows": RUN,
    "increments": dataclasses.replace(RUN, full_snapshot_every=4),
    "a budget": dataclasses.replace(
        RUN, publish_budget=PublishBudget(bytes_per_s=3, max_age_versions=6, image_bytes=64 << 20)
    ),
}


def contents(rows: EmbeddingStore) -> list[bytes]:
    """Every trained row, and all that learning knows of it."""
    return [
        data
        for t, _, bucket in rows.places()
        for data in (
            rows.store.export_bucket(t, bucket),
            *(each.tobytes() for each in rows.store.bucket_state(t, bucket)),
        )
    ]


def replayed(trainer: Trainer) -> Iterator[tuple[int, list[bytes]]]:
    """Give each version and the buckets of a node that followed every delta."""
    rows = trainer.state.rows
    node = _store.ServingStore(tables=rows.served_tables, ddr_budget_bytes=64 << 20)
    node.commit(1)
    for version in trainer.publication.deltas():
        for batch in trainer.publication.read_batches(version):
            node.stage_records(version.number, batch.table_id, batch.bucket, batch.records)
        node.commit(version.number)
        yield version.number, [node.export_bucket(t, bucket) for t, _, bucket in rows.places()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return train(PLAIN, NEWS, unserved(tmp_path_factory.mktemp("plain") / "pub"))


@pytest.fixture(scope="module", params=list(RUNS))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run that nothing stopped."""
    return train(RUNS[request.param], NEWS, unserved(tmp_path_factory.mktemp("whole") / "pub"))


# --- what is published ----------------------------------------------------------------------------


def test_what_is_trained_does_not_depend_on_what_is_served(whole: Trainer, plain: Trainer) -> None:
    assert contents(whole.state.rows) == contents(plain.state.rows)
    assert whole.state.prequential.hourly() == plain.state.prequential.hourly()


def test_nodes_have_rows_in_the_served_type_by_deltas_as_by_snapshots(whole: Trainer) -> None:
    rows = whole.state.rows
    by_deltas = dict(replayed(whole))
    snapshots = [v for v in whole.publication.snapshots() if v.number > 1]
    assert len(snapshots) >= 2
    for version in snapshots:
        path = whole.publication.snapshot_path(version)
        assert [r for *_, r in read_buckets(rows, path)] == by_deltas[version.number]
        tables = manifest_tables(read_manifest(path)).values()
        assert [each.layout.dtype for each in tables][:4] == ["int8", "int4", "fp32", "fp32"]
    # The last version leaves nothing out: it has each row as the trained one reads in that type.
    newest = by_deltas[max(by_deltas)]
    masks = set[int]()
    for (t, table, bucket), found in zip(rows.places(), newest, strict=True):
        trained = rows.store.export_bucket(t, bucket)
        keys_N, live_N, _, values_ND = _store.decode_records(table.layout, trained)
        served = rows.served_tables[t].layout
        wanted = [
            _store.encode_record(int(key), int(live), 0, _store.encode_payload(served, live, row))
            for key, live, row in zip(keys_N, live_N, values_ND, strict=True)
        ]
        assert found == b"".join(wanted)
        masks.update(live_N.tolist())
    assert len(masks) > 2, "chunks were pruned"


def test_versions_take_fewer_bytes(whole: Trainer, plain: Trainer) -> None:
    def sent(trainer: Trainer, table: int) -> int:
        publication = trainer.publication
        return sum(
            len(batch.records)
            for version in publication.deltas()
            for batch in publication.read_batches(version)
            if batch.table_id == table
        )

    for table in (0, 1):
        assert sent(whole, table) < 0.8 * sent(plain, table)
    if whole.versions.image is None:
        assert sent(whole, 2) == sent(plain, 2)


# --- going on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(RUNS))
@pytest.mark.parametrize("batches", [5, 41, pytest.param(77, marks=pytest.mark.long), 104])
def test_a_killed_run_ends_as_one_never_killed(
    plain: Trainer, tmp_path: Path, name: str, batches: int
) -> None:
    wanted = train(RUNS[name], NEWS, unserved(tmp_path / "whole"))
    publication = unserved(tmp_path / "pub")
    train(RUNS[name], NEWS, publication, batches)
    again = train(RUNS[name], NEWS, publication)
    assert newest_files(publication) == newest_files(wanted.publication)
    assert contents(again.state.rows) == contents(wanted.state.rows) == contents(plain.state.rows)
    assert [v.number for v in publication.deltas()] == [
        v.number for v in wanted.publication.deltas()
    ]
    for one, other in zip(publication.deltas(), wanted.publication.deltas(), strict=True):
        mine, theirs = (
            [(b.table_id, b.bucket, b.records) for b in each.read_batches(version)]
            for each, version in ((publication, one), (wanted.publication, other))
        )
        # Those that the first start still sent and the second made good may be in one more.
        if other.number > wanted.state.number - 2:
            assert mine == theirs


@pytest.mark.parametrize("name", list(RUNS))
def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(
    plain: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real, calls = CheckpointWriter.add, 0

    def dying(writer: CheckpointWriter, *args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 400:
            raise Killed
        real(writer, *args, **kwargs)  # type: ignore[arg-type]

    publication = unserved(tmp_path / "pub")
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "add", dying)
        with pytest.raises(Killed):
            train(RUNS[name], NEWS, publication)
    again = train(RUNS[name], NEWS, publication)
    assert contents(again.state.rows) == contents(plain.state.rows)


def test_a_resumed_run_marks_no_row_that_nodes_have(tmp_path: Path) -> None:
    publication = unserved(tmp_path / "pub")
    train(RUN, FirstEvents(NEWS, HALF), publication)
    found = checkpoints.load_newest(publication)
    assert found is not None
    learner = Learner(RUN)
    found.restore_rows(learner.rows)
    assert contents(learner.rows)
    for t, _, bucket in learner.rows.places():
        assert learner.rows.store.take_changes(t, bucket) == b""


def test_a_checkpoint_without_its_trained_rows_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CheckpointWriter.add

    def without(writer: CheckpointWriter, *args: object, **kwargs: object) -> None:
        real(writer, *args, **(kwargs | {"trained": None}))  # type: ignore[arg-type]

    publication = unserved(tmp_path / "pub")
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "add", without)
        train(RUN, FirstEvents(NEWS, HALF), publication)
    found = checkpoints.load_newest(publication)
    assert found is not None
    with pytest.raises(CheckpointError, match="lacks the trained rows of table user, bucket 0"):
        found.restore_rows(Learner(RUN).rows)


def test_rows_of_a_damaged_delta_file_go_out_again(tmp_path: Path) -> None:
    publication = unserved(tmp_path / "pub")
    train(dataclasses.replace(RUN, snapshot_every=20), NEWS, publication, 90)
    path = sorted(publication.path.glob("deltas/*/p-00.delta"))[-1]
    flip_byte(path, -20)
    trainer = train(dataclasses.replace(RUN, snapshot_every=20), NEWS, publication)
    newest = publication.snapshot_path(publication.snapshots()[-1])
    held = [records for *_, records in read_buckets(trainer.state.rows, newest)]
    assert held == [records for *_, records in trainer.state.rows.buckets()]


# --- other ways to go on --------------------------------------------------------------------------


def changed(run: RunConfig, publication: Publication, *, change: bool = False) -> Trainer:
    return Trainer(run, publication, change_model=change)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (PLAIN, RUN),
        pytest.param(RUN, PLAIN, marks=pytest.mark.long),
        (RUNS["increments"], dataclasses.replace(RUNS["increments"], model=PLAIN.model)),
    ],
)
def test_the_served_type_changes_with_the_model(
    tmp_path: Path, before: RunConfig, after: RunConfig
) -> None:
    publication = unserved(tmp_path / "pub")
    first = train(before, FirstEvents(NEWS, HALF), publication)
    learned = contents(first.state.rows)
    path = r"model\.tables\[0\]\.served_dtype"
    with pytest.raises(CheckpointError, match=f"{path}.*--change-model"):
        changed(after, publication)
    trainer = changed(after, publication, change=True)
    assert contents(trainer.state.rows) == learned
    trainer.fit(NEWS)
    newest = publication.snapshot_path(publication.snapshots()[-1])
    held = [records for *_, records in read_buckets(trainer.state.rows, newest)]
    assert held == [records for *_, records in trainer.state.rows.buckets()]
    dtypes = [each["dtype"] for each in read_manifest(newest)["tables"]]
    assert dtypes == [each.served for each in after.model.tables]


@pytest.mark.parametrize("name", list(RUNS))
def test_a_fork_begins_with_the_trained_rows(tmp_path: Path, name: str) -> None:
    origin = unserved(tmp_path / "origin")
    # So many that the newest snapshot is an increment, or has rows that wait.
    train(RUNS[name], NEWS, origin, 104)
    found = checkpoints.load_newest(origin)
    assert found is not None
    learner = Learner(RUNS[name])
    found.restore_rows(learner.rows)
    fork = Trainer(
        PLAIN, unserved(tmp_path / "fork"), fork=Fork(publication=origin, keep_place=True)
    )
    assert contents(fork.state.rows) == contents(learner.rows)


def test_a_rollback_restores_what_was_served(tmp_path: Path) -> None:
    trainer = train(RUN, FirstEvents(NEWS, HALF), unserved(tmp_path / "pub"))
    publication = trainer.publication
    versions = publication.deltas()
    before = dict(replayed(trainer))
    restored = roll_back(publication, versions[-4].number, bus=None)
    assert restored.rows > 0
    assert dict(replayed(trainer))[restored.version] == before[versions[-4].number]
    again = train(RUN, NEWS, publication)
    newest = publication.snapshot_path(publication.snapshots()[-1])
    held = [records for *_, records in read_buckets(again.state.rows, newest)]
    assert held == [records for *_, records in again.state.rows.buckets()]


# --- settings and records -------------------------------------------------------------------------


def test_a_served_type_that_is_no_smaller_is_refused() -> None:
    assert TableConfig(name="t", dtype="bf16", served_dtype="bf16").served == "bf16"
    assert TableConfig(name="t", dtype="bf16").served == "bf16"
    for dtype, served in (("bf16", "fp16"), ("int8", "fp32"), ("fp16", "fp32")):
        with pytest.raises(ValueError, match=f"'t': served_dtype is '{served}'.*no fewer bits"):
            TableConfig(name="t", dtype=dtype, served_dtype=served)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="served_dtype is 'int2'"):
        TableConfig(name="t", served_dtype="int2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype is 'int4'; use one of.*and served_dtype='int4'"):
        TableConfig(name="t", dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two values a byte, and a chunk has 3: give it an even"):
        TableConfig(name="t", dim=6, chunks=2, served_dtype="int4")
    with pytest.raises(ValueError, match="counters need rows of fp32, trained and served, not int"):
        TableConfig(name="t", served_dtype="int8", counters=CountersConfig(feature="t"))


def test_converted_records_are_those_of_the_other_type() -> None:
    old = _store.RowLayout(dtype="fp32", chunks=2, chunk_dim=2)
    values = np.array([0.5, -1.0, 1e6, -3e38], np.float32)
    rows = [(1, 3), (2, 1), (3, 2), (9, 0)]
    records = b"".join(
        _store.encode_record(key, live, 0, _store.encode_payload(old, live, values))
        for key, live in rows
    )
    gone = _store.encode_record(7, 0, 2, b"")
    most = {"fp16": 65504.0, "bf16": float(np.uint32(0x7F7F0000).view(np.float32))}
    most["int4"] = 2e38
    for dtype in ("fp32", "fp16", "bf16", "int8", "int4"):
        new = _store.RowLayout(dtype=dtype, chunks=2, chunk_dim=2)
        bound = most.get(dtype, 3.4e38)
        kept = np.clip(values, -np.float32(bound), np.float32(bound))
        wanted = b"".join(
            _store.encode_record(key, live, 0, _store.encode_payload(new, live, kept))
            for key, live in rows
        )
        assert _store.convert_records(old, new, gone + records) == gone + wanted
        assert np.isfinite(_store.decode_records(new, wanted)[3]).all()
    other = _store.RowLayout(dtype="int8", chunks=4, chunk_dim=1)
    with pytest.raises(_store.StoreError, match="2 chunks of 2 are none of 4 of 1"):
        _store.convert_records(old, other, records)
    with pytest.raises(_store.StoreError, match="cut short"):
        _store.convert_records(old, old, records[:-13])
    keys = _store.RowLayout(dtype="keys", chunks=2, chunk_dim=2)
    with pytest.raises(_store.StoreError, match="rows of keys are no values"):
        _store.convert_records(old, keys, records)


def test_a_store_trains_no_rows_of_int4() -> None:
    layout = _store.RowLayout(dtype="int4", chunk_dim=4)
    table = _store.TableConfig(name="t", id=0, layout=layout)
    with pytest.raises(_store.StoreError, match="table t: rows of int4 are served, not trained"):
        _store.TrainingStore(tables=[table], ddr_budget_bytes=8 << 20)
    _store.ServingStore(tables=[table], ddr_budget_bytes=8 << 20)


def test_a_row_of_int4_takes_fewer_bytes_of_memory() -> None:
    keys_N = np.arange(50_000, dtype=np.uint64)
    values = np.random.default_rng(1).normal(size=32).astype(np.float32)
    taken = {}
    for dtype in ("fp32", "int8", "int4"):
        layout = _store.RowLayout(dtype=dtype, chunk_dim=32)
        table = _store.TableConfig(name="t", id=0, layout=layout)
        store = _store.ServingStore(tables=[table], ddr_budget_bytes=64 << 20)
        row = _store.encode_payload(layout, 1, values)
        records = b"".join(_store.encode_record(int(key), 1, 0, row) for key in keys_N)
        store.stage_records(1, 0, 0, records)
        store.commit(1)
        taken[dtype] = store.stats()["ddr_payload_bytes"] / len(keys_N)
        found, _, _ = store.lookup(0, keys_N[:1].view(np.int64))
        np.testing.assert_array_equal(
            found[0], _store.decode_records(layout, records[: 12 + len(row)])[3][0]
        )
    assert taken["fp32"] >= 128
    assert taken["int8"] >= 36
    assert 20 <= taken["int4"] < 25, taken
