"""Random schedules of Hop's protocol: which message arrives next, which rank ends its gradient.

What may happen next is drawn by weights that change from schedule to schedule, so that some ranks
and channels starve for long. After each event the bounds of trainer/sync/hop.py are checked for the
rank that moved. A net is its iteration, so that parts of a mean tell what they are.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from embertide.trainer.sync import hop

Edges = tuple[tuple[int, int], ...]


class Case(NamedTuple):
    """A graph and the options of all its ranks."""

    edges: Edges
    max_ig: int
    backup: int = 0
    staleness: int = 0
    max_jump: int = 0


def ring(size: int, *, both: bool = True) -> Edges:
    """Return a ring in one direction or both."""
    steps = {1, size - 1} if both else {1}
    return tuple(sorted((i, (i + step) % size) for i in range(size) for step in steps))


def lengths(edges: Edges) -> list[list[int]]:
    """Return the edges of the shortest path from each rank to each."""
    size = 1 + max(map(max, edges))
    far = [[0 if i == j else size for j in range(size)] for i in range(size)]
    for i, j in edges:
        far[i][j] = 1
    for via in range(size):
        for i in range(size):
            for j in range(size):
                far[i][j] = min(far[i][j], far[i][via] + far[via][j])
    return far


def bounds(case: Case) -> list[list[int]]:
    """Return the most that each rank may be ahead of each."""
    far = lengths(case.edges)
    ranks = range(len(far))
    most = [[case.max_ig * far[i][j] for j in ranks] for i in ranks]
    if not case.backup:
        staler = case.staleness + 1
        most = [[min(most[i][j], staler * far[j][i]) for j in ranks] for i in ranks]
    return most


def random_graph(choose: random.Random, size: int) -> Edges:
    """Return a ring in one direction and some edges more."""
    edges = set(ring(size, both=False))
    for _ in range(choose.randrange(2 * size)):
        i, j = choose.sample(range(size), 2)
        edges.add((i, j))
    return tuple(sorted(edges))


def random_case(choose: random.Random) -> Case:
    """Return a graph of 3 to 6 ranks and any options that it allows."""
    edges = random_graph(choose, choose.randint(3, 6))
    least = min(sum(j == rank for _, j in edges) for rank in range(1 + max(map(max, edges))))
    return Case(
        edges,
        max_ig=choose.choice((1, 1, 2, 3, 5)),
        backup=choose.randrange(least),
        staleness=choose.choice((0, 0, 1, 2, 4)),
        max_jump=choose.choice((0, 0, 2, 4)),
    )


class Run:
    """Ranks, and the messages on their way; `step` lets one thing happen."""

    def __init__(self, case: Case, choose: random.Random) -> None:
        self.case = case
        self.most = bounds(case)
        ranks = range(len(self.most))
        options = case._asdict()
        self.workers = [hop.HopWorker[int](rank, **options) for rank in ranks]
        self.iterations = [0] * len(ranks)
        self.skipped = 0
        self.stale = 0
        self.tight = {(i, j): 0 for i in ranks for j in ranks}
        self._choose = choose
        # The events that can happen next, and how likely each rank's and channel's turn is.
        self._messages: list[tuple[int, int, hop.SendUpdate | hop.SendTokens]] = []
        self._computing: list[int] = []
        self._slow = set(choose.sample(ranks, choose.randrange(len(ranks))))
        self._patience = choose.choice((1, 3, 20))
        for worker in self.workers:
            self._act(worker, worker.start())

    def step(self) -> bool:
        """Let one thing happen; False: nothing can, a deadlock."""
        possible = len(self._messages) + len(self._computing)
        if not possible:
            return False
        for _ in range(self._patience):
            at = int(self._choose.random() * possible)
            computes = at >= len(self._messages)
            of = self._computing[at - len(self._messages)] if computes else self._messages[at][0]
            if of not in self._slow:
                break
        if computes:
            rank = self._computing[at - len(self._messages)]
            self._computing.remove(rank)
            worker = self.workers[rank]
            self._act(worker, worker.gradient_done())
            return True
        sender, receiver, message = self._messages[at]
        self._messages[at] = self._messages[-1]
        self._messages.pop()
        worker = self.workers[receiver]
        if isinstance(message, hop.SendTokens):
            actions = worker.receive_tokens(sender, message.tokens)
        else:
            iteration = message.iteration
            actions = worker.update(sender, iteration, message.skipped, iteration)
            assert worker.updates.size <= worker.updates.capacity
        self._act(worker, actions)
        return True

    def _act(self, worker: hop.HopWorker[int], actions: Sequence[hop.Action[int]]) -> None:
        rank = worker.rank
        for action in actions:
            if isinstance(action, hop.Reduce):
                self._check_mean(worker, action)
            elif isinstance(action, hop.Compute):
                self._computing.append(rank)
                self._check_gaps(rank, action.iteration)
            else:
                self._messages += [(rank, receiver, action) for receiver in action.to]

    def _check_gaps(self, rank: int, iteration: int) -> None:
        assert iteration > self.iterations[rank] or iteration == 0
        self.skipped += max(0, iteration - self.iterations[rank] - 1)
        self.iterations[rank] = iteration
        most, tight = self.most[rank], self.tight
        for other, its in enumerate(self.iterations):
            gap = iteration - its
            if gap > 0:
                assert gap <= most[other], (
                    f"rank {rank} is {gap} ahead of {other}, and {most[other]} are allowed:"
                    f" {self.case}"
                )
                if gap > tight[rank, other]:
                    tight[rank, other] = gap

    def _check_mean(self, worker: hop.HopWorker[int], mean: hop.Reduce[int]) -> None:
        total = mean.own + sum(weight for weight, _ in mean.parts)
        assert abs(total - 1) < 1e-9
        assert mean.own > 0
        senders = sum(j == worker.rank for _, j in self.case.edges)
        # With skipping, senders that skipped an iteration sent nothing of it.
        if not self.case.max_jump:
            assert len(mean.parts) >= senders - self.case.backup
        assert len(mean.parts) <= senders
        for _, iteration in mean.parts:
            if self.case.staleness:
                assert iteration >= mean.iteration - self.case.staleness
                self.stale += iteration < mean.iteration
            else:
                assert iteration == mean.iteration


def run_schedules(seed: int, schedules: int, *, events: int = 60) -> tuple[int, int, int]:
    """Run random schedules of random cases, each from its seed.

    Returns:
        Events, iterations that were skipped, and nets older than the iteration of their mean.

    Raises:
        AssertionError: A bound does not hold, or nothing can happen; it names the seed.
    """
    total = skipped = stale = 0
    for number in range(seed, seed + schedules):
        choose = random.Random(number)
        run = Run(random_case(choose), choose)
        try:
            for _ in range(events):
                assert run.step(), f"deadlock: {run.case}"
        except (AssertionError, hop.ProtocolError) as error:
            raise AssertionError(f"schedule {number}: {error}") from error
        total += events
        skipped += run.skipped
        stale += run.stale
    return total, skipped, stale
