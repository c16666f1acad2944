"""Decentralised averaging with bounded gaps: what a rank may do next, without I/O.

Each rank has a net of its own and neighbours on a fixed graph. In an iteration it sends its net to
those that hear from it, computes a gradient, and takes the mean of its own net and of those that it
hears from. No sockets, clocks or threads: events go in, actions come out.

The source is Hop (Luo et al., ASPLOS 2019, arXiv 1902.01064): update queues, token queues, backup
workers, bounded staleness, skipping iterations. What is ours: a net says which iterations before it
were skipped, so that nobody waits for those; and a rank that skips waits for no net.

An edge (i, j) means that i sends its net to j. Each rank also has a self-loop, which is not named:
its own net is a part of every mean and is in no queue. trainer/config/sync.py checks graphs.

With len(i, j) the edges of the shortest path from i to j, and every iteration counted from its
start, at any moment

    Iter(i) - Iter(j) <= min((staleness + 1) * len(j, i), max_ig * len(i, j))

and with backup workers only the second part of it. The bounds hold in any order of messages, and
skipping keeps them.
"""

from collections.abc import Iterable
from typing import Generic, Literal, NamedTuple, TypeVar, cast

Payload = TypeVar("Payload")
State = Literal["start", "gradient", "updates", "tokens"]
_SKIPPED = object()


class ProtocolError(RuntimeError):
    """A message or event that the protocol rules out: a fault of a caller or of another rank."""


class SendUpdate(NamedTuple):
    """Send this rank's net, as it is now.

    Attributes:
        to: The ranks.
        iteration: That it begins.
        skipped: Iterations just before it that this rank skipped: it sends no net of those.
    """

    to: tuple[int, ...]
    iteration: int
    skipped: int


class SendTokens(NamedTuple):
    """Send a number of tokens to each of some ranks."""

    to: tuple[int, ...]
    tokens: int


class Compute(NamedTuple):
    """Compute a gradient of the net as it is now, then call `gradient_done`."""

    iteration: int


class Reduce(NamedTuple, Generic[Payload]):
    """Set the net to a weighted mean of itself and others' nets.

    Attributes:
        iteration: That it ends, or that is begun after it.
        own: The weight of this rank's net.
        parts: Weights and nets of others. All weights add up to 1.
        with_gradient: Whether the step with the gradient of this iteration is taken, after the
            mean. Otherwise the rank skips iterations, and its net is refreshed.
    """

    iteration: int
    own: float
    parts: tuple[tuple[float, Payload], ...]
    with_gradient: bool


Action = SendUpdate | SendTokens | Compute | Reduce[Payload]


class UpdateQueue(Generic[Payload]):
    """Nets that arrived and are not used yet, by sender and iteration. Used by one thread.

    It holds at most 1 + `max_ig` nets of a sender: those of the iterations from this rank's own
    one on. With staleness it holds the newest of each sender alone, which stays for later means.
    """

    def __init__(
        self, senders: Iterable[int], *, max_ig: int, backup: int = 0, staleness: int = 0
    ) -> None:
        """Start empty.

        Args:
            senders: Other ranks that this one hears from.
            max_ig: Tokens of a pair.
            backup: The number of senders that are not waited for.
            staleness: Iterations that a net may be older.
        """
        self._nets: dict[int, dict[int, object]] = {sender: {} for sender in senders}
        self._most = 1 + max_ig
        self._backup = backup
        self._staleness = staleness
        self._first = 0  # nets of earlier iterations are late, and dropped

    @property
    def size(self) -> int:
        """The number of nets that it holds."""
        return sum(net is not _SKIPPED for nets in self._nets.values() for net in nets.values())

    @property
    def capacity(self) -> int:
        """The most that it can hold: (1 + max_ig) for each sender."""
        return self._most * len(self._nets)

    def put(self, sender: int, iteration: int, skipped: int, net: Payload) -> None:
        """Take in a net; one that comes too late is dropped.

        Raises:
            ProtocolError: Not from a sender, or beyond what a sender may be ahead.
        """
        if sender not in self._nets:
            raise ProtocolError(f"a net came from rank {sender}, which does not send to this one")
        nets = self._nets[sender]
        if self._staleness:
            if not nets or iteration > max(nets):
                nets.clear()
                nets[iteration] = net
            return
        for each in range(max(iteration - skipped, self._first), iteration):
            nets[each] = _SKIPPED
        if iteration >= self._first:
            nets[iteration] = net
        if len(nets) > self._most:
            raise ProtocolError(
                f"rank {sender} has {len(nets)} nets here, and {self._most} are allowed: it is"
                " further ahead than its tokens let it be"
            )

    def is_ready(self, iteration: int) -> bool:
        """Whether enough of an iteration came: of all senders but the backup workers.

        A sender that skipped it counts as one that sent it.
        """
        missing = 0
        if self._staleness:
            oldest = iteration - self._staleness
            for nets in self._nets.values():
                missing += not nets or max(nets) < oldest
        else:
            for nets in self._nets.values():
                missing += iteration not in nets
        return missing <= self._backup

    def read(self, iteration: int) -> list[tuple[int, Payload]]:
        """Return weights, not normalised, and nets for the mean of an iteration: all that came.

        With staleness the net of the iteration itself has the weight `staleness` + 1, an older one
        less by its age, a newer one more. Without, all weigh the same.
        """
        if self._staleness:
            oldest = iteration - self._staleness
            weighted = (
                (at - oldest + 1, net) for nets in self._nets.values() for at, net in nets.items()
            )
        else:
            weighted = ((1, nets.get(iteration, _SKIPPED)) for nets in self._nets.values())
        return [
            (weight, cast(Payload, net))
            for weight, net in weighted
            if weight > 0 and net is not _SKIPPED
        ]

    def drop_before(self, iteration: int) -> None:
        """Drop nets of earlier iterations, those too that come later; with staleness, none."""
        self._first = iteration
        if not self._staleness:
            for nets in self._nets.values():
                for late in [each for each in nets if each < iteration]:
                    del nets[late]


class TokenQueues:
    """This rank's tokens from each rank that hears from it. Used by one thread.

    The paper keeps the queue at the rank that puts tokens in. Here these are sent at once and
    counted where they are taken, which gives the same counts, later by a message at most.
    """

    def __init__(self, sources: Iterable[int], max_ig: int) -> None:
        """Start with `max_ig` tokens from each."""
        self._counts = dict.fromkeys(sources, max_ig)

    @property
    def least(self) -> int:
        """Tokens from the rank with the fewest."""
        return min(self._counts.values())

    def put(self, source: int, count: int) -> None:
        """Take in tokens.

        Raises:
            ProtocolError: Not from a rank that hears from this one.
        """
        if source not in self._counts:
            raise ProtocolError(
                f"tokens came from rank {source}, which does not hear from this one"
            )
        self._counts[source] += count

    def take(self, count: int) -> None:
        """Take out a number of tokens from each; there are as many."""
        for source in self._counts:
            self._counts[source] -= count


class HopWorker(Generic[Payload]):
    """One rank's part in the protocol. Used by one thread.

    Each event returns actions, to be done in their order. After `Compute` the rank computes, and
    may take in messages meanwhile; it calls `gradient_done` when it is done.

    Attributes:
        rank: This rank.
        iteration: That it is in.
        updates: Nets that arrived.
        tokens: Tokens that it has.
        skipped: Iterations that it skipped so far.
    """

    def __init__(
        self,
        rank: int,
        edges: Iterable[tuple[int, int]],
        *,
        max_ig: int,
        backup: int = 0,
        staleness: int = 0,
        max_jump: int = 0,
        first: int = 0,
    ) -> None:
        """Stand before an iteration.

        Args:
            rank: This rank.
            edges: Edges of the graph, pairs (from, to) without self-loops, which connect all ranks.
            max_ig: Iterations that a rank may be ahead of one that it sends to, at least 1.
            backup: Nets that a rank does not wait for, fewer than the others that it hears from.
            staleness: Iterations that another's net may be older than this rank's own.
            max_jump: The most iterations that it goes ahead at once; below 2: it skips none.
            first: The iteration that it begins with: the same at all ranks.

        Raises:
            ValueError: A number is below what it must be, or the rank has no neighbours.
        """
        edges = list(edges)
        self.rank = rank
        self.iteration = first
        self.skipped = 0
        self._senders = tuple(sorted({i for i, j in edges if j == rank} - {rank}))
        self._receivers = tuple(sorted({j for i, j in edges if i == rank} - {rank}))
        if not self._senders or not self._receivers:
            raise ValueError(f"rank {rank} does not both send to and hear from another rank")
        for name, value, least in (
            ("max_ig", max_ig, 1),
            ("backup", backup, 0),
            ("staleness", staleness, 0),
            ("max_jump", max_jump, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; give {least} or more")
        if backup >= len(self._senders):
            raise ValueError(
                f"backup is {backup}, and rank {rank} hears from {len(self._senders)} others; give"
                " less than that"
            )
        self.updates: UpdateQueue[Payload] = UpdateQueue(
            self._senders, max_ig=max_ig, backup=backup, staleness=staleness
        )
        self.tokens = TokenQueues(self._receivers, max_ig)
        self._max_ig = max_ig
        self._staleness = staleness
        self._max_jump = max_jump
        self._state: State = "start"

    def start(self) -> list[Action[Payload]]:
        """Begin the first iteration. Called once, before anything else but messages.

        Raises:
            ProtocolError: It has begun before.
        """
        if self._state != "start":
            raise ProtocolError(f"rank {self.rank} has begun before")
        self._state = "gradient"
        return [SendUpdate(self._receivers, self.iteration, 0), Compute(self.iteration)]

    def update(
        self, sender: int, iteration: int, skipped: int, net: Payload
    ) -> list[Action[Payload]]:
        """A net came: what `SendUpdate` says of it, and the net itself, which is kept until used.

        Raises:
            ProtocolError: See `UpdateQueue.put`.
        """
        self.updates.put(sender, iteration, skipped, net)
        return self._go_on()

    def receive_tokens(self, source: int, count: int) -> list[Action[Payload]]:
        """Tokens came.

        Raises:
            ProtocolError: See `TokenQueues.put`.
        """
        self.tokens.put(source, count)
        return self._go_on()

    def gradient_done(self) -> list[Action[Payload]]:
        """The gradient of this iteration is there.

        Raises:
            ProtocolError: None was to be computed.
        """
        if self._state != "gradient":
            raise ProtocolError(f"rank {self.rank} computes no gradient")
        self._state = "updates"
        return self._go_on()

    @property
    def waits_for(self) -> State:
        """The cause of its wait: its start, its own gradient, nets of others, or tokens."""
        return self._state

    def _go_on(self) -> list[Action[Payload]]:
        actions: list[Action[Payload]] = []
        if self._state == "updates" and self.updates.is_ready(self.iteration):
            own = self._staleness + 1
            actions.append(self._reduce(self.iteration, own, with_gradient=True))
            self.updates.drop_before(self.iteration + 1)
            self._state = "tokens"
        if self._state != "tokens" or self.tokens.least < 1:
            return actions
        target = self._choose_next()
        if target > self.iteration + 1:
            own = max(1, self.iteration + 1 - target + self._staleness + 1)
            actions.append(self._reduce(target, own, with_gradient=False))
            self.updates.drop_before(target)  # those of the target are for its own mean, too
        count = target - self.iteration
        self.tokens.take(count)
        self.skipped += count - 1
        self.iteration = target
        self._state = "gradient"
        actions += (
            SendTokens(self._senders, count),
            SendUpdate(self._receivers, target, count - 1),
            Compute(target),
        )
        return actions

    def _choose_next(self) -> int:
        """Return the next iteration: the furthest that others let it skip to, or the next one.

        All ranks that hear from it are ahead if it has more than `max_ig` tokens from each. It goes
        no further than they are, and only where the nets for a refresh have come, so that it never
        waits for a rank that may wait for it.
        """
        spare = min(self._max_jump, self.tokens.least - self._max_ig)
        for target in range(self.iteration + spare, self.iteration + 1, -1):
            if self.updates.is_ready(target) and self.updates.read(target):
                return target
        return self.iteration + 1

    def _reduce(self, iteration: int, own: int, *, with_gradient: bool) -> Reduce[Payload]:
        taken = self.updates.read(iteration)
        total = own + sum(weight for weight, _ in taken)
        parts = tuple((weight / total, net) for weight, net in taken)
        return Reduce(iteration, own / total, parts, with_gradient)
