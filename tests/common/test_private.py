"""Folders and files of one user: what another user could have prepared is refused."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from embertide._common import private
from embertide._common.private import NotPrivateError

NOBODY = 65534
ROOT_ALONE = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    made = private.private_folder(tmp_path / "a" / "b")
    assert mode(made) == 0o700
    assert private.private_folder(made) == made


def test_a_folder_of_ours_that_others_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    assert mode(private.private_folder(tmp_path / "a")) == 0o700


def others(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)


def in_others(path: Path) -> None:
    others(path.parent)


def linked(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to("elsewhere")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def a_file(path: Path) -> None:
    path.touch()


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def in_a_folder_of_all(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)


def of_a_foreign_group(path: Path) -> None:
    path.mkdir()
    os.chown(path, -1, NOBODY)
    path.chmod(0o770)


@pytest.mark.parametrize(
    "prepare",
    [
        *(linked, dangling, a_file, open_to_all, in_a_folder_of_all),
        *(pytest.param(each, marks=ROOT_ALONE) for each in (others, in_others, of_a_foreign_group)),
    ],
)
def test_what_another_user_could_have_prepared_is_refused(
    tmp_path: Path, prepare: Callable[[Path], None]
) -> None:
    path = tmp_path / "parent" / "folder"
    if prepare not in (in_others, in_a_folder_of_all):
        path.parent.mkdir()
    prepare(path)
    with pytest.raises(
        (NotPrivateError, FileExistsError), match=r"folder|chmod|File exists"
    ) as caught:
        private.private_folder(path)
    assert str(tmp_path) in str(caught.value)


@ROOT_ALONE
def test_a_volume_of_a_container_is_no_danger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes mounts an emptyDir of root with mode 0777, and HOME is in it."""
    volume = tmp_path / "tmp"
    volume.mkdir()
    volume.chmod(0o777)
    with pytest.raises(NotPrivateError, match="where others may write"):
        private.private_folder(volume / "mine")
    monkeypatch.setattr(Path, "is_mount", lambda path: path == volume)
    assert mode(private.private_folder(volume / "mine")) == 0o700
    (volume / "theirs").mkdir()
    os.chown(volume / "theirs", NOBODY, NOBODY)
    with pytest.raises(NotPrivateError, match="of user 65534"):
        private.private_folder(volume / "theirs" / "folder")


def test_a_sticky_folder_of_all_is_no_danger(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert mode(private.private_folder(tmp_path / "mine")) == 0o700


def test_caches_lie_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = private.cache_folder("compiled")
    assert made == tmp_path / "cache" / "embertide" / "compiled"
    assert mode(made) == mode(made.parent) == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert private.cache_folder("x") == tmp_path / "home" / ".cache" / "embertide" / "x"


def test_files_are_their_users_alone_whatever_was_there(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_text("kept")
    path.symlink_to(other)
    private.write_private(path, b"secret")
    assert (path.read_bytes(), other.read_text()) == (b"secret", "kept")
    assert mode(path) == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "other"]


def test_what_is_appended_to_is_closed_to_others_and_no_link(tmp_path: Path) -> None:
    path, link = tmp_path / "log", tmp_path / "link"
    path.write_text("before ")
    path.chmod(0o644)
    with os.fdopen(private.open_private(path), "w") as file:
        file.write("after")
    assert (path.read_text(), mode(path)) == ("before after", 0o600)
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic link"):
        private.open_private(link)


@ROOT_ALONE
def test_a_file_of_another_user_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(NotPrivateError, match="of user 65534"):
        private.open_private(path)
