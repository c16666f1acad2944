"""The trainer's commands as child processes, and what they say in JSON while they run."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embertide.server.adapters.process import Child, ProcessError, Stopped

TRAINER = (sys.executable, "-m", "embertide.trainer")
# Not with the rest: a node has neither torch nor what reads events.
MIRROR = (sys.executable, "-m", "embertide.trainer.commands.mirror")
_LINES = 12


class CommandError(ProcessError):
    """A command of ours failed; the message is what it said."""


def reason(name: str, text: str) -> str:
    """Return what a command failed with, from its output."""
    lines = text.splitlines()
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return said[-1] if said else "\n".join([f"{name} failed:", *lines[-_LINES:]])


class TrainerProcess(Stopped):
    """One of the trainer's commands with --json, running beside us. A context manager.

    Attributes:
        progress: The last progress that it reported.
        result: The result that it reported at its end.
    """

    def __init__(self, name: str, arguments: Sequence[str], *, log: Path) -> None:
        """Start `name` with `arguments`; output goes to `log`."""
        self.name = name
        self.progress: dict[str, Any] = {}
        self.result: dict[str, Any] | None = None
        self.process = Child([*TRAINER, name, *arguments, "--json"], log=log)
        self._at = 0

    def poll(self) -> bool:
        """Read what it has said since, and return whether it still runs.

        Raises:
            CommandError: It failed.
        """
        alive = self.process.alive()
        with self.process.log.open("rb") as log:
            log.seek(self._at)
            text = log.read()
        whole = text.rfind(b"\n") + 1
        self._at += whole
        for line in text[:whole].splitlines():
            if line.startswith((b'{"progress"', b'{"result"')):
                said = json.loads(line)
                self.progress = said.get("progress", self.progress)
                self.result = said.get("result", self.result)
        if not alive and self.process.code != 0:
            raise CommandError(reason(self.name, self.process.log_text()))
        return alive

    def stop(self) -> int:
        """Stop it if it still runs, and return its exit code."""
        return self.process.stop()


def run_trainer(name: str, arguments: Sequence[str]) -> Mapping[str, Any]:
    """Run one of the trainer's commands to its end and return what it says in JSON.

    Raises:
        CommandError: It failed.
    """
    done = subprocess.run(
        [*TRAINER, name, *arguments, "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise CommandError(reason(name, done.stderr))
    said: Mapping[str, Any] = json.loads(done.stdout)
    return said


def show_trainer(name: str, arguments: Sequence[str]) -> int:
    """Run one of the trainer's commands, whose output is this command's; return its exit code."""
    return subprocess.run([*TRAINER, name, *arguments], check=False).returncode
