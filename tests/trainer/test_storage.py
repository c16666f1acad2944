"""Publications in object storage: a real S3 server, slow, failing, and with objects harmed."""

import contextlib
import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from buckets import S3, s3_server
from killing import CACHE, Killed
from snapshots import newest_files

from embertide.trainer.config import RunConfig
from embertide.trainer.data import open_events
from embertide.trainer.data.assemble import Chunk
from embertide.trainer.data.base import EventSchema, FeatureColumn
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.errors import ConfigurationError, DataError
from embertide.trainer.presets import news_model
from embertide.trainer.publish import upload
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.mirror import Mirror, MixedError
from embertide.trainer.publish.origin import FolderOrigin
from embertide.trainer.publish.storage import DamagedError, Storage, StorageError
from embertide.trainer.publish.upload import OvertakenError
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint import restoring
from embertide.trainer.run.checkpoint.checkpoint import CheckpointError
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress

RUN = RunConfig(model=news_model(), batch_size=64, publish_every_s=600, snapshot_every=4)
NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5))


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def url(s3: S3) -> Iterator[str]:
    yield s3.bucket()
    s3.harm(0)


def train(
    url: str | None,
    folder: Path,
    *,
    batches: int = 0,
    behind_s: float = 3600,
    run: RunConfig = RUN,
    source: NewsSource = NEWS,
) -> Trainer:
    """Train to the end; or die once so many batches are learned, and storage lacks nothing."""
    storage = None if url is None else Storage(url)
    trainer = Trainer(
        run, Publication(folder), program_cache=CACHE, storage=storage, max_behind_s=behind_s
    )
    left = batches

    def show(_progress: Progress) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed

    if batches:
        with pytest.raises(Killed):
            trainer.fit(source, progress=show, every_s=0)
    else:
        trainer.fit(source)
    return trainer


@pytest.fixture(scope="module")
def never(tmp_path_factory: pytest.TempPathFactory) -> Publication:
    """The folder of a run that knows of no storage."""
    return train(None, tmp_path_factory.mktemp("never") / "pub").publication


def mirrored(url: str, folder: Path) -> Mirror:
    mirror = Mirror(Storage(url), Publication(folder))
    mirror.round()
    return mirror


# --- what is brought over -------------------------------------------------------------------------


def test_storage_has_what_the_folder_has_and_a_mirror_gets_it(
    url: str, never: Publication, tmp_path: Path
) -> None:
    trainer = train(url, tmp_path / "pub")
    mine, storage = trainer.publication, Storage(url)
    for kind in ("snapshots", "deltas", "checkpoints"):
        local = {
            f"{kind}/{path.relative_to(mine.path / kind)}"
            for path in (mine.path / kind).rglob("*")
            if path.is_file()
        }
        assert set(storage.keys(kind)) == local, kind
    assert storage.keys("lineages") == ["lineages/000001"]
    mirror = mirrored(url, tmp_path / "node")
    assert mirror.newest() == mine.versions()[-1]
    assert newest_files(mirror.publication) == newest_files(mine) == newest_files(never)
    assert mirror.stats.snapshots == 1
    before = dataclasses.replace(mirror.stats)
    mirror.round()  # nothing new
    assert mirror.stats == dataclasses.replace(before, rounds=2)


@pytest.mark.parametrize("batches", [1, 4, 7])
def test_a_run_that_goes_on_in_an_empty_folder_ends_as_one_never_stopped(
    url: str, never: Publication, tmp_path: Path, batches: int
) -> None:
    first = train(url, tmp_path / "first", batches=batches)
    shutil.rmtree(tmp_path / "first")
    second = train(url, tmp_path / "second")
    assert second.versions.publisher.lineage == first.versions.publisher.lineage + 1
    assert newest_files(second.publication) == newest_files(never)
    found = checkpoints.load_newest(second.publication)
    assert found is not None
    assert found.checkpoint.version == second.publication.snapshots()[-1]
    log = second.publication.log.read_text().splitlines()
    assert len(log) >= len(never.log.read_text().splitlines())
    assert newest_files(mirrored(url, tmp_path / "node").publication) == newest_files(never)


# Enough rows for half of them not to change from one version to the next.
MANY = NewsSource(NewsConfig(hours=4, views_per_hour=1200, users=6000, new_items_per_hour=60))
INCREMENTS = dataclasses.replace(RUN, snapshot_every=1, full_snapshot_every=4)


def test_a_run_goes_on_in_an_empty_folder_from_an_incremental_snapshot(
    url: str, tmp_path: Path
) -> None:
    never = train(None, tmp_path / "never", run=INCREMENTS, source=MANY)
    first = train(url, tmp_path / "first", batches=160, run=INCREMENTS, source=MANY)
    version, storage = first.publication.increments()[-1], Storage(url)
    assert version > first.publication.snapshots()[-1]
    assert storage.names("increments") == [version]
    # Killed while it fetches: what came is no reason to begin at the snapshot before.
    shutil.rmtree(tmp_path / "first")
    with pytest.MonkeyPatch.context() as patch:

        def die(*_: Any) -> None:
            raise Killed

        patch.setattr(restoring, "fetch_delta", die)
        with pytest.raises(Killed):
            train(url, tmp_path / "second", run=INCREMENTS, source=MANY)
    second = Trainer(
        INCREMENTS, Publication(tmp_path / "second"), program_cache=CACHE, storage=Storage(url)
    )
    assert second.state.number == version.number
    second.fit(MANY)
    assert newest_files(second.publication) == newest_files(never.publication)


def test_a_mirror_follows_by_versions_and_keeps_two_snapshots(url: str, tmp_path: Path) -> None:
    train(url, tmp_path / "pub", batches=1)
    mirror = mirrored(url, tmp_path / "node")
    for batches in (2, 3, 4, 0):
        trainer = train(url, tmp_path / "pub", batches=batches)
        mirror.round()
        assert mirror.newest() == trainer.publication.versions()[-1]
        assert len(mirror.publication.snapshots()) <= 2
        held = {v.number for v in mirror.publication.deltas()}
        first, last = mirror.publication.snapshots()[0], trainer.publication.versions()[-1]
        assert min(held, default=last.number) > first.number
    assert mirror.stats.damaged == 0
    assert mirror.stats.versions > 5


# --- harm -----------------------------------------------------------------------------------------


def test_a_harmed_object_is_never_seen_and_is_asked_for_again(
    s3: S3, url: str, tmp_path: Path
) -> None:
    trainer = train(url, tmp_path / "pub")
    mirror = Mirror(Storage(url), Publication(tmp_path / "node"))
    for key in (r"bucket-\d+\.emb", r"manifest\.json"):
        s3.harm(1, key=rf"snapshots/.*{key}", methods="GET", flip=True)
        mirror.round()
        assert s3.left() == 0
        found = mirror.publication.snapshots()
        assert trainer.publication.snapshots()[-1] not in found
        shutil.rmtree(mirror.publication.path / "snapshots")
    mirror.round()
    assert mirror.stats.damaged == 2
    assert newest_files(mirror.publication) == newest_files(trainer.publication)


def test_a_harmed_version_is_never_seen_and_is_asked_for_again(
    s3: S3, url: str, tmp_path: Path
) -> None:
    trainer = train(url, tmp_path / "pub", batches=6)
    snapshot, last = trainer.publication.snapshots()[-1], trainer.publication.versions()[-1]
    assert last > snapshot
    mirror = Mirror(Storage(url), Publication(tmp_path / "node"))
    for key in ("delta", "commit.pb"):
        s3.harm(1, key=rf"deltas/{last.folder}/.*{key}$", methods="GET", flip=True)
        mirror.round()
        assert s3.left() == 0
        newest_now = mirror.newest()
        assert newest_now is not None
        assert newest_now < last
    assert mirror.stats.damaged == 2
    mirror.round()
    assert mirror.newest() == last


def test_a_harmed_checkpoint_is_passed_over(
    url: str, never: Publication, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(url, tmp_path / "first")
    storage = Storage(url)
    key = f"checkpoints/{first.publication.snapshots()[-1].folder}/rows.safetensors"
    data = bytearray(storage.read(key) or b"")
    data[len(data) // 2] ^= 1
    storage.put_bytes(key, bytes(data))
    second = train(url, tmp_path / "second")
    assert "the checkpoint before is taken" in caplog.text
    assert newest_files(second.publication) == newest_files(never)


@pytest.mark.parametrize("status", [503, 403])
def test_training_goes_on_while_storage_fails_and_it_catches_up(
    s3: S3,
    url: str,
    never: Publication,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    monkeypatch.setattr(upload, "_FIRST_PAUSE_S", 0.05)
    storage = Storage(url)
    trainer = Trainer(RUN, Publication(tmp_path / "pub"), program_cache=CACHE, storage=storage)
    s3.harm(30, key="deltas|snapshots|checkpoints", status=status)
    trainer.fit(NEWS)
    assert s3.left() == 0
    assert trainer.uploader is not None
    # The library tries again by itself what another try may help.
    assert (trainer.uploader.stats.failures > 0) == (status == 403)
    assert newest_files(mirrored(url, tmp_path / "node").publication) == newest_files(never)


def test_training_waits_for_storage_that_is_too_far_behind(
    s3: S3, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    s3.harm(8, key="snapshots|deltas", wait_s=1.5)
    trainer = Trainer(
        RUN,
        Publication(tmp_path / "pub"),
        program_cache=CACHE,
        storage=Storage(url),
        max_behind_s=0.5,
    )
    uploader = trainer.uploader
    assert uploader is not None

    def slowly(_progress: Progress) -> None:
        """So slow that storage is behind while there is training left."""
        until = time.monotonic() + 1
        while uploader.stats.waits == 0 and uploader.behind_s < 0.6 and time.monotonic() < until:
            time.sleep(0.01)

    trainer.fit(NEWS, progress=slowly, every_s=0)
    assert uploader.stats.waits > 0
    assert "training waits" in caplog.text


def test_an_end_without_storage_is_an_error_that_says_what_it_lacks(
    s3: S3, url: str, tmp_path: Path
) -> None:
    storage = Storage(url)
    trainer = Trainer(
        RUN, Publication(tmp_path / "pub"), program_cache=CACHE, storage=storage, storage_end_s=1
    )
    s3.harm(10_000, key="snapshots/", status=503)
    with pytest.raises(StorageError, match="lacks the last versions after 1 s"):
        trainer.fit(NEWS)


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "x" * 300, "../x"])
def test_a_name_that_no_file_can_have_is_damage_and_the_one_before_is_taken(
    url: str, tmp_path: Path, name: str
) -> None:
    train(url, tmp_path / "pub")
    storage = Storage(url)
    before, newest = storage.names("snapshots")[-2:]
    key = f"snapshots/{newest.folder}/manifest.json"
    manifest = json.loads(storage.read(key) or b"")
    manifest["buckets"][0]["path"] = name
    storage.put_bytes(key, json.dumps(manifest).encode())
    mirror = mirrored(url, tmp_path / "node")
    assert mirror.stats.damaged == 1
    assert mirror.publication.snapshots() == [before]
    assert mirror.newest() == newest  # by the versions after it


def test_a_folder_mirrors_one_url(s3: S3, url: str, tmp_path: Path) -> None:
    train(url, tmp_path / "pub")
    mirror = mirrored(url, tmp_path / "node")
    assert FolderOrigin.read(tmp_path / "node") == FolderOrigin(model="news", storage=url)
    del mirror
    with pytest.raises(MixedError, match=f"has {url}, and is to have s3://other"):
        Mirror(Storage("s3://other/prefix"), Publication(tmp_path / "node"))
    mirrored(url, tmp_path / "node").round()
    # Storage of another model under the same URL, and a folder of a build that noted no URL.
    (tmp_path / "node" / "origin.json").unlink()
    other = s3.bucket()
    renamed = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, name="other"))
    train(other, tmp_path / "other", run=renamed)
    with pytest.raises(MixedError, match="has model 'news', and is to have 'other'"):
        mirrored(other, tmp_path / "node")


def test_no_version_is_there_before_its_files(s3: S3, url: str, tmp_path: Path) -> None:
    """Whatever a trainer's end leaves, what a commit or a manifest names can be read."""
    storage = Storage(url)
    s3.harm(10_000, key=r"\.emb", status=403)
    trainer = Trainer(
        RUN, Publication(tmp_path / "pub"), program_cache=CACHE, storage=storage, storage_end_s=0.5
    )
    with pytest.raises(StorageError):
        trainer.fit(NEWS)
    assert storage.names("snapshots")
    assert not any(key.endswith("manifest.json") for key in storage.keys("snapshots"))
    mirror = mirrored(url, tmp_path / "node")
    assert mirror.newest() is None
    s3.harm(0)


def test_a_machine_lost_before_its_first_snapshot_leaves_a_url_to_begin_at(
    s3: S3, url: str, never: Publication, tmp_path: Path
) -> None:
    s3.harm(10_000, key="snapshots|checkpoints", status=403)
    lost = Trainer(
        RUN, Publication(tmp_path / "a"), program_cache=CACHE, storage=Storage(url), storage_end_s=1
    )
    with pytest.raises(StorageError):
        lost.fit(NEWS)
    assert Storage(url).names("deltas") == []
    s3.harm(0)
    second = train(url, tmp_path / "b")
    assert second.versions.publisher.lineage > lost.versions.publisher.lineage
    assert newest_files(second.publication) == newest_files(never)


def test_what_is_gone_from_a_folder_of_this_machine_is_removed_without_an_error(
    tmp_path: Path,
) -> None:
    """Before, half a removal of a trainer that was killed kept the next one's from ever ending."""
    storage = Storage(f"file://{tmp_path}/bucket")
    for name in ("rows", "more"):
        storage.put_bytes(f"deltas/000000000002-000001/{name}", b"x")
    gone = "deltas/000000000002-000001/commit.pb"
    storage.remove([gone])
    assert storage.names("deltas") == [VersionId(2, 1)]
    storage.remove([gone, *storage.keys("deltas")])
    assert storage.keys("deltas") == []
    assert storage.names("deltas") == []


def test_versions_without_a_checkpoint_are_refused(url: str, tmp_path: Path) -> None:
    trainer = train(url, tmp_path / "pub")
    storage = Storage(url)
    for kind in ("checkpoints", "snapshots"):
        storage.remove(storage.keys(kind))
    shutil.rmtree(trainer.publication.path)
    with pytest.raises(CheckpointError, match="no checkpoint that is whole"):
        train(url, tmp_path / "pub")


# --- one publisher --------------------------------------------------------------------------------


def test_the_later_of_two_trainers_takes_over(url: str, never: Publication, tmp_path: Path) -> None:
    first = Trainer(RUN, Publication(tmp_path / "a"), program_cache=CACHE, storage=Storage(url))
    began = threading.Event()
    errors: list[BaseException] = []

    def go() -> None:
        try:
            first.fit(Paused(began))
        except OvertakenError as error:
            errors.append(error)

    class Paused(NewsSource):
        def __init__(self, event: threading.Event) -> None:
            super().__init__(NEWS.config)
            self.event = event

        def chunks(self, start: int) -> Iterator[Chunk]:
            for i, chunk in enumerate(super().chunks(start)):
                if i:
                    self.event.wait(60)
                yield chunk

    thread = threading.Thread(target=go)
    thread.start()
    second = None
    for _ in range(10):
        # Who begins while the other publishes is refused, and told to start again.
        with contextlib.suppress(OvertakenError):
            second = train(url, tmp_path / "b")
            break
    began.set()
    thread.join(60)
    assert second is not None
    assert errors
    assert newest_files(second.publication) == newest_files(never)
    assert newest_files(mirrored(url, tmp_path / "node").publication) == newest_files(never)


def test_a_lineage_is_claimed_once(url: str) -> None:
    storage = Storage(url)
    assert storage.claim("lineages/000004", b"one")
    assert storage.claim("lineages/000004", b"one")  # asked twice
    assert not storage.claim("lineages/000004", b"two")
    assert storage.read("lineages/000004") == b"one"


def test_folders_that_went_apart_are_refused(url: str, tmp_path: Path) -> None:
    train(url, tmp_path / "a", batches=2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for batches in (1, 2):
        train(url, tmp_path / "a", batches=batches)
    alone = train(None, tmp_path / "b", batches=4)
    last = alone.publication.versions()[-1]
    with pytest.raises(CheckpointError, match=f"version {last.number} of lineage {last.lineage}"):
        train(url, tmp_path / "b")


# --- storage itself -------------------------------------------------------------------------------


def test_more_names_than_a_page(url: str) -> None:
    storage = Storage(url)
    storage.side_by_side(
        [lambda n=n: storage.put_bytes(f"deltas/{n:012d}-000001/x", b"x") for n in range(1, 1106)]
    )
    assert [v.number for v in storage.names("deltas")] == list(range(1, 1106))
    keys = storage.keys("deltas")
    assert len(keys) == 1105
    storage.remove(keys)
    assert storage.keys("deltas") == []


def test_a_large_file_comes_back_and_a_false_one_does_not(url: str, tmp_path: Path) -> None:
    storage, path = Storage(url), tmp_path / "large"
    path.write_bytes(bytes(range(256)) * (20 << 12))  # 20 MiB: parts
    storage.put("large", path)
    back = tmp_path / "back"
    storage.fetch("large", back, size=path.stat().st_size, crc32c=None)
    assert back.read_bytes() == path.read_bytes()
    for size, crc in ((1, None), (20 << 20, 5)):
        with pytest.raises(DamagedError, match="large has"):
            storage.fetch("large", back, size=size, crc32c=crc)


def test_what_cannot_be_used_is_named(s3: S3, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nothing://here"):
        Storage("nothing://here")
    with pytest.raises(StorageError, match="s3://no-such-bucket/x"):
        train("s3://no-such-bucket/x", tmp_path / "pub")


def test_events_are_read_from_a_bucket_as_from_files(url: str, tmp_path: Path) -> None:
    columns = {name: pa.array(range(3)) for name in ("user_id", "item_id")}
    for day in (0, 1):
        path = tmp_path / f"day-{day}.parquet"
        at = pa.array([day * 1000 + i for i in range(3)])
        pq.write_table(pa.table({**columns, "clicked": pa.array([0, 1, 0]), "time": at}), path)
        Storage(url).put(path.name, path)
    features = tuple(FeatureColumn(name=name, column=name) for name in columns)
    schema = EventSchema(features=features, label="clicked", ts="time")

    def read(place: str) -> list[tuple[int, ...]]:
        batches = list(open_events(place, schema=schema).batches(batch_size=4))
        return [tuple(each.ts_ms_B) for each in batches]

    found = read(f"{url}/day-*.parquet")
    assert found == read(str(tmp_path / "day-*.parquet"))
    assert sum(map(len, found)) == 6
    with pytest.raises(DataError, match="no file matches"):
        read(f"{url}/week-*.parquet")
    with pytest.raises(DataError, match="no such file"):
        read(f"{url}/week.parquet")


def test_options_come_from_a_folder(
    s3: S3, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        (tmp_path / name.lower()).write_text(value + "\n")
        monkeypatch.delenv(name)
    monkeypatch.setenv("EMBERTIDE_STORAGE_OPTIONS", str(tmp_path))
    storage = Storage(url)
    storage.put_bytes("a", b"b")
    assert storage.read("a") == b"b"
    monkeypatch.setenv("EMBERTIDE_STORAGE_OPTIONS", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="none cannot be read"):
        Storage(url)
