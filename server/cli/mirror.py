"""The process that keeps a publication in object storage in a folder, for a node beside it."""

import json
import time
from pathlib import Path

from embertide._common.terminal import say
from embertide.server.adapters.process import Child, ProcessError, Stopped
from embertide.server.cli.processes import MIRROR, reason

_AGAIN_S = 5.0
_POLL_S = 0.2


def _mirrored(folder: Path) -> str:
    """Return the URL that a folder is a mirror of (docs/formats.md, origin.json); empty: none."""
    try:
        return str(json.loads((folder / "origin.json").read_bytes())["storage"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class Mirror(Stopped):
    """`embertide mirror` as a child, started again when it ends. A context manager.

    What storage fails with ends it never, so an end is a fault of its own, or a kill.
    """

    def __init__(self, url: str, folder: Path, *, log: Path) -> None:
        """Start it; what it says goes to `log`.

        Raises:
            ProcessError: The folder mirrors another URL.
        """
        before = _mirrored(folder)
        if before not in ("", url.rstrip("/")):
            raise ProcessError(
                f"{folder} has {before}, and is to have {url}: give another --directory, or delete "
                "that folder first"
            )
        self._url, self._folder = url, folder
        self._command = [*MIRROR, url, str(folder)]
        self._log = log
        self._began = time.monotonic()
        self._child = Child(self._command, log=log)

    def wait_for_snapshot(self, timeout_s: float) -> None:
        """Return once the folder has a first snapshot.

        Raises:
            ProcessError: The process ended, or the time is up; the message is what it said.
        """
        deadline = time.monotonic() + timeout_s
        while not any(self._folder.glob("snapshots/[!.]*/manifest.json")):
            if not self._child.alive():
                raise ProcessError(reason("mirror", self._child.log_text()))
            if time.monotonic() > deadline:
                said = self._child.log_text().strip().splitlines()[-1:]
                raise ProcessError(
                    f"{self._url} has given no snapshot in {timeout_s:.0f} s; see that the "
                    "trainer runs" + (f": {said[0]}" if said else "")
                )
            time.sleep(_POLL_S)

    def keep(self) -> None:
        """Start it again if it has ended, five seconds after its last start at the earliest."""
        if self._child.alive() or time.monotonic() - self._began < _AGAIN_S:
            return
        said = reason("mirror", self._child.log_text())
        say(f"mirror ended with code {self._child.code}, it starts again: {said}", err=True)
        self._began = time.monotonic()
        self._child = Child(self._command, log=self._log)

    def stop(self) -> int:
        """Stop it, and return its exit code."""
        return self._child.stop()
