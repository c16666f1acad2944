"""Calls from one rank to another, answered at any time by a thread of the rank that is called.

Channels (channel.py) are for what all ranks do together. A call concerns two ranks: the others do
not wait for it. Calls go point to point through torch.distributed (gloo), which has no notion of
them: a header of a few numbers travels first, then as many bytes as it says.

    request   [kind, number, bytes] [bytes]
    reply     [state, number, bytes] [bytes]

A rank has one thread for each rank that may call it. It answers that rank's calls one after the
other, in their order. One thread of a rank calls; it has at most one call of each rank under way.
"""

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embertide.trainer.sync.channel import RankError, Traffic

if TYPE_CHECKING:
    from embertide.trainer.sync.ranks import Ranks

_HEADER = 3
_REQUEST, _REPLY, _BESIDE = 1, 2, 3  # tags of messages
_END = -1  # kind of the last request of a rank
_FAILED = -1  # state of the last reply of a rank that has failed

IDLE_S = 7 * 24 * 3600.0
"""How long a rank may call nobody: gloo would take an idle connection for a lost rank."""

Answer = Callable[[int, int, Tensor], Tensor]
"""Answers a call: (rank that calls, number, bytes) -> bytes. Called by several threads at once."""


def empty() -> Tensor:
    """Return no bytes."""
    return torch.empty(0, dtype=torch.uint8)


class Calls:
    """The calls of one rank. `call`, `begin` and `exchange` are for one thread, `traffic` for any.

    Args:
        ranks: Who there is.
        group: Process group of torch.distributed, used by nobody else.
    """

    def __init__(self, ranks: "Ranks", group: Any) -> None:
        """Answer nothing yet."""
        self.traffic: dict[str, Traffic] = {}
        self._ranks = ranks
        self._group = group
        self._names: list[str] = []
        self._answers: list[Answer] = []
        self._threads: list[threading.Thread] = []
        self._counting = threading.Lock()
        self._failed: Callable[[Exception], None] = lambda _: None

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._ranks.rank

    @property
    def others(self) -> list[int]:
        """Numbers of the other ranks."""
        return [rank for rank in range(self._ranks.size) if rank != self.rank]

    def serve(self, answers: Mapping[str, Answer], failed: Callable[[Exception], None]) -> None:
        """Begin to answer calls, of the same names in the same order on every rank.

        Args:
            answers: By the name of the call.
            failed: Told by a thread of ours that a rank is gone, or what an answer raised.
        """
        self._names, self._answers = list(answers), list(answers.values())
        self._failed = failed
        for rank in self.others:
            thread = threading.Thread(
                target=self._serve, args=(rank,), name=f"serves rank {rank}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End the calls of this rank, and return once all others have ended theirs.

        Raises:
            RankLostError: One is gone.
        """
        for rank in self.others:
            self._send(rank, _REQUEST, (_END, 0), empty())
        for thread in self._threads:
            thread.join()

    # --- calling ----------------------------------------------------------------------------------

    def call(self, rank: int, name: str, number: int, data: Tensor) -> Tensor:
        """Call a rank, and return what it answers.

        Args:
            rank: Another one.
            name: Name of the call.
            number: For the one that answers.
            data: uint8, flat.

        Raises:
            RankLostError: It is gone, or has failed.
        """
        return self.begin(rank, name, number, data)()

    def begin(self, rank: int, name: str, number: int, data: Tensor) -> Callable[[], Tensor]:
        """Call a rank; what is returned waits for the answer, and is to be called."""
        self._send(rank, _REQUEST, (self._names.index(name), number), data)
        self._count(name, messages=1, bytes_=len(data))

        def wait() -> Tensor:
            began = time.monotonic()
            (state, _), answer = self._receive(rank, _REPLY)
            if state == _FAILED:
                raise self._ranks.lost(RuntimeError(f"rank {rank} has failed"))
            self._count(name, waits_s=time.monotonic() - began)
            return answer

        return wait

    def exchange(self, ranks: list[int], values: Tensor, name: str) -> dict[int, Tensor]:
        """Give some other ranks a tensor, and return theirs of the same shape and dtype.

        All of them make this call, and each has all the others among `ranks`.

        Raises:
            RankLostError: One is gone.
        """
        began = time.monotonic()
        found = {rank: torch.empty_like(values) for rank in ranks}
        try:
            sends = [self._group.send([values], rank, _BESIDE) for rank in ranks]
            for rank in ranks:
                self._group.recv([found[rank]], rank, _BESIDE).wait()
            for work in sends:
                work.wait()
        except RuntimeError as error:
            raise self._ranks.lost(error) from error
        self._count(
            name,
            messages=len(ranks),
            bytes_=len(ranks) * values.nbytes,
            waits_s=time.monotonic() - began,
        )
        return found

    # --- messages ---------------------------------------------------------------------------------

    def _count(
        self, name: str, *, messages: int = 0, bytes_: int = 0, waits_s: float = 0.0
    ) -> None:
        with self._counting:
            traffic = self.traffic.setdefault(name, Traffic())
            traffic.messages += messages
            traffic.bytes += bytes_
            traffic.waits_s += waits_s

    def _send(self, rank: int, tag: int, head: tuple[int, int], data: Tensor) -> None:
        header = torch.tensor([*head, len(data)])
        try:
            works = [self._group.send([header], rank, tag)]
            if len(data):
                works.append(self._group.send([data], rank, tag))
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._ranks.lost(error) from error

    def _receive(self, rank: int, tag: int) -> tuple[tuple[int, int], Tensor]:
        header = torch.empty(_HEADER, dtype=torch.int64)
        try:
            self._group.recv([header], rank, tag).wait()
            first, number, size = header.tolist()
            data = torch.empty(size, dtype=torch.uint8)
            if size:
                self._group.recv([data], rank, tag).wait()
        except RuntimeError as error:
            raise self._ranks.lost(error) from error
        return (first, number), data

    def _serve(self, rank: int) -> None:
        """Answer a rank until it has ended."""
        try:
            while True:
                (kind, number), data = self._receive(rank, _REQUEST)
                if kind == _END:
                    return
                answer = self._answers[kind](rank, number, data)
                self._send(rank, _REPLY, (0, number), answer)
                self._count(self._names[kind], messages=1, bytes_=len(answer))
        except Exception as error:
            self._failed(error)
            with contextlib.suppress(Exception):
                self._say_failed(rank, error)

    def _say_failed(self, rank: int, error: Exception) -> None:
        """Let the rank that calls know what its call failed with here."""
        if not isinstance(error, RankError):
            with contextlib.suppress(type(error)), self._ranks.failing():
                raise error
        self._send(rank, _REPLY, (_FAILED, 0), empty())


def timeout() -> datetime.timedelta:
    """Return what a group for calls waits for a message."""
    return datetime.timedelta(seconds=IDLE_S)
