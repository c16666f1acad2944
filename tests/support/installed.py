"""Installations of tritonserver: the wheel's as NVIDIA's container has it, and twins of others."""

import shutil
from pathlib import Path

from embertide.server.adapters.installation import find_installation


def as_in_the_container(folder: Path) -> Path:
    """Lay the wheel's server out as in /opt/tritonserver: it is the same server, and starts."""
    wheel = find_installation()
    (folder / "bin").mkdir(parents=True)
    shutil.copy(wheel.binary, folder / "bin" / "tritonserver")
    (folder / "lib").mkdir()
    for library in wheel.library.parent.iterdir():
        (folder / "lib" / library.name).symlink_to(library)
    (folder / "lib" / "libtritonserver.so").symlink_to(wheel.library)
    for name in ("backends", "caches"):
        (folder / name).symlink_to(wheel.root / name)
    return folder


def twin(folder: Path, script: str) -> Path:
    """Lay out a program that does what `script` of sh says: a twin, and no server."""
    binary = folder / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    (folder / "lib").mkdir()
    (folder / "lib" / "libtritonserver.so").touch()
    return folder


def twin_of_version(folder: Path, version: str, *, without: str = "") -> Path:
    """Lay out a twin with the options of the wheel's server but one, and another version."""
    options = sorted(find_installation().options() - {without})
    lines = "\n".join(f"  {each} <string>\n\tAn option." for each in options)
    return twin(
        folder,
        f"if [ \"$1\" = --help ]; then cat >&2 <<'END'\nUsage: tritonserver [options]\n{lines}\n"
        f"END\nexit 1; fi\necho '| server_version | {version} |'; exec sleep 600",
    )
