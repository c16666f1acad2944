"""A drive without room: what is said of it, and that nothing is written to it in vain."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from killing import CACHE, train
from snapshots import newest_files

from embertide._common import room
from embertide._common.room import RoomWatch, is_no_room, no_room
from embertide.trainer.config import RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.journal import Journal
from embertide.trainer.model.export import ExportError
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import NoRoomError, Publication
from embertide.trainer.run.loop import Trainer

RUN = RunConfig(model=news_model(), batch_size=64, publish_every_s=600, snapshot_every=4)
NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5))
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
MIB = 1 << 20


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The free space of the drive, as far as the trainer asks."""
    state = {"free": 100 * MIB}
    monkeypatch.setattr(room, "free_bytes", lambda _place: state["free"])
    return state


def is_tried(watch: RoomWatch) -> bool:
    try:
        watch.check()
    except OSError as error:
        return not is_no_room(error)
    return True


def test_a_full_drive_is_tried_once_there_is_more_room(
    drive: dict[str, int], tmp_path: Path
) -> None:
    watch = RoomWatch(tmp_path)
    assert is_tried(watch)
    watch.fits(5 * MIB)
    drive["free"] = MIB // 2
    assert is_tried(watch)  # nobody has seen it full
    watch.full()
    for free, tried in ((MIB // 2, False), (MIB // 2 + 1000, False), (MIB, True), (9 * MIB, True)):
        drive["free"] = free
        assert is_tried(watch) == tried
    # Full at 6 MiB, of which 5 were enough before: a quota, or no names left. It is asked itself.
    watch.fits(0)
    drive["free"] = 6 * MIB
    watch.full()
    assert is_tried(watch)


def test_the_message_names_the_folder_and_what_is_free(drive: dict[str, int]) -> None:
    said = no_room(Path("/somewhere/pub"), FULL)
    assert said == "/somewhere/pub has no room (No space left on device, 100 MiB free)"
    drive["free"] = 5000
    assert no_room(Path("pub"), FULL).endswith("(No space left on device, 4 KiB free)")


def test_nothing_is_written_while_the_drive_is_full_and_nothing_is_lost(
    drive: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = Publication(tmp_path / "whole")
    train(RUN, NEWS, whole)
    failed: list[int] = []
    real = Publication.write_delta

    def write(self: Publication, version: Any, *rest: Any) -> None:
        if drive["free"] < MIB:
            failed.append(version.number)
            raise FULL
        real(self, version, *rest)

    monkeypatch.setattr(Publication, "write_delta", write)
    trainer = Trainer(RUN, Publication(tmp_path / "pub"), program_cache=CACHE)

    def show(progress: Any) -> None:
        drive["free"] = 1000 if 5 <= progress.version < 11 else 100 * MIB

    trainer.fit(NEWS, progress=show, every_s=0)
    assert newest_files(trainer.publication) == newest_files(whole)
    without = trainer.versions.counters()["versions_without_room"]
    assert without >= 4
    assert len(failed) == 1  # once, and then the drive was looked at
    said = [each for each in caplog.messages if "has no room" in each]
    assert len(said) == 1
    assert f"{tmp_path}/pub has no room (No space left on device, 0 KiB free)" in said[0]
    assert any(f"with the rows of {without} before it" in each for each in caplog.messages)


def test_a_full_drive_holds_a_decision_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    path.symlink_to("/dev/full")
    waits = list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            path.unlink()

    monkeypatch.setattr("embertide.trainer.data.journal.time.sleep", wait)
    journal = Journal(path)
    journal.add({"one": 1})
    journal.add({"two": 2})
    assert journal.lines() == [{"one": 1}, {"two": 2}]
    assert len(waits) == 3
    (said,) = caplog.messages
    assert said.startswith(f"reading waits: {path} has no room")


def test_a_program_that_has_no_room_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: Path, data: bytes) -> int:
        self.open("wb").close()
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write)
        with pytest.raises(NoRoomError, match=f"{tmp_path}/pub has no room"):
            Trainer(RUN, Publication(tmp_path / "pub"), program_cache=CACHE)
    assert [each.name for each in (tmp_path / "pub").iterdir()] == ["publisher.lock"]


def test_a_full_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor as inductor

    def compile(*_: Any, **__: Any) -> None:
        raise RuntimeError("g++: fatal error: error writing to /tmp/x.s: No space left on device")

    monkeypatch.setattr(inductor, "aot_compile", compile)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(ExportError, match=r"needs room for a while: .* has no room .*TMPDIR"):
        Trainer(RUN, Publication(tmp_path / "pub"))
