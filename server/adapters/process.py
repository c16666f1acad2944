"""Child processes of ours: started so that none outlives us, stopped within a bound."""

import contextlib
import errno
import os
import random
import re
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from embertide._common.errors import OperatingError

_STOP_TIMEOUT_S = 30.0
# Below what Linux gives connections (32768 and up), and below Kubernetes' node ports.
_OURS = 15_000, 30_000
_PORTS_TRIED = 200
_PORTS = random.SystemRandom()  # processes that begin alike draw differently
_interrupted = False


class ProcessError(OperatingError):
    """A process could not be started; the message says why and what to do."""


class UsageError(ProcessError):
    """The request cannot work, however often it is tried."""

    exit_status = 2


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt


def interrupt_on_signals() -> None:
    """Make SIGTERM what Ctrl-C is: whoever started processes stops them on the way out."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)


def check_interrupt() -> None:
    """Raise KeyboardInterrupt again if one came: those raised in a callback of C code are lost.

    For loops that wait, while nothing is being stopped.
    """
    if _interrupted:
        raise KeyboardInterrupt


def how_ended(code: int) -> str:
    """Return how a process ended, by its return code: `signal 11 (SIGSEGV)`, or `code 1`."""
    if code >= 0:
        return f"code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now, and that the system gives nobody by itself.

    A port of the system's own range may become some connection's before it is listened on.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for _ in range(_PORTS_TRIED):
            if len(ports) == count:
                return ports
            port = _PORTS.randrange(*_OURS)
            taken = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                taken.bind(("", port))
                ports.append(port)
    raise ProcessError(
        f"of {_PORTS_TRIED} ports from {_OURS[0]} to {_OURS[1] - 1} that were tried, fewer than "
        f"{count} are free: see who listens with `ss -ltn`"
    )


def check_port(what: str, host: str, port: int) -> None:
    """Prove that `port` of an address or a name of this machine can be listened on.

    Raises:
        ProcessError: Somebody listens there, or it is no port or address of this machine.
    """
    if not 0 <= port <= 65535:
        raise ProcessError(f"{what} port {port} is none: give one from 1 to 65535")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ProcessError(
            f"{what}: {host!r} is no address to listen on: give one of this machine, as 127.0.0.1, "
            "::1 or 0.0.0.0"
        ) from error
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ProcessError(
                    f"{what}: {host} is no address of this machine: give one that it has (`ip addr`"
                    " lists them)"
                ) from error
            if error.errno != errno.EADDRINUSE:
                raise ProcessError(
                    f"{what} port {port} of {host}: {error.strerror}; give another"
                ) from error
            raise ProcessError(
                f"{what} port {port} is in use on {host}: stop what listens there "
                f"(ss -ltnp 'sport = :{port}') or choose another port"
            ) from error


class Stopped:
    """A context manager whose end is `stop`."""

    def stop(self) -> int:
        """Stop it and return its exit code; does nothing if it ended already."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return it, running."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop it."""
        self.stop()


class Child(Stopped):
    """A process in a session of its own, its output in a log.

    Ctrl-C in a terminal reaches us alone, and we stop the child. Should the thread that starts it
    end (with its process, if killed), the kernel ends the child too.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start it, in `folder` or in ours; `environment` is added to ours."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether it runs."""
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def log_text(self) -> str:
        """Return the log so far."""
        return self.log.read_text(errors="replace")

    def send(self, signum: signal.Signals) -> None:
        """Send it a signal, and do not wait; does nothing if it ended already."""
        self._process.send_signal(signum)

    def traced_by(self) -> int:
        """Return the process that debugs it; 0: none does, or it ended."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return 0
        found = re.search(r"^TracerPid:\s*(\d+)$", status, re.MULTILINE)
        return int(found[1]) if found else 0

    def kill(self) -> None:
        """End it as a crash would, and wait."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end and return its code.

        Raises:
            TimeoutExpired: It still runs.
        """
        return self._process.wait(timeout_s)

    def stop(self) -> int:
        """Stop it and return its exit code; does nothing if it ended already."""
        if self.alive():
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()
