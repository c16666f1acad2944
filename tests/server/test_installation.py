"""Which tritonserver is started, and what is said of one that cannot be."""

import importlib.metadata
import shutil
import time
from pathlib import Path

import pytest
from installed import as_in_the_container, twin, twin_of_version
from typer.testing import CliRunner

from embertide.server.adapters.installation import InstallationError, find_installation
from embertide.server.cli.app import app

pytestmark = pytest.mark.usefixtures("unnamed")
NEEDED = ("--model-repository=/m", "--grpc-port=1", "--metrics-port=2", "--log-verbose", "1")


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have named another server for them."""
    monkeypatch.delenv("EMBERTIDE_TRITON", raising=False)


def test_the_wheels_server_is_found_and_has_its_library() -> None:
    found = find_installation()
    wheel = Path(str(importlib.metadata.distribution("nvidia-pytriton").locate_file("")))
    assert found.binary == wheel / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    assert found.library.parent == wheel / "nvidia_pytriton.libs"
    assert b"TRITONSERVER_ServerNew" in found.library.read_bytes()
    assert found.version() == "2.51.0"
    found.check_options(NEEDED)


def test_a_variable_without_a_value_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an image has it that was built without a server of its base."""
    wheel = find_installation()
    monkeypatch.setenv("EMBERTIDE_TRITON", "")
    assert find_installation() == wheel
    assert CliRunner().invoke(app, ["doctor", "--json"]).stdout.count(str(wheel.binary)) == 1


def test_an_installation_is_named_by_its_folder_or_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = as_in_the_container(tmp_path / "tritonserver")
    by_folder = find_installation(folder)
    assert by_folder.binary == folder / "bin" / "tritonserver"
    assert by_folder.root == folder
    assert by_folder.library == folder / "lib" / "libtritonserver.so"
    link = tmp_path / "triton"
    link.symlink_to(by_folder.binary)
    assert find_installation(link) == find_installation(by_folder.binary) == by_folder
    monkeypatch.setenv("EMBERTIDE_TRITON", str(folder))
    assert find_installation() == by_folder
    assert by_folder.version() == "2.51.0"


def test_the_wheels_tree_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = find_installation()
    monkeypatch.setenv("EMBERTIDE_TRITON", str(tmp_path))
    assert find_installation(wheel.root) == wheel
    with pytest.raises(InstallationError):
        find_installation()


def test_libraries_are_looked_for_in_the_installation_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_installation(twin(tmp_path / "t", "exit 0"))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/theirs")
    assert found.environment()["LD_LIBRARY_PATH"] == f"{tmp_path}/t/lib:/theirs"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert found.environment()["LD_LIBRARY_PATH"] == f"{tmp_path}/t/lib"


def test_what_is_not_there_is_said_with_the_remedy(tmp_path: Path) -> None:
    no_library = twin(tmp_path / "bare", "exit 0")
    shutil.rmtree(no_library / "lib")
    locked = twin(tmp_path / "locked", "exit 0")
    (locked / "bin" / "tritonserver").chmod(0o644)
    for path, what in {
        tmp_path / "absent": f"{tmp_path}/absent is not there: give",
        tmp_path: f"{tmp_path}/bin/tritonserver is not there: give",
        tmp_path / ("x" * 300): "x: File name too long; give",
        no_library: "no installed tritonserver, as .*/bare/lib/libtritonserver.so is not there",
        locked: "cannot be executed by this user: chmod",
    }.items():
        with pytest.raises(InstallationError, match=what) as caught:
            find_installation(path)
        assert "by --triton or EMBERTIDE_TRITON" in str(caught.value)


@pytest.mark.parametrize(
    ("script", "what"),
    [
        (
            "echo '/t: error while loading shared libraries: libcudart.so.12: cannot open shared "
            "object file: No such file or directory' >&2; exit 127",
            r"loading shared libraries: libcudart\.so\.12: cannot open.*LD_LIBRARY_PATH",
        ),
        (
            'echo "/t: /lib/libc.so.6: version \\`GLIBC_2.38\' not found (required by /t)" >&2; '
            "exit 1",
            r"GLIBC_2\.38' not found.*on the system that it was built for",
        ),
        ("echo usage: ls; exit 2", r"is no tritonserver \(code 2: usage: ls\): give"),
        ("exit 3", r"is no tritonserver \(code 3: it said nothing\)"),
        ("kill -ILL $$", r"is no tritonserver \(signal 4 \(SIGILL\)"),
        ("printf 'a\\033[2Jb\\n'", r"a\\x1b\[2Jb"),
    ],
)
def test_a_program_that_cannot_serve_is_said_by_its_own_words(
    tmp_path: Path, script: str, what: str
) -> None:
    found = find_installation(twin(tmp_path / "t", script))
    with pytest.raises(InstallationError, match=what) as caught:
        found.check_options(NEEDED)
    assert "\n" not in str(caught.value)


def test_no_program_of_this_machine_is_said(tmp_path: Path) -> None:
    folder = twin(tmp_path / "t", "")
    (folder / "bin" / "tritonserver").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(InstallationError, match=r"cannot be started \(Exec format error\): give"):
        find_installation(folder).options()


def test_a_server_without_an_option_that_is_needed_is_refused(tmp_path: Path) -> None:
    folder = twin_of_version(tmp_path / "t", "2.40.0", without="--grpc-port")
    with pytest.raises(InstallationError, match="has no --grpc-port: it is too old, or was built"):
        find_installation(folder).check_options(NEEDED)


def test_the_version_is_the_servers_own_and_nothing_is_left_running(tmp_path: Path) -> None:
    found = find_installation(twin_of_version(tmp_path / "t", "2.72.0"))
    began = time.monotonic()
    assert found.version() == "2.72.0"
    assert time.monotonic() - began < 20  # the twin sleeps for 600
    dies = twin_of_version(tmp_path / "dies", "2.72.0")
    script = dies / "bin" / "tritonserver"
    script.write_text(script.read_text().rpartition("echo")[0] + "echo no GPU; exit 1\n")
    with pytest.raises(InstallationError, match=r"does not start .*\(code 1\): no GPU"):
        find_installation(dies).version()
