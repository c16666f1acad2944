"""Another user of the machine beside running processes of ours (claim A.4); needs root.

Everything runs with an umask of 0, below a folder that all may enter, with a temporary folder that
all share and in which the stranger has made torch's folder of compiled code first. Then `nobody`
(stranger.py) tries to write into each folder and file, to read secrets in files and processes, and
to have each socket and port answer as Redis.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import psutil
from full_disk import within

from bench.servers import BenchError
from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.triton import find_backends

_SCRIPT = Path(__file__).with_name("stranger.py")
_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
_PYTHON = "/usr/bin/python3"  # ours may lie where nobody gets in
_START_S = 600.0
_EVENTS = 20_000


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The things that a stranger got at and tried, by kind: written, secrets, sockets, ports."""

    got: dict[str, list[str]]
    tried: dict[str, int]


class Site:
    """Folders that all users of the machine may enter, and processes of ours. A context manager.

    Attributes:
        folder: Folder of everything; the working folder of the processes.
        temporary: Shared by all users, as /tmp is.
        planted: The folder in which torch would compile of itself; the stranger's.
        secrets: Texts that nobody else may see.
    """

    def __init__(self) -> None:
        """Make the folders.

        Raises:
            BenchError: This user cannot become another.
        """
        if os.geteuid() != 0:
            raise BenchError("only root can try as another user: run this as root")
        self._stack = contextlib.ExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix="strangers-", dir="/tmp"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.folder.chmod(0o755)
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.temporary.chmod(0o1777)
        self.planted = self.temporary / "torchinductor_root"
        self.as_nobody("/bin/sh", "-c", f"umask 0 && mkdir -m 777 {self.planted}")
        self.secrets: list[str] = []
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes, and remove the folders."""
        self._stack.close()

    def as_nobody(self, *command: str) -> str:
        """Return what a command of another user prints."""
        done = subprocess.run(
            [*_NOBODY, *command], cwd="/", capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise BenchError(f"as nobody: {done.stderr[-400:]}")
        return done.stdout

    def token(self, role: str) -> str:
        """Return a new line of a tokens file, whose token is a secret."""
        self.secrets.append(secrets.token_hex(16))
        return f"{role}:{self.secrets[-1]}\n"

    def start(self, name: str, *words: object) -> Child:
        """Start a command of ours with an umask of 0."""
        # The user's own choices of folders are not what is tried here.
        environment = {"HOME": str(self.folder / "home"), "TMPDIR": str(self.temporary)}
        unset = ("-u", "XDG_CACHE_HOME", "-u", "TORCHINDUCTOR_CACHE_DIR")
        script = 'umask 0; exec "$@"'
        command = [sys.executable, "-m", "embertide.server.cli", *map(str, words)]
        child = Child(
            ["env", *unset, "/bin/sh", "-c", script, "sh", *command],
            log=self.folder / "logs" / f"{name}.log",
            environment=environment,
            folder=self.folder,
        )
        self._children.append(self._stack.enter_context(child))
        return child

    def await_text(self, child: Child, text: str) -> None:
        """Wait until a process has printed a text.

        Raises:
            BenchError: It ends before, or takes ten minutes.
        """
        deadline = time.monotonic() + _START_S
        while text not in child.log_text():
            if not child.alive() or time.monotonic() > deadline:
                raise BenchError(f"no {text!r} of {child.log}: {child.log_text()[-800:]}")
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """Return the processes that run, children of children too."""
        found = []
        for child in self._children:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(child.pid)
                found += [parent, *parent.children(recursive=True)]
        return found

    def look(self) -> Found:
        """Have the stranger try everything, now."""
        ports, pids = set(), []
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                pids.append(each.pid)
                held = each.net_connections(kind="tcp4")
                ports |= {one.laddr.port for one in held if one.status == psutil.CONN_LISTEN}
        return look(
            [self.folder],
            shared=[self.temporary, self.planted],
            secrets=self.secrets,
            pids=pids,
            ports=sorted(ports),
        )


def wait_for(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait until something is so.

    Raises:
        BenchError: It is not within ten minutes.
    """
    if within(_START_S, condition) is None:
        raise BenchError(otherwise)


def look(
    folders: Sequence[Path],
    *,
    shared: Sequence[Path] = (),
    secrets: Sequence[str] = (),
    pids: Sequence[int] = (),
    ports: Sequence[int] = (),
) -> Found:
    """Return what `nobody` gets at."""
    facts = {
        "folders": [str(each) for each in folders],
        "shared": [str(each) for each in shared],
        "secrets": list(secrets),
        "pids": list(pids),
        "ports": list(ports),
    }
    done = subprocess.run(
        [*_NOBODY, _PYTHON, "-c", _SCRIPT.read_text(), json.dumps(facts)],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"the stranger failed: {done.stderr[-800:]}")
    return Found(**json.loads(done.stdout))


def start_control(site: Site) -> Child:
    """Start a control plane with a state store of its own, tokens and an audit log."""
    tokens = site.folder / "tokens"
    tokens.touch(0o600)
    tokens.write_text(site.token("operator") + site.token("node"))
    token = site.folder / "token"
    token.touch(0o600)
    token.write_text(site.secrets[0] + "\n")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    child = site.start("control", "control", "--listen", address, "--tokens", tokens)
    site.await_text(child, "control plane of model")
    (site.folder / "home").mkdir(exist_ok=True)
    added = site.start(
        "context", "context", "add", "here", "--control", address, "--token-file", token
    )
    added.wait(60)
    drained = site.start("drain", "node", "drain", "node-0", "--control", address)
    drained.wait(60)
    return child


def start_demo(site: Site, out: Path) -> Child:
    """Start a demo, and wait until its trainer, control plane, Redis and nodes all run."""
    names = ("--grpc-port", "--metrics-port", "--control-port")
    ports = [word for pair in zip(names, free_ports(len(names)), strict=True) for word in pair]
    words = ("--events", _EVENTS, "--out", out, "--backends", find_backends())
    child = site.start("demo", "demo", *words, *ports)
    deadline = time.monotonic() + _START_S
    while not (out / "kept").exists() and not (out / "report.json").exists():
        replays = any("replay" in " ".join(each.cmdline()) for each in _alive(site))
        if replays:
            break
        if not child.alive() or time.monotonic() > deadline:
            raise BenchError(f"the demo does not serve: {child.log_text()[-800:]}")
        time.sleep(0.1)
    return child


def _alive(site: Site) -> Iterator[psutil.Process]:
    for each in site.processes():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            each.cmdline()
            yield each


def start_serve(site: Site, publication: Path) -> Child:
    """Start a node over a publication, with a password in its URL of Redis."""
    ports = free_ports(2)
    words = ["serve", publication, "--kind", "lookup", "--backends", find_backends()]
    for name, port in zip(("--grpc-port", "--metrics-port"), ports, strict=True):
        words += [name, port]
    child = site.start("serve", *words, "--ssd-mib", "64", "--directory", site.folder / "serve")
    site.await_text(child, "ready")
    return child
