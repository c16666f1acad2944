"""The ranks of one run: processes that take every step together (torch.distributed, gloo).

Each rank runs the same loop over the same events; it owns some buckets and learns from a part of
each batch. What one rank alone may do, it does where `Ranks.first` holds. Ranks talk through
channels: a channel is a process group of its own for one thread, so that what a thread sends never
waits for another thread's.

A rank that is lost ends the run on all others, with an error that names it: whoever fails says so
in the store that the ranks met at (`Ranks.failing`), and whoever finds a connection closed asks
there.

Shapes: R ranks.
"""

import contextlib
import datetime
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
import torch.distributed
from torch import Tensor

from embertide.trainer.sync import calls
from embertide.trainer.sync.calls import Calls
from embertide.trainer.sync.channel import Channel, Pending, RankError, RankLostError, Traffic

TIMEOUT_S = 600.0
"""Bound on a rank's wait for another in one exchange: longer than compiling the dense net takes."""
# Bound on the wait of the live ranks for one another's word when one is lost.
_ROLL_CALL_S = 1.0
_WHOLE = 64 << 10  # bytes that go to all ranks as they are; more go in parts
_MAX_WORDS = 4000  # of what a rank says that it failed with

log = logging.getLogger(__name__)
# torch names these classes without types.
dist: Any = torch.distributed


def _bytes(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class GlooChannel(Channel):
    """Exchanges of one thread with the same thread of all ranks."""

    def __init__(self, ranks: "Ranks", group: Any) -> None:
        """Use a process group."""
        super().__init__()
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks = ranks
        self._group = group

    def _done(self, kind: str, messages: int, size: int, began: float) -> None:
        traffic = self.traffic.setdefault(kind, Traffic())
        traffic.messages += messages
        traffic.bytes += size
        traffic.waits_s += time.monotonic() - began

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._ranks.lost(error) from error

    def _begin(
        self, kind: str, start: Callable[[], Any], out: Tensor, messages: int, size: int
    ) -> Pending:
        with self._naming():
            work = start()

        def wait() -> Tensor:
            began = time.monotonic()
            with self._naming():
                work.wait()
            self._done(kind, messages, size, began)
            return out

        return Pending(wait)

    def sum(self, values: Tensor, kind: str) -> Pending:
        """See `Channel`."""
        rest = self.size - 1
        size = 2 * rest * values.nbytes // self.size  # a ring: reduce and scatter, then gather
        return self._begin(kind, lambda: self._group.allreduce([values]), values, 2 * rest, size)

    def exchange(
        self, sent: Tensor, to_R: Sequence[int], from_R: Sequence[int], kind: str
    ) -> Pending:
        """See `Channel`."""
        out = torch.empty(sum(from_R), dtype=sent.dtype)
        others = [n for rank, n in enumerate(to_R) if rank != self.rank]
        return self._begin(
            kind,
            lambda: self._group.alltoall_base(out, sent, list(from_R), list(to_R)),
            out,
            sum(n > 0 for n in others),
            sum(others) * sent.element_size(),
        )

    def from_first(self, data: bytes | None, kind: str) -> bytes:
        """See `Channel`."""
        began = time.monotonic()
        length = torch.tensor([0 if data is None else len(data)])
        with self._naming():
            self._group.broadcast([length]).wait()
            body = torch.empty(int(length), dtype=torch.uint8) if data is None else _bytes(data)
            in_parts = self.size > 2 and len(body) > _WHOLE
            if in_parts:
                body = self._in_parts(body)
            elif len(body):
                self._group.broadcast([body]).wait()
        sent = self._children() * len(body)
        if in_parts:
            part = -(-len(body) // self.size)
            sent = (self.size - 1) * part * (2 if self.first else 1)
        self._done(kind, 2 * self._children(), sent, began)
        return data if data is not None else body.numpy().tobytes()

    def _children(self) -> int:
        """Return to how many ranks this one passes on what it gets: broadcast goes by a tree."""
        steps = (1 << k for k in range(self.size.bit_length()))
        return sum(step > self.rank and self.rank + step < self.size for step in steps)

    def _in_parts(self, body: Tensor) -> Tensor:
        """Give each rank a part, which it gives to all: the first sends twice at most, not R times.

        Others' `body` says how long it is.
        """
        part = -(-len(body) // self.size)
        whole = torch.zeros(part * self.size, dtype=torch.uint8)
        to_R = [part] * self.size if self.first else [0] * self.size
        if self.first:
            whole[: len(body)] = body
        mine = torch.empty(part, dtype=torch.uint8)
        from_R = [part, *[0] * (self.size - 1)]
        sent = whole if self.first else whole[:0]
        self._group.alltoall_base(mine, sent, from_R, to_R).wait()
        parts = list(whole.split(part))
        self._group.allgather([parts], [mine]).wait()
        return torch.cat(parts)[: len(body)]

    def gather(self, value: Any, kind: str = "words") -> list[Any]:
        """See `Channel`."""
        began = time.monotonic()
        data = _bytes(json.dumps(value).encode())
        with self._naming():
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            self._group.allgather([lengths], [torch.tensor([len(data)])]).wait()
            most = int(max(lengths))
            padded = torch.zeros(most, dtype=torch.uint8)
            padded[: len(data)] = data
            bodies = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
            self._group.allgather([bodies], [padded]).wait()
        self._done(kind, 2 * (self.size - 1), (most + 8) * (self.size - 1), began)
        return [
            json.loads(body[: int(length)].numpy().tobytes())
            for body, length in zip(bodies, lengths, strict=True)
        ]

    def gather_bytes(self, data: bytes, kind: str) -> list[bytes]:
        """See `Channel`."""
        sizes = [int(size) for size in self.gather(len(data), kind)]
        sent = _bytes(data * self.size)
        got = self.exchange(sent, [len(data)] * self.size, sizes, kind).wait().numpy().tobytes()
        ends = [sum(sizes[: rank + 1]) for rank in range(self.size)]
        return [got[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class Ranks:
    """The ranks of one run, as one of them sees them. Channels belong to threads; the rest to any.

    Attributes:
        rank: This one's number.
        size: The number of ranks.
    """

    def __init__(self, rank: int, size: int, store: Any, timeout_s: float) -> None:
        """Use a store that all ranks reach; `join` and `alone` make one."""
        self.rank = rank
        self.size = size
        self._store = store
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._channels: dict[str, Channel] = {}
        self._calls: Calls | None = None
        self._told = False

    @classmethod
    def alone(cls) -> Self:
        """Be the only rank: nothing is exchanged."""
        return cls(0, 1, None, TIMEOUT_S)

    @classmethod
    def join(cls, *, timeout_s: float = TIMEOUT_S) -> Self:
        """Meet the ranks that torchrun's environment names; without one, be alone.

        Raises:
            RankLostError: They do not come.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls.alone()
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        except (RuntimeError, ValueError) as error:
            raise RankLostError(
                f"the ranks cannot meet: {error}; see that all run and reach the first"
            ) from error
        # Each start of the group by one agent meets apart from those before it.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(rank, size, dist.PrefixStore(f"embertide/{attempt}", store), timeout_s)

    @property
    def first(self) -> bool:
        """Whether this is the rank that does what one alone may do."""
        return self.rank == 0

    def channel(self, name: str) -> Channel:
        """Return the channel of that name, made at its first use: by all ranks, in one order."""
        if name not in self._channels:
            if self._store is None:
                self._channels[name] = Channel()
                return self._channels[name]
            try:
                store = dist.PrefixStore(name, self._store)
                group = dist.ProcessGroupGloo(store, self.rank, self.size, self._timeout)
            except RuntimeError as error:
                raise self.lost(error) from error
            self._channels[name] = GlooChannel(self, group)
        return self._channels[name]

    def calls(self) -> Calls:
        """Return the calls from one rank to another, made at first use, as channels are.

        There is more than one rank.
        """
        if self._calls is None:
            try:
                store = dist.PrefixStore("calls", self._store)
                group = dist.ProcessGroupGloo(store, self.rank, self.size, calls.timeout())
            except RuntimeError as error:
                raise self.lost(error) from error
            self._calls = Calls(self, group)
        return self._calls

    @property
    def traffic(self) -> dict[str, Traffic]:
        """The traffic that this rank has sent, by kind."""
        found: dict[str, Traffic] = {}
        sent = [channel.traffic for channel in list(self._channels.values())]
        for traffic in sent if self._calls is None else [*sent, self._calls.traffic]:
            for kind, each in list(traffic.items()):
                total = found.setdefault(kind, Traffic())
                total.messages += each.messages
                total.bytes += each.bytes
                total.waits_s += each.waits_s
        return found

    # --- what ranks say of themselves -------------------------------------------------------------

    def tell(self, what: str, value: Any) -> None:
        """Leave a JSON value for the first rank, who need not wait for it."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # it only shows what goes on
                self._store.set(f"told/{what}/{self.rank}", json.dumps(value))

    def told(self, what: str) -> list[Any]:
        """Return what the other ranks left last; those that did not are left out."""
        if self._store is None:
            return []
        keys = [f"told/{what}/{rank}" for rank in range(self.size) if rank != self.rank]
        try:
            there = [key for key in keys if self._store.check([key])]
            return [json.loads(self._store.get(key)) for key in there]
        except RuntimeError:
            return []

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Let the other ranks know what this one fails with."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            if self._store is not None and not self._told:
                self._told = True
                words = f"{type(error).__name__}: {error}"[:_MAX_WORDS]
                with contextlib.suppress(RuntimeError):
                    self._store.set(f"failed/{self.rank}", words)
            raise

    def lost(self, error: Exception) -> RankLostError:
        """Say which rank is gone: one that failed said so, one that was killed misses the call."""
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        store = self._store
        if store is None:
            return RankLostError(reason)
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            store.set(f"here/{self.rank}", "")
            until = time.monotonic() + _ROLL_CALL_S
            while True:
                failed = [rank for rank in others if store.check([f"failed/{rank}"])]
                if failed:
                    words = store.get(f"failed/{failed[0]}").decode(errors="replace")
                    return RankLostError(f"rank {failed[0]} failed: {words}")
                missing = [rank for rank in others if not store.check([f"here/{rank}"])]
                if not missing or time.monotonic() > until:
                    break
                time.sleep(0.05)
        except RuntimeError:
            return RankLostError(
                "the store where the ranks met is gone, and with it the machine of rank 0: "
                f"{reason}"
            )
        if not missing:
            return RankLostError(f"all ranks are there, but an exchange failed: {reason}")
        names = ", ".join(map(str, missing))
        return RankLostError(
            f"rank {names} is gone without a word (killed, or its machine is lost), or stands "
            f"still: {reason}"
        )
