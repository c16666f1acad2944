"""The faults of a round: drawn from the round's seed alone, so that a seed repeats a round."""

import dataclasses
import random
from collections.abc import Sequence

NODES = ("node-0", "node-1")
PROCESSES = (*NODES, "trainer", "control", "bus", "state")
BUS_LINKS = ("trainer>bus", "node-0>bus", "node-1>bus")
PEER_LINKS = ("peers>node-0", "peers>node-1")
LINKS = (
    *BUS_LINKS,
    *PEER_LINKS,
    "trainer>state",
    "control>state",
    "node-0>state",
    "node-1>state",
    "nodes>control",
)
_WINDOW_S = 2.5  # in which the faults of a round begin
_MAX_FAULTS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        at_s: When it begins, from the begin of its round.
        kind: Name of a `Kind`.
        target: A process, a link or a kind of file; empty for the whole machine.
        for_s: How long it lasts; of a killed process, how long nobody starts it again.
        amount: How strong it is, in the unit of its kind.
    """

    at_s: float
    kind: str
    target: str
    for_s: float
    amount: float = 0.0

    def line(self) -> str:
        """Describe it for people."""
        target = f" {self.target}" if self.target else ""
        amount = f" ({self.amount:g})" if self.amount else ""
        return f"{self.at_s:.2f} s: {self.kind}{target}{amount} for {self.for_s:.2f} s"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of fault.

    Attributes:
        targets: The things that it may hit.
        lasts: Shortest and longest, in s.
        amounts: Least and greatest strength.
        weight: How often it is drawn, against the others.
        follow: Kinds of which one follows, so that what was harmed is read: each with its targets.
        about: Its effect, for people; the unit of `amounts` in it.
    """

    name: str
    targets: Sequence[str]
    lasts: tuple[float, float]
    weight: int
    about: str
    amounts: tuple[float, float] = (0.0, 0.0)
    follow: Sequence[tuple[str, str]] = ()


_READ_FILES = (
    *(("kill", node) for node in NODES),
    ("flush", "bus"),
    ("cut", "node-0>bus"),
    ("cut", "node-1>bus"),
    ("kill", "trainer"),
)
_KINDS = (
    Kind(
        name="kill",
        targets=PROCESSES,
        lasts=(0.1, 1.5),
        weight=10,
        about="SIGKILL; the process is started again after that time",
    ),
    Kind(
        name="stop",
        targets=PROCESSES,
        lasts=(0.3, 3.0),
        weight=8,
        about="SIGSTOP, then SIGCONT",
    ),
    Kind(
        name="delay",
        targets=LINKS,
        lasts=(0.5, 3.0),
        weight=5,
        amounts=(5, 150),
        about="every packet of a link waits so many ms",
    ),
    Kind(
        name="loss",
        targets=LINKS,
        lasts=(0.5, 3.0),
        weight=5,
        amounts=(0.02, 0.4),
        about="that share of a link's packets is sent again 200 ms later, as TCP does",
    ),
    Kind(
        name="stall",
        targets=LINKS,
        lasts=(0.3, 3.0),
        weight=5,
        about="nothing passes on a link, and its connections stay open",
    ),
    Kind(
        name="cut",
        targets=LINKS,
        lasts=(0.1, 3.0),
        weight=5,
        about="all connections of a link are closed, and new ones too",
    ),
    Kind(
        name="flip-messages",
        targets=BUS_LINKS,
        lasts=(1.0, 3.0),
        weight=6,
        amounts=(0.02, 0.5),
        about="of that share of the bus's messages one bit is flipped on the way",
    ),
    Kind(
        name="flip-file",
        targets=("delta", "commit", "dense", "snapshot"),
        lasts=(0.0, 0.0),
        weight=6,
        follow=_READ_FILES,
        about="one bit of the newest such file is flipped, and stays so",
    ),
    Kind(
        name="flip-file",
        targets=("checkpoint",),
        lasts=(0.0, 0.0),
        weight=1,
        follow=(("kill", "trainer"),),
        about="the same of a checkpoint",
    ),
    Kind(
        name="flip-file",
        targets=("plan-0", "plan-1"),
        lasts=(0.0, 0.0),
        weight=1,
        follow=tuple(("kill", node) for node in NODES),
        about="the same of the plan that a node keeps",
    ),
    Kind(name="flush", targets=("bus",), lasts=(0.0, 0.0), weight=3, about="FLUSHALL"),
    Kind(
        name="full",
        targets=("bus",),
        lasts=(1.0, 3.0),
        weight=3,
        about="maxmemory is less than what Redis holds",
    ),
    Kind(
        name="disk-full",
        targets=("publication",),
        lasts=(0.5, 2.0),
        weight=3,
        about="the file system of the publication has no room",
    ),
    Kind(
        name="busy-cpu",
        targets=("",),
        lasts=(1.0, 3.0),
        weight=3,
        amounts=(1, 4),
        about="so many processes a core do nothing but count",
    ),
    Kind(
        name="busy-disk",
        targets=("",),
        lasts=(1.0, 3.0),
        weight=2,
        about="another process writes and syncs to the drive all the time",
    ),
    Kind(
        name="clock",
        targets=("trainer", "control", *NODES),
        lasts=(1.0, 3.0),
        weight=2,
        amounts=(-30, 30),
        about="the wall clock of a process is so many s off",
    ),
)


def kinds(without: Sequence[str] = ()) -> list[Kind]:
    """Return the kinds that can be drawn, but for those of these names."""
    return [kind for kind in _KINDS if kind.name not in without]


def _fault(rng: random.Random, kind: Kind, target: str, at_s: float) -> Fault:
    least, most = kind.amounts
    return Fault(
        at_s=round(at_s, 2),
        kind=kind.name,
        target=target,
        for_s=round(rng.uniform(*kind.lasts), 2),
        amount=round(rng.uniform(least, most), 2),
    )


def draw(seed: int, without: Sequence[str] = ()) -> list[Fault]:
    """Return the faults of a round, in the order of their begin."""
    rng = random.Random(seed)
    faults = []
    for _ in range(rng.randint(1, _MAX_FAULTS)):
        # Drawn from all, so that what this machine cannot do leaves the other faults as they are.
        kind = rng.choices(_KINDS, [each.weight for each in _KINDS])[0]
        drawn = [_fault(rng, kind, rng.choice(kind.targets), rng.uniform(0.0, _WINDOW_S))]
        if kind.follow:
            name, target = rng.choice(kind.follow)
            following = next(each for each in _KINDS if each.name == name)
            drawn.append(_fault(rng, following, target, drawn[0].at_s + rng.uniform(0.0, 0.5)))
        if kind.name not in without:
            faults += drawn
    return sorted(faults, key=lambda fault: fault.at_s)
