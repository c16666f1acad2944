"""The wheel of this Python: built, installed where no compiler is, its demo run to the report."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import extras
import pytest

ROOT = Path(__file__).parents[2]
# The commands in a minimal Debian that the demo calls.
TOOLS = ("setpriv", "ldd", "sh", "dirname", "uname")


def run(*command: object, cwd: Path, path: str) -> str:
    environment = {"PATH": path, "HOME": str(cwd), "LANG": "C.UTF-8"}
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, backends: Path) -> Path:
    """The wheel of this Python."""
    folder = tmp_path_factory.mktemp("wheel")
    make = (sys.executable, ROOT / ".ci" / "wheel.py", "--built", backends.parent)
    where = ("--work", folder / "work", "--out", folder / "dist", "--python", sys.executable)
    run(*make, *where, cwd=folder, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (made,) = (folder / "dist").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a node and its publication, by this checkout."""
    with extras.served(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.mark.long
@pytest.mark.parametrize("extra", extras.EXTRAS)
def test_an_extra_alone_does_what_its_page_says(
    wheel: Path, site: tuple[str, Path], extra: str
) -> None:
    extras.try_extra(wheel, extra, *site)


@pytest.mark.long
def test_a_wheel_runs_the_demo_where_no_compiler_is(tmp_path: Path, wheel: Path) -> None:
    here = os.environ["PATH"]
    assert "manylinux" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    for part in (
        "__init__.py",
        "py.typed",
        "config.py",
        "data.py",
        "nn.py",
        "backends/embertide/libtriton_embertide.so",
        "backends/embertide/libembertide_dense.so",
        "bin/embertide_node",
        "bin/embertide_server",
        "licences/libgrpc29.txt",
    ):
        assert f"embertide/{part}" in names
    assert not [name for name in names if "libtorch" in name]
    assert {name.partition("/")[0].partition(".")[0].partition("-")[0] for name in names} == {
        "embertide"
    }

    tools, venv = tmp_path / "tools", tmp_path / "venv"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(run("which", tool, cwd=tmp_path, path=here).strip())
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path, path=here)
    locked = tmp_path / "locked.txt"  # versions alone: hashes would be asked of the wheel too
    lines = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    locked.write_text("\n".join(line.split()[0] for line in lines if line[:1].isalpha()))
    pip = (venv / "bin" / "pip", "install", "-q", "-c", locked)
    run(*pip, f"{wheel}[serve,train]", cwd=tmp_path, path=f"{venv / 'bin'}:{here}")

    path = f"{venv / 'bin'}:{tools}"
    embertide = venv / "bin" / "embertide"
    run(embertide, "demo", "--events", "20000", cwd=tmp_path, path=path)
    report = json.loads((tmp_path / "build" / "demo" / "report.json").read_text())
    assert report["events"] == 20_000
    assert report["failed_requests"] == 0
    run(
        venv / "bin" / "python", "-c", "import embertide; embertide.Client", cwd=tmp_path, path=path
    )
