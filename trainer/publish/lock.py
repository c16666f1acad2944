"""The lock that keeps a second trainer out of a publication folder (docs/training.md).

A publisher without a bus takes it: two could otherwise take the same lineage. The operating system
holds it for the process, and lets go when that ends, however it ends. Two publishers of one process
share it; their lineages tell them apart.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path

from embertide.trainer.errors import FinalError

LOCK_FILE = "publisher.lock"
# A file system without locks: the folder can be used, and says so.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

log = logging.getLogger(__name__)
# A process's locks of a file end when it closes any descriptor of it: one a file, with its users.
_held: dict[Path, tuple[int, int]] = {}


class LockedError(FinalError):
    """Another process publishes to the folder; the message names it."""


def _release(path: Path) -> None:
    fd, users = _held.pop(path)
    if users > 1:
        _held[path] = fd, users - 1
    else:
        os.close(fd)


class FolderLock:
    """Held from its making until nothing refers to it, or the process ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            LockedError: Another process has it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.resolve() / LOCK_FILE
        if path in _held:
            fd, users = _held[path]
            _held[path] = fd, users + 1
        else:
            _held[path] = _open_locked(path), 1
        weakref.finalize(self, _release, path)


def _open_locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EAGAIN}:
                holder = os.read(fd, 256).decode(errors="replace").strip() or "another process"
                raise LockedError(
                    f"{path.parent} is published to by {holder}: stop that trainer, train into "
                    "another folder, or give both the same --bus, where the later one takes over"
                ) from error
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(
                "%s: this file system has no locks (%s): let one trainer use it", path, error
            )
        os.ftruncate(fd, 0)
        os.write(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        stack.pop_all()
    return fd
