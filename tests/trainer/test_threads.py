"""Background work of the trainer where the system starts no thread, or a task raises."""

import threading
from pathlib import Path
from typing import Any

import pytest
from killing import CACHE, train
from snapshots import newest_files
from waiting import wait_until

from embertide.trainer.config import RunConfig
from embertide.trainer.data.ahead import read_ahead
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.presets import news_model
from embertide.trainer.publish import upload
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.mirror import Mirror
from embertide.trainer.publish.storage import Storage
from embertide.trainer.publish.threads import NoThreadError, Workers
from embertide.trainer.run.loop import Trainer

RUN = RunConfig(model=news_model(), batch_size=64, publish_every_s=600, snapshot_every=4)
NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5))


class Refusing:
    """A limit of threads: the next ones of each name, told by its beginning, are not started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: dict[str, int] = {}
        self.refused = 0
        start = threading.Thread.start
        limit = self

        def refuse(thread: threading.Thread) -> None:
            for name, left in limit.left.items():
                if left and thread.name.startswith(name):
                    limit.left[name] -= 1
                    limit.refused += 1
                    raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)

    def next(self, times: int, *names: str) -> None:
        self.left = dict.fromkeys(names, times)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    return Refusing(monkeypatch)


def test_a_job_without_a_thread_is_done_by_who_gave_it(
    limit: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    workers, done = Workers("work"), list[str]()
    limit.next(2, "work")
    for _ in range(3):
        workers.submit(lambda: done.append(threading.current_thread().name)).result(5)
    assert [name.startswith("work") for name in done] == [False, False, True]
    assert workers.refused == 2
    assert [each.split(";")[0] for each in caplog.messages] == [
        "work: RuntimeError: can't start new thread",
        "work: threads are started again",
    ]


def test_a_job_that_needs_a_thread_says_what_to_do(limit: Refusing) -> None:
    workers, done = Workers("work"), list[int]()
    limit.next(1, "work")
    with pytest.raises(NoThreadError, match=r"raise the limit of processes \(`ulimit -u`"):
        workers.submit(lambda: done.append(1), here=False).result(5)
    workers.submit(lambda: done.append(2)).result(5)
    assert done == [2]  # and the one before is not done late


def test_an_error_of_a_job_is_that_of_the_job(limit: Refusing) -> None:
    def fails() -> None:
        raise KeyError("x")

    workers = Workers("work")
    for refused in (0, 1):
        limit.next(refused, "work")
        with pytest.raises(KeyError):
            workers.submit(fails).result(5)


def test_reading_ahead_begins_once_a_thread_is_there(limit: Refusing) -> None:
    limit.next(2, "reader")
    batches = list(NEWS.batches(batch_size=64))
    with read_ahead(iter(batches), 1 << 20) as ahead:
        assert [batch.first for batch in ahead] == [batch.first for batch in batches]
    assert limit.refused == 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Publication:
    publication = Publication(tmp_path_factory.mktemp("whole") / "pub")
    train(RUN, NEWS, publication)
    return publication


def test_a_run_under_a_limit_of_threads_ends_with_the_same_bytes(
    limit: Refusing, whole: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(upload, pause, 0.05)
    names = ("keys", "publish", "delta", "reader", "upload", "storage")
    storage = Storage(f"file://{tmp_path}/bucket")
    trainer = Trainer(RUN, Publication(tmp_path / "pub"), program_cache=CACHE, storage=storage)
    limit.next(4, *names)  # the reader waits longer each time: 1.5 s in all
    trainer.fit(NEWS)
    assert limit.refused > 10
    assert newest_files(trainer.publication) == newest_files(whole)
    mirror = Mirror(Storage(f"file://{tmp_path}/bucket"), Publication(tmp_path / "node"))
    mirror.round()
    assert newest_files(mirror.publication) == newest_files(whole)


def test_a_checkpoint_without_a_thread_is_left_out_and_the_next_is_written(
    limit: Refusing, whole: Publication, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(RUN, Publication(tmp_path / "pub"), program_cache=CACHE)
    published = 0

    def show(_progress: Any) -> None:
        nonlocal published
        if published == 0 and trainer.versions.saver.stats.saved == 1:
            published = 1
            # As if its thread had ended: the pool has no other way to lose one.
            trainer.versions.saver._workers = Workers("checkpoint")
            limit.next(1, "checkpoint")

    trainer.fit(NEWS, progress=show, every_s=0)
    assert limit.refused == 1
    assert trainer.versions.saver.stats.without_thread == 1
    assert "the one before stays: no thread could be started" in caplog.text
    assert newest_files(trainer.publication) == newest_files(whole)


def test_an_upload_that_raises_anything_is_said_and_heals(
    whole: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_FIRST_PAUSE_S", 0.05)
    errors = [ZeroDivisionError("by zero"), MemoryError(), SystemExit(3), KeyError("name")]
    look = upload.Uploader._look_for_versions
    seen: list[dict[str, Any]] = []

    def fails(self: upload.Uploader) -> bool:
        if errors:
            raise errors.pop()
        return look(self)

    monkeypatch.setattr(upload.Uploader, "_look_for_versions", fails)
    storage = Storage(f"file://{tmp_path}/bucket")
    trainer = Trainer(RUN, Publication(tmp_path / "pub"), program_cache=CACHE, storage=storage)

    def show(progress: Any) -> None:
        seen.append(progress.background["upload-versions"])
        wait_until(lambda: not errors)

    trainer.fit(NEWS, progress=show, every_s=0)
    assert trainer.uploader is not None
    assert trainer.uploader.stats.failures == 4
    assert seen[-1]["failures"] == 4
    mirror = Mirror(Storage(f"file://{tmp_path}/bucket"), Publication(tmp_path / "node"))
    mirror.round()
    assert newest_files(mirror.publication) == newest_files(whole)


def test_a_round_of_a_mirror_that_raises_anything_is_counted_and_the_next_goes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(Storage(f"file://{tmp_path}/bucket"), Publication(tmp_path / "node"))
    errors = [ZeroDivisionError("by zero"), ValueError("embedded null byte")]
    round_of = mirror.round

    def fails() -> None:
        if errors:
            raise errors.pop()
        round_of()

    monkeypatch.setattr(mirror, "round", fails)
    monkeypatch.setattr("embertide.trainer.publish.mirror._LONGEST_PAUSE_S", 0.05)
    ended = threading.Event()

    def show(stats: Any) -> None:
        if stats.rounds:
            ended.set()

    mirror.run(0.01, ended, show)
    assert (mirror.stats.failures, mirror.stats.rounds) == (2, 1)
