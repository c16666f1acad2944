"""A drive without room: how it is told from other errors, and what is said of it.

The message names the folder and the room that is left on its drive, so that whoever reads it knows
where to look.
"""

import errno
import os
import shutil
from pathlib import Path

_MIB = 1 << 20
_MORE = 64 << 10  # than before: less is other files' coming and going
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


def is_no_room(error: BaseException) -> bool:
    """Return whether an error means that a drive, or a quota of it, is full."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    # The store's library says it in words.
    return any(os.strerror(number) in str(error) for number in _NO_ROOM)


def no_room(place: Path, error: BaseException) -> str:
    """Return what to say where a file in `place` could not be written: where, why, what is free."""
    what = error.strerror if isinstance(error, OSError) else str(error)
    return f"{place} has no room ({what}, {_free(place)})"


def free_bytes(place: Path) -> int | None:
    """Return what is free where a file or folder lies or would; None: it is not known."""
    for folder in (place, *place.absolute().parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None


def _free(place: Path) -> str:
    free = free_bytes(place)
    if free is None:
        return "it is not known how much is free"
    return f"{free >> 20} MiB free" if free >= _MIB else f"{free >> 10} KiB free"


class RoomWatch:
    """Remembers that a folder's drive was full, so that nothing is written in vain.

    A drive that has neither more room than then, nor room for what was written before, costs a look
    at it for each version, and not the bytes of each version over and over. Used by one thread at a
    time.
    """

    def __init__(self, folder: Path) -> None:
        """Know of nothing yet."""
        self._folder = folder
        self._free: int | None = None  # when it was full
        self._largest = _MIB  # of what was written

    def check(self) -> None:
        """Return where there may be room.

        Raises:
            OSError: There is as little as when the drive was full (ENOSPC).
        """
        if self._free is None:
            return
        free = free_bytes(self._folder)
        if free is not None and free < min(self._free + _MORE, self._largest):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))

    def full(self) -> None:
        """Say that the drive was full, once what was written in vain is gone."""
        if self._free is None:
            self._free = free_bytes(self._folder)

    def fits(self, size: int) -> None:
        """Say that so many bytes were written."""
        self._free = None
        self._largest = max(self._largest, size)
