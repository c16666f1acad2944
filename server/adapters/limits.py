"""The system's limits on a process: open files, threads, memory; the minimum that a node needs.

Without enough files a server ends with a signal or never gets ready, without enough threads it is
aborted, and neither says why. So `serve` and `control` look first, and `doctor` shows it.
"""

import os
import resource
from pathlib import Path

from embertide.server.adapters.process import ProcessError

MIN_FILES = 256
"""A node that nobody asks has some 64 open, and one for each connection."""
GOOD_FILES = 4096
MIN_THREADS = 128
"""A node that nobody asks has some 40, and more as requests come."""
_CGROUP = Path("/sys/fs/cgroup")
_COUNTED_BELOW = 8192  # a user's threads are counted only where they may matter
_NO_LIMIT = 1 << 60


def raise_files() -> int:
    """Let this process and its children open as many files as they may; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft  # the kernel's own limit is lower
    return _bounded(hard)


def open_files() -> int:
    """Return how many files a process may open, once it has asked for all that it may."""
    return _bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def free_threads() -> int:
    """Return how many threads may still be started, by the user's and the container's limits."""
    limit = _bounded(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    room = limit if limit > _COUNTED_BELOW or os.geteuid() == 0 else limit - _threads_of_user()
    most, used = _of_cgroup("pids", "pids.max"), _of_cgroup("pids", "pids.current")
    if most is not None:
        room = min(room, most - (used or 0))
    return max(0, room)


def memory_bytes() -> int:
    """Return the memory that this machine or container has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _of_cgroup("memory", name)
        if limit is not None:
            return min(total, limit)
    return total


def check_limits() -> None:
    """Raise the limit of files, and prove that servers can be started.

    Raises:
        ProcessError: They would end, or stand still, for want of files or threads.
    """
    files, threads = raise_files(), free_threads()
    if files < MIN_FILES:
        raise ProcessError(
            f"this process may open {files} files, a server needs {MIN_FILES} at least: raise "
            "the limit (`ulimit -Hn 65536`, LimitNOFILE= of systemd)"
        )
    if threads < MIN_THREADS:
        raise ProcessError(
            f"{threads} more threads may be started, a server needs {MIN_THREADS} at least: "
            "raise the limit (`ulimit -u`, --pids-limit of a container, TasksMax= of systemd)"
        )


def _bounded(limit: int) -> int:
    return _NO_LIMIT if limit == resource.RLIM_INFINITY else limit


def _of_cgroup(controller: str, name: str) -> int | None:
    """Return the least number that a file has in our cgroup or one above; None: there is none."""
    found: list[int] = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP
        folder = Path(path.lstrip("/"))
        for each in (folder, *folder.parents):
            try:
                text = (root / each / name).read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if text.isdigit():
                found.append(int(text))
                if name.endswith("current"):
                    return found[0]
    return min(found, default=None)


def _threads_of_user() -> int:
    mine, count = os.geteuid(), 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == mine:
                count += sum(1 for _ in (folder / "task").iterdir())
        except OSError:
            continue  # it has ended
    return count
