"""The links between processes: TCP connections that pass through here and can be harmed.

No privilege is needed: a link listens on a port of its own and connects to the process that it
leads to. All links run in one process, so that the traffic's checks do not slow them down.

Requires: what is not to be decoded here is passed as it came. Only messages of the bus are looked
for: in Redis's protocol they are the value of the field `m`, in commands and in replies alike.
"""

import asyncio
import contextlib
import dataclasses
import multiprocessing
import random
import re
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from embertide.server.cli.chaos.options import ChaosError

_CHUNK_BYTES = 1 << 16
_RESENT_S = 0.2  # the least time in which TCP sends again what was lost
_MESSAGE = re.compile(rb"\$1\r\nm\r\n\$(\d+)\r\n")
_ANSWER_S = 60.0  # on a machine that is busy elsewhere; a process starts, too


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where a link listens, host and port, and where it leads: the same, or a Unix socket."""

    listen: tuple[str, int]
    to: tuple[str, int] | Path


@dataclasses.dataclass(kw_only=True, slots=True)
class Harm:
    """The damage that a link does to its traffic; by default none."""

    delay_s: float = 0.0
    loss: float = 0.0
    stall: bool = False
    cut: bool = False
    flip: float = 0.0  # share of the messages


class _Link:
    """One link."""

    def __init__(self, route: Route, seed: int) -> None:
        self.route = route
        self.flipped = 0
        self.harm = Harm()
        self._rng = random.Random(seed)
        self._flows = asyncio.Event()
        self._flows.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None] | None] = set()

    async def listen(self) -> None:
        await asyncio.start_server(self._accept, *self.route.listen)

    def set(self, harm: Harm) -> None:
        self.harm = harm
        if harm.stall:
            self._flows.clear()
        else:
            self._flows.set()
        if harm.cut:
            for each in list(self._open):
                each.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.harm.cut:
            writer.transport.abort()
            return
        try:
            to = self.route.to
            further, there = await (
                asyncio.open_unix_connection(to)
                if isinstance(to, Path)
                else asyncio.open_connection(*to)
            )
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, there}
        self._open |= ends
        task = asyncio.current_task()
        self._tasks.add(task)  # the loop itself holds tasks weakly
        pumps = [
            asyncio.create_task(self._pump(reader, there)),
            asyncio.create_task(self._pump(further, writer)),
        ]
        try:
            # Cancelled with the process: the protocol above it would write that to the log.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            self._open -= ends
            self._tasks.discard(task)
            for each in ends:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                wait_s = self.harm.delay_s
                if self.harm.loss and self._rng.random() < self.harm.loss:
                    wait_s += _RESENT_S
                if wait_s:
                    await asyncio.sleep(wait_s)
                await self._flows.wait()
                writer.write(self._flip(data) if self.harm.flip else data)
                await writer.drain()

    def _flip(self, data: bytes) -> bytes:
        """Return the data with a bit flipped in some of the messages in it."""
        changed = bytearray(data)
        for match in _MESSAGE.finditer(data):
            begin, end = match.end(), min(match.end() + int(match[1]), len(data))
            if begin < end and self._rng.random() < self.harm.flip:
                changed[self._rng.randrange(begin, end)] ^= 1 << self._rng.randrange(8)
                self.flipped += 1
        return bytes(changed)


async def _serve(commands: Connection, routes: Mapping[str, Route]) -> None:
    links = {name: _Link(route, seed) for seed, (name, route) in enumerate(routes.items())}
    for each in links.values():
        await each.listen()
    commands.send("listening")
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def obey() -> None:
        try:
            name, harm = commands.recv()
        except EOFError:  # whoever began us is gone
            ended.set()
            return
        if name is None:
            commands.send({name: each.flipped for name, each in links.items()})
        else:
            links[name].set(harm)

    loop.add_reader(commands.fileno(), obey)
    await ended.wait()


def _run(commands: Connection, routes: Mapping[str, Route]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    asyncio.run(_serve(commands, routes))


class Links:
    """All links, in a process of their own. Used by one thread; a context manager that ends it."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        """Start the process; every link is open when this returns."""
        spawn: Any = multiprocessing.get_context("spawn")  # a fork would take gRPC's threads along
        self._commands, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(theirs, routes), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def _answer(self) -> Any:
        if not self._commands.poll(_ANSWER_S):
            raise ChaosError(f"the links' process {self._process.pid} does not answer")
        return self._commands.recv()

    def set(self, name: str, harm: Harm) -> None:
        """Do this to a link from now on, and nothing else."""
        self._commands.send((name, harm))

    def flipped(self) -> dict[str, int]:
        """Return the bits flipped so far, by link."""
        self._commands.send((None, None))
        said: dict[str, int] = self._answer()
        return said

    def __enter__(self) -> Self:
        """Return the running links."""
        return self

    def __exit__(self, *error: object) -> None:
        """End them."""
        self._commands.close()
        self._process.join(_ANSWER_S)
        if self._process.is_alive():
            self._process.kill()
