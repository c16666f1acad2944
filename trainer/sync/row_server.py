"""Rows that are served: any rank may read rows and add to them at any time, at their owner.

`Exchange` has all ranks exchange rows in every step together, so that each step waits for the
slowest rank. Here an owner answers each rank by itself. A rank learns a whole batch so:

    gather   keys of the batch -> their rows, from each owner
    apply    sums of the keys' gradients -> each owner takes one exact step with them

Rows change between the two: by the gradients of other ranks that come first. How many these may be
is bounded: an owner holds gradients back until the batches that read before them have been applied.
With a bound of S, every owner keeps to

    lacks(k) + k <= S      of the k-th oldest batch that has read and has not yet applied (from 0)

where lacks(k) counts the gradients applied since it read. The oldest one may always be applied, and
a batch that reads later never makes one before it wait; so nothing waits in a circle. No more than
S + 1 batches may have read at a time: who hands batches out sees to that.

A rank numbers the gradients that it sends to an owner. An owner passes over a number that it has
applied, so that gradients that come twice count once; a number that is missing is an error.

Shapes: T tables, U keys, D values of a row or a gradient.
"""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embertide import _store
from embertide.trainer.errors import TrainerError
from embertide.trainer.sync import codec
from embertide.trainer.sync.calls import Answer, Calls, empty
from embertide.trainer.sync.channel import Channel
from embertide.trainer.sync.codec import Block
from embertide.trainer.sync.exchange import Asked, BagKeys, Exchange, Floats, Keys, Lookup

_GATHER, _APPLY = "gather", "apply"
_POWERS = 11


class LostGradientsError(TrainerError):
    """An owner lacks gradients that a rank has sent: their number was passed over."""


@dataclasses.dataclass(slots=True)
class RowServerStats:
    """Counters of one owner since the start.

    Attributes:
        gathers: Batches that have read, to apply or not.
        applied: Sets of gradients that were applied, by rank.
        repeated: Sets that had been applied before and were passed over.
        holds_s: Time in which gradients were held back by the bound.
        staleness: Counts of applied sets, by how many others were applied since their batch had
            read.
    """

    gathers: int = 0
    applied: Counter[int] = dataclasses.field(default_factory=Counter)
    repeated: int = 0
    holds_s: float = 0.0
    staleness: Counter[int] = dataclasses.field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """Return them by name; of the histogram, the counts by power of two."""
        return {
            "gathers": self.gathers,
            "applied": sum(self.applied.values()),
            "repeated": self.repeated,
            "holds_s": self.holds_s,
            "staleness": by_powers(self.staleness),
        }


def by_powers(counts: Counter[int]) -> dict[str, int]:
    """Return a histogram by what its bins begin with: 0, 1, 2, 4 ... 1,024 and more."""
    bins = {str(begin): 0 for begin in (0, *(1 << power for power in range(_POWERS)))}
    for value, count in dict(counts).items():  # others may count meanwhile
        power = min(value.bit_length(), _POWERS)
        bins[str(0 if power == 0 else 1 << (power - 1))] += count
    return bins


class RowServer:
    """Serves the rows of one store. For any number of threads.

    Args:
        max_staleness: Sets of gradients that may be applied between a batch's gather and its apply.
        lookup: Looks bags up in the store.
        step: Takes a step with the gradients of bags.
    """

    def __init__(
        self,
        max_staleness: int,
        lookup: "Callable[[Sequence[_store.BagLookup]], Any]",
        step: "Callable[[Sequence[_store.BagGradients]], Any]",
    ) -> None:
        """Serve a store in which nobody else looks up or takes steps meanwhile."""
        self.stats = RowServerStats()
        self.max_staleness = max_staleness
        self._lookup, self._step = lookup, step
        self._changed = threading.Condition()
        self._open: dict[int, int] = {}  # sets applied when a batch read, by its number, oldest 1st
        self._applied = 0
        self._last: Counter[int] = Counter()  # number of the newest set applied, by rank
        self._failed: Exception | None = None

    def gather(self, batch: int, bags: "Sequence[_store.BagLookup]", *, follows: bool) -> None:
        """Look bags up; `follows`: the batch will apply gradients, or none."""
        with self._changed:
            self.stats.gathers += 1
            if follows:
                self._open[batch] = self._applied
            self._lookup(bags)

    def apply(
        self, rank: int, number: int, batch: int, bags: "Sequence[_store.BagGradients]"
    ) -> bool:
        """Take a step with a batch's gradients once the bound allows it.

        Args:
            rank: Who sends them.
            number: Number of the set, one more than that rank's before it.
            batch: Which has read; it is done with that.
            bags: Nothing where the batch is not learned.

        Returns:
            False: the set had been applied before.

        Raises:
            LostGradientsError: A number was passed over.
        """
        with self._changed:
            if number <= self._last[rank]:
                self.stats.repeated += 1
                return False
            if number != self._last[rank] + 1:
                raise LostGradientsError(
                    f"rank {rank} sends its gradients number {number}, and those after"
                    f" {self._last[rank]} have not come; start the run again, which goes on from"
                    " its checkpoint"
                )
            if bags and not self._may_apply(batch):
                began = time.monotonic()
                self._changed.wait_for(lambda: self._failed is not None or self._may_apply(batch))
                self.stats.holds_s += time.monotonic() - began
                if self._failed is not None:
                    raise self._failed
            lacks = self._applied - self._open.pop(batch)
            if bags:
                self._step(bags)
                self._applied += 1
                self.stats.staleness[lacks] += 1
            self.stats.applied[rank] += 1
            self._last[rank] = number
            self._changed.notify_all()
            return True

    def fail(self, error: Exception) -> None:
        """Have all that are held back raise an error: a rank that they wait for is gone."""
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def _may_apply(self, batch: int) -> bool:
        """Whether no batch that has read before this one would lack more than the bound."""
        for place, (older, at) in enumerate(self._open.items()):
            if older == batch:
                return True
            if self._applied - at + place + 1 > self.max_staleness:
                return False
        raise AssertionError(f"batch {batch} applies gradients and has not read")


class ServedExchange(Exchange):
    """The exchange of a rank that learns whole batches by itself.

    `ask`, `rows`, `give` and `release` are for one thread, which learns one batch after the other;
    what others ask of this rank's rows is served beside it.

    Attributes:
        batch: Number of the batch that is learned, as it was handed out; set before `ask`.
        sent: Sets of gradients sent, by owner.
        server: The server of this rank's rows; set before anything is asked.
    """

    server: RowServer

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Open channels and calls; see `Exchange`."""
        super().__init__(*arguments, **named)
        self.calls: Calls = self.ranks.calls()
        self.batch = 0
        self.sent: Counter[int] = Counter()

    def answers(self) -> dict[str, Answer]:
        """Return what answers the calls of others, by name."""
        return {_GATHER: self._answer_gather, _APPLY: self._answer_apply}

    def check(self, channel: Channel) -> None:
        """See that owners have applied all that was sent; all ranks call it together.

        Raises:
            LostGradientsError: On every rank: an owner has not.
        """
        counts = [self._by_rank(self.sent), self._by_rank(self.server.stats.applied)]
        said = channel.gather(counts)
        for rank, (sent_R, _) in enumerate(said):
            for owner, (_, applied_R) in enumerate(said):
                if sent_R[owner] != applied_R[rank]:
                    raise LostGradientsError(
                        f"rank {rank} has sent {sent_R[owner]} sets of gradients to rank {owner},"
                        f" which has applied {applied_R[rank]}; start the run again, which goes on"
                        " from its checkpoint"
                    )

    def _by_rank(self, counts: Counter[int]) -> list[int]:
        return [counts[rank] for rank in range(self.ranks.size)]

    # --- what this rank asks of others ------------------------------------------------------------

    def ask(self, bags: Sequence[BagKeys]) -> Asked:
        """Say which keys a batch has; nothing is sent yet."""
        routed = self.router.route(bags)
        lengths_RT = routed.lengths.reshape(self.ranks.size, -1).astype(np.int64)
        ends = np.cumsum(lengths_RT.reshape(-1))[:-1]
        pieces = np.split(routed.keys, ends)
        tables = lengths_RT.shape[1]
        keys_RT = [pieces[at : at + tables] for at in range(0, len(pieces), tables)]
        return Asked(routed, keys_RT, None)

    def rows(self, asked: Asked, lookup: Lookup) -> Floats:
        """Return the rows of a batch's keys, in their order, as they are at their owners now.

        Owners that have none of them hear nothing of the batch. Where torch records gradients,
        `give` or `release` has to follow.

        Raises:
            RankLostError: An owner is gone.
        """
        del lookup
        follows = int(torch.is_grad_enabled())
        waits: dict[int, Callable[[], Tensor]] = {}
        mine = self.ranks.rank
        for rank in self._from_here():
            keys_T = asked.keys_RT[rank]
            if rank != mine and any(map(len, keys_T)):
                data = _packed([*map(len, keys_T), follows], np.concatenate(keys_T))
                waits[rank] = self.calls.begin(rank, _GATHER, self.batch, data)
        own = self._looked_up(self.batch, asked.keys_RT[mine], bool(follows))
        parts: list[Floats] = []
        for rank, keys_T in enumerate(asked.keys_RT):
            if rank == mine:
                parts.append(own)
            elif rank in waits:
                parts.append(
                    codec.decode(self.codecs.rows, waits[rank](), self._row_blocks(keys_T))
                )
        return np.concatenate(parts)

    def give(self, asked: Asked, sums: Floats) -> None:
        """Have the owners apply the summed gradients of a batch's keys; returns when all have.

        Args:
            asked: The result of `ask`, which `rows` has read.
            sums: The result of `asked.routed.sum`.

        Raises:
            RankLostError: An owner is gone.
        """
        at, parts_R = 0, list[Floats]()
        for keys_T in asked.keys_RT:
            end = at + sum(len(keys) * dim for keys, dim in zip(keys_T, self._dims, strict=True))
            parts_R.append(sums[at:end])
            at = end
        self._apply(asked, asked.keys_RT, parts_R)

    def release(self, asked: Asked) -> None:
        """Say that nothing is learned from a batch that `rows` has read."""
        nothing = [[keys[:0] for keys in keys_T] for keys_T in asked.keys_RT]
        self._apply(asked, nothing, [np.empty(0, np.float32)] * self.ranks.size)

    def _apply(self, asked: Asked, keys_RT: list[list[Keys]], sums_R: list[Floats]) -> None:
        waits: list[Callable[[], Tensor]] = []
        mine = self.ranks.rank
        self.sent[mine] += 1
        for rank in self._from_here():
            if rank == mine or not any(map(len, asked.keys_RT[rank])):
                continue
            self.sent[rank] += 1
            keys_T = keys_RT[rank]
            blocks = self._gradient_blocks(keys_T)
            coded = codec.encode(self.codecs.gradients, sums_R[rank], blocks)
            numbers = [*map(len, keys_T), self.sent[rank]]
            data = torch.cat([_packed(numbers, np.concatenate(keys_T)), coded])
            waits.append(self.calls.begin(rank, _APPLY, self.batch, data))
        bags = self._bags(keys_RT[mine], sums_R[mine])
        self.server.apply(mine, self.sent[mine], self.batch, bags)
        for wait in waits:
            wait()

    def _from_here(self) -> list[int]:
        """Return all ranks, this one first."""
        size = self.ranks.size
        return [(self.ranks.rank + step) % size for step in range(size)]

    # --- what others ask of this rank -------------------------------------------------------------

    def _answer_gather(self, rank: int, batch: int, data: Tensor) -> Tensor:
        del rank
        numbers, keys_T, _ = self._unpacked(data)
        rows = self._looked_up(batch, keys_T, bool(numbers[-1]))
        return codec.encode(self.codecs.rows, rows, self._row_blocks(keys_T))

    def _answer_apply(self, rank: int, batch: int, data: Tensor) -> Tensor:
        numbers, keys_T, coded = self._unpacked(data)
        sums = codec.decode(self.codecs.gradients, coded, self._gradient_blocks(keys_T))
        self.server.apply(rank, numbers[-1], batch, self._bags(keys_T, sums))
        return empty()

    def _looked_up(self, batch: int, keys_T: Sequence[Keys], follows: bool) -> Floats:
        blocks = self._row_blocks(keys_T)
        out = np.empty(sum(each.keys * each.width for each in blocks), np.float32)
        lookups: list[_store.BagLookup] = []
        at = 0
        for t, (keys, block) in enumerate(zip(keys_T, blocks, strict=True)):
            end = at + block.keys * block.width
            if block.keys:
                lookups.append((t, keys, None, "sum", out[at:end].reshape(block.keys, block.width)))
            at = end
        self.server.gather(batch, lookups, follows=follows)
        return out

    def _bags(self, keys_T: Sequence[Keys], sums: Floats) -> "list[_store.BagGradients]":
        bags: list[_store.BagGradients] = []
        at = 0
        for t, (keys, dim) in enumerate(zip(keys_T, self._dims, strict=True)):
            end = at + len(keys) * dim
            if len(keys):
                bags.append((t, keys, None, sums[at:end].reshape(len(keys), dim)))
            at = end
        return bags

    def _row_blocks(self, keys_T: Sequence[Keys]) -> list[Block]:
        return [self._row_block(t, len(keys)) for t, keys in enumerate(keys_T)]

    def _gradient_blocks(self, keys_T: Sequence[Keys]) -> list[Block]:
        return [Block(len(keys), dim) for keys, dim in zip(keys_T, self._dims, strict=True)]

    def _unpacked(self, data: Tensor) -> tuple[list[int], list[Keys], Tensor]:
        """Return the numbers of `_packed`, its keys by table, and what stands behind them."""
        tables = len(self._dims)
        whole = data.numpy()
        numbers = whole[: 8 * (tables + 1)].view(np.int64).tolist()
        begin = 8 * (tables + 1)
        end = begin + 8 * sum(numbers[:tables])
        keys = whole[begin:end].view(np.int64)
        keys_T = np.split(keys, np.cumsum(numbers[:tables])[:-1])
        return numbers, keys_T, data[end:]


def _packed(numbers: Sequence[int], keys: NDArray[np.int64]) -> Tensor:
    both = np.concatenate([np.array(numbers, np.int64), keys])
    return torch.from_numpy(both.view(np.uint8))
