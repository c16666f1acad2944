"""Ranks for tests: processes that stay, each of which runs a test's function with its `Ranks`."""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

from embertide.trainer.sync.ranks import Ranks

dist: Any = torch.distributed
_WAIT_S = 120.0


class RankFailedError(Exception):
    """A rank's function raised; `kind` names what, the text is its own."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        """Keep the facts."""
        super().__init__(rank, kind, text, trace)
        self.rank, self.kind, self.text, self.trace = rank, kind, text, trace

    def __str__(self) -> str:
        """Return the error that it raised, and where."""
        return f"rank {self.rank}: {self.kind}: {self.text}\n{self.trace}"


def _serve(connection: Connection, host: str, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(host, port, None, False)
    while True:
        job = connection.recv()
        if job is None:
            return
        name, rank, size, timeout_s, function, arguments = job
        try:
            ranks = Ranks(rank, size, dist.PrefixStore(name, store), timeout_s)
            with ranks.failing():
                connection.send(function(ranks, *arguments))
        except Exception as error:
            connection.send(
                RankFailedError(rank, type(error).__name__, str(error), traceback.format_exc())
            )


class RankPool:
    """Processes, made when they are first needed. A rank that was killed is made anew."""

    def __init__(self) -> None:
        """Begin with none."""
        self._store = dist.TCPStore("127.0.0.1", 0, None, True)
        self._context = multiprocessing.get_context("spawn")
        self._ranks: list[tuple[Any, Connection]] = []
        self._jobs = 0

    def _grown(self, size: int) -> list[tuple[Any, Connection]]:
        for place in range(size):
            if place < len(self._ranks) and self._ranks[place][0].is_alive():
                continue
            mine, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(theirs, "127.0.0.1", self._store.port), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks[place : place + 1] = [(process, mine)]
        return self._ranks[:size]

    def results(
        self, size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0
    ) -> list[Any]:
        """Run `function(ranks, *arguments)` by `size` ranks; what each returned, raised, or None.

        None is of a rank that killed itself.
        """
        self._jobs += 1
        ranks = self._grown(size)
        for rank, (_, connection) in enumerate(ranks):
            connection.send((f"{self._jobs}", rank, size, timeout_s, function, arguments))
        found: list[Any] = []
        for process, connection in ranks:
            try:
                assert connection.poll(_WAIT_S), "a rank stands still"
                found.append(connection.recv())
            except (EOFError, ConnectionResetError):
                process.join()
                found.append(None)
        return found

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run it, and raise what a rank raised."""
        found = self.results(size, function, *arguments)
        for each in found:
            if isinstance(each, RankFailedError):
                raise each
        return found

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._ranks:
            with contextlib.suppress(OSError):
                connection.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()


@contextlib.contextmanager
def rank_pool() -> Iterator[RankPool]:
    """Give a pool, and end it."""
    pool = RankPool()
    try:
        yield pool
    finally:
        pool.close()


def die() -> None:
    """End this process as SIGKILL does."""
    os.kill(os.getpid(), 9)
