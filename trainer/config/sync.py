"""How the ranks of a run bring the dense net's gradients, or their nets, together.

A strategy is a frozen class. `AllReduce` and `DCT` are synchronous: all ranks take every step
together. `AsynchronousSync` names the others, whose ranks need not be at the same step.
"""

import ast
import dataclasses
import math
import types
from collections.abc import Iterable, Mapping
from typing import Literal

from embertide.trainer.config.choices import check_choice
from embertide.trainer.errors import ConfigurationError

GradientValues = Literal["fp32", "fp16"]
GroupSchedule = Literal["generated", "static"]
RING = "ring"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce:
    """Every step adds up the gradients of all ranks; all end it with the same net.

    Attributes:
        values: The type of gradients on their way: "fp32"; or "fp16", half the bytes, which rounds
            them.
    """

    strategy: Literal["all_reduce"] = dataclasses.field(default="all_reduce", init=False)
    values: GradientValues = "fp32"

    def __post_init__(self) -> None:
        """Refuse values that do not exist."""
        check_choice("AllReduce: values", self.values, GradientValues)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DCT:
    """As `AllReduce`, of the largest gradients alone; the others are added to later steps' ones.

    Attributes:
        density: The share of gradients that a rank sends in a step, more than 0. With 1 all of them
            travel, as with `AllReduce`. None: 0.016 / ranks, less than a hundredth of all-reduce's
            bytes in fp32.
        whole_steps: The first so many steps are those of `AllReduce()`: a new net learns most of
            what it knows in few steps, and loses quality if these are made of large gradients.
        refresh_every: Steps from one choice of each tensor's threshold to the next. The first ones
            are at steps 1, 2, 4 and so on up to 512 after the whole ones.
        values: The type of gradients on their way: "fp16", or "fp32". The rounding is kept for
            later steps.
        error_feedback: Whether what does not travel is added to the gradients of the next step.
            Without it quality is lost; it can be switched off to measure that.
    """

    strategy: Literal["dct"] = dataclasses.field(default="dct", init=False)
    density: float | None = None
    whole_steps: int = 400
    refresh_every: int = 1000
    values: GradientValues = "fp16"
    error_feedback: bool = True

    def __post_init__(self) -> None:
        """Refuse a density that sends nothing, or more than there is."""
        given = self.density
        if given is not None and not (math.isfinite(given) and 0 < given <= 1):
            raise ValueError(
                f"DCT: density is {self.density}; give a share above 0, and at most 1, which sends"
                " all gradients"
            )
        _check_least("DCT", "whole_steps", self.whole_steps, 0)
        _check_least("DCT", "refresh_every", self.refresh_every, 1)
        check_choice("DCT: values", self.values, GradientValues)

    def density_of(self, ranks: int) -> float:
        """Return the share of so many ranks.

        A gradient takes 4 bytes, its position among them, to each of the others; of all-reduce each
        takes 8 (R - 1) / R. So R ranks send 2 / (R density) times fewer bytes, before headers.
        """
        return min(1.0, 0.016 / ranks) if self.density is None else self.density


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AsynchronousSync:
    """The settings of all strategies whose ranks need not be at the same step.

    Attributes:
        max_row_staleness: Batches whose gradients may come between the time when a batch reads its
            rows and its own. With 0 one batch is learned after the other.
        max_batches_apart: Batches by which the rank that is ahead and the one behind may differ.

    While a rank that is k times slower than N - 1 others learns a batch, these learn k (N - 1).
    With less of either bound they wait for it.
    """

    max_row_staleness: int = 64
    max_batches_apart: int = 64

    def __post_init__(self) -> None:
        """Refuse bounds below the least."""
        name = type(self).__name__
        _check_least(name, "max_row_staleness", self.max_row_staleness, 0)
        _check_least(name, "max_batches_apart", self.max_batches_apart, 1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartialAllReduce(AsynchronousSync):
    """Groups of a few ranks take the mean of their nets, so that no rank waits for all others.

    Attributes:
        group_size: Ranks of a group: 2 or 3 suit few ranks.
        schedule: "generated": groups are made as ranks ask for them. "static": who meets whom
            follows from the step alone, which suits ranks of equal speed.
        buffer: Whether a rank that asks gets a group that was already made with it, if there is
            one. It is part of what keeps fast ranks going; without it, to measure that.
        division: Whether all ranks that have no group are divided into groups at once, so that
            these do not overlap.
        max_lag: A rank that has asked so many times less than the one that asks is left out of
            its groups; 0: none is left out.
    """

    strategy: Literal["partial_all_reduce"] = dataclasses.field(
        default="partial_all_reduce", init=False
    )
    group_size: int = 2
    schedule: GroupSchedule = "generated"
    buffer: bool = True
    division: bool = True
    max_lag: int = 4

    def __post_init__(self) -> None:
        """Refuse groups that mix nothing."""
        AsynchronousSync.__post_init__(self)
        _check_least("PartialAllReduce", "group_size", self.group_size, 2)
        _check_least("PartialAllReduce", "max_lag", self.max_lag, 0)
        check_choice("PartialAllReduce: schedule", self.schedule, GroupSchedule)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hop(AsynchronousSync):
    """Each rank takes the mean of its net and its neighbours' on a fixed graph.

    Attributes:
        graph: "ring": a rank sends to the one before it and to the one after it. Or pairs of
            ranks (from, to), as ((0, 1), (1, 2), (2, 0)); every rank must be reached from every
            other. Each rank also has its own net, which is not named.
        max_ig: Tokens of a pair: iterations that a rank may be ahead of one that it hears from.
        backup: Nets of neighbours that a rank does not wait for in each iteration.
        staleness: Iterations by which a neighbour's net may be older than the rank's own.
        max_jump: Iterations that a rank far behind may skip at once; 0: none.
    """

    strategy: Literal["hop"] = dataclasses.field(default="hop", init=False)
    graph: str | tuple[tuple[int, int], ...] = RING
    max_ig: int = 4
    backup: int = 0
    staleness: int = 0
    max_jump: int = 0

    def __post_init__(self) -> None:
        """Refuse a graph on which what one rank learns does not reach all."""
        AsynchronousSync.__post_init__(self)
        _check_least("Hop", "max_ig", self.max_ig, 1)
        for name in ("backup", "staleness", "max_jump"):
            _check_least("Hop", name, getattr(self, name), 0)
        if isinstance(self.graph, str):
            check_choice("Hop: graph", self.graph, Literal["ring"], " or pairs of ranks (from, to)")
            return
        edges = tuple((int(a), int(b)) for a, b in self.graph)
        object.__setattr__(self, "graph", edges)
        _check_graph(edges)
        self._check_backup(edges)

    def _check_backup(self, edges: Iterable[tuple[int, int]]) -> None:
        least = min(_count_ends(edges, 1).values())
        if self.backup >= least:
            raise ValueError(
                f"Hop: backup is {self.backup}, and a rank of the graph hears from {least} others:"
                " give less than that, or a graph with more edges"
            )

    def edges(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """Return the graph's edges (from, to) among so many ranks, in order, without self-loops.

        Raises:
            ConfigurationError: The graph is of another number of ranks.
        """
        if self.graph == RING:
            steps = {1, ranks - 1} - {0}
            return tuple(sorted((r, (r + s) % ranks) for r in range(ranks) for s in steps))
        edges = tuple(sorted(edge for edge in self.graph if not isinstance(edge, str)))
        if (there := 1 + max(map(max, edges))) != ranks:
            raise ConfigurationError(
                f"Hop: the graph has {there} ranks, and the run has {ranks}: start as many, or give"
                f" a graph of {ranks}, as graph={RING!r}"
            )
        return edges


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGD(AsynchronousSync):
    """Each rank learns by itself; every few steps all take the mean of their nets.

    Attributes:
        every: Steps of a rank from one mean to the next.
    """

    strategy: Literal["local_sgd"] = dataclasses.field(default="local_sgd", init=False)
    every: int = 8

    def __post_init__(self) -> None:
        """Refuse no steps."""
        AsynchronousSync.__post_init__(self)
        _check_least("LocalSGD", "every", self.every, 1)


Sync = AllReduce | DCT | PartialAllReduce | Hop | LocalSGD

STRATEGIES: Mapping[str, type[Sync]] = types.MappingProxyType(
    {
        "all_reduce": AllReduce,
        "dct": DCT,
        "partial_all_reduce": PartialAllReduce,
        "hop": Hop,
        "local_sgd": LocalSGD,
    }
)
"""By the name that `strategy` has, which checkpoints and `--sync` name them by."""


def check_sync(sync: object) -> None:
    """Refuse what is no strategy.

    Raises:
        ValueError: It is not one of `STRATEGIES`.
    """
    if not isinstance(sync, Sync):
        names = ", ".join(f"{kind.__name__}()" for kind in STRATEGIES.values())
        raise ValueError(f"sync is {sync!r}; use one of {names}")


def check_ranks(sync: Sync, ranks: int) -> None:
    """Refuse a strategy that the ranks of a run are too few for, or that is of other ranks.

    Raises:
        ConfigurationError: The message names the strategy, the ranks and what would do.
    """
    least = 1
    if isinstance(sync, PartialAllReduce):
        least = sync.group_size
    elif isinstance(sync, Hop):
        least = 2
    if ranks < least:
        raise ConfigurationError(
            f"sync is {type(sync).__name__}, whose groups need {least} ranks or more, and the run"
            f" has {ranks}: start {least} (--nproc {least}), or use AllReduce()"
        )
    if isinstance(sync, Hop):
        edges = sync.edges(ranks)
        try:
            sync._check_backup(edges)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error


def parse_sync(text: str) -> Sync:
    """Return the strategy that an option names, as "dct" or "dct:density=0.01,values=fp32".

    Raises:
        ValueError: There is no such strategy or setting, or it refuses the value.
    """
    name, colon, rest = text.partition(":")
    kind = STRATEGIES.get(name.replace("-", "_"))
    if kind is None:
        raise ValueError(f"sync is {name!r}; use one of {', '.join(STRATEGIES)}")
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    given: dict[str, object] = {}
    for word in rest.split(",") if colon else ():
        setting, equals, value = word.partition("=")
        if setting not in known or not equals:
            raise ValueError(
                f"sync {name}: {word!r} is no setting; write NAME=VALUE with one of"
                f" {', '.join(known)}"
            )
        given[setting] = _plain(value)
    try:
        return kind(**given)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"sync {text}: {error}; give numbers and words") from error


_WORDS = {"true": True, "false": False}


def _plain(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value


def _check_least(kind: str, name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{kind}: {name} is {value!r}; give {least} or more")


def _count_ends(edges: Iterable[tuple[int, int]], end: int) -> dict[int, int]:
    counts: dict[int, int] = {}
    for edge in edges:
        counts[edge[end]] = counts.get(edge[end], 0) + 1
    return counts


def _check_graph(edges: tuple[tuple[int, int], ...]) -> None:
    """Refuse edges that do not connect all ranks in both directions.

    Raises:
        ValueError: A rank is named below 0, in a loop or twice, or one does not reach another.
    """
    if not edges:
        raise ValueError(f"Hop: graph has no edges; give pairs of ranks (from, to), or {RING!r}")
    for edge in edges:
        if min(edge) < 0 or edge[0] == edge[1] or edges.count(edge) > 1:
            raise ValueError(
                f"Hop: graph has the edge {edge}; give two different ranks, from 0 on, once"
            )
    ranks = 1 + max(map(max, edges))
    for what, source, target in (("is not reached from", 0, 1), ("does not reach", 1, 0)):
        reached, fresh = {0}, {0}
        while fresh:
            fresh = {edge[target] for edge in edges if edge[source] in fresh} - reached
            reached |= fresh
        if missing := sorted(set(range(ranks)) - reached):
            raise ValueError(
                f"Hop: graph is not connected: rank {missing[0]} {what} rank 0; add edges until"
                f" every rank of 0 to {ranks - 1} reaches every other, or use {RING!r}"
            )
