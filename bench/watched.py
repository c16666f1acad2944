"""The cost of being watched: serving, and ticks of the control plane, beside viewers and scrapes.

Five visitors have a page of a console open, which asks again as often as the page's script does,
and all /metrics are scraped each second. With them and without them in turn:

* throughput and p99 of a fleet of two nodes that share a model, closed loop. The nodes and their
  clients have one core; console, control plane, visitors and whoever scrapes have another one, as
  they run on other machines in life;
* ticks of a control plane of 1,000 simulated nodes and 10^6 buckets, alone on one core
  (bench/drift/scale.py); all else has the other core.
"""

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from bench import keys, parts
from bench.console import Visitor
from bench.drift.scale import Scale, p99, running
from bench.fleet import MODEL, Fleet, start_fleet
from bench.load import encode
from bench.report import CONSOLE, Row, measure
from bench.servers import BUILD, BenchError
from bench.shapes import Shape
from embertide.server.adapters.process import Child, free_ports

_VIEWERS = ("/", "/latency", "/load", "/nodes", "/timeline")
_REFRESH_S = 3.0  # as console.js
_SCRAPE_S = 1.0
_SERVING, _WATCHING = 0, 1  # cores
_SETTLE_S = 1.0
_SHAPE = Shape(name="criteo", rows=20_000)
_BATCH, _REQUESTS = 64, 256
_VERSIONS_PER_S = 0.5
_CLAIM = "G.3"


class Watchers:
    """A console with visitors, and scrapes. A context manager that ends them.

    Args:
        control: host:port of the control plane.
        pages: URLs of /metrics.
        log: The console's log.
    """

    def __init__(self, control: str, pages: Sequence[str], log: Path) -> None:
        """Start the console, and log its visitors in."""
        (port,) = free_ports(1)
        self._address, self._pages = f"127.0.0.1:{port}", pages
        words = ["console", "--control", control, "--listen", self._address]
        self._console = Child([sys.executable, "-m", "embertide.server.cli", *words], log=log)
        self._await("console of ")
        self._looks, self._stop = threading.Event(), threading.Event()
        self._failed: list[BaseException] = []
        self.answers = 0
        self._lock = threading.Lock()
        visits = [functools.partial(self._visit, path) for path in _VIEWERS]
        self._threads = [threading.Thread(target=visit) for visit in visits]
        self._threads.append(threading.Thread(target=self._scrape))
        for thread in self._threads:
            thread.start()

    def _await(self, text: str) -> None:
        ends_s = time.monotonic() + 60
        while text not in self._console.log_text():
            if time.monotonic() > ends_s or not self._console.alive():
                raise BenchError(f"the console does not start: {self._console.log_text()}")
            time.sleep(0.1)

    def _each(self, every_s: float) -> Iterator[None]:
        """Yield as often, while they look."""
        while not self._stop.is_set():
            if not self._looks.wait(0.1):
                continue
            due_s = time.monotonic() + every_s
            yield
            with self._lock:
                self.answers += 1
            self._stop.wait(max(0.0, due_s - time.monotonic()))

    def _visit(self, path: str) -> None:
        try:
            visitor = Visitor(self._address)
            visitor.log_in()
            for _ in self._each(_REFRESH_S):
                visitor.ask(path, headers={"hx-request": "true"})
        except Exception as error:
            self._failed.append(error)

    def _scrape(self) -> None:
        try:
            for _ in self._each(_SCRAPE_S):
                for page in self._pages:
                    with urllib.request.urlopen(page, timeout=10) as answer:
                        answer.read()
        except Exception as error:
            self._failed.append(error)

    @contextlib.contextmanager
    def looking(self, *, look: bool) -> Iterator[None]:
        """Have them look meanwhile, or not.

        Raises:
            BenchError: One of them got no answer.
        """
        if look:
            self._looks.set()
        try:
            yield
        finally:
            self._looks.clear()
        if self._failed:
            raise BenchError(f"a look failed: {self._failed[0]}") from self._failed[0]

    def __enter__(self) -> Self:
        """Return them, who do not look yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """End them."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._console.stop()


def _pin(pid: int, core: int) -> None:
    """Give a process, all its threads, one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})


def _requests() -> list[bytes]:
    keys_NFL, _ = keys.draw(_SHAPE, _REQUESTS * _BATCH)
    return [encode(MODEL, batch_BF) for batch_BF in np.split(keys_NFL[:, :, 0], _REQUESTS)]


def _turn(fleet: Fleet, watchers: Watchers, seconds: float, *, look: bool) -> tuple[float, float]:
    """Return requests a second, and their p99 in us."""
    with watchers.looking(look=look):
        fleet.clients.start(None)
        time.sleep(_SETTLE_S)
        begin = time.time()
        time.sleep(seconds)
        seen = fleet.clients.stop().between(begin, begin + seconds)
    if seen.failed:
        raise BenchError(f"{seen.failed} requests failed: {seen.failures}")
    return seen.requests_per_s, seen.latency_us_p99


def serving(given: argparse.Namespace) -> Iterator[Row]:
    """Yield what a fleet serves with viewers and scrapes, of what it serves without."""
    folder = BUILD / "bench" / "watched"
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(start_fleet(folder, _SHAPE, _requests(), _VERSIONS_PER_S, port))
        pages = [each.options.reached(each.options.metrics_port) for each in fleet.nodes]
        urls = [f"http://{page}/metrics" for page in (*pages, f"127.0.0.1:{port}")]
        watchers = stack.enter_context(Watchers(fleet.control, urls, folder / "console.log"))
        served = [each.process.pid for each in fleet.nodes]
        for pid in (*served, *(each.pid or 0 for each in multiprocessing.active_children())):
            _pin(pid, _SERVING)
        rates, p99s = [], []
        _turn(fleet, watchers, given.seconds, look=True)  # all is warm
        for number in range(given.repetitions):
            order = (False, True) if number % 2 else (True, False)
            found = {look: _turn(fleet, watchers, given.seconds, look=look) for look in order}
            rates.append(found[True][0] / found[False][0])
            p99s.append(found[True][1] / found[False][1])
            CONSOLE.print(
                f"{found[False][0]:,.0f} -> {found[True][0]:,.0f} requests/s, p99 "
                f"{found[False][1]:,.0f} -> {found[True][1]:,.0f} us"
            )
        CONSOLE.print(f"{watchers.answers} answers to viewers and scrapes")
    case = "two nodes, five viewers and a scrape each second, of none"
    yield measure((case, "throughput", "ratio"), rates, better="higher", target=0.99, claim=_CLAIM)
    yield measure((case, "p99", "ratio"), p99s, better="lower", target=1.02, claim=_CLAIM)


def _ticks(scale: Scale, watchers: Watchers, seconds: float, *, look: bool) -> list[float]:
    with watchers.looking(look=look):
        told: list[float] = scale.quiet(seconds)["ticks_ms"]
    return told


def _without_each(turns: list[list[float]]) -> list[float]:
    """Return p99 of the ticks of all turns but one, for each: a turn has too few for its own."""
    return [
        p99(list(itertools.chain.from_iterable(turns[:left] + turns[left + 1 :])))
        for left in range(len(turns))
    ]


def ticks(given: argparse.Namespace) -> Iterator[Row]:
    """Yield what a tick of 1,000 nodes takes with viewers and scrapes, of what it takes without."""
    fleet = argparse.Namespace(nodes=given.nodes, tables=8, bits=given.bits, groups=8)
    with contextlib.ExitStack() as stack:
        scale = stack.enter_context(running(fleet))
        ends_s = time.monotonic() + 180
        while scale.store.load().plan is None:
            if time.monotonic() > ends_s:
                raise BenchError("no plan was made in three minutes")
            time.sleep(0.2)
        urls = [f"http://127.0.0.1:{scale.metrics_port}/metrics"]
        log = BUILD / "bench" / "watched-console.log"
        control = f"127.0.0.1:{scale.ports[0]}"
        watchers = stack.enter_context(Watchers(control, urls, log))
        _ticks(scale, watchers, given.tick_seconds, look=True)  # the first page is made
        turns: dict[bool, list[list[float]]] = {False: [], True: []}
        for number in range(given.repetitions):
            for look in (False, True) if number % 2 else (True, False):
                took_ms = _ticks(scale, watchers, given.tick_seconds, look=look)
                turns[look].append(took_ms)
                CONSOLE.print(f"viewers {look}: {len(took_ms)} ticks, p99 {p99(took_ms):.2f} ms")
    without, with_them = map(_without_each, (turns[False], turns[True]))
    ratios = [b / a for a, b in zip(without, with_them, strict=True)]
    case = f"{given.nodes:,} nodes, {8 << given.bits:,} buckets"
    yield measure((case, "tick p99", "ms"), without, better="lower", target=0)
    yield measure(
        (f"{case}, five viewers and a scrape each second, of none", "tick p99", "ratio"),
        ratios,
        better="lower",
        target=1.1,
        claim=_CLAIM,
    )


def measured(given: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of both, or of the part that is named."""
    named = given.part or ("serving", "ticks")
    os.sched_setaffinity(0, {_WATCHING})  # and what this starts, but for what is pinned elsewhere
    yield from itertools.chain.from_iterable(
        {"serving": serving, "ticks": ticks}[each](given) for each in named
    )


if __name__ == "__main__":
    parser = parts.options("watched", __doc__)
    parser.add_argument("--part", nargs="*", choices=("serving", "ticks"))
    parser.add_argument("--seconds", type=float, default=8.0, help="of a turn of serving")
    parser.add_argument("--tick-seconds", type=float, default=25.0, help="of a turn of ticks")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--bits", type=int, default=17, help="each of 8 tables has 2^bits buckets")
    parts.command("What watching costs", measured, parser)
