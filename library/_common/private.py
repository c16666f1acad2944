"""Folders and files that this user alone can use, on a machine that has other users.

Caches of compiled code, sockets and state lie in such folders. A name that somebody can guess, in
a folder where all may write, belongs to whoever makes it first: so the owner is looked at, and no
link is followed. Safe to call from any thread and from several processes at once.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from embertide._common.errors import OperatingError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = 0o077


class NotPrivateError(OperatingError):
    """Another user can use or replace a folder; the message says which and what to do."""


def _others_write(found: os.stat_result) -> bool:
    """Return whether other users may write; a group of our own name's is nobody else."""
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and found.st_gid not in (0, os.getegid())


def _is_volume(path: Path, found: os.stat_result) -> bool:
    """Return whether the administrator mounted a folder here, as a container's volumes are.

    Kubernetes makes volumes of root that all may write to. Who runs in the container is one user.
    """
    return found.st_uid == 0 and path.is_mount()


def _check_ancestors(path: Path) -> None:
    """Prove that nobody else can put another folder in the place of this one."""
    for parent in path.parents:
        found = parent.stat()
        if found.st_uid not in (0, os.geteuid()):
            raise NotPrivateError(
                f"{path} is in {parent}, which is of user {found.st_uid}; choose another folder"
            )
        sticky = found.st_mode & stat.S_ISVTX
        if _others_write(found) and not sticky and not _is_volume(parent, found):
            raise NotPrivateError(
                f"{path} is in {parent}, where others may write; chmod go-w it, or choose another"
            )


def private_folder(path: Path) -> Path:
    """Return the absolute path of a folder of mode 0700, made if it is missing.

    One of ours that others may read is closed to them (0700). The last part of the path must not
    be a link; its parents are resolved.

    Raises:
        NotPrivateError: Another user owns the folder or can replace it, or could write into it.
        OSError: It cannot be made.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link at the end
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.parent.resolve() / path.name
    _check_ancestors(path)
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotPrivateError(f"{path} is no folder; remove it, or choose another folder")
    if found.st_uid != os.geteuid():
        raise NotPrivateError(
            f"{path} is of user {found.st_uid}, not of this one; choose another folder"
        )
    if _others_write(found):
        raise NotPrivateError(
            f"others may write into {path}; look at what is in it, then chmod 700 it"
        )
    if found.st_mode & _OTHERS:
        path.chmod(0o700)
    return path


def own_folder(path: Path) -> Path:
    """Return `private_folder(path)`, or a folder that the administrator made for us.

    Such a folder is of root: a volume that is mounted into a container, or one below /var. It stays
    as it is.

    Raises:
        NotPrivateError: As `private_folder`; or all users share the folder, as they do /tmp.
        OSError: It cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        if found.st_uid == 0 != os.geteuid() or _is_volume(path, found):
            if found.st_mode & stat.S_ISVTX:
                raise NotPrivateError(f"all users share {path}; give a folder below it")
            return path.resolve()
    return private_folder(path)


def trusted_folder(path: Path) -> Path:
    """Return a folder whose files may run: of this user or root, and written by no other.

    It is made as `private_folder` if it is missing, and else stays as it is.

    Raises:
        NotPrivateError: Another user owns the folder, may write into it, or can replace it.
        OSError: It cannot be made.
    """
    path = path.resolve()
    if not path.exists():
        return private_folder(path)
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise NotPrivateError(f"{path} is of user {found.st_uid}; choose another folder")
    if _others_write(found):
        raise NotPrivateError(
            f"others may write into {path}; look at what is in it, then chmod go-w it"
        )
    _check_ancestors(path)
    return path


def close_umask() -> None:
    """Let no other user write what this process and its children make from now on.

    Who may read it stays as it is: nodes of another user may read a publication.
    """
    os.umask(os.umask(0o077) | 0o022)


def temporary_folder() -> Path:
    """Return a new folder of mode 0700 that nobody can foretell; whoever asked removes it."""
    return Path(tempfile.mkdtemp(prefix="embertide-"))


def cache_folder(name: str) -> Path:
    """Return this user's folder of what can be made again, `$XDG_CACHE_HOME/embertide/NAME`.

    Raises:
        NotPrivateError: As `private_folder`.
        OSError: As `private_folder`.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored, says the specification.
    root = Path(given) if given.startswith("/") else Path.home() / ".cache"
    return private_folder(private_folder(root / "embertide") / name)


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 in one step; what was there is replaced, a link too.

    Raises:
        OSError: The system's.
    """
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def open_private(path: Path) -> int:
    """Return a descriptor that appends to a file of mode 0600, made if it is missing.

    One of ours that others may read is closed to them. No link is followed.

    Raises:
        NotPrivateError: Another user owns the file.
        OSError: The system's; ELOOP: it is a link.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    found = os.fstat(handle)
    if found.st_uid != os.geteuid():
        os.close(handle)
        raise NotPrivateError(
            f"{path} is of user {found.st_uid}, not of this one; choose another file"
        )
    if found.st_mode & _OTHERS:
        os.fchmod(handle, 0o600)
    return handle
