"""Which ranks take the mean of their nets together, and when: partial all-reduce without I/O.

After a step of its own a rank takes part in one group: the members' nets become their mean, and no
other rank waits. `GroupGenerator` makes groups as ranks ask for them; `static_group` gives those of
ranks of equal speed, which need no coordinator. No sockets, clocks or threads.

The source is Prague (Luo et al., ASPLOS 2020), first named Ripples (arXiv 1909.08029): the group
generator with a lock for each worker, group buffer, group division and the filter of slow workers.
The static schedule is that of the authors' code (laekov/preduce). Connected windows are ours.
"""

import collections
import random
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MIN_EPOCH = 25
"""Groups of an epoch: any window of 50 groups has a whole one."""
_NODE_RANKS = 4  # of the static schedule
_FADE = 4
"""Times `max_lag` to which requests of a rank add up before all counts are halved.

A rank at 0.8 of the speed of others is then never behind them, and one at half of it is.
"""


class GroupError(RuntimeError):
    """A rank asks twice, or a group is done that does not run: a fault of a caller."""


class Group(NamedTuple):
    """Ranks whose nets become their mean.

    Attributes:
        number: Counts groups in the order in which they were made, from 0.
        members: The ranks, ascending; a single one keeps its net.
        serves: Those of them whose request it answers: they go on with their next step after it.
            The others wait for another group. With a group buffer: all of them.
    """

    number: int
    members: tuple[int, ...]
    serves: tuple[int, ...]


class GroupGenerator:
    """Makes groups of ranks, and says when each may begin. Used by one thread, of the coordinator.

    A rank asks after each of its steps. Groups wait in a queue for each rank, in the order in which
    they were made. A group begins when it is the first in the queues of all its members, each of
    them has asked, and none is in a group that runs. The oldest group that has not ended is the
    first everywhere, so every group begins once its members have asked: there is no deadlock.

    * Group buffer: a rank that asks takes part in the first group that was already made with it; a
      new one is made only if there is none. Without it every request makes a group of its own.
    * Group division: all ranks without a group are divided into groups at once, so that these do
      not overlap. Without it one group of random ranks is made, which may have to wait for others.
    * Filter: groups leave out a rank that asked `max_lag` times less than the one that asks; what
      is long past counts less.

    Groups are connected: an epoch ends when its groups connect all ranks that are not behind, and
    has at most half of `window` groups, since a group that joins parts is made before it would be
    too late. So the groups of any `window` following numbers connect all ranks, unless one left or
    joined within, and but for those that were `max_lag` requests behind the median when an epoch in
    it began or when it made such a group. A rank that is behind still gets a group with one that is
    not whenever it asks.

    The filter does not help who is in a group with a rank that stops: a caller that knows of it
    says so (`leave`).

    The same seed and the same calls give the same groups. Queues of a rank are bounded by the ranks
    that ask: each request makes at most one group for each rank.

    Attributes:
        size: Ranks, those that left included.
        group_size: The most members of a group; one more where a rank would be alone after a
            division, or where a group must connect others and the rank that asks is behind.
        window: Groups within which all ranks are connected: 50, or four times the least number of
            groups that connect all ranks, if that is more.
        behind: The ranks that the connection of this epoch leaves out.
        epoch: Counts epochs, from 0.
    """

    def __init__(
        self,
        size: int,
        group_size: int,
        *,
        buffer: bool = True,
        division: bool = True,
        max_lag: int = 0,
        seed: int = 0,
    ) -> None:
        """Start with all ranks present, and no group.

        Args:
            size: Ranks.
            group_size: Members of a group, at least 2.
            buffer: Whether there is a group buffer.
            division: Whether there is group division.
            max_lag: The lag of the filter; 0: none.
            seed: Seed of the groups.

        Raises:
            ValueError: `size` is below 1, `group_size` below 2 or `max_lag` below 0.
        """
        for name, value, least in (
            ("size", size, 1),
            ("group_size", group_size, 2),
            ("max_lag", max_lag, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; give {least} or more")
        self.size = size
        self.group_size = group_size
        self.behind: frozenset[int] = frozenset()
        self.epoch = -1
        self._buffer = buffer
        self._division = division
        self._max_lag = max_lag
        self._random = random.Random(seed)
        self._epoch_groups = max(_MIN_EPOCH, 2 * -(-(size - 1) // (group_size - 1)))
        self.window = 2 * self._epoch_groups
        self._number = 0
        self._present = set(range(size))
        self._requests = [0.0] * size
        self._asks = [False] * size
        self._queues: list[collections.deque[Group]] = [collections.deque() for _ in range(size)]
        self._running: list[Group | None] = [None] * size  # the lock of each rank
        self._begin_epoch()

    def request(self, rank: int) -> list[Group]:
        """A rank has ended its step and asks for its next group.

        Returns:
            The groups that begin now, oldest first. The rank goes on when one that serves it is
            done.

        Raises:
            GroupError: There is no such rank, it left, or its last request is not answered yet.
        """
        self._check_present(rank)
        if self._asks[rank]:
            raise GroupError(f"rank {rank} asks for a group, and its last one is not done")
        self._asks[rank] = True
        self._count(rank)
        if not (self._buffer and self._queues[rank]):
            self._make_groups(rank)
        return self._begin_groups([rank])

    def done(self, group: Group) -> list[Group]:
        """All members of a running group have ended it, or given it up.

        Returns:
            The groups that begin now, oldest first.

        Raises:
            GroupError: It does not run.
        """
        if self._running[group.members[0]] != group:
            raise GroupError(f"group {group.number} of ranks {group.members} does not run")
        for rank in group.members:
            self._running[rank] = None
            self._queues[rank].popleft()
            if rank in group.serves:
                self._asks[rank] = False
        return self._begin_groups(group.members)

    def leave(self, rank: int) -> list[Group]:
        """A rank stopped, was lost or has nothing more to learn from: nobody waits for it.

        Groups that have not begun go on without it. One that runs stays locked until it is `done`.

        Returns:
            The groups that begin now, oldest first.

        Raises:
            GroupError: There is no such rank, or it left before.
        """
        self._check_present(rank)
        self._present.remove(rank)
        self._asks[rank] = False
        running = self._running[rank]
        touched = {rank}
        for group in [group for group in self._queues[rank] if group != running]:
            rest = Group(
                group.number,
                tuple(member for member in group.members if member != rank),
                tuple(member for member in group.serves if member != rank),
            )
            for member in rest.members:
                queue = self._queues[member]
                queue[queue.index(group)] = rest
                touched.add(member)
            self._queues[rank].remove(group)
        self._begin_epoch()
        # Without a group buffer a group may be left that serves nobody: its members still hold it.
        return self._begin_groups(sorted(touched))

    def join(self, rank: int) -> None:
        """A rank that left takes part again; it counts as one of median speed from now on.

        Raises:
            GroupError: There is no such rank, it is present, or a group that it left still runs.
        """
        if not 0 <= rank < self.size or rank in self._present or self._running[rank]:
            raise GroupError(f"rank {rank} joins: it is no rank that left, or its group still runs")
        if self._present:
            self._requests[rank] = statistics.median(self._requests[r] for r in self._present)
        self._present.add(rank)
        self._begin_epoch()

    def waits_for(self) -> set[int]:
        """Return the ranks that have not asked, and that a rank waits for that has."""
        heads = [self._queues[rank][0] for rank in self._present if self._asks[rank]]
        return {rank for group in heads for rank in group.members if not self._asks[rank]}

    def _check_present(self, rank: int) -> None:
        if rank not in self._present:
            raise GroupError(f"rank {rank} is not one of those present: {sorted(self._present)}")

    def _count(self, rank: int) -> None:
        """Count a request; all counts are halved now and then, so that what is long past fades.

        Else a rank that once stood still for some steps would be behind for ever.
        """
        self._requests[rank] += 1
        if self._max_lag and self._requests[rank] > _FADE * self._max_lag:
            self._requests = [count / 2 for count in self._requests]

    def _begin_groups(self, ranks: Iterable[int]) -> list[Group]:
        """Lock and return the groups at the head of these ranks' queues that may begin."""
        began: dict[int, Group] = {}
        for rank in ranks:
            if not self._queues[rank]:
                continue
            group = self._queues[rank][0]
            if group.number not in began and all(
                self._asks[member]
                and self._running[member] is None
                and self._queues[member][0] == group
                for member in group.members
            ):
                began[group.number] = group
                for member in group.members:
                    self._running[member] = group
        return [began[number] for number in sorted(began)]

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self._left = self._epoch_groups
        present = sorted(self._present)
        self._core = present
        self._parts = {rank: rank for rank in present}  # a forest: parents, roots their own
        self.behind = frozenset()
        self._leave_out_behind()

    def _leave_out_behind(self) -> None:
        """Ask no more of the epoch than to connect the ranks that are not behind now."""
        if self._max_lag and self._core:
            median = statistics.median(self._requests[rank] for rank in self._present)
            self.behind |= {
                rank for rank in self._core if median - self._requests[rank] >= self._max_lag
            }
            self._core = [rank for rank in self._core if rank not in self.behind]
        self._part_count = len({self._part(rank) for rank in self._core})

    def _part(self, rank: int) -> int:
        while (parent := self._parts[rank]) != rank:
            self._parts[rank] = self._parts[parent]
            rank = parent
        return rank

    def _make_groups(self, asking: int) -> None:
        """Make the group of a rank that has none, and with division those of others without one."""
        if asking not in self.behind:
            groups = self._divide(asking) if self._division else [self._draw(asking)]
        else:
            groups = [self._draw(asking, free=True)]
        if self._left - len(groups) < self._groups_needed():
            self._leave_out_behind()
            groups = [self._bridge(asking)]
        for members in groups:
            self._append(tuple(sorted(members)), asking)

    def _groups_needed(self) -> int:
        return -(-(self._part_count - 1) // (self.group_size - 1))

    def _append(self, members: tuple[int, ...], asking: int) -> None:
        serves = members if self._buffer else tuple({asking}.intersection(members))
        group = Group(self._number, members, serves)
        self._number += 1
        for rank in members:
            self._queues[rank].append(group)
        roots = {self._part(rank) for rank in members}
        first = min(roots)
        for root in roots:
            self._parts[root] = first
        self._part_count = len({self._part(rank) for rank in self._core})
        self._left -= 1
        if self._part_count <= 1:
            self._begin_epoch()
        assert self._left >= self._groups_needed(), "an epoch has too few groups left"

    def _is_near(self, rank: int, asking: int) -> bool:
        lag = self._requests[asking] - self._requests[rank]
        return not self._max_lag or lag < self._max_lag

    def _divide(self, asking: int) -> list[list[int]]:
        """Divide the ranks without a group; one that would be alone goes to the last group.

        It would else have a group with a rank that has one before it, and wait for both.
        """
        others = [
            rank
            for rank in self._core
            if rank != asking and not self._queues[rank] and self._is_near(rank, asking)
        ]
        if not others:
            return [self._draw(asking)]
        self._random.shuffle(others)
        ranks, each = [asking, *others], self.group_size
        groups = [ranks[at : at + each] for at in range(0, len(ranks), each)]
        if len(groups[-1]) == 1:
            alone = groups.pop()
            groups[-1] += alone
        return groups

    def _draw(self, asking: int, *, free: bool = False) -> list[int]:
        """Return a group of random ranks; `free`: of those that have none, as far as there are.

        With division all others have a group: the rank meets one with the fewest.
        """
        others = [rank for rank in self._core if rank != asking and self._is_near(rank, asking)]
        self._random.shuffle(others)
        most = self.group_size - 1
        if free or self._division:
            others.sort(key=lambda rank: len(self._queues[rank]))
            most = max(1, min(most, sum(not self._queues[rank] for rank in others)))
        return [asking, *others[:most]]

    def _bridge(self, asking: int) -> list[int]:
        """Return a group that joins as many parts as it can: one rank of each, the freest."""
        ranks = self._core.copy()
        self._random.shuffle(ranks)
        ranks.sort(key=lambda rank: len(self._queues[rank]))
        group = [asking]
        joined = {self._part(asking)}
        most = self.group_size - (asking in self._core)
        for rank in ranks:
            if most and (part := self._part(rank)) not in joined:
                group.append(rank)
                joined.add(part)
                most -= 1
        return group


def static_group(step: int, rank: int, size: int) -> tuple[int, ...]:
    """Return the ranks that a rank meets after a step, itself among them, ascending.

    The schedule of ranks of equal speed, by nodes of four ranks: in turn the first of each node
    meet, all of each node, the second of each node, all of each node; while those of different
    nodes meet, two others of each node do. All members get the same answer, any four following
    steps connect all ranks. A pure function, for any thread; laekov/preduce has it.

    Args:
        step: From 0 on; the same at all ranks.
        rank: Below `size`.
        size: Ranks, any number; the last node may have fewer.
    """
    node, place = divmod(rank, _NODE_RANKS)
    phase = step % 4
    if phase % 2:
        return _node_places(node, range(_NODE_RANKS), size)
    across = phase // 2
    if place == across:
        return tuple(range(across, size, _NODE_RANKS))
    pair = (2, 3) if phase == 0 else (0, 3)
    return _node_places(node, pair, size) if place in pair else (rank,)


def _node_places(node: int, places: Sequence[int], size: int) -> tuple[int, ...]:
    ranks = (node * _NODE_RANKS + place for place in places)
    return tuple(rank for rank in ranks if rank < size)
