"""A tritonserver that somebody names: laid out as in NVIDIA's container, it serves as the wheel's.

It is the wheel's server in another place, for no registry has another one.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from installed import as_in_the_container, twin
from served import answer, serving
from serving import MODULES, metric

import embertide
from embertide._common.direct_http import open_url
from embertide.server.adapters import process
from embertide.server.adapters.installation import InstallationError, find_installation
from embertide.server.adapters.known_holes import advice
from embertide.server.cli.metrics_page import MetricsPage


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_in_the_container(tmp_path_factory.mktemp("opt") / "tritonserver")


def told(*words: str) -> Path:
    """The folder in /proc of the server that was told this."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        said = path.read_bytes().decode(errors="replace").split("\0")
        if set(words) <= set(said) and said[0].endswith(("tritonserver", "embertide_server")):
            return path.parent
    raise AssertionError(f"nobody was told {words}")


def program_of(address: str) -> Path:
    """The program of the tritonserver that listens at a port."""
    return (told(f"--grpc-port={address.rpartition(':')[2]}") / "exe").readlink()


def test_serve_starts_the_one_that_is_named(
    installed: Path, snapshot: tuple[Path, Any], backends: Path, tmp_path: Path
) -> None:
    named = ("--triton", str(installed))
    with serving(snapshot[0], tmp_path, backends, *named, http=True) as addresses:
        assert program_of(addresses["grpc"]) == installed / "bin" / "tritonserver"
        with MODULES["grpc"].InferenceServerClient(addresses["grpc"]) as raw:
            assert answer(raw, "grpc") > 0
        with open_url(f"http://{addresses['metrics']}/metrics", 10) as reply:
            page = reply.read().decode()
    version = find_installation(installed).version()
    said = (tmp_path / "serve.log").read_text()
    assert f"is ready: Triton {version}, gRPC " in said
    warned = "give a newer tritonserver by --triton" in said
    assert warned == bool(advice(version))  # HTTP is open
    assert metric(page, "embertide_server_info", version=version) == 1
    assert MetricsPage(page).model("lookup")["tritonserver"] == version


def test_python_starts_the_one_that_is_named(
    installed: Path, snapshot: tuple[Path, Any], tmp_path: Path
) -> None:
    program = installed / "bin" / "tritonserver"
    with embertide.serve(
        snapshot[0], kind="lookup", triton=program, front="triton", folder=tmp_path / "stock"
    ) as node:
        assert program_of(node.grpc) == program
    # Ours has the core of the same one.
    own = tmp_path / "own"
    with embertide.serve(snapshot[0], kind="lookup", triton=program, folder=own) as node:
        library = find_installation(program).library.resolve()
        assert str(library) in (told(f"--grpc={node.grpc}") / "maps").read_text()
    with pytest.raises(InstallationError, match="/absent is not there: give"):
        embertide.serve(snapshot[0], kind="lookup", triton=tmp_path / "absent")


def test_one_that_cannot_be_loaded_ends_the_command_with_its_reason(
    snapshot: tuple[Path, Any], backends: Path, tmp_path: Path
) -> None:
    lacks = "error while loading shared libraries: libdcgm.so.3: cannot open shared object file"
    folder = twin(tmp_path / "t", f"echo {lacks!r} >&2; exit 127")
    command = [sys.executable, "-m", "embertide.server.cli", "serve", str(snapshot[0])]
    command += ["--kind", "lookup", "--directory", str(tmp_path / "d")]
    command += ["--backends", str(backends), "--triton", str(folder), "--front", "triton"]
    with process.Child(command, log=tmp_path / "log") as child:
        assert child.wait(60) == 1
        said = child.log_text()
    assert "libdcgm.so.3" in said
    assert "LD_LIBRARY_PATH" in said
    assert "Traceback" not in said
