"""Known faults of versions of tritonserver: those of its listeners, outside our code.

Written by hand on 2026-11-28, and not complete: from trials of 2.51 and 2.72 (docs/install.md), and
from the changes of github.com/triton-inference-server/server, whose pull requests the numbers name.
"""

import dataclasses
import re
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hole:
    """Something that a stranger, or an ordinary caller, can do to a server.

    Attributes:
        door: Through which; one that is closed lets nobody do it.
        what: Its effect, in words for people.
        repaired: The first version without it, of 2.x; None: no version is known.
    """

    door: Literal["gRPC", "HTTP"]
    what: str
    repaired: int | None


_HOLES = (
    # 7840 in 2.53, 8078 in 2.57, 8220 in 2.59; tried: 2.51 ends, 2.72 lives.
    Hole(
        door="gRPC",
        what="gRPC calls that pass their deadline or are cancelled end it",
        repaired=59,
    ),
    # Nesting 8172 in 2.58, chunks on the stack 8305 in 2.60, unpacking 8570 in 2.65, shapes 8676 in
    # 2.68, number of chunks 8770 in 2.69; tried: 2.51 ends or swells, 2.72 refuses.
    Hole(
        door="HTTP",
        what="an HTTP request of a hundred bytes ends it or fills its memory",
        repaired=69,
    ),
    Hole(door="gRPC", what="1 MB of compressed gRPC takes 1 GB of it", repaired=None),
    Hole(door="HTTP", what="plain HTTP bodies of any size are held whole", repaired=None),
)
_REMEDY = (
    "give a newer tritonserver by --triton: NVIDIA's container has 2.69 from 26.05 on "
    "(docs/install.md)"
)


def known_holes(version: str) -> list[Hole]:
    """Return what is known of a version, as 2.51.0; of one that cannot be read, nothing is."""
    match = re.match(r"2\.(\d+)\.", version)
    if match is None:
        return []
    minor = int(match[1])
    return [hole for hole in _HOLES if hole.repaired is None or minor < hole.repaired]


def advice(version: str, *, http: bool = True) -> str:
    """Return in one line what a newer server would repair, and how to get it; empty: nothing.

    Args:
        version: The server's version.
        http: Whether its HTTP is open.
    """
    repaired = [
        f"{hole.what} (until 2.{hole.repaired})"
        for hole in known_holes(version)
        if hole.repaired is not None and (http or hole.door != "HTTP")
    ]
    return f"{'; '.join(repaired)}: {_REMEDY}" if repaired else ""
