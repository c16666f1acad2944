"""Where torch compiles: in a folder of this user alone, whatever another one has prepared."""

import getpass
import os
import stat
import tempfile
from pathlib import Path

import pytest
from torch import nn
from torch._inductor import codecache

from embertide.trainer.model.export import (
    ExportError,
    export_dense,
    private_compiler,
    private_headers,
)

NAME = "TORCHINDUCTOR_CACHE_DIR"
ROOT_ALONE = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv(NAME, "")  # so that it is put back
    monkeypatch.delenv(NAME)
    return tmp_path / "caches" / "embertide"


def chosen() -> Path:
    private_compiler()
    return Path(os.environ[NAME])


def test_it_is_private_and_stays(caches: Path) -> None:
    assert chosen() == caches / "torch"
    assert stat.S_IMODE(chosen().stat().st_mode) == 0o700


def test_a_name_that_all_can_foretell_is_not_used(
    caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foretold = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    monkeypatch.setenv(NAME, str(foretold))  # as torch itself does once it has compiled
    assert chosen() == caches / "torch"


def test_a_folder_that_the_user_names_is_his(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, str(tmp_path / "named"))
    assert chosen() == tmp_path / "named"


def test_precompiled_headers_are_private_too(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, str(shared / name))
    private_compiler()
    private_headers()
    header = codecache._precompile_header("cstddef", "", device_type="cpu", aot_mode=True)
    assert Path(header).parent == caches / "torch" / "precompiled_headers"
    assert Path(f"{header}.gch").is_file()
    assert not shared.exists()


def test_a_home_that_cannot_be_written_to_gets_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    made = chosen()
    assert made.parent == Path(tempfile.gettempdir())
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


@ROOT_ALONE
def test_what_another_user_made_first_is_refused(caches: Path) -> None:
    (caches / "torch").mkdir(parents=True)
    os.chown(caches / "torch", 65534, 65534)
    with pytest.raises(ExportError, match=r"the compiler's cache: .* is of user 65534"):
        private_compiler()


@ROOT_ALONE
def test_programs_of_another_user_are_not_taken(tmp_path: Path) -> None:
    cache = tmp_path / "programs"
    cache.mkdir()
    os.chown(cache, 65534, 65534)
    with pytest.raises(ExportError, match=r"the cache of programs: .* is of user 65534"):
        export_dense(
            nn.Bilinear(2, 4, 1),
            tmp_path / "program.pt2",
            dense_features=2,
            embedding_dim=4,
            cache=cache,
        )
