"""How fast a node that was away takes what it missed: the third part of `make bench-fresh`.

One of two nodes is stopped (SIGSTOP) for a while and goes on, while a publisher changes 50,000 rows
a second all the time. Counted is how many rows a second it then applies until it has the version
that was newest when it went on, against how many were written a second meanwhile. Redis keeps what
a node misses while that says what it has applied, 30 s: a shorter stop is caught up with from the
bus, a longer one from the files.
"""

import argparse
import dataclasses
import os
import signal
import time
from collections.abc import Iterator

from bench import parts, report
from bench.fleet import Commits, Fleet, start_fleet
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError
from bench.shapes import Shape
from bench.versions import CHANGED_SHARE
from embertide.server.cli.metrics_page import MetricsPage

_FOLDER = BUILD / "bench" / "catchup"
_TABLES, _VERSIONS_PER_S = 8, 5
_CASES = {"by the bus": 20.0, "by files": 40.0}  # seconds away
_LONGEST_S = 120.0
_MIN_RATIO = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Return:
    """The work of a node after it went on."""

    versions: int  # that it missed
    seconds: float  # until it had them
    by_files: int  # how many of what it took until then were read from files
    written_per_s: float  # versions, from the stop until it had caught up

    @property
    def applied_per_s(self) -> float:
        """Versions."""
        return self.versions / self.seconds


def _from_files(fleet: Fleet) -> int:
    page = MetricsPage(fleet.nodes[1].metrics())
    return int(page.sum("embertide_bus_events_total", event="catch_up"))


def _go_away(fleet: Fleet, seconds: float) -> Return:
    """Stop the second node for a while.

    Raises:
        BenchError: It does not catch up.
    """
    pid, log = fleet.nodes[1].pid, fleet.versions.log
    files, had, began = _from_files(fleet), log[-1].number, time.time()
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        newest = log[-1].number
        os.kill(pid, signal.SIGCONT)
    went_on = time.time()
    watched = Commits(fleet.peers[1])
    watched.start()
    try:
        while not (reached := [at for number, at in watched.seen if number >= newest]):
            if time.time() - went_on > _LONGEST_S:
                raise BenchError(f"version {newest} is not there after {_LONGEST_S:.0f} s")
            time.sleep(0.01)
    finally:
        watched.end()
    return Return(
        versions=newest - had,
        seconds=reached[0] - went_on,
        by_files=_from_files(fleet) - files,
        written_per_s=fleet.versions.published(began, reached[0]) / (reached[0] - began),
    )


def _measure(fleet: Fleet, repetitions: int) -> dict[str, list[Return]]:
    done: dict[str, list[Return]] = {case: [] for case in _CASES}
    for n in range(repetitions):
        for case, seconds in _CASES.items():
            time.sleep(2.0)  # both nodes have what there is
            back = _go_away(fleet, seconds)
            done[case].append(back)
            CONSOLE.print(
                f"[dim]{n + 1}/{repetitions} away {seconds:.0f} s: {back.versions} versions in "
                f"{back.seconds:.2f} s, {back.by_files} by files; "
                f"{back.applied_per_s / back.written_per_s:.1f} times as fast as they are written"
            )
        fleet.versions.snapshot()  # and what is before it goes
    return done


def _run(given: argparse.Namespace) -> Iterator[report.Row]:
    shape = Shape(name="catchup", rows=given.rows, tables=_TABLES, buckets=16)
    with start_fleet(_FOLDER, shape, [], _VERSIONS_PER_S) as fleet:
        done = _measure(fleet, given.repetitions)
    per_version = int(shape.rows * CHANGED_SHARE) * shape.tables
    for case, returns in done.items():
        yield report.compare(
            (f"away {_CASES[case]:.0f} s, back {case}", "applied", "rows/s"),
            [per_version * each.applied_per_s for each in returns],
            [per_version * each.written_per_s for each in returns],
            peer_name="rows written a second",
            better="higher",
            target=_MIN_RATIO,
        )


if __name__ == "__main__":
    parser = parts.options("catchup", __doc__)
    parser.add_argument("--rows", type=int, default=125_000, help="of a table, of eight")
    parts.command("A node catches up", _run, parser)
