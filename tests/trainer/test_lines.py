"""Files of lines on a full drive: lines are lost and counted, none is there in part."""

import json
import logging
from pathlib import Path

import pytest

from embertide.trainer.commands.reports import json_log
from embertide.trainer.data.base import DeadLetters
from embertide.trainer.data.lines_file import LinesFile

FULL = Path("/dev/full")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("embertide.trainer.data.lines_file.time.monotonic", lambda: now[0])
    return now


def test_a_full_drive_costs_lines_and_is_tried_again(
    tmp_path: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a" / "lines"
    file = LinesFile(path)
    assert file.add([b"one\n"]) == 1
    path.rename(tmp_path / "kept")
    path.symlink_to(FULL)
    assert [file.add([b"two\n", b"three\n"]) for _ in range(3)] == [0] * 3
    path.unlink()
    (tmp_path / "kept").rename(path)
    assert file.add([b"four\n"]) == 0  # it is not asked at each line
    clock[0] += 1
    assert file.add([b"five\n"]) == 1
    assert path.read_bytes() == b"one\nfive\n"
    assert file.lost == 7
    (said,) = caplog.messages
    assert f"{path} has no room (No space left on device, " in said
    assert "MiB free)" in said


def test_a_bound_keeps_whole_lines(tmp_path: Path) -> None:
    file = LinesFile(tmp_path / "lines", 10)
    assert [file.add([b"abc\n"] * n) for n in (1, 2, 1)] == [1, 1, 0]
    assert (file.path.read_bytes(), file.lost) == (b"abc\nabc\n", 2)


def test_other_errors_are_raised(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        LinesFile(tmp_path).add([b"one\n"])


def test_a_log_on_a_full_drive_says_what_it_lost(tmp_path: Path, clock: list[float]) -> None:
    path = tmp_path / "log"
    path.symlink_to(FULL)
    with json_log(path) as log:
        logging.getLogger("embertide.somewhere").warning("one")
        log.write({"two": 2})
        path.unlink()
        clock[0] += 2
        log.write({"three": 3})
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["three"] == 3
    assert json.loads(line)["lost"] == 3  # that the drive is full was one


def test_dead_letters_on_a_full_drive_are_counted(tmp_path: Path) -> None:
    dead = DeadLetters(path=FULL)
    dead.add([1, 2], "bad", [0, 0])
    dead.add_range(3, 4, "worse", "x")
    assert (dead.by_reason, dead.lost) == ({"bad": 2, "worse": 4}, 3)
