"""Each extra in a fresh environment, from the wheel (claim A.2): what its page says works there.

Pip makes an environment of an extra alone, as a user would, and a script does what the extra's page
begins with.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from strangers import wait_for

import embertide
from bench.servers import BenchError
from embertide.server.adapters.process import Child, free_ports

EXTRAS = ("client", "train", "serve", "train,serve", "train,mlflow")
_INSTALL_S, _RUN_S = 3600, 1800
_HOURS = "12"

_CLIENT = """
import sys, numpy, embertide
assert numpy.__version__ >= "2", numpy.__version__
with embertide.Client(sys.argv[1], timeout_s=30) as client:
    clicks = {"user": [17, 4], "prev": [3, 3], "cand": [8, 9], "env": [4, 4], "device": [1, 3]}
    clicks |= {"os": [2, 2], "country": [1, 1], "region": [9, 21], "referrer": [2, 2]}
    ranked = client.rank("news", clicks | {"hour": [13, 13]})
    assert len(ranked.scores) == 2, ranked
for name, extra in (("train", "train"), ("serve", "serve")):
    try:
        getattr(embertide, name)
    except ImportError as error:
        assert f"embertide[{extra}]" in str(error), error
    else:
        raise SystemExit(f"embertide.{name} without its extra")
"""
_TRAIN = """
import embertide
trained = embertide.train("news", folder="by-function", hours=12, events=2_000)
assert trained.events == 2_000, trained
"""


class Environment:
    """A fresh environment of one Python with one extra."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        """Make it.

        Raises:
            BenchError: There is no such Python here, or pip fails; the message has its end.
        """
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        _run(python_of(wheel), "-m", "venv", folder / "venv", cwd=folder)
        target = f"{wheel}[{extra}]" if extra else str(wheel)
        _run(self.bin / "pip", "install", "-q", target, cwd=folder, timeout_s=_INSTALL_S)

    def python(self, code: str, *words: object) -> str:
        """Return what a script prints."""
        return _run(self.bin / "python", "-c", code, *words, cwd=self.folder)

    def embertide(self, *words: object) -> str:
        """Return what a command prints."""
        return _run(self.bin / "embertide", *words, cwd=self.folder)


def python_of(wheel: Path) -> str:
    """Return the interpreter that a wheel is for.

    Raises:
        BenchError: There is none here.
    """
    version = "3." + wheel.name.split("-")[2].removeprefix("cp3")
    places = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    # Not pyenv's shim first: it stands there for versions that are not chosen.
    found = next(map(str, places), None) or shutil.which(f"python{version}")
    if found is None:
        raise BenchError(f"there is no Python {version} here for {wheel.name}")
    return found


def _run(*command: object, cwd: Path, timeout_s: float = _RUN_S) -> str:
    words = [str(word) for word in command]
    kept = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k == "HOME"}
    environment = {**kept, "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"{' '.join(words[:4])}: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, Path]]:
    """A publication, and the address of a node over it, by this checkout."""
    embertide.train("news", folder=folder / "news", hours=int(_HOURS), events=2_000)
    with embertide.serve(folder / "news") as served:
        yield served.grpc, folder / "news"


def _try_client(there: Environment, grpc: str, publication: Path) -> None:
    there.python(_CLIENT, grpc)


def _try_train(there: Environment, grpc: str, publication: Path) -> None:
    there.embertide("train", "news", "--demo", "--hours", _HOURS)
    there.python(_TRAIN)


def _try_serve(there: Environment, grpc: str, publication: Path) -> None:
    ports = free_ports(2)
    names = ("--grpc-port", "--metrics-port")
    words = [str(word) for pair in zip(names, ports, strict=True) for word in pair]
    command = [str(there.bin / "embertide"), "serve", str(publication), "--kind", "lookup", *words]
    log = there.folder / "serve.log"
    with Child(command, log=log, folder=there.folder) as child:
        wait_for(lambda: "ready" in child.log_text() or not child.alive(), "serve is not ready")
        if not child.alive():
            raise BenchError(child.log_text()[-1500:])
        there.embertide("status", "--url", f"http://127.0.0.1:{ports[1]}/metrics")


def _try_both(there: Environment, grpc: str, publication: Path) -> None:
    names = ("--grpc-port", "--metrics-port", "--control-port")
    ports = zip(names, free_ports(3), strict=True)
    there.embertide("demo", "--events", "5000", *(word for pair in ports for word in pair))
    said = json.loads((there.folder / "build" / "demo" / "report.json").read_text())
    if said["failed_requests"]:
        raise BenchError(f"{said['failed_requests']} requests of the demo failed")


def _try_mlflow(there: Environment, grpc: str, publication: Path) -> None:
    runs = there.folder / "runs"
    there.embertide(
        "train", "news", "--demo", "--hours", _HOURS, "--mlflow", f"sqlite:///{runs}.db"
    )


_TRIES: dict[str, Callable[[Environment, str, Path], None]] = {
    "client": _try_client,
    "train": _try_train,
    "serve": _try_serve,
    "train,serve": _try_both,
    "train,mlflow": _try_mlflow,
}


def try_extra(wheel: Path, extra: str, grpc: str, publication: Path) -> None:
    """Make the environment of an extra, and do what its page says.

    Raises:
        BenchError: Something of that fails.
    """
    with tempfile.TemporaryDirectory(prefix="extra-") as name:
        _TRIES[extra](Environment(Path(name), wheel, extra), grpc, publication)
