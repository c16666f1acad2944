"""A virtual clock on which ranks run the strategies' protocol code: what each would do a second.

Ranks have compute times and links have costs; groups, nets and tokens are those of the code that
ships (trainer/sync/groups.py, trainer/sync/hop.py). Where a model is given, ranks learn with it.
"""

import dataclasses
import functools
import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

from embertide.trainer.sync import hop
from embertide.trainer.sync.groups import Group, GroupGenerator, static_group

Compute = Callable[[int, random.Random], float]
"""Seconds of a rank's next step."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The cost of messages, in seconds.

    Attributes:
        latency: Seconds of a message, however short.
        transfer: Seconds of a net, once over a link.
    """

    latency: float = 0.0005
    transfer: float = 0.15

    def mean(self, members: int) -> float:
        """Return what it takes a group to get its mean: a ring all-reduce."""
        steps = 2 * (members - 1)
        return steps * self.latency + steps / members * self.transfer


class Learning:
    """The learning of ranks on the clock; this one learns nothing."""

    def begin(self, rank: int) -> bool:
        """A rank takes a batch and computes with its net as it is; False: there is none left."""
        return True

    def give(self, ranks: Sequence[int]) -> None:
        """Ranks ended computing: their gradients of rows are applied."""

    def step(self, ranks: Sequence[int]) -> None:
        """Ranks take a step of their nets with what they computed."""

    def mean(self, ranks: Sequence[int]) -> None:
        """Ranks set their nets to the mean of these."""

    def net(self, rank: int) -> Any:
        """Return a rank's net, to send."""

    def mix(self, rank: int, own: float, parts: Sequence[tuple[float, Any]]) -> None:
        """A rank sets its net to a weighted mean of its own and others."""


@dataclasses.dataclass(kw_only=True)
class Clock:
    """Ranks on a virtual clock. Each method runs one strategy from time 0, and may be called once.

    Attributes:
        ranks: The number of ranks.
        compute: The compute time of each step.
        link: Between any two ranks.
        until: Seconds at which it stops.
        seed: Seed of compute times.
        learning: The learning of the ranks.
    """

    ranks: int
    compute: Compute
    link: Link = dataclasses.field(default_factory=Link)
    until: float = 200.0
    seed: int = 1
    learning: Learning = dataclasses.field(default_factory=Learning)

    def __post_init__(self) -> None:
        """Stand at time 0."""
        self.steps = [0] * self.ranks
        self.now = 0.0
        self.groups: list[int] = []  # sizes
        self._late = 0
        self._random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def rate(self) -> float:
        """Batches a second of all ranks together."""
        return sum(self.steps) / min(self.now, self.until)

    @property
    def late_rate(self) -> float:
        """The same in the second half of the time, of groups as ranks ask and of Hop."""
        return 2 * self._late / self.until

    def _end_step(self, rank: int) -> None:
        self.steps[rank] += 1
        self._late += self.now > self.until / 2

    def _at(self, after: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + after, self._count, act))

    def _run(self) -> None:
        while self._events and self._events[0][0] <= self.until:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def _begin(self, rank: int, then: Callable[[], None]) -> bool:
        """Let a rank compute; `then` follows. False: no batch is left."""
        if not self.learning.begin(rank):
            return False
        self._at(self.compute(rank, self._random), then)
        return True

    def all_reduce(self, *, rows_apart: bool = False) -> "Clock":
        """Every step waits for all ranks; `rows_apart`: rows take a step for each rank's gradients.

        Without it they take one with the sum of all.
        """
        everyone = range(self.ranks)
        while self.now < self.until:
            if not all(self.learning.begin(rank) for rank in everyone):
                break  # the events end with a step of all
            slowest = max(self.compute(rank, self._random) for rank in everyone)
            self.now += slowest + self.link.mean(self.ranks)
            for ranks in [[rank] for rank in everyone] if rows_apart else [everyone]:
                self.learning.give(ranks)
            self.learning.step(everyone)
            self.learning.mean(everyone)
            self.steps = [steps + 1 for steps in self.steps]
        return self

    def local_sgd(self, every: int) -> "Clock":
        """Ranks take a batch when they are free; after `every` for each all take the mean."""
        everyone = range(self.ranks)
        left = True
        while left and self.now < self.until:
            free = [(self.now, rank) for rank in everyone]
            for _ in range(every * self.ranks):
                begins, rank = free[0]
                left = left and begins < self.until and self.learning.begin(rank)
                if left:
                    heapq.heapreplace(free, (begins + self.compute(rank, self._random), rank))
                    self.learning.give([rank])
                    self.learning.step([rank])
                    self.steps[rank] += 1
            self.now = max(free)[0] + self.link.mean(self.ranks)
            self.learning.mean(everyone)
        return self

    def partial_all_reduce(self, group_size: int, **options: Any) -> "Clock":
        """Groups as ranks ask for them; options are those of `GroupGenerator`."""
        groups = GroupGenerator(self.ranks, group_size, **options)

        def compute(rank: int) -> None:
            if not self._begin(rank, lambda: computed(rank)):
                begin_groups(groups.leave(rank))

        def computed(rank: int) -> None:
            self.learning.give([rank])
            self.learning.step([rank])
            self._end_step(rank)
            self._at(self.link.latency, lambda: begin_groups(groups.request(rank)))

        def begin_groups(begun: Sequence[Group]) -> None:
            for group in begun:
                self.groups.append(len(group.members))
                # The coordinator's answer, the mean, and the report that it is done.
                takes = self.link.latency + self.link.mean(len(group.members))
                self._at(takes, functools.partial(done, group))

        def done(group: Group) -> None:
            self.learning.mean(group.members)
            begun = groups.done(group)
            for rank in group.serves:
                compute(rank)
            begin_groups(begun)

        for rank in range(self.ranks):
            compute(rank)
        self._run()
        return self

    def static(self) -> "Clock":
        """Groups by the static schedule."""
        arrived: dict[tuple[int, tuple[int, ...]], int] = {}

        def compute(rank: int) -> None:
            self._begin(rank, lambda: computed(rank))

        def computed(rank: int) -> None:
            self.learning.give([rank])
            self.learning.step([rank])
            step = self.steps[rank]
            self.steps[rank] += 1
            members = static_group(step, rank, self.ranks)
            arrived[step, members] = arrived.get((step, members), 0) + 1
            if arrived[step, members] == len(members):
                del arrived[step, members]
                self._at(self.link.mean(len(members)), lambda: done(members))

        def done(members: tuple[int, ...]) -> None:
            self.learning.mean(members)
            for rank in members:
                compute(rank)

        for rank in range(self.ranks):
            compute(rank)
        self._run()
        return self

    def hop(self, edges: Sequence[tuple[int, int]], **options: int) -> "Clock":
        """Hop on a graph; options are those of `HopWorker`."""
        workers = [hop.HopWorker[Any](rank, edges, **options) for rank in range(self.ranks)]

        def act(rank: int, actions: Sequence[hop.Action[Any]]) -> None:
            for action in actions:
                if isinstance(action, hop.Compute):
                    self._begin(rank, lambda: computed(rank))
                elif isinstance(action, hop.Reduce):
                    self.learning.mix(rank, action.own, action.parts)
                    if action.with_gradient:
                        self.learning.step([rank])
                elif isinstance(action, hop.SendTokens):
                    for to in action.to:
                        arrives = functools.partial(token, rank, to, action.tokens)
                        self._at(self.link.latency, arrives)
                else:
                    send(rank, action)

        def send(rank: int, sent: hop.SendUpdate) -> None:
            net = self.learning.net(rank)
            for place, to in enumerate(sent.to, 1):
                takes = self.link.latency + place * self.link.transfer
                self._at(takes, functools.partial(update, rank, to, sent, net))

        def token(rank: int, to: int, count: int) -> None:
            act(to, workers[to].receive_tokens(rank, count))

        def update(rank: int, to: int, sent: hop.SendUpdate, net: Any) -> None:
            act(to, workers[to].update(rank, sent.iteration, sent.skipped, net))

        def computed(rank: int) -> None:
            self.learning.give([rank])
            self._end_step(rank)
            act(rank, workers[rank].gradient_done())

        for rank, worker in enumerate(workers):
            act(rank, worker.start())
        self._run()
        return self


def ring(ranks: int) -> list[tuple[int, int]]:
    """Return the edges of a ring in both directions."""
    steps = {1, ranks - 1}
    return sorted((rank, (rank + step) % ranks) for rank in range(ranks) for step in steps)


def equal(rank: int, choose: random.Random) -> float:
    """1 s, within 10 %."""
    return choose.uniform(0.9, 1.1)


def one_slow(times: float) -> Compute:
    """Return times of which those of the first rank are so many times longer."""
    return lambda rank, choose: equal(rank, choose) * (times if rank == 0 else 1)


def random_slow(rank: int, choose: random.Random) -> float:
    """Each step takes six times as long with a chance of an eighth."""
    return equal(rank, choose) * (6 if choose.random() < 1 / 8 else 1)
