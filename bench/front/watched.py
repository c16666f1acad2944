"""The stock server as `embertide serve` keeps it, where one call in a hundred has a deadline.

500 calls a second, by gRPC alone, of which 1 % say that they wait 0.1 to 10 ms. Each time the
server ends by such a call it is started again; what becomes of the other calls meanwhile, with one
node, and with three nodes whose caller asks the next one when one has failed.
"""

import argparse
import asyncio
import collections
import dataclasses
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench import report
from bench.edges import restart
from bench.front.callers import moment_s
from bench.front.questions import INFER
from bench.servers import BUILD
from embertide._common import kserve

_RATE = 500.0
_IMPATIENT = 0.01
_ANSWER_S = 5.0
_SLOTS = 400  # calls under way, at most
_ENDED = re.compile(r"\w+ ended by (.+?) after")
_SERVES = re.compile(r"serves again, ([0-9.]+) s after it ended")
_NO_MORE = "is started no more"


@dataclasses.dataclass(slots=True)
class Seen:
    """What became of the calls.

    Attributes:
        ended: Calls by what became of them.
        failed_at_s: Of each failed call that waited, when it began.
        skipped: Calls that were not made, as too many were under way.
        seconds: That calls were made for.
    """

    ended: collections.Counter[str]
    failed_at_s: list[float]
    skipped: int = 0
    seconds: float = 0.0


class Calls:
    """Calls at a rate, each of one node after the other until one answers."""

    def __init__(self, addresses: Sequence[str], request: bytes, seed: int) -> None:
        """Take who is asked, and what."""
        self._addresses, self._request = addresses, request
        self._rng = random.Random(seed)
        self._turn = 0
        self.seen = Seen(collections.Counter(), [])

    async def run(self, seconds: float) -> Seen:
        """Call for so long."""
        channels = [grpc.aio.insecure_channel(each, kserve.OPTIONS) for each in self._addresses]
        stubs: list[Any] = [channel.unary_unary(INFER) for channel in channels]
        under_way: set[asyncio.Task[None]] = set()
        began, made = time.monotonic(), 0
        while (now := time.monotonic() - began) < seconds:
            while made < now * _RATE:
                made += 1
                if len(under_way) >= _SLOTS:
                    self.seen.skipped += 1
                    continue
                impatient = self._rng.random() < _IMPATIENT
                call = self._impatient(stubs) if impatient else self._patient(stubs)
                task = asyncio.create_task(call)
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            await asyncio.sleep(0.002)
        self.seen.seconds = time.monotonic() - began
        await asyncio.gather(*under_way)
        for channel in channels:
            await channel.close()
        return self.seen

    def _order(self, stubs: list[Any]) -> list[Any]:
        self._turn += 1
        at = self._turn % len(stubs)
        return [*stubs[at:], *stubs[:at]]

    async def _impatient(self, stubs: list[Any]) -> None:
        try:
            await self._order(stubs)[0](self._request, timeout=moment_s(self._rng))
            self.seen.ended["impatient, answered"] += 1
        except grpc.RpcError as error:
            said: Any = error
            self.seen.ended[f"impatient, {said.code().name}"] += 1

    async def _patient(self, stubs: list[Any]) -> None:
        began = time.monotonic()
        for n, stub in enumerate(self._order(stubs)):
            call = stub(self._request)
            try:
                # What goes on unheard cannot end the server; a cancel can.
                await asyncio.wait_for(asyncio.shield(call), _ANSWER_S)
                self.seen.ended["answered" if n == 0 else "answered by another node"] += 1
                return
            except (TimeoutError, grpc.RpcError):
                continue
        self.seen.failed_at_s.append(began)
        self.seen.ended["failed"] += 1


def _ends(nodes: Sequence[restart.Node]) -> tuple[list[str], list[float], int]:
    """Return how servers ended, how long each was away, and how many nodes gave up."""
    texts = [node.child.log_text() for node in nodes]
    ended = [how for text in texts for how in _ENDED.findall(text)]
    away_s = [float(each) for text in texts for each in _SERVES.findall(text)]
    return ended, away_s, sum(_NO_MORE in text for text in texts)


def _rows(case: str, seen: Seen, nodes: Sequence[restart.Node]) -> Iterator[report.Row]:
    ended, away_s, gave_up = _ends(nodes)
    sys.stderr.write(f"{case}: {seen.ended}, skipped {seen.skipped}, {ended}, away {away_s}\n")

    def row(metric: str, unit: str, value: float) -> report.Row:
        return report.measure((case, metric, unit), [value], better="lower", target=0)

    waited = sum(n for name, n in seen.ended.items() if not name.startswith("impatient"))
    yield row("calls that waited", "count", waited)
    yield row("... not answered", "count", seen.ended["failed"] + seen.skipped)
    yield row(
        "... answered by another node than the first asked",
        "count",
        seen.ended["answered by another node"],
    )
    yield row("ends of a server", "count", len(ended))
    yield row(
        "calls not answered for each end",
        "count",
        (seen.ended["failed"] + seen.skipped) / max(1, len(ended)),
    )
    yield row("ends an hour, all nodes", "1/h", 3600 * len(ended) / seen.seconds)
    if away_s:
        yield row("away after an end, median", "s", statistics.median(away_s))
        yield row("away after an end, longest", "s", max(away_s))
    yield row("nodes started no more", "count", gave_up)


def run(options: argparse.Namespace) -> Iterator[report.Row]:
    """Run one node, then three."""
    base = BUILD / "bench" / "front"
    base.mkdir(parents=True, exist_ok=True)
    rng = random.Random(options.seed)
    for count in (1, 3):
        with tempfile.TemporaryDirectory(dir=base) as name:
            folder = Path(name)
            snapshot = restart.write_model(folder)
            with restart.serving(snapshot, folder, nodes=count) as nodes:
                addresses = [node.address for node in nodes]
                keys_NF = np.stack([np.array(each) for each in restart.call(rng).values()], axis=1)
                tensors = {"KEYS": keys_NF.astype(np.int64)}
                request = kserve.infer_request(restart.MODEL, tensors, ("EMBEDDING", "VERSION"))
                calls = Calls(addresses, request.SerializeToString(), options.seed)
                seen = asyncio.run(calls.run(options.seconds))
                case = f"{count} node{'s' * (count > 1)} kept, {options.seconds:.0f} s"
                yield from _rows(case, seen, nodes)
