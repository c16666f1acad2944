"""Whoever follows a page of the documentation: a folder, and a terminal for each service."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from bench.servers import BenchError
from embertide.server.adapters.process import Child

_SERVICE = re.compile(r"embertide (serve\b|control\b|import .*--serve\b)")
_READY = "Ctrl-C stops it"
_COMMAND_S = 600
_END_S = 60
_ENDED = {0, 128 + signal.SIGINT}


class Desk:
    """Does blocks of shell as they are printed. Of one thread; services end with it.

    Args:
        folder: Where files are saved and commands run.
        changes: Words of files and commands that are others here, such as ports.
    """

    def __init__(self, folder: Path, changes: Mapping[str, str] | None = None) -> None:
        """Nothing runs yet."""
        self._folder = folder
        self._changes = changes or {}
        self._words = re.compile("|".join(map(re.escape, self._changes)) or r"(?!)")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {"PATH": path, "PYTHONUNBUFFERED": "1"}
        self._services: list[Child] = []

    def save(self, name: str, text: str) -> None:
        """Save a file."""
        (self._folder / name).write_text(self._changed(text), encoding="utf-8")

    def do(self, text: str) -> str:
        """Do a block, and return what it prints to stdout; services are left running.

        Each line of a block that begins with a service is one; all are ready when this returns.

        Raises:
            BenchError: A command failed.
            TimeoutExpired: It takes ten minutes.
        """
        text = self._changed(text)
        if not _SERVICE.match(text):
            return self._run(text)
        lines = text.replace("\\\n", " ").splitlines()
        for service, line in [(self._start(line), line) for line in lines]:
            self._await(service, line)
        return ""

    def _changed(self, text: str) -> str:
        return self._words.sub(lambda found: self._changes[found[0]], text)

    def _run(self, text: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self._folder,
            env={**os.environ, **self._environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"exit status {done.returncode}: {text}\n{done.stdout}{done.stderr}")
        return done.stdout

    def _start(self, line: str) -> Child:
        service = Child(
            ["bash", "-c", f"exec {line}"],
            log=self._folder / f"terminal-{len(self._services)}.log",
            environment=self._environment,
            folder=self._folder,
        )
        self._services.append(service)
        return service

    def _await(self, service: Child, line: str) -> None:
        ends = time.monotonic() + _COMMAND_S
        while _READY not in service.log_text():
            if time.monotonic() > ends or not all(each.alive() for each in self._services):
                raise BenchError(f"{line}: {service.log_text()}")
            time.sleep(0.1)

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End all services, as Ctrl-C does.

        Raises:
            BenchError: One ended otherwise, and no other error is under way.
        """
        wrong = []
        for service in reversed(self._services):
            if service.alive():
                os.kill(service.pid, signal.SIGINT)
            try:
                code = service.wait(_END_S)
            except subprocess.TimeoutExpired:
                service.kill()
                code = -signal.SIGKILL
            if code not in _ENDED:
                wrong.append(f"exit status {code}: {service.log_text()}")
        if wrong and kind is None:
            raise BenchError("\n".join(wrong))
