"""Files of lines that people read: rejected rows, events put aside, a run's log.

They are worth less than the run: a drive without room costs lines, which are counted and said once,
and never ends it. Once there is room, the lines that come then are written.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from embertide._common.room import is_no_room, no_room

_AGAIN_S = 1.0  # between tries on a full drive
_SAID_EVERY_S = 600.0

log = logging.getLogger(__name__)


class LinesFile:
    """Appends lines to a file, all of a call or none. Used by one thread at a time.

    Attributes:
        lost: Lines that are not in the file, for it or its drive is full.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        """Name the file, which is made with the first line; it grows to `max_bytes` at most."""
        self.path = path
        self.lost = 0
        self._max_bytes = max_bytes
        self._again_s = 0.0  # until then the drive counts as full
        self._said_s = -_SAID_EVERY_S

    def add(self, lines: Sequence[bytes]) -> int:
        """Append lines, each with its line feed; return how many are in the file.

        Raises:
            OSError: It cannot be written, for another reason than that there is no room.
        """
        if time.monotonic() < self._again_s:
            self.lost += len(lines)
            return 0
        try:
            kept = self._append(lines)
        except OSError as error:
            if not is_no_room(error):
                raise
            self._full(error)
            kept = 0
        self.lost += len(lines) - kept
        return kept

    def _append(self, lines: Sequence[bytes]) -> int:
        try:
            out = self.path.open("ab", buffering=0)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            out = self.path.open("ab", buffering=0)
        with out:
            begin = out.tell()
            kept, data = len(lines), b"".join(lines)
            if self._max_bytes is not None:
                kept, data = _fitting(lines, self._max_bytes - begin)
            try:
                written = 0
                while written < len(data):
                    written += out.write(data[written:])
            except OSError:
                if written:
                    os.ftruncate(out.fileno(), begin)  # no line is there in part
                raise
        return kept

    def _full(self, error: OSError) -> None:
        now = time.monotonic()
        self._again_s = now + _AGAIN_S
        if now - self._said_s >= _SAID_EVERY_S:
            self._said_s = now
            log.warning("%s; lines are left out until there is some", no_room(self.path, error))


def _fitting(lines: Sequence[bytes], room: int) -> tuple[int, bytes]:
    """Return how many of the first lines fit, and these."""
    fitting: list[bytes] = []
    for line in lines:
        room -= len(line)
        if room < 0:
            break
        fitting.append(line)
    return len(fitting), b"".join(fitting)
