"""Decisions made by waiting, on disk before they are relied on: lines of JSON beside a publication.

Reading again would not show such a decision. Whoever reads again takes it from here; so a copy of
the publication has the journals, too, and so has each checkpoint, as they were then.
"""

import contextlib
import errno
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from embertide._common.room import is_no_room, no_room

SILENCES = "silences.jsonl"
"""Journal of merged inputs (merge.py)."""

CLOSINGS = "closed.jsonl"
"""Journal of an input that is a partition of Kafka (kafka_partition.py)."""

INPUTS = "inputs"
"""The folder of the journals of merged inputs, a folder each."""

_AGAIN_S = 0.5
_SAID_EVERY_S = 60.0

log = logging.getLogger(__name__)

_NAME = re.compile(rf"{SILENCES}|{CLOSINGS}|{INPUTS}/\d{{1,6}}/{CLOSINGS}")


class Journal:
    """A file of decisions; without a path it keeps none. Used by one thread."""

    def __init__(self, path: Path | None) -> None:
        """Name the file, which need not exist."""
        self._path = path

    def lines(self) -> list[dict[str, Any]]:
        """Return what was written; a line that a kill cut short was never relied on."""
        if self._path is None or not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_bytes().split(b"\n")[:-1]]

    def add(self, said: dict[str, Any]) -> None:
        """Append a line; it is on disk when this returns.

        Where the drive is full it waits for room: whoever decides by waiting waits a little longer,
        and what is live is held where it comes from.
        """
        if self._path is None:
            return
        said_s = -_SAID_EVERY_S
        while True:
            try:
                self._append(json.dumps(said).encode() + b"\n")
            except OSError as error:
                if not is_no_room(error):
                    raise
                if time.monotonic() >= said_s + _SAID_EVERY_S:
                    said_s = time.monotonic()
                    log.error("reading waits: %s", no_room(self._path, error))
                time.sleep(_AGAIN_S)
            else:
                return

    def _append(self, line: bytes) -> None:
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as out:
            begin = out.tell()
            written = out.write(line)
            try:
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(out.fileno())
            except OSError:
                os.ftruncate(out.fileno(), begin)  # no line is there in part
                raise

    def replace(self, lines: Iterable[dict[str, Any]]) -> None:
        """Have these lines alone, all of them or, after a kill or on a full drive, those before."""
        if self._path is None:
            return
        partial = self._path.with_name(f".{self._path.name}.partial")
        lines = list(lines)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as out:
                out.writelines(json.dumps(each).encode() + b"\n" for each in lines)
                out.flush()
                os.fsync(out.fileno())
            partial.rename(self._path)
        except OSError as error:
            # It drops what nobody needs; the lines of before say the same.
            if not is_no_room(error) or (lines and not self._path.exists()):
                raise
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def is_journal(name: str) -> bool:
    """Return whether a file of a publication, named from its folder, is a journal."""
    return _NAME.fullmatch(name) is not None


def journals(folder: Path) -> dict[str, Path]:
    """Return the journals of a publication by name, in the order of names."""
    found = (folder / SILENCES, folder / CLOSINGS, *folder.glob(f"{INPUTS}/*/{CLOSINGS}"))
    named = {path.relative_to(folder).as_posix(): path for path in found if path.is_file()}
    return {name: named[name] for name in sorted(named) if is_journal(name)}


def journal_lines(folder: Path) -> dict[str, list[str]]:
    """Return what the journals of a publication hold, a line that is being written excepted.

    A journal that is replaced meanwhile is read as it was before or after.
    """
    return {
        name: path.read_bytes().decode().split("\n")[:-1] for name, path in journals(folder).items()
    }


def restore_journals(folder: Path, lines: Mapping[str, list[str]]) -> list[str]:
    """Write the journals that a publication lacks, as a checkpoint has them; return their names."""
    missing = [name for name in lines if is_journal(name) and not (folder / name).exists()]
    for name in missing:
        Journal(folder / name).replace(json.loads(line) for line in lines[name])
    return missing
