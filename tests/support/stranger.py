"""A probe for what another user of a machine can reach: run by that user's system Python alone.

    setpriv --reuid=65534 --regid=65534 --clear-groups /usr/bin/python3 stranger.py FACTS

FACTS is JSON: `folders` to look through, those `shared` by all users, `secrets` whose text nobody
may see, `pids` of processes and the `ports` on which they listen. It prints JSON: what it got at of
each kind of thing that it tried, and how many it tried.
"""

import json
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

_ANSWER_S = 2.0
_MAX_BYTES = 1 << 22


def _paths(folders: list[str]) -> Iterator[str]:
    for folder in folders:
        yield folder
        for here, below, files in os.walk(folder):
            yield from (os.path.join(here, name) for name in (*below, *files))  # noqa: PTH118


def _can_write(path: str) -> bool:
    """Whether a file can be changed, or a folder be given another file."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode) or stat.S_ISSOCK(mode):
        return False
    if not stat.S_ISDIR(mode):
        return os.access(path, os.W_OK)
    name = os.path.join(path, ".stranger")  # noqa: PTH118
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except OSError:
        return False
    os.unlink(name)  # noqa: PTH108
    return True


def _secrets_in(path: str, secrets: list[bytes]) -> bool:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES)
    except OSError:
        return False
    return any(secret in data for secret in secrets)


def _answers_redis(family: int, address: str | tuple[str, int]) -> bool:
    """Whether a Redis takes a command of somebody who has shown nothing."""
    with socket.socket(family) as talk:
        talk.settimeout(_ANSWER_S)
        try:
            talk.connect(address)
            talk.sendall(b"PING\r\n")
            return talk.recv(64).startswith((b"+PONG", b"-NOAUTH", b"-DENIED"))
        except OSError:
            return False


def _sockets(folders: list[str]) -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    names = {words[7] for words in map(str.split, lines) if len(words) > 7}
    return sorted(name for name in names if any(name.startswith(f"{f}/") for f in folders))


def main() -> None:
    """Try, and say what came of it."""
    facts = json.loads(sys.argv[1])
    folders, pids = facts["folders"], facts["pids"]
    secrets = [each.encode() for each in facts["secrets"]]
    paths = list(_paths(folders))
    shared = set(facts["shared"])
    sockets, ports = _sockets(folders), facts["ports"]
    processes = [f"/proc/{pid}/{name}" for pid in pids for name in ("cmdline", "environ", "mem")]
    got = {
        "written": [path for path in paths if path not in shared and _can_write(path)],
        "secrets": [path for path in (*paths, *processes) if _secrets_in(path, secrets)],
        "sockets": [name for name in sockets if _answers_redis(socket.AF_UNIX, name)],
        "ports": [str(n) for n in ports if _answers_redis(socket.AF_INET, ("127.0.0.1", n))],
    }
    tried = {
        "written": len(paths),
        "secrets": len(paths) + len(processes),
        "sockets": len(sockets),
        "ports": len(ports),
    }
    json.dump({"got": got, "tried": tried}, sys.stdout)


if __name__ == "__main__":
    main()
